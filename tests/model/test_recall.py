"""Recall on the real model: it copies with the full cache, and cannot once the passage is gone."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import detach
from kvpolicy.budget import Budget
from kvpolicy.config import load
from kvpolicy.evaluate.task import Context, run_task
from kvpolicy.evaluate.tasks.recall import Recall
from kvpolicy.evaluate.texts import load_text, samples

pytestmark = pytest.mark.model


def test_what_was_kept_is_recalled_and_nothing_else(smollm2):
    text, _ = load_text("builtin:python-docs")
    windows, _ = samples(smollm2.tokenizer(text, verbose=False)["input_ids"], 192, 2, seed=0)

    def accuracy(policy, budget=None):
        budget = budget and Budget.parse(budget)
        context = Context(*smollm2[:2], load(policy), budget, torch.tensor(windows), batch=2, seed=0)
        return run_task(Recall(), context, str(policy))["accuracy"]

    try:
        full = accuracy("full")
        dropped = accuracy("streaming_llm", 32)
        spans = [[start, start + 24] for start in (37, 108)]  # where the passages are
        kept = accuracy({"kind": "protect", "spans": spans, "of": "streaming_llm"}, 96)
    finally:
        detach(smollm2.model)
    assert full > 0.8
    assert dropped < 0.1
    assert kept > 0.8
