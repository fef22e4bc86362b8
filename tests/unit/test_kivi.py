"""Entries in a few bits: codes and ranges by themselves, what is left of tokens by a plain definition, and bytes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from kvpolicy import EvictionCache, cli, load
from kvpolicy.attention.blocks import Scoring, attend
from kvpolicy.errors import BudgetError, ConfigError
from kvpolicy.explain import explain
from kvpolicy.pool import SlotPool
from kvpolicy.quantised import Coded, PerChannel, PerToken, Quantised, QuantisedPool, pack, unpack
from kvpolicy.testing import check_policy
from tests import folder, tiny
from tests.reference import RULES
from tests.stored import Stored
from tests.unit.test_reference import compare
from tests.unit.test_step import waits_for_nothing

BITS = (2, 4, 8)
OF: dict[str, Any] = {
    "h2o": "h2o",
    "streaming_llm": "streaming_llm",
    "random": "random",
    "snapkv": {"kind": "snapkv", "window": 3, "kernel": 3},
    "tova": "tova",
    "knorm": "knorm",
    "vatp": {"kind": "vatp", "of": {"kind": "h2o", "sinks": 1, "recent": 3}},
    "union": {"kind": "union", "parts": [{"take": 2, "of": "sinks"}, {"take": 0.5, "of": "recent"}, {"of": "heavy"}]},
}
RANKED = [of for name, of in OF.items() if name != "knorm"]
"""Without ties: the keys of a token that comes twice are of the same length."""
SMALL = {"kind": "kivi", "group": 4, "residual": 3}
every_inner = pytest.mark.parametrize("name", list(OF))


def kivi(of: Any = None, **options: Any) -> dict[str, Any]:
    return {**SMALL, **options, **({} if of is None else {"of": of})}


def feed(model: Any, cache: Any, tokens: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens, attention_mask=mask, use_cache=True, **tiny.cache_argument(cache), **more).logits


def run(model: Any, cache: Any, tokens: Tensor, calls: list[int]) -> Tensor:
    return torch.cat([feed(model, cache, part) for part in tokens.split(calls, 1)], 1)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.family("llama")


# -- codes and ranges ------------------------------------------------------------------------------------------


def coded(vectors: Tensor, per: type[PerChannel] | type[PerToken], bits: int, group: int) -> Coded:
    """The rows of `vectors` in slots of one head."""
    rows = vectors[None, None]
    slots = -(-len(vectors) // group) * group
    fresh = torch.arange(slots).view(1, 1, -1) < len(vectors)
    filled = torch.cat([rows, rows.new_full((1, 1, slots - len(vectors), rows.shape[-1]), 77.0)], 2)
    layout = per(Quantised(bits, group), rows.shape[-1])
    return Coded.none(bits, layout, rows).grown(slots).joined(filled, fresh, torch.zeros_like(fresh))


def there_and_back(vectors: Any, per: Any, bits: int = 2, group: int = 4) -> Tensor:
    vectors = torch.as_tensor(vectors)
    return coded(vectors, per, bits, group).decoded()[0, 0, : len(vectors)]


def test_a_group_of_numbers() -> None:
    expected = torch.tensor([[0, 1.0667, 2.1333, 3.2]])
    torch.testing.assert_close(there_and_back([[0, 1, 2, 3.2]], PerToken), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(there_and_back([[0], [1], [2], [3.2]], PerChannel), expected.T, atol=1e-4, rtol=0)


def test_keys_with_an_outlying_channel_are_better_off_per_channel() -> None:
    keys = torch.tensor([[0.1, 8, 0.5, 0.3], [0.2, 9, 0.4, 0.1], [0.3, 10, 0.6, 0.2], [0, 8.5, 0.55, 0.25]])
    errors = [float((there_and_back(keys, per) - keys).abs().max()) for per in (PerChannel, PerToken)]
    assert errors == pytest.approx([1 / 3, 0.55], abs=1e-3)


def test_numbers_that_are_all_the_same_come_back() -> None:
    for per in (PerChannel, PerToken):
        for number in (0.0, -3.3, 6e4):
            same = torch.full((4, 8), number, dtype=torch.float16)
            assert torch.equal(there_and_back(same, per), same)


@given(bits=st.sampled_from(BITS), width=st.integers(1, 40), seed=st.integers(0, 999))
def test_codes_are_packed_and_unpacked(bits: int, width: int, seed: int) -> None:
    codes = torch.randint(
        0, 2**bits, (2, 3, 5, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape[-1] == math.ceil(width * bits / 8)
    assert torch.equal(unpack(packed, bits, width), codes)


def half_steps(stored: Coded) -> Tensor:
    """Half a step of the group of each number, ``[batch, kv_heads, slots, width]``."""
    return stored.layout.join(stored.scale.double() / 2 + stored.layout.split(stored.decoded()).double() * 0)


def rounding(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """How far a sum of two terms as large as these may be off: computed in float32 at least, and rounded to `dtype`."""
    return numbers.abs().double() * (torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("per", [PerChannel, PerToken])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    bits=st.sampled_from(BITS),
    group=st.integers(1, 9),
    width=st.integers(1, 20),
    slots=st.integers(1, 20),
    spread=st.sampled_from([1e-3, 1.0, 100.0]),
    offset=st.sampled_from([0.0, 5.0, -300.0]),
    seed=st.integers(0, 999),
)
def test_no_number_is_off_by_more_than_half_a_step(
    per: Any, dtype: torch.dtype, bits: int, group: int, width: int, slots: int, spread: float, offset: float, seed: int
) -> None:
    drawn = torch.randn(slots, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    vectors = (drawn * spread + offset).to(dtype)
    stored = coded(vectors, per, bits, group)
    off = (stored.decoded()[0, 0, :slots].double() - vectors.double()).abs()
    number = torch.finfo(dtype)
    coarse = (2**bits - 1) * number.smallest_normal * number.eps  # steps below what the type tells apart
    assert bool((off <= half_steps(stored)[0, 0, :slots] + rounding(vectors, dtype) + coarse).all())


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    per=st.sampled_from([PerChannel, PerToken]),
    taken=st.lists(st.booleans(), min_size=8, max_size=8),
    comes=st.lists(st.booleans(), min_size=8, max_size=8),
    size=st.sampled_from([0.1, 1.0, 3.0]),
    seed=st.integers(0, 999),
)
def test_newcomers_widen_ranges_or_leave_codes_as_they_are(
    bits: int, per: Any, taken: list[bool], comes: list[bool], size: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    old, new = (torch.randn(8, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    before = coded(old, per, bits, 4)
    there, fresh = torch.tensor(taken).view(1, 1, 8), torch.tensor(comes).view(1, 1, 8)
    fresh = fresh & ~there
    after = before.joined(new[None, None] * size, fresh, there)
    stays, was, now = there[0, 0], before.decoded()[0, 0], after.decoded()[0, 0]
    codes = [unpack(stored.codes, bits, 5)[0, 0] for stored in (before, after)]
    top = 2**bits - 1
    spans = [torch.stack([stored.zero, stored.zero + top * stored.scale]) for stored in (before, after)]
    layout, each = before.layout, torch.ones(1, 1, 8, 5, dtype=torch.float64)
    changed = layout.join(layout.split(each) * (spans[0] != spans[1]).any(0))[0, 0].bool()
    assert torch.equal(codes[0][stays & ~changed.any(-1)], codes[1][stays & ~changed.any(-1)])
    assert torch.equal(codes[0][~changed & stays[:, None]], codes[1][~changed & stays[:, None]])
    low, high = (layout.join(layout.split(each) * span)[0, 0] for span in spans[1])
    assert bool((was >= low - 1e-12)[stays].all() and (was <= high + 1e-12)[stays].all())
    half = half_steps(after)[0, 0] + 1e-12
    assert bool(((now - was).abs() <= half)[stays].all())
    assert bool(((now - new * size).abs() <= half)[fresh[0, 0]].all())
    fits = fresh[0, 0] & ~changed.any(-1)
    assert bool((new[fits] * size >= low[fits]).all())


# -- against the plain definition ------------------------------------------------------------------------------

CALLS = [24, *[1] * 40, 9, *[1] * 9]


@every_inner
@pytest.mark.parametrize("bits", BITS)
def test_prompt_steps_and_a_second_turn(name: str, bits: int, model: Any) -> None:
    compare(kivi(OF[name], bits=bits), model, 12, tiny.ids(1, sum(CALLS)), CALLS, reference_of=Stored)


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("of", ["full", "h2o"])
def test_families(family: str, of: str) -> None:
    budget = 999 if of == "full" else 12
    compare(kivi(of), tiny.family(family), budget, tiny.ids(2, 50), [20] + [1] * 30, reference_of=Stored)


@pytest.mark.parametrize(
    "of",
    [
        {"kind": "every", "tokens": 5, "of": "h2o"},
        {"kind": "phases", "prefill": "h2o", "decode": "full"},
        {"kind": "phases", "prefill": "full", "decode": "h2o"},
        {"kind": "protect", "sinks": 2, "recent": 4, "of": "knorm"},
    ],
    ids=lambda of: "-".join(map(str, of.values())),
)
def test_cut_seldom_and_in_phases(of: Any, model: Any) -> None:
    compare(kivi(of), model, 12, tiny.ids(2, sum(CALLS)), CALLS, reference_of=Stored)


@every_inner
def test_chunks_and_a_padded_batch(name: str, model: Any) -> None:
    tokens, mask = tiny.left_pad([17, 5, 11])
    more = tiny.ids(3, 30, seed=7)
    tokens, mask = torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    calls = [10, 7, 1, 1, 1, 9, 1, 1, 6, 1, 1, 8]
    compare(kivi(OF[name], group=3), model, 9, tokens, calls, mask, reference_of=Stored)


def test_a_row_that_pauses(model: Any) -> None:
    tokens, mask = tiny.ids(2, 45), torch.ones(2, 45, dtype=torch.long)
    mask[1, 22:32] = 0
    calls = [16, 4, 1, 1, 7, 1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1]
    compare(kivi("h2o"), model, 9, tokens, calls, mask, reference_of=Stored)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    of=st.sampled_from([*RANKED, {"kind": "every", "tokens": 3, "of": "tova"}]),
    bits=st.sampled_from(BITS),
    group=st.integers(1, 9),
    residual=st.integers(0, 9),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2)]),
    more=st.integers(1, 16),
    calls=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    steps=st.integers(0, 30),
    rows=st.integers(1, 2),
    seed=st.integers(0, 10_000),
)
def test_any_sizes(
    of: Any,
    bits: int,
    group: int,
    residual: int,
    heads: Any,
    more: int,
    calls: list[int],
    steps: int,
    rows: int,
    seed: int,
) -> None:
    model = tiny.family("llama", seed=seed, heads=heads[0], kv_heads=heads[1])
    policy = kivi(of, bits=bits, group=group, residual=residual)
    calls = [*calls, *[1] * steps]
    compare(policy, model, max(residual, 5) + more, tiny.ids(rows, sum(calls), seed), calls, reference_of=Stored)


# -- full precision --------------------------------------------------------------------------------------------


@every_inner
def test_sixteen_bits_are_no_quantisation(name: str, model: Any) -> None:
    tokens = tiny.ids(2, sum(CALLS))
    ours, plain = EvictionCache(model, kivi(OF[name], bits=16), 12), EvictionCache(model, OF[name], 12)
    for part in tokens.split(CALLS, 1):
        assert torch.equal(feed(model, ours, part), feed(model, plain, part))
        for layer in range(2):
            assert torch.equal(ours.positions(layer), plain.positions(layer))
    assert ours.nbytes() == plain.nbytes()
    assert {type(pool) for pool in ours.layers} == {SlotPool}


@pytest.mark.parametrize("of", ["h2o", "knorm"])
def test_the_newest_tokens_are_exact(of: str, model: Any) -> None:
    """The residual of each head, and up to a group more, as far as the policy keeps them."""
    tokens = tiny.ids(1, 64)
    full = DynamicCache(config=model.config)
    feed(model, full, tokens)
    cache, counts = EvictionCache(model, kivi(of, residual=5), 20), set()
    for part in tokens.split([30] + [1] * 34, 1):
        feed(model, cache, part)
        pool = cache.layers[0]  # where keys do not depend on what was kept
        for head in range(2):
            slots = pool.active_positions[0, head].tolist()
            whole, held = (sorted(p for p in some if p >= 0) for some in (slots[pool.coded :], slots))
            assert whole == held[len(held) - len(whole) :]
            for p in whole:
                torch.testing.assert_close(pool.active_keys[0, head, slots.index(p)], full.layers[0].keys[0, head, p])
            counts.add(len(whole))
    assert max(counts) <= 5 + 4
    assert counts == set(range(5, 9)) if of == "h2o" else len(counts) > 1


# -- attention -------------------------------------------------------------------------------------------------


def bound(pool: QuantisedPool, query: Tensor, scaling: float) -> float:
    """How far attention over `pool` may be off: by half a step of a value, and by what half a step of keys shifts."""
    assert pool.store is not None
    keys, values = (half_steps(stored) for stored in pool.store)
    shift = float((query.abs() @ keys.transpose(-1, -2)).max()) * scaling
    held = pool.active_values
    spread = float(held.amax() - held.amin()) + 2 * float(values.max())
    return float(values.max()) + math.expm1(2 * shift) * spread / 2


@pytest.mark.parametrize("bits", BITS)
def test_attention_is_as_close_as_steps_are_small(bits: int) -> None:
    draw = torch.Generator().manual_seed(bits)

    def drawn(tokens: int) -> Tensor:
        return torch.randn(1, 2, tokens, 16, generator=draw, dtype=torch.float64)

    pool = QuantisedPool(load(kivi(bits=bits, group=8)), None, 0, torch.tensor([0]))
    keys, values = drawn(101), drawn(101)
    for part in (slice(0, 100), slice(100, 101)):
        pool.expected = True
        pool.update(keys[:, :, part], values[:, :, part])
        pool.place(None)
        query = drawn(part.stop - part.start)
        found = attend(pool, query, Scoring(0.25))
        most = bound(pool, query, 0.25) if part.start else 0
        pool.evict(part.stop - part.start)
    expected = torch.softmax(query @ keys.transpose(-1, -2) * 0.25, -1) @ values
    off = float((found - expected).abs().max())
    assert 0 < off <= most
    assert bits < 8 or most < float(values.amax() - values.amin()) / 10, "the bound says something"


def test_a_step_decodes_a_layer_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though attention and two policies ask for it; and nothing decoded is left."""
    blend = {"kind": "blend", "parts": [{"kind": "vatp", "of": "heavy"}, "keydiff"]}
    cache = EvictionCache(model, kivi(blend), 12)
    run(model, cache, tiny.ids(1, 40), [30] + [1] * 10)
    counted, decoded = [], Coded.decoded
    monkeypatch.setattr(Coded, "decoded", lambda coded: counted.append(coded) or decoded(coded))
    for step in range(8):
        feed(model, cache, tiny.ids(1, 1, seed=step))
    layers, of_a_layer = 2, 2
    assert len(counted) == 8 * layers * of_a_layer
    assert all(pool._decoded is None for pool in cache.layers)


