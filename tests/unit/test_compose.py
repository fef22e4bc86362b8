"""Compositions against a plain masked full-cache run of their definition, and the identities they promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpolicy import EvictionCache, load
from kvpolicy.compose import Part, Union
from kvpolicy.errors import BudgetError, ConfigError
from tests import tiny
from tests.unit.test_reference import compare

HEAVY_AND_SNAP = [
    {"take": 1, "of": "sinks"},
    {"take": 0.5, "of": "heavy"},
    {"take": 0.5, "of": {"kind": "snapkv", "window": 2, "kernel": 3}},
]
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "union of tokens and shares": {
        "kind": "union",
        "parts": [{"take": 2, "of": "sinks"}, {"take": 0.6, "of": "recent"}, {"take": 0.4, "of": "heavy"}],
    },
    "union, equal parts": {"kind": "union", "parts": [{"of": "recent"}, {"of": "lru"}, {"of": "heavy"}]},
    "union, what is left goes to the last": {
        "kind": "union",
        "parts": [{"take": 0.3, "of": "heavy"}, {"take": 2, "of": "recent"}],
    },
    "union with a part that wants little": {
        "kind": "union",
        "parts": [
            {"take": 6, "of": {"kind": "span", "start": 5, "stop": 8}},
            {"take": 2, "of": "heavy"},
            {"of": "recent"},
        ],
    },
    "blend by rank": {
        "kind": "blend",
        "parts": [{"of": "h2o", "weight": 2.0}, {"of": {"kind": "lru", "recent": 2}}, {"of": {"kind": "random"}}],
    },
    "blend by z-score": {
        "kind": "blend",
        "normalise": "zscore",
        "parts": [{"of": "heavy"}, {"of": {"kind": "snapkv", "window": 2}, "weight": 0.5}],
    },
    "blend by sum": {
        "kind": "blend",
        "normalise": "sum",
        "parts": [{"of": "heavy"}, {"of": {"kind": "random", "recent": 3}}],
    },
    "cascade": {"kind": "cascade", "narrow": "heavy", "to": 1.5, "pick": {"kind": "streaming_llm", "sinks": 1}},
    "cascade under every": {
        "kind": "every",
        "tokens": 5,
        "of": {"kind": "cascade", "narrow": "recent", "to": 12, "pick": "h2o"},
    },
    "phases": {"kind": "phases", "prefill": {"kind": "snapkv", "window": 4}, "decode": "h2o"},
    "phases that keep what is written": {"kind": "phases", "prefill": "h2o", "decode": "full"},
    "phases that read all and then evict": {"kind": "phases", "prefill": "full", "decode": "streaming_llm"},
    "layers": {"kind": "layers", "at": {"0": "streaming_llm"}, "default": "h2o"},
    "layers, one of them full": {"kind": "layers", "at": {"1": "full"}, "default": "lru"},
    "protect": {"kind": "protect", "sinks": 1, "recent": 2, "spans": [[4, 6]], "of": "heavy"},
    "protect a union": {
        "kind": "protect",
        "sinks": 1,
        "recent": 0.25,
        "of": {"kind": "union", "parts": HEAVY_AND_SNAP},
    },
    "every": {"kind": "every", "tokens": 4, "of": "h2o"},
    "depth four": {
        "kind": "protect",
        "sinks": 1,
        "of": {
            "kind": "layers",
            "at": {"0": "streaming_llm"},
            "default": {
                "kind": "phases",
                "prefill": {"kind": "union", "parts": HEAVY_AND_SNAP},
                "decode": {"kind": "blend", "parts": [{"of": "recent"}, {"of": "heavy", "weight": 3.0}]},
            },
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("name", list(COMPOSITIONS))
def test_against_the_reference(name: str, family: str) -> None:
    compare(COMPOSITIONS[name], tiny.family(family), 10, tiny.ids(1, 60), [22] + [1] * 38)


@pytest.mark.parametrize("name", list(COMPOSITIONS))
def test_chunks_a_second_turn_and_a_padded_batch(name: str) -> None:
    tokens, mask = tiny.left_pad([17, 5, 11])
    more = tiny.ids(3, 24, seed=7)
    tokens, mask = torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    if "every" in name:  # the rows of a batch are cut together, when the longest needs it
        tokens, mask = tiny.ids(3, 41), None
    compare(COMPOSITIONS[name], tiny.family("llama"), 10, tokens, [10, 7, 1, 1, 1, 9, 1, 1, 6, 1, 3], mask)


def test_rows_under_every_are_cut_together_and_stay_in_bounds() -> None:
    model, (tokens, mask) = tiny.family("llama"), tiny.left_pad([17, 5, 11])
    cache = EvictionCache(model, {"kind": "every", "tokens": 4, "of": "h2o"}, budget=10)
    most = []
    with torch.no_grad():
        model(tokens, attention_mask=mask, **tiny.cache_argument(cache))
        for step in range(30):
            mask = torch.cat([mask, mask[:, -1:]], 1)
            model(tiny.ids(3, 1, step), attention_mask=mask, **tiny.cache_argument(cache))
            most.append(cache.kept(0).amax(-1).tolist())
    assert [row[0] for row in most[:8]] == [11, 12, 13, 10, 11, 12, 13, 10]
    assert max(max(row) for row in most) == 13
    assert most[-1] == [most[-1][0]] * 3, "once they are full, rows go together"


def kept(policy: Any, budget: int, steps: int = 40) -> list[Any]:
    """Positions after a prompt and after each step of a tiny model."""
    model, tokens = tiny.family("llama"), tiny.ids(2, 30 + steps)
    cache = EvictionCache(model, policy, budget=budget)
    found = []
    with torch.no_grad():
        for at in [slice(0, 30), *(slice(i, i + 1) for i in range(30, 30 + steps))]:
            model(tokens[:, at], use_cache=True, **tiny.cache_argument(cache))
            found.append([cache.positions(layer).tolist() for layer in range(2)])
    return found


@pytest.mark.parametrize("budget", [5, 9, 16])
def test_published_policies_are_expressions(budget: int) -> None:
    sinks, recent, heavy = load("sinks"), load("recent"), load("heavy")
    assert kept(sinks.take(4) | recent, budget) == kept("streaming_llm", budget)
    assert kept(recent.take(0.5) | heavy, budget) == kept("h2o", budget)
    assert kept(recent.take(3) | heavy, budget) == kept({"kind": "h2o", "recent": 3}, budget)
    assert kept(recent, budget) == kept({"kind": "streaming_llm", "sinks": 0}, budget)
    assert kept(heavy, budget) == kept({"kind": "h2o", "recent": 0}, budget)


@pytest.mark.parametrize(
    "wrapped",
    [
        {"kind": "union", "parts": ["h2o"]},
        {"kind": "blend", "parts": ["h2o"]},
        {"kind": "cascade", "narrow": "h2o", "pick": "h2o"},
        {"kind": "phases", "prefill": "h2o", "decode": "h2o"},
        {"kind": "layers", "at": {"0": "h2o"}, "default": "h2o"},
        {"kind": "protect", "of": "h2o"},
        {"kind": "every", "tokens": 1, "of": "h2o"},
    ],
)
def test_a_composition_of_one_is_that_one(wrapped: dict[str, Any]) -> None:
    assert kept(wrapped, 9) == kept("h2o", 9)


def test_a_part_sees_what_it_would_see_alone() -> None:
    """Another part makes attention hand out every block of rows; what a window policy scores stays the same."""
    model, tokens = tiny.family("llama"), tiny.ids(1, 300)

    def votes(policy: Any, field: str) -> torch.Tensor:
        cache = EvictionCache(model, policy, budget=400)
        with torch.no_grad():
            model(tokens, **tiny.cache_argument(cache))
        return cache.scores(1)[field]

    snap = {"kind": "snapkv", "window": 3}
    together = {"kind": "blend", "parts": ["lru", snap, {"kind": "snapkv", "window": 40}]}
    torch.testing.assert_close(votes(together, "1.votes"), votes(snap, "votes"))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    budget=st.integers(1, 80),
    takes=st.lists(st.one_of(st.integers(0, 10), st.floats(0, 0.2), st.none()), min_size=1, max_size=5),
)
def test_a_union_gives_away_the_budget_exactly(budget: int, takes: list[Any]) -> None:
    union = Union(parts=tuple(Part(take=take, of=load("recent")) for take in takes))
    if union.required() > budget:
        with pytest.raises(BudgetError, match="union"):
            union.check(budget)
        return
    whole = [tokens for _, _, tokens in union.split(budget)]
    assert sum(whole) == budget
    assert all(tokens == take for tokens, take in zip(whole[:-1], takes[:-1], strict=True) if isinstance(take, int))
    rows = union._taken(torch.tensor([[[budget]], [[budget + 7]]]))
    assert [int(torch.as_tensor(part).expand(2, 1, 1)[0]) for part in rows] == whole


def test_the_prefix_stays_whatever_decides() -> None:
    model = tiny.family("llama")
    cache = EvictionCache(model, "recent", budget=12, prefix=[3, 7])
    tokens, mask = tiny.left_pad([30, 20])
    with torch.no_grad():
        model(tokens, attention_mask=mask, **tiny.cache_argument(cache))
        for step in range(20):
            mask = torch.cat([mask, mask[:, -1:]], 1)
            model(tiny.ids(2, 1, step), attention_mask=mask, **tiny.cache_argument(cache))
    assert cache.positions(1)[0, 0].tolist() == [0, 1, 2, *range(41, 50)]
    assert cache.positions(0)[1, 1].tolist() == [*range(7), *range(35, 40)]


def test_what_two_protect_is_counted_once() -> None:
    inner = {"kind": "protect", "sinks": 4, "recent": 3, "spans": [[8, 11], [14, 15]], "of": "heavy"}
    layers = {"kind": "layers", "at": {"0": "lru"}, "default": inner}
    nested = {"kind": "protect", "prefix": True, "spans": [[10, 12]], "of": layers}
    joined = load(nested).for_layer(1, 2)
    expected = {"kind": "protect", "sinks": 4, "recent": 3, "spans": [[8, 12], [14, 15]], "prefix": True, "of": "heavy"}
    assert joined == load(expected)
    assert joined.split(20, prefix=6) == [("of", load("heavy"), 20 - 6 - 5 - 3)]


def test_a_prefix_has_to_be_given_and_to_fit() -> None:
    model, waiting = tiny.family("llama"), {"kind": "protect", "prefix": True, "of": "h2o"}
    with pytest.raises(ConfigError, match="say how many first tokens"):
        EvictionCache(model, waiting, budget=8)
    with pytest.raises(BudgetError, match=r"cannot hold the 9 it must protect \(prefix=8"):
        EvictionCache(model, waiting, budget=8, prefix=8)
    with pytest.raises(ConfigError, match="prefix must be a number of tokens"):
        EvictionCache(model, "h2o", budget=8, prefix=-1)
    cache = EvictionCache(model, "h2o", budget=8, prefix=[1, 2, 3])
    with pytest.raises(ConfigError, match="prefix has 3 numbers and the batch 2 rows"), torch.no_grad():
        model(tiny.ids(2, 20), **tiny.cache_argument(cache))


def test_when_to_evict_is_not_for_a_part_to_say() -> None:
    for part in ("full", {"kind": "every", "tokens": 4, "of": "h2o"}):
        with pytest.raises(ConfigError, match="decides when to evict"):
            load({"kind": "union", "parts": [part, "recent"]})
        with pytest.raises(ConfigError, match="decides when to evict"):
            load({"kind": "cascade", "narrow": part, "pick": "recent"})
    with pytest.raises(ConfigError, match="only has an order"):
        load({"kind": "blend", "normalise": "sum", "parts": [{"kind": "union", "parts": ["h2o"]}]})


def test_layers_that_a_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match="the model has layers 0 to 1"):
        EvictionCache(tiny.family("llama"), {"kind": "layers", "at": {"5": "lru"}, "default": "h2o"}, budget=8)


def test_sugar_reads_as_it_is_written() -> None:
    policy = load("sinks").take(4) | load("recent").take(0.5) | load("heavy")
    assert policy == load(
        {"kind": "union", "parts": [{"take": 4, "of": "sinks"}, {"take": 0.5, "of": "recent"}, "heavy"]}
    )
