"""Budgets that grow, differ by layer and differ by head: exact totals, and the masked reference."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy import EvictionCache, load
from kvpolicy.budget import Budget, layer_budgets, over_layers
from kvpolicy.errors import BudgetError
from kvpolicy.plugins import registry
from kvpolicy.policy import View
from kvpolicy.ragged import PAGE
from tests import tiny
from tests.unit.test_reference import compare

ADAPTIVE = registry().allocators["adaptive"]
PYRAMID = registry().allocators["pyramid"]


def pyramid(average: int, layers: int, prompt: int | None = None, **options: Any) -> list[int]:
    budget = Budget(tokens=average, layers=PYRAMID(**options))
    return over_layers(budget, average, tuple(range(layers)), layers, prompt)


# -- layers ------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    average=st.integers(1, 512),
    layers=st.integers(1, 48),
    beta=st.floats(1, 64),
    window=st.integers(0, 64),
    prompt=st.one_of(st.none(), st.integers(1, 4096)),
)
def test_a_pyramid_gives_away_exactly_the_total(
    average: int, layers: int, beta: float, window: int, prompt: int | None
) -> None:
    found = pyramid(average, layers, prompt, beta=beta, window=window)
    assert sum(found) == average * layers
    assert min(found) >= 1
    assert found == sorted(found, reverse=True)


def test_the_worked_pyramids() -> None:
    assert pyramid(8, 4, 100, beta=3, window=2) == [12, 9, 7, 4], "real steps of 8/3, and the total is 32, not 36"
    assert sum(pyramid(128, 32, 10**6, beta=20, window=8)) == 128 * 32, "the official code exceeds it by 176"
    assert pyramid(8, 4, 12, beta=3, window=2) == [12, 9, 7, 4], "the first layer gets all of the prompt"
    assert pyramid(8, 4, 11, beta=3, window=2) == [8, 8, 8, 8], "shorter than twice what is divided"
    assert pyramid(100, 5, beta=1.5) == [133, 117, 100, 83, 67], "the first has twice what the last has"
    assert pyramid(9, 5, beta=1) == [9] * 5


@given(
    average=st.integers(1, 512),
    layers=st.integers(1, 48),
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=4),
)
def test_given_weights_give_away_exactly_the_total(average: int, layers: int, weights: list[float]) -> None:
    allocator = load_allocator("given", weights={f"{i}:{i + 1}": w for i, w in enumerate(weights)})
    found = over_layers(Budget(tokens=average, layers=allocator), average, tuple(range(layers)), layers, None)
    assert sum(found) == average * layers
    assert min(found) >= 1


def load_allocator(kind: str, **options: Any) -> Any:
    return registry().allocators[kind](**options)


def test_twice_as_much_for_the_lower_half() -> None:
    allocator = load_allocator("given", weights={":50%": 2})
    found = over_layers(Budget(tokens=30, layers=allocator), 30, tuple(range(6)), 6, None)
    assert found == [40, 40, 40, 20, 20, 20]


def test_a_layer_that_keeps_all_takes_nothing_from_the_others() -> None:
    policy = load({"kind": "layers", "at": {"0": "full"}, "default": "h2o"})
    shares = layer_budgets(policy, Budget(tokens=10, layers=PYRAMID(beta=2)), 5)
    assert shares[0][1] is None
    assert sum(its.resolve(100) for _, its in shares[1:] if its is not None) == 40


def test_a_layer_that_cannot_hold_what_it_must_protect() -> None:
    policy = {"kind": "streaming_llm", "sinks": 6}
    with pytest.raises(BudgetError, match="layer 1: streaming_llm: a budget of 5 tokens cannot hold the 6"):
        EvictionCache(tiny.family("llama"), policy, budget={"tokens": 10, "layers": {"kind": "pyramid", "beta": 2}})


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("kind", ["h2o", "streaming_llm"])
def test_a_pyramid_against_the_reference(kind: str, family: str) -> None:
    budget = {"tokens": 10, "layers": {"kind": "pyramid", "beta": 2.5}}
    compare(kind, tiny.family(family, layers=3), budget, tiny.ids(2, 60), [25] + [1] * 35, budgets=[16, 10, 4])


def test_a_pyramid_of_a_share_is_that_of_each_row_alone() -> None:
    model = tiny.family("llama", layers=3)
    budget = {"share": 0.4, "layers": {"kind": "pyramid", "beta": 4}}
    tokens, mask = tiny.left_pad([40, 21])

    def run(tokens: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        cache = EvictionCache(model, "h2o", budget=budget)
        with torch.no_grad():
            model(tokens, attention_mask=mask, **tiny.cache_argument(cache))
            for step in range(12):
                mask = torch.cat([mask, mask[:, -1:]], 1)
                model(tiny.ids(1, 1, step).expand(len(tokens), 1), attention_mask=mask, **tiny.cache_argument(cache))
        return [cache.positions(layer) for layer in range(3)]

    together, alone = run(tokens, mask), run(tokens[1:, 19:], mask[1:, 19:])
    for layer in range(3):
        row = together[layer][1]
        assert [head[head >= 0].tolist() for head in row] == [head[head >= 0].tolist() for head in alone[layer][0]]


# -- growth ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["h2o", "streaming_llm", "lru"])
def test_a_share_of_what_is_seen_grows(kind: str) -> None:
    model = tiny.family("llama")
    cache = EvictionCache(model, kind, budget={"share": 0.5, "of": "seen", "min": 8, "max": 30})
    before: set[int] = set()
    with torch.no_grad():
        for step in range(80):
            count = 10 if step == 0 else 1
            model(tiny.ids(1, count, step), **tiny.cache_argument(cache))
            seen = 10 + step
            expected = min(max(8, (seen + 1) // 2), 30)
            assert cache.kept(0).tolist() == [[expected] * 2], seen
            now = set(cache.positions(0)[0, 0].tolist())
            assert now <= before | set(range(seen - count, seen)), "what was evicted stays away"
            before = now


def test_a_growing_share_is_not_that_of_a_prompt_still_to_come() -> None:
    model, budget = tiny.family("llama"), {"share": 0.25, "of": "seen"}
    cache = EvictionCache(model, {"kind": "streaming_llm", "sinks": 4}, budget=budget, prompt_length=150)
    with torch.no_grad():
        model(tiny.ids(1, 40), **tiny.cache_argument(cache))
    assert cache.kept(0).tolist() == [[10, 10]]


def test_a_growing_share_in_a_padded_batch_is_that_of_each_row_alone() -> None:
    model, budget = tiny.family("llama"), {"share": 0.4, "of": "seen"}
    tokens, mask = tiny.left_pad([30, 13])

    def run(tokens: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
        cache = EvictionCache(model, "h2o", budget=budget)
        with torch.no_grad():
            model(tokens, attention_mask=mask, **tiny.cache_argument(cache))
            for step in range(40):
                mask = torch.cat([mask, mask[:, -1:]], 1)
                model(tiny.ids(1, 1, step).expand(len(tokens), 1), attention_mask=mask, **tiny.cache_argument(cache))
        return [head[head >= 0].tolist() for head in cache.positions(1)[-1]]

    assert run(tokens, mask) == run(tokens[1:, 17:], mask[1:, 17:])


# -- heads -------------------------------------------------------------------------------------------------


def divided(rows: list[list[float]], budget: int, alpha: float) -> list[int]:
    scores = torch.tensor([rows])
    positions = torch.arange(scores.shape[-1], dtype=torch.int32).expand(1, len(rows), -1)
    view = View({}, positions, torch.tensor([[[scores.shape[-1]]]]), budget, scores, scores)
    return ADAPTIVE(alpha=alpha).divide((scores,), view, torch.tensor([[[budget]]])).flatten().tolist()


def test_the_worked_heads() -> None:
    rows = [[0.70, 0.16, 0.09, 0.05], [0.30, 0.28, 0.22, 0.20]]
    assert divided(rows, 2, 0.0) == [1, 3]
    assert divided(rows, 2, 0.2) == [1, 3], "the official code loses a slot here"
    assert divided(rows, 2, 0.5) == [2, 2]
    assert divided(rows, 2, 1.0) == [2, 2], "alpha 1 is uniform"
    mass = [sum(sum(row[:share]) for row, share in zip(rows, shares, strict=True)) for shares in ([2, 2], [1, 3])]
    assert mass == pytest.approx([1.44, 1.50])


@settings(max_examples=150, deadline=None)
@given(
    budget=st.integers(1, 512),
    heads=st.integers(1, 16),
    more=st.integers(1, 64),
    alpha=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_heads_are_given_exactly_the_total(budget: int, heads: int, more: int, alpha: float, seed: int) -> None:
    drawn = torch.rand(heads, budget + more, generator=torch.Generator().manual_seed(seed)) ** 4
    found = divided(drawn.tolist(), budget, alpha)
    assert sum(found) == heads * budget
    assert all(1 <= share <= budget + more for share in found)


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("kind", ["h2o", "heavy", "streaming_llm", "lru"])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_ragged_heads_against_the_reference(kind: str, family: str, alpha: float) -> None:
    budget = {"tokens": 10, "heads": {"kind": "adaptive", "alpha": alpha}}
    calls = [30, *[1] * 20, 7, *[1] * 10]
    compare(kind, tiny.family(family), budget, tiny.ids(2, 67), calls, budgets=[10, 10], alpha=Fraction(alpha))


def test_ragged_heads_in_a_padded_batch() -> None:
    tokens, mask = tiny.left_pad([40, 7, 22])
    more = tiny.ids(3, 20, seed=7)
    tokens, mask = torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    budget = {"tokens": 9, "heads": {"kind": "adaptive", "alpha": 0.0}}
    calls = [40, *[1] * 20]
    compare("h2o", tiny.family("llama"), budget, tokens, calls, mask, budgets=[9, 9], alpha=Fraction(0))


@pytest.mark.parametrize("tokens", [4, 40])
def test_ragged_heads_are_divided_anew_at_each_cut_of_every(tokens: int) -> None:
    model, budget = tiny.family("llama"), {"tokens": 12, "heads": {"kind": "adaptive", "alpha": 0.0}}
    cache = EvictionCache(model, {"kind": "every", "tokens": tokens, "of": "h2o"}, budget=budget)
    shares = set()
    with torch.no_grad():
        model(tiny.ids(1, 60), **tiny.cache_argument(cache))
        for step in range(3 * tokens):
            model(tiny.ids(1, 1, step), **tiny.cache_argument(cache))
            total = int(cache.kept(0).sum())
            assert total == 24 + 2 * ((step + 1) % tokens)
            if (step + 1) % tokens == 0:
                shares.add(tuple(cache.kept(0)[0].tolist()))
    assert len(shares) > 1 or tokens == 4, "little changes between cuts so near to each other"


def test_ragged_heads_that_keep_what_is_written() -> None:
    policy = {"kind": "phases", "prefill": {"kind": "snapkv", "window": 4}, "decode": "full"}
    cache = EvictionCache(model := tiny.family("llama"), policy, budget={"tokens": 12, "heads": "adaptive"})
    with torch.no_grad():
        model(tiny.ids(1, 60), **tiny.cache_argument(cache))
        for step in range(150):
            model(tiny.ids(1, 1, step), **tiny.cache_argument(cache))
    assert int(cache.kept(0).sum()) == 24 + 2 * 150
    assert all(set(range(60, 210)) <= set(head.tolist()) for head in cache.positions(0)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_what_is_kept_within_a_page_a_head(dtype: torch.dtype) -> None:
    model = tiny.family("llama", dtype=dtype, heads=8, kv_heads=4)
    budget = {"tokens": 64, "heads": {"kind": "adaptive", "alpha": 0.0}}
    cache = EvictionCache(model, "heavy", budget=budget)
    with torch.no_grad():
        model(tiny.ids(2, 300), **tiny.cache_argument(cache))
        for step in range(5):
            model(tiny.ids(2, 1, step), **tiny.cache_argument(cache))
    slot = 2 * 8 * dtype.itemsize + 4 + 4  # key and value, position, mass
    for layer, pool in enumerate(cache.layers):
        kept = cache.kept(layer)
        assert int(kept.sum()) == 2 * 4 * 64
        assert kept.max() > 1.15 * kept.min(), "otherwise nothing is shown"
        tables = pool.pages.nbytes() + pool.free.nbytes + pool.shares.nbytes + pool.seen.nbytes
        block = kept.numel() * PAGE * slot
        assert int(kept.sum()) * slot <= pool.nbytes() - tables <= int(kept.sum()) * slot + block


def test_ragged_heads_of_beams_and_repeated_rows() -> None:
    model, budget = tiny.family("llama"), {"tokens": 10, "heads": {"kind": "adaptive", "alpha": 0.0}}

    def run(rows: list[int], change: Any) -> tuple[torch.Tensor, list[Any]]:
        cache = EvictionCache(model, "h2o", budget=budget)
        with torch.no_grad():
            model(tiny.ids(3, 40)[rows], **tiny.cache_argument(cache))
            change(cache)
            for step in range(8):
                logits = model(tiny.ids(1, 1, step).expand(3, 1), **tiny.cache_argument(cache)).logits
        return logits, cache.positions(0).tolist()

    logits, positions = run([0, 1, 2], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])))
    expected, places = run([2, 0, 0], lambda cache: None)
    torch.testing.assert_close(logits, expected)
    assert positions == places


def test_a_budget_that_holds_everything_changes_nothing_with_ragged_heads() -> None:
    model, tokens = tiny.family("llama"), tiny.ids(2, 50)
    cache = EvictionCache(model, "h2o", budget={"tokens": 60, "heads": "adaptive"})
    with torch.no_grad():
        model(tokens[:, :30], **tiny.cache_argument(cache))
        found = [model(tokens[:, i : i + 1], **tiny.cache_argument(cache)).logits for i in range(30, 50)]
        expected = model(tokens, use_cache=False).logits[:, 30:]
    torch.testing.assert_close(torch.cat(found, 1), expected)
