"""Every policy against a plain masked full-cache run of its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.tiny as tiny
from kvpolicy import EvictionCache
from tests.reference import RULES, Reference


def compare(kind: str, model: Any, budget: int, calls: list[int], rows: int = 1, seed: int = 0, **options: Any) -> None:
    """Feed the same tokens, `calls` tokens at a time, to both; logits and kept positions must agree throughout."""
    tokens = tiny.ids(rows, sum(calls), seed)
    reference = Reference(model, kind, budget, **options)
    cache = EvictionCache(model, {"kind": kind, **options}, budget=None if kind == "full" else budget)
    at = 0
    for count in calls:
        part = tokens[:, at : at + count]
        at += count
        expected = reference(part)
        with torch.no_grad():
            actual = model(part, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        for layer in range(len(cache.layers)):
            positions = cache.positions(layer)
            found = [[[p for p in head if p >= 0] for head in row] for row in positions.tolist()]
            assert found == reference.kept(layer), (kind, layer, at)
            assert kind == "full" or bool((cache.kept(layer) <= budget).all())
    assert cache.get_seq_length() == at


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("kind", list(RULES))
def test_prompt_and_decode(kind: str, family: str) -> None:
    compare(kind, tiny.family(family), 12, [20] + [1] * 60)
