"""Policies that become each other: the same kept sets in every layer, row and head, after a prompt and at each step.

Each identity comes with a change that breaks it, so that a test in which nothing depends on the options would fail.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import pytest
import torch
from kvpolicy_plugins.vatp import VATP
from torch import Tensor

from kvpolicy import EvictionCache, EvictionPolicy, View, load
from kvpolicy.plugins import registry
from kvpolicy.testing import CHECKS, Case, Rule
from tests import tiny

BUDGET = 9
EVERYTHING = 10**6
TOUCH = 1e-30
"""A share of attention that every token gets."""


class Flat(EvictionPolicy):
    """All tokens are worth the same."""

    kind: Literal["flat"] = "flat"

    def priority(self, view: View) -> Tensor:
        return torch.ones_like(view.positions, dtype=torch.float64)


class Longest(EvictionPolicy):
    """The tokens with the longest values."""

    kind: Literal["longest"] = "longest"

    def priority(self, view: View) -> Tensor:
        return view.values.abs().sum(-1)  # equal tokens tie in the first layer, to the last bit


class LongestByL2(Longest):
    kind: Literal["longest_l2"] = "longest_l2"  # type: ignore[assignment]

    def priority(self, view: View) -> Tensor:
        return view.values.norm(dim=-1)


class Identity(NamedTuple):
    """`left` keeps what `right` keeps, and `broken` does not."""

    left: Any
    right: Any
    broken: Any
    family: str = "llama"
    left_budget: Any = BUDGET
    broken_budget: Any = BUDGET


def by_kind(kind: str, **options: Any) -> dict[str, Any]:
    return {"kind": kind, **options}


EACH = by_kind("tova", heads="each")
SLIDING = {"kind": "streaming_llm", "sinks": 0}
QUIET = by_kind("keyformer", noise="none", end=1.0)

IDENTITIES: dict[str, Identity] = {
    # the line from H2O to TOVA
    "H2O that forgets at once, without recents, is TOVA of each head": Identity(
        by_kind("h2o", decay=0, recent=0), EACH, by_kind("h2o", decay=0.2, recent=0)
    ),
    "A2SF that forgets at once is the last query": Identity(
        by_kind("a2sf", decay=0, recent=0), EACH, by_kind("a2sf", decay=0.2, recent=0)
    ),
    "A2SF that forgets nothing is H2O": Identity(by_kind("a2sf", decay=1), "h2o", by_kind("a2sf", decay=0.9)),
    "A2SF is H2O that fades": Identity(
        by_kind("a2sf", decay=0.7, recent=2), by_kind("h2o", decay=0.7, recent=2), by_kind("a2sf", decay=0.9, recent=2)
    ),
    "H2O without recents is the greedy sum": Identity(by_kind("h2o", recent=0), "heavy", by_kind("h2o", recent=2)),
    "Keyformer without noise and warmth is H2O": Identity(
        {**QUIET, "recent": 0.5}, "h2o", {**QUIET, "recent": 0.5, "start": 3.0, "end": 3.0}
    ),
    "Keyformer's noise is what makes it another": Identity(
        {**QUIET, "recent": 0}, "heavy", {**QUIET, "recent": 0, "noise": "gumbel"}
    ),
    "Scissorhands of one query is the last query": Identity(
        by_kind("scissorhands", window=1, recent=0), EACH, by_kind("scissorhands", window=3, recent=0)
    ),
    "R-KV of one query and no redundancy is the last query, the newest aside": Identity(
        by_kind("rkv", window=1, weight=1.0, kernel=1),
        by_kind("protect", recent=1, of=EACH),
        by_kind("rkv", window=1, weight=0.2, kernel=1),
        family="opt",
    ),
    "CAKE of one query is the last query, the newest aside": Identity(
        by_kind("cake", window=1, kernel=1), by_kind("protect", recent=1, of=EACH), by_kind("cake", window=3, kernel=1)
    ),
    "CAKE without the variance cuts a prompt as SnapKV does": Identity(
        by_kind("phases", prefill=by_kind("cake", window=3, gamma=0), decode="full"),
        by_kind("phases", prefill=by_kind("snapkv", window=3), decode="full"),
        by_kind("phases", prefill=by_kind("cake", window=3), decode="full"),
    ),
    # windows
    "H2O without heavies is a sliding window": Identity(
        by_kind("h2o", recent=1.0), SLIDING, by_kind("h2o", recent=0.7)
    ),
    "H2O without heavies promotes nothing": Identity(
        by_kind("h2o", recent=1.0, promote="always"), SLIDING, by_kind("h2o", recent=0.7, promote="always")
    ),
    "StreamingLLM without sinks is a sliding window": Identity(SLIDING, "recent", by_kind("streaming_llm", sinks=1)),
    "A2SF without heavies is a sliding window": Identity(by_kind("a2sf", recent=1.0), SLIDING, "a2sf"),
    "SnapKV that is all window is a sliding window": Identity(
        by_kind("snapkv", window=BUDGET), SLIDING, by_kind("snapkv", window=BUDGET - 2)
    ),
    "R-KV that is all window is a sliding window": Identity(
        by_kind("rkv", window=BUDGET), SLIDING, by_kind("rkv", window=BUDGET - 2)
    ),
    "chance outside sinks and recents that are all is StreamingLLM": Identity(
        by_kind("random", recent=1.0), "streaming_llm", by_kind("random", recent=3)
    ),
    "LagKV without lags to compare is StreamingLLM": Identity(
        by_kind("lagkv", sinks=4), "streaming_llm", by_kind("lagkv", sinks=4, lag=2)
    ),
    # uses
    "LRU of every touch is first in, first out": Identity(
        by_kind("lru", tau=TOUCH, recent=0, ties="age"), SLIDING, by_kind("lru", tau=1.0, recent=0, ties="age")
    ),
    "LRU of every touch goes by its ties": Identity(
        by_kind("lru", tau=TOUCH, recent=0), "heavy", by_kind("lru", tau=1.0, recent=0)
    ),
    "LFU of every touch counts queries since": Identity(
        by_kind("lfu", tau=TOUCH, recent=0), "sinks", by_kind("lfu", tau=1.0, recent=0)
    ),
    "LFU of every touch, divided by queries since, is LRU of every touch": Identity(
        by_kind("lfu", tau=TOUCH, recent=2, normalise="visible"),
        by_kind("lru", tau=TOUCH, recent=2),
        by_kind("lfu", tau=TOUCH, recent=2),
    ),
    # votes
    "SnapKV without pooling has no kind of pooling": Identity(
        by_kind("snapkv", window=3, kernel=1),
        by_kind("snapkv", window=3, kernel=1, pooling="max"),
        by_kind("snapkv", window=3, kernel=3),
    ),
    "NACL that draws nothing is SnapKV without pooling": Identity(
        by_kind("nacl", proxies=3, drawn=0, sinks=0, recent=3),
        by_kind("snapkv", window=3, kernel=1),
        by_kind("nacl", proxies=3, drawn=3, sinks=0, recent=3),
    ),
    "AhaKV unsharpened is SnapKV without pooling, weighed by values": Identity(
        by_kind("ahakv", window=3, recent=3, length=None),
        by_kind("vatp", norm="l2", of=by_kind("snapkv", window=3, kernel=1)),
        by_kind("ahakv", window=3, recent=3, length=4),
    ),
    "AhaKV does not sharpen what is short": Identity(
        by_kind("ahakv", window=3, recent=2, length=EVERYTHING),
        by_kind("ahakv", window=3, recent=2, length=None),
        by_kind("ahakv", window=3, recent=2, length=4),
    ),
    # values
    "VATP of what is all the same is the length of values": Identity(
        VATP(of=Flat()), Longest(), VATP(of=Flat(), norm="l2")
    ),
    "VATP by L2 of what is all the same": Identity(
        VATP(of=Flat(), norm="l2"), LongestByL2(), VATP(of=Flat(), norm="l1")
    ),
    # heads
    "one KV head is the layer": Identity("tova", EACH, "h2o", family="one KV head"),
    "a group of one has its mean for its maximum": Identity(
        by_kind("h2o", group="max"), "h2o", by_kind("h2o", decay=0.5), family="opt"
    ),
    # what narrows to everything, or to what stays
    "a cascade that narrows nothing": Identity(
        by_kind("cascade", narrow="recent", to=EVERYTHING, pick="h2o"),
        "h2o",
        by_kind("cascade", narrow="recent", to=1.2, pick="h2o"),
    ),
    "a cascade that leaves no choice": Identity(
        by_kind("cascade", narrow="h2o", to=1.0, pick="knorm"),
        "h2o",
        by_kind("cascade", narrow="h2o", to=3.0, pick="knorm"),
    ),
    # allocators
    "Ada-KV all of whose budget is divided equally": Identity(
        "h2o",
        "h2o",
        "h2o",
        left_budget={"tokens": BUDGET, "heads": {"kind": "adaptive", "alpha": 1.0}},
        broken_budget={"tokens": BUDGET, "heads": {"kind": "adaptive", "alpha": 0.0}},
    ),
    "PyramidKV whose last layer has the mean": Identity(
        "h2o",
        "h2o",
        "h2o",
        left_budget={"tokens": BUDGET, "layers": {"kind": "pyramid", "beta": 1.0}},
        broken_budget={"tokens": BUDGET, "layers": {"kind": "pyramid", "beta": 2.0}},
    ),
    "PyramidKV all of whose budget is window": Identity(
        "h2o",
        "h2o",
        "h2o",
        left_budget={"tokens": BUDGET, "layers": {"kind": "pyramid", "window": BUDGET}},
        broken_budget={"tokens": BUDGET, "layers": {"kind": "pyramid", "window": 4}},
    ),
    "equal weights": Identity(
        "h2o",
        "h2o",
        "h2o",
        left_budget={"tokens": BUDGET, "layers": {"kind": "given", "weights": {"0": 3, "1": 3}}},
        broken_budget={"tokens": BUDGET, "layers": {"kind": "given", "weights": {"0": 3, "1": 2}}},
    ),
    "uniform layers": Identity(
        "h2o",
        "h2o",
        by_kind("h2o", recent=2),
        left_budget={"tokens": BUDGET, "layers": "uniform", "heads": "uniform"},
    ),
}
every = pytest.mark.parametrize("name", list(IDENTITIES))


@cache
def model_of(family: str) -> Any:
    return tiny.family("llama", kv_heads=1) if family == "one KV head" else tiny.family(family)


def kept(family: str, policy: Any, budget: Any, padded: bool = False) -> list[Any]:
    """Positions by call, layer, row and head: of a prompt, 40 steps, another chunk and some more steps."""
    model, cache = model_of(family), EvictionCache(model_of(family), policy, budget)
    tokens, mask = tiny.left_pad([20, 13] if padded else [20, 20])
    tokens = torch.cat([tokens, tiny.ids(2, 51, seed=3)], 1)
    mask = torch.cat([mask, torch.ones(2, 51, dtype=torch.long)], 1)
    found, at = [], 0
    for count in (20, *[1] * 40, 6, *[1] * 5):
        part = slice(at, at := at + count)
        with torch.no_grad():
            model(tokens[:, part], attention_mask=mask[:, :at] if padded else None, **tiny.cache_argument(cache))
        found.append([[[[p for p in head if p >= 0] for head in row] for row in cache.positions(layer).tolist()]
                      for layer in range(2)])  # fmt: skip
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["rows alike", "padded"])
@every
def test_identities(name: str, padded: bool) -> None:
    identity = IDENTITIES[name]
    left = kept(identity.family, identity.left, identity.left_budget, padded)
    right = kept(identity.family, identity.right, BUDGET, padded)
    for call, (one, two) in enumerate(zip(left, right, strict=True)):
        assert one == two, f"call {call}"


@every
def test_what_breaks_them(name: str) -> None:
    """Both in the prompt's cut and later, or the identity would say little about one of them."""
    identity = IDENTITIES[name]
    broken = kept(identity.family, identity.broken, identity.broken_budget)
    right = kept(identity.family, identity.right, BUDGET)
    assert broken[0] != right[0]
    assert sum(one != two for one, two in zip(broken, right, strict=True)) > len(right) / 2


