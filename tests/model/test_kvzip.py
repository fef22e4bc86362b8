"""On the real model: what is kept without knowing the question answers it, where the prompt's own end would not."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import EvictionCache, compress, detach, load, policies
from kvpolicy.evaluate.models import cache_argument
from kvpolicy.evaluate.task import Context
from kvpolicy.evaluate.tasks.recall import Recall
from kvpolicy.evaluate.texts import load_text, samples

pytestmark = pytest.mark.model


def test_a_question_that_was_not_known_is_answered(smollm2):
    """A passage of random words in a text, asked for after the cut: KVzip and retrieval heads have kept it."""
    model, tokenizer, _ = smollm2
    text, _ = load_text("builtin:python-docs")
    windows, _ = samples(tokenizer(text, verbose=False)["input_ids"], 128, 2, seed=0)
    task = Recall(cue=8, answer=8)
    rows = task.rows(Context(model, tokenizer, load("full"), None, torch.tensor(windows), batch=2, seed=0))
    context, question, answer = rows.split([128 - task.cue - task.answer, task.cue, task.answer], 1)

    @torch.inference_mode()
    def accuracy(policy, budget=None):
        cache = EvictionCache(model, policy, budget)
        given = {cache_argument(model): cache}
        if cache.awaiting:
            compress(model, tokenizer, cache, context)
        else:
            model(context, **given)
        logits = [model(question, **given).logits[:, -1:]]
        logits += [model(word, **given).logits for word in answer[:, :-1].split(1, 1)]
        return float((torch.cat(logits, 1).argmax(-1) == answer).float().mean())

    try:
        full = accuracy("full")
        kvzip = accuracy("kvzip", 0.25)
        snapkv = accuracy({"kind": "phases", "prefill": {"kind": "snapkv", "window": 16}, "decode": "full"}, 0.25)
        profiled = policies()["duo_attention"].profiled(model, tokenizer, [torch.tensor(windows[0][:96])])
        duo = accuracy(profiled.model_copy(update={"sparsity": 0.5, "sinks": 4, "recent": 24}))
    finally:
        detach(model)
    assert full > 0.7
    assert kvzip > 0.9 * full and duo > 0.9 * full
    assert snapkv < 0.2
