"""Policies with signals of other kinds: worked examples, plain definitions, and what they have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import EvictionCache, load
from kvpolicy.testing import check_policy
from tests import tiny
from tests.reference import MORE
from tests.unit.test_policies import ROWS, Trace, kept
from tests.unit.test_reference import compare
from tests.unit.test_step import Strict

SPECS: dict[str, dict[str, Any]] = {
    "a2sf": {"kind": "a2sf"},
    "a2sf, max": {"kind": "a2sf", "decay": 0.5, "recent": 2, "group": "max"},
    "h2o, fading": {"kind": "h2o", "decay": 0.8},
    "h2o, mean": {"kind": "h2o", "normalise": "visible"},
    "h2o, fading mean": {"kind": "h2o", "decay": 0.9, "normalise": "visible", "recent": 2},
    "h2o, max": {"kind": "h2o", "group": "max", "sinks": 1},
    "keydiff": {"kind": "keydiff"},
    "knorm": {"kind": "knorm"},
    "lfu": {"kind": "lfu"},
    "lfu, visible": {"kind": "lfu", "normalise": "visible", "tau": 1.5, "recent": 1},
    "tova": {"kind": "tova"},
    "tova, each": {"kind": "tova", "heads": "each"},
}
"""Policies with options that matter for a budget of a few tokens."""
DRAWS = ("keyformer", "nacl")
every = pytest.mark.parametrize("name", list(SPECS))

# -- worked examples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [None, 1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("a2sf", {"decay": 0.5, "recent": 1}, [0, 3, 5]),
        ("h2o", {"decay": 0.5, "recent": 1}, [0, 3, 5]),
        ("h2o", {"normalise": "visible", "recent": 0}, [0, 2, 3]),
        ("h2o", {"group": "max", "recent": 1}, [0, 2, 5]),
        ("lfu", {"recent": 1}, [0, 2, 5]),
        ("tova", {}, [0, 3, 5]),
        ("tova", {"heads": "each"}, [0, 3, 5]),
    ],
)
def test_worked_examples(kind: str, options: dict[str, Any], expected: list[int], blocks: int | None) -> None:
    assert kept(kind, blocks=blocks, **options) == expected


def observed(kind: str, blocks: int | None = None, **options: Any) -> Trace:
    trace = Trace(load({"kind": kind, **options}), 3)
    trace.observe(ROWS, blocks)
    return trace


def test_a2sf_fades() -> None:
    mass = observed("a2sf", decay=0.5).fields["mass"].flatten()
    torch.testing.assert_close(mass, torch.tensor([0.6375, 0.13125, 0.4, 0.415, 0.185, 0.2]))


def test_h2o_means() -> None:
    trace = observed("h2o", normalise="visible")
    priority = trace.policy.priority(trace.view())
    expected = torch.tensor([0.525, 0.12, 0.2875, 0.61 / 3, 0.145, 0.2])
    torch.testing.assert_close(priority.flatten(), expected)  # type: ignore[union-attr]


def test_lfu_counts() -> None:
    assert observed("lfu").fields["uses"].flatten().tolist() == [6, 0, 3, 1, 1, 1]
    trace = observed("lfu", normalise="visible")
    uses, *_ = trace.policy.priority(trace.view())
    torch.testing.assert_close(uses.flatten(), torch.tensor([1.0, 0.0, 0.75, 1 / 3, 0.5, 1.0]))


def by_keys(kind: str, keys: list[Any], budget: int, values: Tensor | None = None, **options: Any) -> list[int]:
    """What is kept of tokens with such keys."""
    trace = Trace(load({"kind": kind, **options}), budget, torch.tensor(keys, dtype=torch.float32), values)
    trace.observe([[1 / (i + 1)] * (i + 1) for i in range(len(keys))])
    return trace.evict()


def test_knorm_keeps_short_keys() -> None:
    assert by_keys("knorm", [[0, 1.0], [3, 0], [0, 2], [2.5, 0], [1.5, 0], [0, 4]], 3) == [0, 2, 4]


def test_keydiff_drops_what_points_where_the_others_do() -> None:
    assert by_keys("keydiff", [[1, 0], [1, 0], [0, 1]], 2) == [1, 2], "equally alike, so the older goes"
    assert by_keys("keydiff", [[5, 0], [0.1, 0], [0, 1]], 2) == [1, 2], "length is no matter"


def test_tova_joins_heads_by_position() -> None:
    """Heads that hold different tokens, in slots of different order."""
    from kvpolicy_plugins.tova import _over_heads

    positions = torch.tensor([[[0, 3, 7], [7, -1, 0]]], dtype=torch.int32)
    score = torch.tensor([[[0.5, 0.3, 0.2], [0.6, 0.0, 0.4]]])
    torch.testing.assert_close(_over_heads(score, positions), torch.tensor([[[0.45, 0.15, 0.4], [0.4, 0.0, 0.45]]]))


# -- identities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"kind": "h2o", "decay": 0, "recent": 0}, {"kind": "tova", "heads": "each"}),
        ({"kind": "h2o", "decay": 0.7, "recent": 1.0}, "recent"),
        ({"kind": "h2o", "recent": 1.0}, "recent"),
        ({"kind": "h2o", "decay": 0.7, "recent": 2}, {"kind": "a2sf", "decay": 0.7, "recent": 2}),
        ({"kind": "a2sf", "decay": 1, "recent": 0}, "heavy"),
        ({"kind": "a2sf", "decay": 0, "recent": 0}, {"kind": "tova", "heads": "each"}),
    ],
)
def test_identities(left: Any, right: Any) -> None:
    model = tiny.family("llama")
    same(model, left, right)


def same(model: Any, left: Any, right: Any, budget: int = 9) -> None:
    """Both keep the same tokens, after a prompt and after each of some steps."""
    tokens = tiny.ids(2, 60)
    caches = [EvictionCache(model, policy, budget) for policy in (left, right)]
    for part in tokens.split([20, *[1] * 40], 1):
        with torch.no_grad():
            one, two = (model(part, use_cache=True, **tiny.cache_argument(cache)).logits for cache in caches)
        torch.testing.assert_close(one, two)
        for layer in range(2):
            assert torch.equal(*(cache.positions(layer) for cache in caches))


def test_tova_keeps_one_set_in_a_layer() -> None:
    model = tiny.family("llama", heads=8, kv_heads=4)
    cache = EvictionCache(model, "tova", 8)
    with torch.no_grad():
        for part in tiny.ids(2, 50).split([20, *[1] * 30], 1):
            model(part, use_cache=True, **tiny.cache_argument(cache))
            for layer in range(2):
                assert bool((cache.positions(layer) == cache.positions(layer)[:, :1]).all())


# -- the plain definitions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@every
def test_prompt_and_fifty_steps(name: str, family: str) -> None:
    compare(SPECS[name], tiny.family(family), 12, tiny.ids(1, 74), [24] + [1] * 50)


@every
def test_chunks_a_second_turn_and_a_padded_batch(name: str) -> None:
    tokens, mask = tiny.left_pad([17, 5, 11])
    more = tiny.ids(3, 30, seed=7)
    tokens, mask = torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    compare(SPECS[name], tiny.family("llama"), 9, tokens, [10, 7, 1, 1, 1, 9, 1, 1, 6, 1, 1, 8], mask)


@every
def test_cut_seldom(name: str) -> None:
    policy = {"kind": "every", "tokens": 5, "of": SPECS[name]}
    compare(policy, tiny.family("llama", heads=6, kv_heads=2), 10, tiny.ids(2, 60), [3, 15] + [1] * 42)


def test_tova_after_a_policy_with_a_set_for_each_head() -> None:
    policy = {"kind": "phases", "prefill": "h2o", "decode": "tova"}
    compare(policy, tiny.family("llama"), 9, tiny.ids(2, 50), [20] + [1] * 20 + [10])


# -- the checks ------------------------------------------------------------------------------------------------


@every
def test_checks(name: str) -> None:
    spec = SPECS[name]
    check_policy(load(spec), draws_by={"row", "head"} if spec["kind"] in DRAWS else ())


def test_every_rule_is_tried() -> None:
    assert {spec["kind"] for spec in SPECS.values()} == {*MORE, "h2o"}


@torch.no_grad()
@every
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [12, 0.5], ids=["tokens", "share"])
def test_no_synchronisation_in_a_decode_step(name: str, padded: bool, budget: Any) -> None:
    model = tiny.family("llama", dtype=torch.float32)
    cache = EvictionCache(model, SPECS[name], budget=budget)
    tokens, mask = tiny.left_pad([25, 17])
    model(tokens, attention_mask=mask if padded else None, **tiny.cache_argument(cache))
    for step in range(3):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        places = torch.full((2, 1), 25 + step)
        with Strict():
            model(
                tiny.ids(2, 1, step),
                attention_mask=mask if padded else None,
                position_ids=places,
                **tiny.cache_argument(cache),
            )
