"""Every policy against a plain masked full-cache run of its definition: kept sets, positions and logits."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpolicy import EvictionCache
from tests import tiny
from tests.reference import RULES, Reference

BOUNDED = [kind for kind in RULES if kind != "full"]


def compare(
    policy: str | dict[str, Any],
    model: Any,
    budget: Any,
    tokens: torch.Tensor,
    calls: list[int],
    mask: torch.Tensor | None = None,
    budgets: list[int] | None = None,
    alpha: Fraction | None = None,
    reference_of: type[Reference] = Reference,
    positions: str | None = None,
) -> None:
    """Feed `tokens` to both, `calls` tokens at a time; logits and kept positions must agree throughout.

    `budgets` is what `budget` comes to in each layer, where it is not the same number for all; `alpha` is that of
    heads divided adaptively.
    """
    reference = reference_of(model, policy, budgets or budget, alpha, positions == "rolled")
    cache = EvictionCache(model, policy, budget=None if policy == "full" else budget, positions=positions)
    at = 0
    for count in calls:
        real = None if mask is None else mask[:, : at + count]
        part = tokens[:, at : at + count]
        expected = reference(part, real)
        with torch.no_grad():
            actual = model(part, attention_mask=real, use_cache=True, **tiny.cache_argument(cache)).logits
        here = slice(None) if mask is None else mask[:, at : at + count].bool()
        torch.testing.assert_close(actual[here], expected[here], rtol=1e-7, atol=1e-7)
        at += count
        assert cache.get_seq_length() == at
        for layer in range(len(cache.layers)):
            held = cache.positions(layer)
            assert bool((held.diff(dim=-1) >= 0).all())
            found = [[[p for p in head if p >= 0] for head in row] for row in held.tolist()]
            assert found == reference.kept(layer), (policy, layer, at)


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("kind", list(RULES))
def test_prompt_and_sixty_steps(kind: str, family: str) -> None:
    compare(kind, tiny.family(family), 12, tiny.ids(1, 80), [20] + [1] * 60)


@pytest.mark.parametrize("kind", list(RULES))
def test_chunks_a_second_turn_and_a_padded_batch(kind: str) -> None:
    tokens, mask = tiny.left_pad([17, 5, 11])
    more = tiny.ids(3, 30, seed=7)
    tokens, mask = torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    compare(kind, tiny.family("llama"), 9, tokens, [10, 7, 1, 1, 1, 9, 1, 1, 6, 1, 1, 8], mask)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("h2o", {"recent": 0}),
        ("h2o", {"recent": 1, "sinks": 2}),
        ("h2o", {"recent": 1.0}),
        ("lru", {"tau": 2.0}),
        ("lru", {"recent": 1}),
        ("streaming_llm", {"sinks": 0}),
        ("random", {"sinks": 0, "recent": 0}),
        ("random", {"draw": "fresh", "seed": 5}),
        ("random", {"rows": "shared", "recent": 2}),
    ],
)
def test_options(kind: str, options: dict[str, Any]) -> None:
    compare({"kind": kind, **options}, tiny.family("llama"), 8, tiny.ids(2, 50), [14] + [1] * 30 + [6])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(BOUNDED),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 2)]),
    budget=st.integers(1, 24),
    calls=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    steps=st.integers(60, 70),
    rows=st.integers(1, 2),
    seed=st.integers(0, 10_000),
)
def test_any_sizes(
    kind: str, heads: tuple[int, int], budget: int, calls: list[int], steps: int, rows: int, seed: int
) -> None:
    model = tiny.family("llama", seed=seed, heads=heads[0], kv_heads=heads[1])
    calls = [*calls, *[1] * steps]
    compare(kind, model, budget, tiny.ids(rows, sum(calls), seed), calls)
