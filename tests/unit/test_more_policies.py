"""Policies with signals of other kinds: worked examples, plain definitions, and what they have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvpolicy_plugins import rkv
from kvpolicy_plugins._gumbel import gumbel
from kvpolicy_plugins.ahakv import sharpened
from kvpolicy_plugins.keyformer import Keyformer
from kvpolicy_plugins.rkv import redundancy
from kvpolicy_plugins.tova import over_heads
from torch import Tensor

from kvpolicy import EvictionCache, load
from kvpolicy.attention.rows import AttentionRows
from kvpolicy.draw import uniform
from kvpolicy.policy import View
from kvpolicy.select import survivors
from kvpolicy.testing import check_policy
from kvpolicy.testing.case import Case
from tests import tiny
from tests.reference import MORE
from tests.unit.test_policies import ROWS, Trace, kept
from tests.unit.test_reference import compare
from tests.unit.test_step import compiles_once, waits_for_nothing

SPECS: dict[str, dict[str, Any]] = {
    "vatp": {"kind": "vatp", "of": {"kind": "h2o", "sinks": 1, "recent": 3}},
    "vatp, l2 of ties": {"kind": "vatp", "norm": "l2", "of": {"kind": "lfu", "recent": 2}},
    "vatp of scores below zero": {"kind": "vatp", "of": "knorm"},
    "vatp in a union": {
        "kind": "union",
        "parts": [{"take": 0.5, "of": "recent"}, {"of": {"kind": "vatp", "of": "heavy"}}],
    },
    "criticalkv": {"kind": "criticalkv", "of": {"kind": "h2o", "sinks": 1, "recent": 3}},
    "criticalkv, none first, of ties": {"kind": "criticalkv", "first": 0, "of": {"kind": "lfu", "recent": 2}},
    "criticalkv of scores below zero": {"kind": "criticalkv", "first": 3, "of": "knorm"},
    "criticalkv in a union": {
        "kind": "union",
        "parts": [{"take": 0.3, "of": "recent"}, {"of": {"kind": "criticalkv", "of": "heavy"}}],
    },
    "snapkv": {"kind": "snapkv", "window": 3, "kernel": 3},
    "a2sf": {"kind": "a2sf"},
    "a2sf, max": {"kind": "a2sf", "decay": 0.5, "recent": 2, "group": "max"},
    "ahakv": {"kind": "ahakv", "length": 6},
    "ahakv, plain": {"kind": "ahakv", "window": 3, "length": None, "recent": 2, "sinks": 1},
    "cake": {"kind": "cake", "window": 3, "kernel": 3},
    "cake, mean": {"kind": "cake", "window": 4, "gamma": 0, "kernel": 1},
    "cake, one query": {"kind": "cake", "window": 1},
    "expected_attention": {"kind": "expected_attention", "sinks": 1, "future": 16, "every": 3},
    "expected_attention, mean": {"kind": "expected_attention", "covariance": False, "values": False, "every": 1},
    "expected_attention, anew": {"kind": "expected_attention", "sinks": 0, "future": 3, "every": 1, "epsilon": 0.05},
    "h2o, fading": {"kind": "h2o", "decay": 0.8},
    "h2o, mean": {"kind": "h2o", "normalise": "visible"},
    "h2o, fading mean": {"kind": "h2o", "decay": 0.9, "normalise": "visible", "recent": 2},
    "h2o, max": {"kind": "h2o", "group": "max", "sinks": 1},
    "h2o, promoting": {"kind": "h2o", "promote": "always", "recent": 3},
    "h2o, promoting a fading share": {"kind": "h2o", "promote": "always", "decay": 0.9, "sinks": 2, "recent": 0.3},
    "h2o, promoting the newest": {"kind": "h2o", "promote": "always", "recent": 0},
    "keydiff": {"kind": "keydiff"},
    "keyformer": {"kind": "keyformer", "steps": 20},
    "keyformer, seed": {"kind": "keyformer", "seed": 4, "rows": "shared", "start": 0.5, "end": 3, "steps": 9},
    "keyformer, quiet": {"kind": "keyformer", "noise": "none", "recent": 1},
    "kivi, all bits": {"kind": "kivi", "bits": 16, "of": {"kind": "h2o", "sinks": 1}},
    "knorm": {"kind": "knorm"},
    "lagkv": {"kind": "lagkv", "lag": 3, "sinks": 2},
    "lagkv, all": {"kind": "lagkv", "lag": 4, "sinks": 0, "compare": "all"},
    "lagkv, short": {"kind": "lagkv"},
    "lfu": {"kind": "lfu"},
    "lfu, visible": {"kind": "lfu", "normalise": "visible", "tau": 1.5, "recent": 1},
    "lru, by age": {"kind": "lru", "ties": "age", "tau": 0.7, "recent": 1},
    "nacl": {"kind": "nacl", "proxies": 4, "sinks": 1},
    "nacl, recent": {"kind": "nacl", "proxies": 2, "drawn": 3, "sinks": 0, "recent": 2, "seed": 5, "rows": "shared"},
    "rkv": {"kind": "rkv", "window": 3},
    "rkv, attention": {"kind": "rkv", "window": 2, "weight": 0.8, "kernel": 3, "alike": 0.2},
    "scissorhands": {"kind": "scissorhands", "window": 6, "recent": 2},
    "scissorhands, all": {"kind": "scissorhands", "recent": 0.25},
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
        ("keyformer", {"noise": "none", "recent": 1}, [0, 2, 5]),
        ("kivi", {"of": {"kind": "h2o", "recent": 1}}, [0, 2, 5]),
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


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("scissorhands", {"window": 3, "recent": 1}, [0, 2, 5]),
        ("nacl", {"proxies": 2, "sinks": 0, "recent": 1, "drawn": 0}, [0, 2, 5]),
    ],
)
def test_windows(kind: str, options: dict[str, Any], expected: list[int]) -> None:
    assert kept(kind, blocks=3, **options) == expected  # the last block holds the window


def test_scissorhands_counts() -> None:
    trace = observed("scissorhands", blocks=3, window=3, recent=1)
    counted, mean, _ = trace.policy.priority(trace.view())
    assert (-counted).flatten().tolist() == [0, 3, 1, 1, 1, 0]
    torch.testing.assert_close(
        mean.flatten(), torch.tensor([0.95, 0.2, 0.75, 0.61, 0.29, 0.2]) / torch.tensor([3, 3, 3, 3, 2, 1])
    )
    trace.observe([[0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.4]])
    counted, _, _ = trace.policy.priority(trace.view())
    assert (-counted).flatten().tolist() == [1, 3, 2, 2, 2, 1, 0], "query 3 has left the window, and t is 7"


def test_keyformer_adds_noise_and_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, noise = [2, 0.5, 1, 0.2, 0.8, 1.5], [-0.3, 1.9, 0.1, -0.2, 0.6, 0.0]
    monkeypatch.setattr(Keyformer, "_drawn", lambda self, view, logits: torch.tensor(noise)[: logits.shape[-1]])
    for start, expected in (
        (1.0, [0.1885, 0.3796, 0.1035, 0.0344, 0.1397, 0.1543]),
        (2.0, [0.1868, 0.2651, 0.1384, 0.0798, 0.1608, 0.1690]),
    ):
        trace = Trace(load({"kind": "keyformer", "start": start, "recent": 1}), 3)
        trace.observe([[1.0]] * 5)  # what matters is the next row
        trace.fields["score"].zero_()
        trace.observe([torch.tensor(logits).softmax(-1).tolist()])
        torch.testing.assert_close(trace.fields["score"].flatten(), torch.tensor(expected), atol=1e-4, rtol=0)
        assert trace.evict() == [0, 1, 5]


def test_keyformer_without_noise_is_the_softmax() -> None:
    trace = Trace(load({"kind": "keyformer", "noise": "none", "recent": 1}), 3)
    trace.observe([[1.0]] * 5)
    trace.fields["score"].zero_()
    row = torch.tensor([2, 0.5, 1, 0.2, 0.8, 1.5]).softmax(-1)
    trace.observe([row.tolist()])
    torch.testing.assert_close(trace.fields["score"].flatten(), row)
    assert trace.evict() == [0, 2, 5]


def test_keyformer_temperature_rises_while_decoding_and_starts_again() -> None:
    policy = load({"kind": "keyformer", "noise": "none", "steps": 4, "start": 1.0, "end": 3.0})
    trace = Trace(policy, 99)
    row = [0.6, 0.4]
    trace.observe([[1.0], row])
    found = []
    for _ in range(6):
        before = trace.fields["score"].flatten()[:2].clone()
        trace.observe([[*row, *[0.0] * (trace.seen - 1)]])
        gained = trace.fields["score"].flatten()[:2] - before
        found.append(float((torch.tensor(row).log().diff() / gained.log().diff())[0]))
    assert found == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.0], abs=1e-3)
    trace.observe([[1.0] + [0.0] * trace.seen, [1.0] + [0.0] * (trace.seen + 1)])
    assert int(trace.fields["read"].min()) == int(trace.fields["read"].max()) == trace.seen


def test_gumbel_noise_is_standard() -> None:
    noise = gumbel(uniform(0, torch.arange(200_000)), torch.float64)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(1.6449, abs=0.03)
    assert bool(gumbel(torch.tensor([0.0, 1 - 2**-24]), torch.float32).isfinite().all())


def test_nacl_draws_by_the_softmax_of_scores() -> None:
    """One is sure; the other comes from the rest, by chances that are nearly even."""
    drawn = []
    for seed in range(3000):
        trace = Trace(load({"kind": "nacl", "proxies": 1, "sinks": 0, "recent": 0, "drawn": 1, "seed": seed}), 2)
        trace.observe([[1.0], [0.5, 0.5], [0.3, 0.4, 0.3], [0.4, 0.1, 0.3, 0.2]], 3)
        one, other = trace.evict()
        assert one == 0
        drawn.append(other)
    chances = [drawn.count(p) / len(drawn) for p in (1, 2, 3)]
    assert chances == pytest.approx([0.301, 0.367, 0.332], abs=0.03)


def test_lagkv_scales_by_the_lag_that_follows() -> None:
    vectors = torch.tensor([[0, 1], [2, 1], [0, 0], [1, 2.0]])
    view = Trace(load({"kind": "lagkv", "lag": 2, "sinks": 0, "compare": "all"}), 3, vectors, vectors)
    view.observe([[1.0]] * 4)
    worth, _ = view.policy.priority(view.view())
    torch.testing.assert_close(worth.flatten(), torch.tensor([0.3302, 0.6698, 2, 2]), atol=1e-4, rtol=0)
    assert view.evict() == [1, 2, 3]
    assert by_keys("lagkv", vectors.tolist(), 2, vectors, lag=2, sinks=0) == [2, 3], "what nothing follows stays"
    flat = torch.tensor([[0, 1], [2, 1], [0, 3], [1, 3.0]])
    assert by_keys("lagkv", flat.tolist(), 3, flat, lag=2, sinks=0) == [1, 2, 3], "a channel that stays the same"


def test_rkv_weighs_importance_and_redundancy() -> None:
    keys = torch.tensor([[1, 0], [0.99, 0.14], [0, 1], [0.6, -0.8]])
    positions = torch.arange(4).view(1, 1, -1)
    redundant = redundancy(keys.view(1, 1, 4, 2), positions, 0.5).flatten()
    torch.testing.assert_close(redundant, torch.tensor([0.2343, 0.3506, 0.1987, 0.2164]), atol=1e-4, rtol=0)
    row = [[1.0]] * 4 + [[0.30, 0.28, 0.22, 0.20, 0.0]]
    for weight, expected in ((0.1, [2, 3, 4]), (0.9, [0, 1, 4])):
        policy = load({"kind": "rkv", "window": 1, "kernel": 1, "weight": weight})
        trace = Trace(policy, 3, torch.cat([keys, torch.zeros(1, 2)]))
        trace.observe(row, 4)
        assert trace.evict() == expected


def test_rkv_compares_all_keys_whatever_fits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, positions = torch.randn(2, 3, 40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40)
    positions = positions.flip(0).expand(2, 3, -1)
    whole = redundancy(keys, positions, 0.5)
    monkeypatch.setattr(rkv, "_ROWS", 7)
    torch.testing.assert_close(redundancy(keys, positions, 0.5), whole)


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({"gamma": 0}, [0.4, 0.4, 0.1, 0.1]),
        ({}, [36.4, 36.4, 0.1, 0.1]),
        ({"gamma": 1, "window": 1}, [0.1, 0.7, 0.1, 0.1]),  # of one query there is no variance
        ({"kernel": 3}, [72.8 / 3, 72.9 / 3, 36.6 / 3, 0.2 / 3]),
    ],
)
def test_cake_adds_the_variance(options: dict[str, Any], scores: list[float]) -> None:
    trace = Trace(load({"kind": "cake", "window": 2, "kernel": 1, **options}), 4)
    rows = [[0.7, 0.1, 0.1, 0.1, 0.0], [0.1, 0.7, 0.1, 0.1, 0.0, 0.0]]
    trace.observe([*[[1.0]] * 4, *rows], 6 - trace.policy.window)
    torch.testing.assert_close(trace.fields["score"].flatten()[:4], torch.tensor(scores))
    trace.observe([[0.1, 0.2, 0.3, 0.4, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(trace.fields["score"].flatten()[:4], torch.tensor([0.1, 0.2, 0.3, 0.4]))


@pytest.mark.parametrize(("values", "expected"), [([0.2, 1, 1, 2, 1.5, 1], [2, 3, 5]), ([1.0] * 6, [0, 2, 5])])
def test_ahakv_weighs_by_values(values: list[float], expected: list[int]) -> None:
    lengths = torch.tensor(values).unsqueeze(-1)
    trace = Trace(load({"kind": "ahakv", "window": 2, "recent": 1}), 3, lengths, lengths)
    trace.observe(ROWS, 4)
    assert trace.evict() == expected


def test_ahakv_sharpens_by_a_gain() -> None:
    """The last row with a gain of one and a half; `length` is the one from which that follows."""
    logits = torch.tensor(ROWS[-1], dtype=torch.float64).log()
    length: Any = 6 * float((-(1.5**2 - 1) * logits.var(unbiased=False) / 2).exp())
    before, after = logits.exp(), sharpened(logits, length)
    torch.testing.assert_close(after, (1.5 * logits).softmax(-1))
    entropies = [float(-(p * p.log()).sum()) for p in (before, after)]
    assert entropies == pytest.approx([1.615, 1.461], abs=1e-3)


@pytest.mark.parametrize(("norm", "expected"), [("l1", [2, 3, 5]), ("l2", [0, 2, 5])])
def test_vatp_weighs_by_values(norm: str, expected: list[int]) -> None:
    """Token 3 weighs 1.22 by l1 and 0.61 by l2, the sink 0.63 by either."""
    values = torch.tensor([[0.2, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0.5] * 4, [0, 0, 1.5, 0], [1, 0, 0, 0]])
    policy = {"kind": "vatp", "norm": norm, "of": {"kind": "h2o", "recent": 1}}
    trace = Trace(load(policy), 3, values, values)
    trace.observe(ROWS)
    assert trace.evict() == expected


def test_ahakv_sharpens_to_the_entropy_of_fewer_tokens() -> None:
    logits = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row = sharpened(logits, 1000)
    few = logits[:, :1000].softmax(-1)
    entropies = [float(-(p * p.log()).sum()) for p in (row, few, logits.softmax(-1))]
    assert entropies[0] == pytest.approx(entropies[1], abs=0.25)
    assert entropies[0] < entropies[2] - 1
    torch.testing.assert_close(sharpened(logits, 4000), logits.softmax(-1))


@pytest.mark.parametrize(("values", "kept"), [(True, [0, 1, 3]), (False, [0, 3, 4])])
def test_expected_attention_without_rotation(values: bool, kept: list[int]) -> None:
    policy = load({"kind": "expected_attention", "sinks": 0, "values": values})
    keys = torch.tensor([[1, 0], [0, 2], [-1, 1], [0.5, 0.5], [2, 0], [0, -1]]).view(1, 1, 6, 2)
    lengths = torch.tensor([1, 2, 1, 1, 0.1, 1]).view(1, 1, 6, 1)
    side = 0.2**0.5
    queries = torch.tensor([[9, 9], [2, 0], [0, 0], [1, side], [1, -side]])  # mean (1, 0), covariance diag(.5, .1)
    seen, positions = torch.tensor([[[8]]], dtype=torch.int32), torch.arange(2, 8, dtype=torch.int32).view(1, 1, 6)
    fields = {"expected": torch.zeros(1, 1, 6, 1), "scored": torch.full((1, 1, 6), -1, dtype=torch.int32)}
    heads = {name: torch.zeros(1, 1, *of.sized(GROUPLESS)) for name, of in policy.head_fields().items()}
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):  # of which the first is among the first four of the text
        block, final = queries[rows].view(1, 1, 1, -1, 2), rows.stop == 5
        attention = AttentionRows(
            torch.arange(3, 8)[rows].view(1, 1, -1, 1), queries=block, unrotated=lambda block=block: block, final=final
        )
        view = View(fields, positions, seen, 3, keys, lengths, attention=attention, heads=heads)
        found = policy.observe(view)
        fields |= {name: state for name, state in found.items() if name in fields}
        heads |= {name: state for name, state in found.items() if name in heads}
    assert heads["count"].item() == 4
    view = View(fields, positions, seen, 3, keys, lengths, heads=heads)
    priority, _ = policy.priority(view)
    expected = torch.tensor([0.173, 0.083, 0.043, 0.112, 0.511, 0.077])
    weighed = expected * lengths.flatten() if values else expected
    torch.testing.assert_close(priority.flatten(), weighed, atol=1e-3, rtol=0)
    _, stay = survivors(policy.ranking(view), view, 3)
    assert (stay.flatten() - 2).tolist() == kept


@pytest.mark.parametrize("every", [1, 4])
def test_expected_attention_is_of_the_text_where_positions_are_rolled(every: int) -> None:
    """Until something is evicted, scores do not depend on how keys are held."""
    model, tokens = tiny.family("llama"), tiny.ids(2, 40)
    policy = {"kind": "expected_attention", "every": every}
    caches = [EvictionCache(model, policy, 64, positions=how) for how in ("original", "rolled")]
    with torch.no_grad():
        for part in tokens.split([20, 8, *[1] * 12], 1):
            for cache in caches:
                model(part, use_cache=True, **tiny.cache_argument(cache))
    for layer in range(2):
        torch.testing.assert_close(*(cache.scores(layer) for cache in caches), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*(cache.head_state(layer) for cache in caches), rtol=1e-5, atol=1e-5)


def test_expected_attention_scores_what_was_scored_longest_ago() -> None:
    model = tiny.family("llama")
    cache = EvictionCache(model, {"kind": "expected_attention", "every": 4}, 64)
    with torch.no_grad():
        for part in tiny.ids(1, 26).split([20, *[1] * 6], 1):
            model(part, use_cache=True, **tiny.cache_argument(cache))
    # One in four, rounded up, and the newcomer of each step is one of them.
    by_step = {23: [*range(10, 15), 22], 24: [*range(15, 20), 23], 25: [*range(5), 20, 24], 26: [*range(5, 10), 21, 25]}
    scored = cache.scores(0)["scored"][0, 0].tolist()
    assert {step: [p for p, when in enumerate(scored) if when == step] for step in sorted(set(scored))} == by_step


GROUPLESS = {"group": 1, "head_dim": 2}


def test_tova_joins_heads_by_position() -> None:
    """Heads that hold different tokens, in slots of different order."""
    positions = torch.tensor([[[0, 3, 7], [7, -1, 0]]], dtype=torch.int32)
    score = torch.tensor([[[0.5, 0.3, 0.2], [0.6, 0.0, 0.4]]])
    torch.testing.assert_close(over_heads(score, positions), torch.tensor([[[0.45, 0.15, 0.4], [0.4, 0.0, 0.45]]]))


# -- one set in a layer ---------------------------------------------------------------------------------------


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
def test_a_row_that_pauses(name: str) -> None:
    """Padding in the middle, for a chunk and for some steps."""
    tokens, mask = tiny.ids(2, 45), torch.ones(2, 45, dtype=torch.long)
    mask[1, 22:32] = 0
    compare(SPECS[name], tiny.family("llama"), 9, tokens, [16, 4, 1, 1, 7, 1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1], mask)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(list(SPECS)),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 2)]),
    more=st.integers(0, 16),
    calls=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    steps=st.integers(5, 45),
    rows=st.integers(1, 2),
    seed=st.integers(0, 10_000),
)
def test_any_sizes(
    name: str, heads: tuple[int, int], more: int, calls: list[int], steps: int, rows: int, seed: int
) -> None:
    model = tiny.family("llama", seed=seed, heads=heads[0], kv_heads=heads[1])
    calls, least = [*calls, *[1] * steps], Case(load(SPECS[name])).least
    compare(SPECS[name], model, least + more, tiny.ids(rows, sum(calls), seed), calls)


@every
def test_cut_seldom(name: str) -> None:
    policy = {"kind": "every", "tokens": 5, "of": SPECS[name]}
    compare(policy, tiny.family("llama", heads=6, kv_heads=2), 10, tiny.ids(2, 60), [3, 15] + [1] * 42)


COMPOSED: dict[str, dict[str, Any]] = {
    "union": {
        "kind": "union",
        "parts": [{"take": 2, "of": "sinks"}, {"take": 4, "of": SPECS["nacl"]}, {"of": "knorm"}],
    },
    "blend": {
        "kind": "blend",
        "parts": [{"of": SPECS["lfu"]}, {"of": SPECS["keyformer"], "weight": 1.37}, {"of": "tova", "weight": 2.11}],
    },
    "cascade": {"kind": "cascade", "narrow": SPECS["h2o, max"], "to": 1.5, "pick": SPECS["keyformer, quiet"]},
    "protect": {"kind": "protect", "sinks": 2, "recent": 2, "of": SPECS["nacl, recent"]},
    "layers": {"kind": "layers", "at": {"0": SPECS["rkv"]}, "default": SPECS["scissorhands"]},
}


@pytest.mark.parametrize("name", list(COMPOSED))
def test_compositions(name: str) -> None:
    compare(COMPOSED[name], tiny.family("llama"), 10, tiny.ids(2, 60), [22, 6] + [1] * 32)


def test_tova_after_a_policy_with_a_set_for_each_head() -> None:
    policy = {"kind": "phases", "prefill": "h2o", "decode": "tova"}
    compare(policy, tiny.family("llama"), 9, tiny.ids(2, 50), [20] + [1] * 20 + [10])


# -- the checks ------------------------------------------------------------------------------------------------


@every
def test_checks(name: str) -> None:
    spec = SPECS[name]
    check_policy(load(spec), draws_by={"row", "head"} if spec["kind"] in DRAWS else ())


def test_every_rule_is_tried() -> None:
    others = {"h2o", "kivi", "lru", "snapkv", "vatp", "criticalkv", "union"}
    assert {spec["kind"] for spec in SPECS.values()} == {*MORE, *others} - {"quest"}  # which has a file of its own


@every
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [12, 0.5], ids=["tokens", "share"])
def test_no_synchronisation_in_a_decode_step(name: str, padded: bool, budget: Any) -> None:
    waits_for_nothing(tiny.family("llama", dtype=torch.float32), SPECS[name], budget, padded, [25, 17])


@every
def test_a_steady_step_compiles_once_to_the_same_tokens(name: str) -> None:
    compiles_once(tiny.family("llama", dtype=torch.float32), SPECS[name], 12, 20, 12)


# -- what users of such tools ran into -------------------------------------------------------------------------


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_everything_stays_finite_in_low_precision(name: str, dtype: torch.dtype) -> None:
    """In a padded batch under the tightest budget there is; scores keep their precision."""
    model, (tokens, mask) = tiny.family("llama", dtype=dtype), tiny.left_pad([19, 12, 1])
    cache = EvictionCache(model, SPECS[name], Case(load(SPECS[name])).least)
    for step in range(8):
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask, **tiny.cache_argument(cache)).logits
        assert bool(logits[mask[:, -logits.shape[1] :].bool()].isfinite().all())
        tokens, mask = tiny.ids(3, 1, step), torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
    for scores in cache.scores(1).values():
        assert scores.dtype in (torch.float32, torch.int32)
        assert bool(scores.isfinite().all())


@pytest.mark.parametrize("kind", [*MORE, "snapkv"])
def test_what_is_written_gets_a_place(kind: str) -> None:
    """The kept set must not freeze on the prompt."""
    model = tiny.family("llama", dtype=torch.float32)
    cache = EvictionCache(model, kind, 16)
    with torch.no_grad():
        for part in tiny.ids(1, 232).split([32, *[1] * 200], 1):
            model(part, **tiny.cache_argument(cache))
    for layer in range(2):
        assert bool((cache.positions(layer) >= 32).any(-1).all())
