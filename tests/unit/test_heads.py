"""Heads of a layer with policies of their own: some without a bound, against the masked reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy import EvictionCache, load
from kvpolicy.errors import BudgetError, ConfigError
from kvpolicy.ragged import PAGE
from kvpolicy.testing import check_policy
from tests import tiny
from tests.unit.test_reference import compare
from tests.unit.test_step import Strict

SPECS: dict[str, dict[str, Any]] = {
    "one of two": {"kind": "heads", "at": {"1": "full"}, "default": {"kind": "streaming_llm", "sinks": 2}},
    "by attention": {"kind": "heads", "at": {"0": "h2o"}, "default": "full"},
    "two that evict": {
        "kind": "heads",
        "at": {"0": {"kind": "h2o", "recent": 2}},
        "default": {"kind": "snapkv", "window": 3},
    },
    "all full": {"kind": "heads", "at": {"0": "full"}, "default": "full"},
    "tova beside what it does not decide": {
        "kind": "heads",
        "at": {"0": {"kind": "tova", "heads": "each"}},
        "default": "full",
    },
    "in a layer": {
        "kind": "layers",
        "at": {"0": {"kind": "heads", "at": {"0": "full"}, "default": {"kind": "random", "sinks": 1}}},
        "default": "lru",
    },
    "protected": {
        "kind": "protect",
        "sinks": 2,
        "recent": 3,
        "of": {"kind": "heads", "at": {"1": "full"}, "default": "heavy"},
    },
    "a union in a head": {
        "kind": "heads",
        "at": {"1": "full"},
        "default": {"kind": "union", "parts": [{"take": 4, "of": "recent"}, {"of": "heavy"}]},
    },
}
every = pytest.mark.parametrize("name", list(SPECS))


@every
def test_against_the_reference(name: str) -> None:
    """Long enough that a head without a bound gets pages once more."""
    budget = None if name == "all full" else 10
    calls = [24, *[1] * 66, 5, *[1] * 4]
    compare(SPECS[name], tiny.family("llama"), budget, tiny.ids(1, sum(calls)), calls, budgets=[budget or 99] * 2)


@pytest.mark.parametrize("family", ["opt", "gpt_neox"])
def test_other_families(family: str) -> None:
    compare(SPECS["by attention"], tiny.family(family), 10, tiny.ids(2, 50), [24, *[1] * 20, 6])


@every
def test_from_a_short_prompt(name: str) -> None:
    """All heads hold the same until the budget is used up."""
    budget = None if name == "all full" else 10
    compare(SPECS[name], tiny.family("llama"), budget, tiny.ids(2, 40), [3] + [1] * 37, budgets=[budget or 99] * 2)


@every
def test_chunks_a_second_turn_and_a_padded_batch(name: str) -> None:
    budget = None if name == "all full" else 9
    tokens, mask = tiny.left_pad([17, 5, 11])
    more = tiny.ids(3, 30, seed=7)
    tokens, mask = torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    calls = [10, 7, 1, 1, 1, 9, 1, 1, 6, 1, 1, 8]
    compare(SPECS[name], tiny.family("llama"), budget, tokens, calls, mask, budgets=[budget or 99] * 2)


@every
def test_a_row_that_pauses(name: str) -> None:
    budget = None if name == "all full" else 9
    tokens, mask = tiny.ids(2, 45), torch.ones(2, 45, dtype=torch.long)
    mask[1, 22:32] = 0
    calls = [16, 4, 1, 1, 7, 1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1]
    compare(SPECS[name], tiny.family("llama"), budget, tokens, calls, mask, budgets=[budget or 99] * 2)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2)]),
    full=st.sampled_from(["0", "1", "0,1", "1:", ":50%"]),
    of=st.sampled_from(["h2o", "recent", {"kind": "streaming_llm", "sinks": 1}, "lfu"]),
    budget=st.integers(1, 24),
    calls=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    steps=st.integers(5, 70),
    rows=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_any_sizes(
    heads: Any, full: str, of: Any, budget: int, calls: list[int], steps: int, rows: int, seed: int
) -> None:
    model = tiny.family("llama", seed=seed, heads=heads[0], kv_heads=heads[1])
    named = {"1:": range(1, heads[1]), ":50%": range(heads[1] // 2)}.get(full)
    written = full if named is None else ",".join(map(str, named))
    calls = [*calls, *[1] * steps]
    spec = {"kind": "heads", "at": {written: "full"}, "default": of}
    compare(spec, model, budget, tiny.ids(rows, sum(calls), seed), calls)
    assert load({**spec, "at": {full: "full"}}).owners(heads[1]) == [  # type: ignore[attr-defined]
        full if name == written else name
        for name in load(spec).owners(heads[1])  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("name", ["one of two", "by attention", "in a layer"])
def test_rolled_positions(name: str) -> None:
    calls = [24, *[1] * 66, 5, 1]
    tokens = tiny.ids(2, sum(calls))
    compare(SPECS[name], tiny.family("llama"), 10, tokens, calls, budgets=[10, 10], positions="rolled")


def test_evicted_seldom() -> None:
    policy = {"kind": "every", "tokens": 5, "of": SPECS["by attention"]}
    compare(policy, tiny.family("llama"), 10, tiny.ids(1, 100), [3, 15] + [1] * 82)


def fed(model: Any, cache: EvictionCache, tokens: Tensor, prompt: int) -> Tensor:
    with torch.no_grad():
        parts = tokens.split([prompt, *[1] * (tokens.shape[1] - prompt)], 1)
        return [model(part, use_cache=True, **tiny.cache_argument(cache)).logits for part in parts][-1]


def test_tokens_of_its_own_need_no_budget() -> None:
    spec = {**SPECS["one of two"], "tokens": 7}
    compare(spec, tiny.family("llama"), None, tiny.ids(1, 60), [20, *[1] * 40], budgets=[7, 7])
    with pytest.raises(BudgetError, match="heads says by itself how many tokens it keeps: leave the budget out"):
        EvictionCache(tiny.family("llama"), spec, 9)
    mixed = {"kind": "layers", "at": {"0": spec}, "default": "recent"}
    compare(mixed, tiny.family("llama"), 9, tiny.ids(1, 40), [20, *[1] * 20], budgets=[7, 9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_pages(dtype: torch.dtype) -> None:
    """A page each sixteen tokens for heads that grow, in steps of 64; nothing more for those that do not."""
    model = tiny.family("llama", dtype=dtype, heads=8, kv_heads=4)
    cache = EvictionCache(model, {"kind": "heads", "at": {"0": "full"}, "default": "heavy"}, 40)
    fed(model, cache, tiny.ids(2, 340), 200)
    slot = 2 * 8 * dtype.itemsize + 4 + 4  # key and value, position, mass
    for layer, pool in enumerate(cache.layers):
        assert cache.kept(layer).tolist() == [[340, 40, 40, 40]] * 2
        tables = pool.pages.nbytes() + pool.free.nbytes + pool.shares.nbytes + pool.seen.nbytes
        held = pool.nbytes() - tables
        pages = 2 * (3 * -(-41 // PAGE) + -(-(200 + 64) // PAGE) + 2 * 4)
        assert held == pages * PAGE * slot
        assert held < 0.55 * 2 * 4 * 340 * slot


def test_a_page_more_leaves_the_others_where_they_are() -> None:
    model = tiny.family("llama")
    cache = EvictionCache(model, SPECS["one of two"], 10)
    fed(model, cache, tiny.ids(1, 30), 30)
    before = cache.nbytes()
    for step in range(200):
        fed(model, cache, tiny.ids(1, 1, step), 1)
    assert cache.kept(0).tolist() == [[10, 230]]
    page = PAGE * (2 * 8 * 8 + 4) + 4 * 8  # keys, values, positions, and its row in the tables
    most = 2 * 3 * 64 // PAGE * page
    assert 0 < cache.nbytes() - before <= 1.3 * most, "a head that evicts gets nothing"


@pytest.mark.parametrize("padded", [False, True])
@every
def test_a_step_waits_for_nothing(name: str, padded: bool) -> None:
    model, budget = tiny.family("llama", dtype=torch.float32), None if name == "all full" else 12
    cache = EvictionCache(model, SPECS[name], budget)
    tokens, mask = tiny.left_pad([25, 17])
    with torch.no_grad():
        model(tokens, attention_mask=mask if padded else None, **tiny.cache_argument(cache))
        for step in range(30):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            given = {"attention_mask": mask} if padded else {}
            with Strict():
                model(
                    tiny.ids(2, 1, step),
                    position_ids=torch.full((2, 1), 25 + step),
                    **given,
                    **tiny.cache_argument(cache),
                )


def test_beams() -> None:
    model = tiny.family("llama")

    def run(rows: list[int], change: Any) -> tuple[Tensor, list[Any]]:
        cache = EvictionCache(model, SPECS["by attention"], 10)
        fed(model, cache, tiny.ids(3, 60)[rows], 40)
        change(cache)
        logits = fed(model, cache, tiny.ids(1, 90).expand(3, 90), 1)
        return logits, cache.positions(0).tolist()

    logits, positions = run([0, 1, 2], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])))
    expected, places = run([2, 0, 0], lambda cache: None)
    torch.testing.assert_close(logits, expected)
    assert positions == places
    model.generate(
        tiny.ids(1, 20),
        num_beams=3,
        max_new_tokens=8,
        do_sample=False,
        **tiny.cache_argument(EvictionCache(model, SPECS["one of two"], 10)),
    )


@pytest.mark.parametrize("name", ["by attention", "two that evict", "in a layer", "protected"])
def test_checks(name: str) -> None:
    check_policy(load(SPECS[name]), draws_by={"row"} if name == "in a layer" else ())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"at": {"2": "full"}, "default": "h2o"}, "heads 2: a layer of the model has KV heads 0 to 1"),
        ({"at": {"x": "full"}, "default": "h2o"}, "needs KV heads, such as 0, 0-1"),
        ({"at": {"0": {"kind": "every", "tokens": 3, "of": "h2o"}}, "default": "h2o"}, "every decides when to evict"),
        (
            {"at": {"0": {"kind": "heads", "at": {"0": "full"}, "default": "full"}}, "default": "h2o"},
            "heads says how many",
        ),
        (
            {"at": {"0": {"kind": "kvzip", "decode": "bounded"}}, "default": "h2o"},
            "kvzip divides its budget over all heads",
        ),
        ({"at": {}, "default": "h2o"}, "at"),
    ],
)
def test_what_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvictionCache(tiny.family("llama"), {"kind": "heads", **spec}, 9)


def test_budgets_that_contradict() -> None:
    model = tiny.family("llama")
    with pytest.raises(ConfigError, match="heads says by itself how the budget is divided: leave heads out"):
        EvictionCache(model, SPECS["one of two"], {"tokens": 9, "heads": "adaptive"})
    with pytest.raises(ConfigError, match="heads says by itself how the budget is divided: leave layers out"):
        EvictionCache(model, SPECS["one of two"], {"tokens": 9, "layers": "cake"})
    with pytest.raises(ConfigError, match="kivi stores a layer in a way of its own"):
        EvictionCache(model, {"kind": "kivi", "of": SPECS["one of two"]}, 40)
    for kind in ("union", "phases"):
        parts = {
            "union": {"parts": [SPECS["one of two"]]},
            "phases": {"prefill": SPECS["one of two"], "decode": "full"},
        }
        with pytest.raises(ConfigError, match="heads says how many tokens each head holds"):
            EvictionCache(model, {"kind": kind, **parts[kind]}, 9)