class Unpooled(Rule):
    """SnapKV without pooling: sums of the last queries of a call, in a decode step a running sum."""

    def begin(self) -> None:
        self.votes: dict[int, float] = defaultdict(float)
        self.rows: list[dict[int, float]] = []
        self.before = 0

    def observe(self, query: int, probs: dict[int, float]) -> None:
        self.rows.append(probs)

    def finish(self, seen: int) -> None:
        window = self.policy.window
        left = 1 - 1 / window if self.before and seen - self.before == 1 else 0
        self.votes = defaultdict(float, {p: left * votes for p, votes in self.votes.items()})
        for row in self.rows[-window:]:
            for position, prob in row.items():
                self.votes[position] += prob
        self.rows, self.before = [], seen

    def keep(self, held: list[int], seen: int) -> list[int]:
        stay = [position for position in held if position >= seen - self.policy.window]
        rest = [position for position in held if position not in stay]
        return stay + self.best(rest, self.budget - len(stay), lambda position: self.votes[position])


def test_snapkv_of_a_kernel_of_one_does_not_pool() -> None:
    CHECKS["reference"](Case(load({"kind": "snapkv", "window": 3, "kernel": 1}), Unpooled))
    with pytest.raises(AssertionError, match="by Unpooled"):
        CHECKS["reference"](Case(load({"kind": "snapkv", "window": 3, "kernel": 3}), Unpooled))


def complete() -> list[str]:
    """Kinds that need nothing but a prompt, and evict."""
    return sorted(
        kind
        for kind, policy in registry().policies.items()
        if policy.bounded is True
        and not any(field.is_required() for field in policy.model_fields.values())
        and not any(load(kind).rehearsing())
    )


@pytest.mark.parametrize("kind", complete())
def test_a_budget_that_holds_everything_is_the_full_cache(kind: str) -> None:
    found = kept("llama", load(kind), 100)
    assert found[-1] == [[[list(range(71))] * 2] * 2] * 2
    assert all(len(one[0][0][0]) < len(two[0][0][0]) for one, two in pairwise(found))