def test_fewer_bits_lose_more() -> None:
    """In one layer what is lost is in proportion to the step, to first order: 85 times less at 8 bits than at 2."""
    model = tiny.family("llama", layers=1)
    tokens = tiny.ids(1, 80)
    full = run(model, DynamicCache(config=model.config), tokens, [60] + [1] * 20)[:, 60:]
    off = []
    for bits in BITS:
        cache = EvictionCache(model, kivi(bits=bits, group=8))
        off.append(float((run(model, cache, tokens, [60] + [1] * 20)[:, 60:] - full).abs().mean()))
    assert off[0] > 3 * off[1] > 9 * off[2] > 0
    assert 85 / 3 < off[0] / off[2] < 85 * 3


# -- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of", ["full", "h2o", "streaming_llm", {"kind": "random", "rows": "shared"}, OF["snapkv"], "tova"], ids=str
)
@pytest.mark.parametrize("budget", [10, 0.5])
def test_rows_of_a_padded_batch_are_as_if_alone(of: Any, budget: Any, model: Any) -> None:
    policy, budget = kivi(of, residual=2), None if of == "full" else budget
    lengths = [40, 16, 9] if budget == 0.5 else [20, 9, 3]
    tokens, mask = tiny.left_pad(lengths)
    more = tiny.ids(3, 25, seed=9)
    together = EvictionCache(model, policy, budget)
    first = feed(model, together, tokens, mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    logits = []
    for step in range(25):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        places = mask.sum(-1, keepdim=True) - 1
        logits.append(feed(model, together, more[:, step : step + 1], mask, position_ids=places))
    for row, length in enumerate(lengths):
        alone = EvictionCache(model, policy, budget)
        one = feed(model, alone, tokens[row : row + 1, -length:])
        torch.testing.assert_close(first[row : row + 1, -length:], one, rtol=1e-9, atol=1e-9)
        for step in range(25):
            one = feed(model, alone, more[row : row + 1, step : step + 1])
            torch.testing.assert_close(logits[step][row : row + 1], one, rtol=1e-9, atol=1e-9)
        for layer in range(2):
            held = [[p for p in head if p >= 0] for head in together.positions(layer)[row].tolist()]
            assert held == alone.positions(layer)[0].tolist()


def test_rows_are_reordered_repeated_and_selected(model: Any) -> None:
    tokens, more = tiny.ids(3, 30), tiny.ids(3, 12, seed=1)

    def prepared(rows: Tensor) -> EvictionCache:
        cache = EvictionCache(model, kivi("h2o"), 12)
        run(model, cache, rows, [24] + [1] * 6)
        return cache

    moves = {
        (2, 0, 0): lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
        (1,): lambda cache: cache.batch_select_indices(torch.tensor([1])),
        (0, 0, 1, 1, 2, 2): lambda cache: cache.batch_repeat_interleave(2),
    }
    for order, move in moves.items():
        moved, straight = prepared(tokens), prepared(tokens[list(order)])
        move(moved)
        steps = more[list(range(len(order)))] if len(order) <= 3 else more.repeat(2, 1)
        found, wanted = (run(model, cache, steps, [1] * 12) for cache in (moved, straight))
        torch.testing.assert_close(found, wanted)
        assert torch.equal(moved.positions(1), straight.positions(1))
        assert moved.nbytes() == straight.nbytes()


def test_beams_and_generate(model: Any) -> None:
    cache = EvictionCache(model, kivi("h2o", bits=8), 16)
    written = model.generate(
        tiny.ids(2, 30), num_beams=3, max_new_tokens=12, do_sample=False, **tiny.cache_argument(cache)
    )
    assert written.shape == (2, 42)
    assert cache.kept(0).shape == (6, 2)


def test_reset_makes_it_as_new(model: Any) -> None:
    cache, runs = EvictionCache(model, kivi("h2o"), 12), []
    for _ in range(2):
        runs.append(run(model, cache, tiny.ids(1, 60), [24] + [1] * 30 + [6]))
        cache.reset()
        assert cache.nbytes() == cache.get_seq_length() == 0
    assert torch.equal(*runs)
    with pytest.raises(ConfigError, match="cannot be cropped"):
        cache.crop(-1)


# -- bytes -----------------------------------------------------------------------------------------------------


def by_hand(held: int, most: float, storage: Quantised, width: int, itemsize: int, fields: int, heads: int = 2) -> int:
    """Bytes of a layer of one row: codes, ranges, what is in full precision, 4-byte positions, the free slot."""
    groups = math.ceil(max(held - storage.residual, 0) / storage.group)
    coded, full = groups * storage.group, min(storage.residual + storage.group, most + 1)
    codes = coded * math.ceil(width * storage.bits / 8)
    key_ranges, value_ranges = groups * width, coded * math.ceil(width / min(storage.group, width))
    numbers = 2 * (key_ranges + value_ranges) + 2 * full * width
    return int(heads * (2 * codes + numbers * itemsize + (coded + full) * (4 + fields) + 8) + 4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("group", "residual"), [(4, 3), (3, 0), (32, 32), (5, 19)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_follow_the_formula(bits: int, group: int, residual: int, dtype: torch.dtype) -> None:
    model, storage = tiny.family("llama", dtype=dtype), Quantised(bits, group, residual)
    cache = EvictionCache(model, {"kind": "kivi", "bits": bits, "group": group, "residual": residual, "of": "h2o"}, 40)
    run(model, cache, tiny.ids(1, 120), [100] + [1] * 20)
    assert cache.nbytes() == 2 * by_hand(40, 40, storage, 8, dtype.itemsize, fields=4)
    grown = EvictionCache(model, {"kind": "kivi", "bits": bits, "group": group, "residual": residual})
    run(model, grown, tiny.ids(1, 100 + 3 * group), [100] + [1] * 3 * group)
    whole = 100 + 3 * group if (100 - residual) % group == 0 else 0  # each move takes a group of its own
    if whole:
        assert grown.nbytes() == 2 * by_hand(whole, math.inf, storage, 8, dtype.itemsize, fields=0)


def test_two_bits_come_to_three() -> None:
    numbers = 2 * 128 * 10**6
    bits = 8 * Quantised(bits=2, group=32, residual=32).nbytes(10**6, 10**6, 128, 2) / numbers
    assert bits == pytest.approx(2 + 2 * 16 / 32, rel=1e-3)


@pytest.mark.parametrize("of", ["full", "h2o", {"kind": "every", "tokens": 7, "of": "h2o"}], ids=str)
def test_nothing_grows_beyond_the_budget_and_no_prompt_is_left(of: Any) -> None:
    model = tiny.family("llama", dtype=torch.float32)
    cache = EvictionCache(model, kivi(of, group=8), None if of == "full" else 40)
    run(model, cache, tiny.ids(1, 1000), [900] + [1] * 100)
    held, plain = cache.nbytes(), EvictionCache(model, of, None if of == "full" else 40)
    run(model, plain, tiny.ids(1, 1000), [900] + [1] * 100)
    assert held < plain.nbytes()
    if of != "full":
        run(model, cache, tiny.ids(1, 100), [1] * 100)
        assert cache.nbytes() == held


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("group", "residual"), [(4, 3), (3, 0), (16, 8), (5, 19)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [60, 90])
def test_a_budget_of_bytes_buys_as_many_tokens_as_fit(
    bits: int, group: int, residual: int, dtype: torch.dtype, budget: int
) -> None:
    """And not a group more. What is kept is what a budget of that many tokens keeps."""
    model, calls, storage = tiny.family("llama", dtype=dtype), [400] + [1] * 20, Quantised(bits, group, residual)
    tokens, policy = tiny.ids(1, sum(calls)), kivi("h2o", bits=bits, group=group, residual=residual)
    ours = EvictionCache(model, {**policy, "counts": "bytes"}, budget)
    run(model, ours, tokens, calls)
    held, worth = ours.layers[0].limit, 2 * (budget + 1) * 8 * dtype.itemsize  # a plain cache has a free slot, too
    whole = [by_hand(some, some, storage, 8, dtype.itemsize, fields=4) - 2 * 8 - 4 for some in (held, held + group)]
    assert whole[0] <= 2 * worth < whole[1]
    assert ours.nbytes() == 2 * (whole[0] + 2 * 8 + 4)  # where the free slot of each head is, and what a row has seen
    assert (ours.kept(0) == held).all()
    other = EvictionCache(model, policy, held)
    run(model, other, tokens, calls)
    assert torch.equal(ours.positions(1), other.positions(1))


def test_bytes_that_buy_nothing_are_refused(model: Any) -> None:
    policy = kivi("h2o", counts="bytes")  # groups of 4, a residual of 3
    with pytest.raises(BudgetError, match=r"^the bytes of 7 tokens are too few for 7 in full precision \(residual"):
        EvictionCache(model, policy, 7)
    cache = EvictionCache(model, policy, 0.25)
    with pytest.raises(BudgetError, match=r"the bytes of 5 tokens are too few .*; raise the budget, or lower residual"):
        feed(model, cache, tiny.ids(1, 20))
    assert load(kivi("h2o", bits=16, counts="bytes")).storage is None


EXPLAINED = [
    ({}, None),
    ({"of": "h2o"}, 40),
    ({"of": "h2o"}, 400),
    ({"of": "h2o", "residual": 50}, 60),
    ({"of": {"kind": "every", "tokens": 8, "of": "h2o"}}, 40),
    ({"of": {"kind": "phases", "prefill": "snapkv", "decode": "full"}}, 40),
    ({"of": {"kind": "phases", "prefill": "full", "decode": "h2o"}}, 40),
    ({"of": "h2o"}, {"share": 0.2, "of": "seen"}),
    ({"of": "h2o"}, {"share": 0.2, "layers": {"kind": "pyramid", "beta": 4}}),
    ({"of": "h2o", "counts": "bytes"}, 40),
    ({"of": "h2o", "counts": "bytes"}, {"share": 0.3, "layers": {"kind": "pyramid", "beta": 2}}),
]


@pytest.mark.parametrize(("options", "budget"), EXPLAINED, ids=str)
def test_bytes_are_known_before(options: dict[str, Any], budget: Any) -> None:
    model = tiny.family("llama", dtype=torch.float32, layers=3)
    policy = kivi(**options)
    found = explain(policy, model.config, 150, dtype="float32", budget=budget)
    cache = EvictionCache(model, policy, budget)
    feed(model, cache, tiny.ids(1, 150))
    for numbers, pool in zip(found.layers, cache.layers, strict=False):
        assert numbers.bytes.total == pool.nbytes()
        assert numbers.slots == pool.used
    assert found.bytes.total == cache.nbytes()


# -- budgets and layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
def test_a_budget_that_grows(padded: bool, model: Any) -> None:
    tokens, mask = tiny.left_pad([30, 14 if padded else 30])
    cache = EvictionCache(model, kivi("h2o", residual=5, group=3), {"share": 0.5, "of": "seen", "min": 6})
    feed(model, cache, tokens, mask)
    for step in range(30):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        feed(model, cache, tiny.ids(2, 1, step), mask)
        limits = [max(6, math.floor(0.5 * int(row) + 0.5)) for row in mask.sum(-1)]
        assert [int(cache.kept(1)[row].max()) for row in range(2)] == limits


def test_layers_may_be_stored_in_different_ways(model: Any) -> None:
    policy = {"kind": "layers", "at": {"0": kivi("h2o", bits=4)}, "default": "h2o"}
    cache = EvictionCache(model, policy, 12)
    run(model, cache, tiny.ids(1, 40), [20] + [1] * 20)
    assert [type(pool) for pool in cache.layers] == [QuantisedPool, SlotPool]
    assert [int(cache.kept(layer).max()) for layer in range(2)] == [12, 12]


@pytest.mark.parametrize("around", ["protect", "every"])
def test_it_may_sit_inside_what_has_one_part(around: str, model: Any) -> None:
    outside = {"kind": around, **({"sinks": 2} if around == "protect" else {"tokens": 4})}
    caches = [
        EvictionCache(model, policy, 14) for policy in ({**outside, "of": kivi("h2o")}, kivi({**outside, "of": "h2o"}))
    ]
    for part in tiny.ids(1, 60).split([20] + [1] * 40, 1):
        assert torch.equal(*(feed(model, cache, part) for cache in caches))
    assert {type(pool) for cache in caches for pool in cache.layers} == {QuantisedPool}


def test_a_prefix_goes_with_it(model: Any) -> None:
    cache = EvictionCache(model, kivi("h2o"), 14, prefix=5)
    run(model, cache, tiny.ids(1, 60), [20] + [1] * 40)
    assert cache.positions(0)[0, 0, :5].tolist() == list(range(5))


@pytest.mark.parametrize(
    "policy",
    [
        {"kind": "union", "parts": [{"take": 4, "of": "sinks"}, SMALL]},
        {"kind": "blend", "parts": ["h2o", SMALL]},
        {"kind": "cascade", "narrow": "h2o", "pick": {**SMALL, "of": "h2o"}},
        {"kind": "phases", "prefill": {**SMALL, "of": "h2o"}, "decode": "full"},
        {"kind": "phases", "prefill": {"kind": "protect", "sinks": 1, "of": {**SMALL, "of": "h2o"}}, "decode": "full"},
        {"kind": "phases", "prefill": {"kind": "layers", "at": {"0": SMALL}, "default": "full"}, "decode": "full"},
    ],
    ids=lambda policy: policy["kind"],
)
def test_one_part_of_several_cannot_say_how_a_layer_is_stored(policy: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be one part of several|decides when to evict"):
        load(policy)


def test_what_cannot_be_meant_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="kivi says itself how a layer is stored"):
        load(kivi(kivi("h2o")))
    with pytest.raises(ConfigError, match="bits: must be 2, 4, 8 or 16, not 3"):
        load({"kind": "kivi", "bits": 3})
    with pytest.raises(BudgetError, match=r"a residual of 12 leaves nothing to quantise; raise the budget or lower"):
        EvictionCache(model, kivi("h2o", residual=12), 12)
    with pytest.raises(BudgetError, match=r"budget\.heads: kivi has layers stored in a way of their own"):
        EvictionCache(model, kivi("h2o"), {"tokens": 12, "heads": "adaptive"})
    EvictionCache(model, kivi("h2o", bits=16), {"tokens": 12, "heads": "adaptive"})
    cache = EvictionCache(model, kivi(), 12)
    feed(model, cache, tiny.ids(1, 12))
    with pytest.raises(BudgetError, match="13 tokens do not fit its budget of 12"):
        feed(model, cache, tiny.ids(1, 1))


# -- the checks, steps and the comparison ----------------------------------------------------------------------


@pytest.mark.parametrize("of", [None, *OF.values()], ids=str)
def test_checks(of: Any) -> None:
    check_policy(load(kivi(of)), draws_by={"row", "head"} if of == "random" else ())


def test_checks_of_sixteen_bits() -> None:
    check_policy(load(kivi("h2o", bits=16)))


def test_approximations_are_not_held_against_what_is_exact() -> None:
    from kvpolicy.testing.case import Case, NotApplicable
    from kvpolicy.testing.checks import CHECKS

    for name in ("keys", "whole"):
        with pytest.raises(NotApplicable, match="layer 0 stores approximations"):
            CHECKS[name](Case(load(SMALL)))


@pytest.mark.parametrize("kind", [*RULES, "snapkv", "tova", "knorm"])
@pytest.mark.parametrize("padded", [False, True])
def test_no_synchronisation_in_a_decode_step(kind: str, padded: bool) -> None:
    """Three steps, of which one moves tokens into quantised slots."""
    policy, budget = kivi(kind, group=2), None if kind == "full" else 12
    waits_for_nothing(tiny.family("llama", dtype=torch.float32), policy, budget, padded, [21, 17])


@torch.no_grad()
def test_steps_compile_to_few_graphs() -> None:
    """One for the step that moves tokens, two for the others: the second does not count on how many came since."""
    model = tiny.family("llama", dtype=torch.float32)

    def run(step: Any) -> list[int]:
        cache = EvictionCache(model, kivi("h2o"), 12)
        token = model(tiny.ids(1, 20), **tiny.cache_argument(cache)).logits[:, -1:].argmax(-1)
        tokens = []
        for _ in range(30):
            token = step(token, **tiny.cache_argument(cache)).logits[:, -1:].argmax(-1)
            tokens.append(int(token))
        return tokens

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = run(torch.compile(model.forward, fullgraph=True, backend="eager"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    assert compiled == run(model.forward)


def test_a_comparison_shows_bytes(tmp_path: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", folder.save_model(tmp_path / "model"), "--text", folder.save_text(tmp_path / "text.txt")]
    mine = tmp_path / "small.yaml"
    mine.write_text("kind: kivi\ngroup: 8\nresidual: 4\nof: h2o\n")
    idle = tmp_path / "idle.yaml"
    idle.write_text("kind: kivi\nof: h2o\n")
    size = ["--budgets", "16,20", "--tokens", "120", "--samples", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(
        "sys.argv", ["kvpolicy", "compare", *map(str, words), "--policies", f"kivi,h2o,{mine},{idle}", *size]
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    found = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    cells = {(cell["policy"], cell["budget"]): cell for cell in found}
    full, alone, plain, small = (cells[name, 16] for name in ("full", "kivi", "h2o", str(mine)))
    assert alone["kept_tokens"] == full["kept_tokens"] == 119
    assert small["kept_tokens"] == plain["kept_tokens"] == 16
    assert alone["cache_bytes"] < full["cache_bytes"]
    assert all(math.isfinite(cell["perplexity"]) for cell in found)
    assert cells[str(idle), 16]["notes"] == ["nothing was quantised, as all is within the residual of 32"]
    assert not any(cell["notes"] for cell in found if cell["policy"] != str(idle))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("kivi")]
    assert [row[1] for row in rows] == ["–"], "one row, and no budget"
