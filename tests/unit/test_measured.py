"""Budgets measured layer by layer: worked numbers, the plain definition, exact totals, and what is held meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvpolicy_plugins.cake_layers import CAKELayers

from kvpolicy import EvictionCache, Need
from kvpolicy.allocator import LayerAllocator, MeasuredLayerAllocator, largest_remainder, largest_remainder_within
from kvpolicy.attention import blocks
from kvpolicy.attention.rows import AttentionRows
from kvpolicy.budget import Budget
from kvpolicy.errors import BudgetError
from kvpolicy.explain import explain
from kvpolicy.measured import Row
from kvpolicy.policy import View
from tests import tiny
from tests.preferences import cake_budgets
from tests.unit.test_more_policies import COMPOSED, SPECS
from tests.unit.test_reference import compare
from tests.unit.test_step import compiles_once, waits_for_nothing

LAYERS = 5
SHARP = {"kind": "cake", "window": 4, "tau1": 0.1, "tau2": 0.15}
"""Layers of tiny models are much alike; here they are told apart all the same."""
ANEW = ("expected_attention", "keydiff", "lagkv", "rkv", "scissorhands")
"""Policies whose scores depend on which tokens are still there, so that cutting twice is not cutting once."""


def budget(tokens: int = 20, **options: Any) -> dict[str, Any]:
    return {"tokens": tokens, "layers": {**SHARP, **options}}


def read(model: Any, policy: Any, its: Any, tokens: torch.Tensor, mask: Any = None, **options: Any) -> EvictionCache:
    cache = EvictionCache(model, policy, its, **options)
    feed(model, cache, tokens, mask)
    return cache


def feed(model: Any, cache: EvictionCache, tokens: torch.Tensor, mask: Any = None) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, attention_mask=mask, use_cache=True, **tiny.cache_argument(cache)).logits


def limits(cache: EvictionCache) -> list[list[int]]:
    """What each layer may hold in each row."""
    rows = cache.layers[0].seen.shape[0]
    return [[pool.limit] * rows if pool.limits is None else pool.limits.flatten().tolist() for pool in cache.layers]


def held(cache: EvictionCache) -> list[list[list[list[int]]]]:
    return [
        [[[p for p in head if p >= 0] for head in row] for row in cache.positions(layer).tolist()]
        for layer in range(len(cache.layers))
    ]


def final(model: Any, tokens: torch.Tensor, average: int = 20, **options: Any) -> list[int]:
    """The budgets of the plain definition."""
    return cake_budgets(model, tokens, average, **{**{k: v for k, v in SHARP.items() if k != "kind"}, **options})[0]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.family("llama", layers=LAYERS)


# -- worked numbers ----------------------------------------------------------------------------------------


def measured(rows: list[list[float]]) -> list[float]:
    """Entropy and variance of the last two of six tokens."""
    probs = torch.tensor([[*row, 0.0, 0.0] for row in rows]).view(1, 1, 1, 2, 6)
    positions = torch.arange(6, dtype=torch.int32).view(1, 1, -1)
    view = View({}, positions, torch.tensor([[[6]]]), 3, probs, probs, attention=AttentionRows(None, probs=probs))
    return CAKELayers(window=2).measure(view)[0].tolist()


def test_the_worked_preferences() -> None:
    one = measured([[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1]])
    two = measured([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    assert one == pytest.approx([1.881, 0.36], abs=5e-4)
    assert two == pytest.approx([2.560, 0.10], abs=5e-4)
    allocator = CAKELayers(window=2)
    assert [allocator.preference(*each) for each in (one, two)] == pytest.approx([0.677, 0.256], abs=5e-4)
    shares = allocator.shares([one, two], average=8, layers=2, prompt=100)  # twelve slots beside the windows
    assert [float(share) - 2 for share in shares] == pytest.approx([8.71, 3.29], abs=5e-3)
    assert largest_remainder(shares) == [11, 5]


def test_temperatures_weigh_entropy_and_variance() -> None:
    assert CAKELayers(tau1=2, tau2=0.5).preference(9.0, 3.0) == pytest.approx(3.0 * 9.0)
    assert CAKELayers().preference(float("nan"), 1.0) == 0


def test_what_no_layer_can_use_goes_to_the_others() -> None:
    allocator = CAKELayers(window=2)
    found = allocator.shares([[8.0, 1.0], [1.0, 1.0], [1.0, 1.0]], average=12, layers=3, prompt=16)
    assert found == [16, 10, 10]
    assert allocator.shares([[8.0, 1.0]], average=12, layers=3, prompt=16) == [16], "one layer alone may keep it all"
    assert allocator.shares([[0.0, 1.0]] * 3, average=12, layers=3, prompt=16) == [12, 12, 12], "nothing to tell apart"
    assert allocator.shares([[1.0, 1.0]] * 3, average=1, layers=3, prompt=16) == [1, 1, 1], "less than the window"


def test_one_of_many_heads_in_a_padded_row() -> None:
    """Heads are added up, padding counts for nothing, and each row is measured for itself."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(2, 3, 2, 4, 9, generator=generator).softmax(-1)
    probs[1, :, :, 0] = 0  # one of the four queries is padding
    positions = torch.arange(9, dtype=torch.int32).expand(2, 3, -1)
    view = View(
        {}, positions, torch.tensor([[[9]], [[9]]]), 3, probs, probs, attention=AttentionRows(None, probs=probs)
    )
    found = CAKELayers(window=4).measure(view)
    for row, real in ((0, probs[0]), (1, probs[1, :, :, 1:])):
        past = real[..., :5]
        torch.testing.assert_close(found[row, 0], -(past * past.log()).sum())
        torch.testing.assert_close(found[row, 1], past.var(-2).sum())


# -- totals ------------------------------------------------------------------------------------------------

numbers = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))


@settings(max_examples=150, deadline=None)
@given(
    layers=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=16),
    average=st.integers(1, 64),
    more=st.integers(1, 200),
    window=st.integers(1, 32),
    data=st.data(),
)
def test_totals_are_exact_and_nothing_comes_back(
    layers: list[tuple[float, float]], average: int, more: int, window: int, data: st.DataObject
) -> None:
    allocator = CAKELayers(window=window)
    least = [data.draw(st.integers(allocator.least(average), average)) for _ in layers]
    row = Row(average, average + more)
    before: list[int] = []
    for count in range(1, len(layers) + 1):
        row.divide(allocator, layers[:count], len(layers), least[:count])
        assert sum(row.tokens) <= average * len(layers)
        assert all(low <= tokens <= row.prompt for low, tokens in zip(least, row.tokens, strict=False))
        assert all(now <= was for now, was in zip(row.tokens, before, strict=False))
        before = row.tokens
    assert sum(row.tokens) == average * len(layers)


@given(quotas=st.lists(st.fractions(0, 100, max_denominator=50), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_without_bounds_it_is_the_largest_remainder(quotas: list[Fraction], seed: int) -> None:
    quotas.append(-sum(quotas) % 1)
    wide = largest_remainder_within(quotas, [0] * len(quotas), [1000] * len(quotas))
    assert wide == largest_remainder(quotas)


def test_bounds_are_paid_for_by_the_others() -> None:
    thirds = [Fraction(10, 3)] * 3
    assert largest_remainder_within(thirds, [0, 0, 0], [3, 9, 9]) == [3, 4, 3]
    assert largest_remainder_within(thirds, [0, 0, 0], [1, 9, 9]) == [1, 5, 4]
    assert largest_remainder_within(thirds, [0, 0, 6], [9, 9, 9]) == [2, 2, 6]
    with pytest.raises(ValueError, match="cannot be met"):
        largest_remainder_within(thirds, [0, 0, 0], [3, 3, 3])


# -- against the plain definition --------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("name", ["cake", "snapkv", "a2sf", "h2o, mean", "lfu", "nacl", "tova"])
def test_kept_sets_of_the_plain_definition(name: str, family: str) -> None:
    model, tokens = tiny.family(family, layers=LAYERS), tiny.ids(2, 70)
    rows = [final(model, row[:50]) for row in tokens]
    assert min(map(len, map(set, rows))) > 2, "layers differ"
    budgets = [list(both) for both in zip(*rows, strict=True)]
    compare(SPECS[name], model, budget(), tokens, [50] + [1] * 20, budgets=budgets)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 2)]),
    layers=st.integers(1, 6),
    average=st.integers(2, 24),
    more=st.integers(1, 40),
    window=st.integers(1, 8),
    tau=st.sampled_from([0.1, 0.3, 1.0, 2.0]),
    seed=st.integers(0, 10_000),
)
def test_budgets_of_the_plain_definition(
    heads: tuple[int, int], layers: int, average: int, more: int, window: int, tau: float, seed: int
) -> None:
    window = min(window, average)
    model = tiny.family("llama", seed=seed, heads=heads[0], kv_heads=heads[1], layers=layers)
    tokens = tiny.ids(1, average + more, seed)
    its = budget(average, window=window, tau1=tau, tau2=tau)
    cache = read(model, "recent", its, tokens)
    expected = [average] * layers
    if window > 1:  # without variance nothing is preferred
        expected = final(model, tokens[0], average, window=window, tau1=tau, tau2=tau)
    assert [each for [each] in limits(cache)] == expected
    assert sum(expected) == average * layers


@pytest.mark.parametrize("size", [1, 1 << 9])
def test_how_many_heads_are_observed_at_once_is_no_matter(
    model: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, mask = tiny.left_pad([60, 43, 51])
    for policy in ("streaming_llm", "h2o", {"kind": "snapkv", "window": 7}, {"kind": "lru"}):
        monkeypatch.undo()
        whole = read(model, policy, budget(), tokens, mask)
        monkeypatch.setattr(blocks, "_CPU_BLOCK_BYTES", size)
        parts = read(model, policy, budget(), tokens, mask)
        assert limits(parts) == limits(whole)
        assert held(parts) == held(whole)


class Fixed(LayerAllocator):
    """What is said."""

    kind: Literal["fixed"] = "fixed"
    tokens: list[int]

    def quotas(self, average: int, layers: Sequence[int], of: int, prompt: int | None) -> list[int]:
        return self.tokens


STAGED = {
    **{name: spec for name, spec in SPECS.items() if spec["kind"] not in ANEW},
    **{name: COMPOSED[name] for name in ("union", "protect")},
    "union of keys": {"kind": "union", "parts": [{"take": 0.5, "of": "knorm"}, {"of": "recent"}]},
}


@pytest.mark.parametrize("name", list(STAGED))
def test_cutting_in_stages_is_cutting_once(model: Any, name: str) -> None:
    tokens = tiny.ids(1, 60)
    staged = read(model, STAGED[name], budget(), tokens)
    tokens_of = [each for [each] in limits(staged)]
    once = read(model, STAGED[name], Budget(tokens=20, layers=Fixed(tokens=tokens_of)), tokens)
    assert held(staged) == held(once)
    assert max(tokens_of) > 20 > min(tokens_of)
    if name.startswith(("snapkv", "cake")):
        for layer in range(LAYERS):
            for key, state in once.scores(layer).items():
                torch.testing.assert_close(staged.scores(layer)[key], state)


# -- what is held meanwhile --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", {"kind": "cake", "window": 4}], ids=str)
@pytest.mark.parametrize("prompt", [21, 30, 200])
def test_no_more_is_held_than_the_total_and_the_layer_under_way(policy: Any, prompt: int) -> None:
    model, tokens = tiny.family("llama", layers=8, seed=prompt), tiny.ids(1, prompt)
    cache = EvictionCache(model, policy, budget())
    held_after: list[int] = []
    slots_after: list[int] = []

    def look(*args: Any) -> None:
        held_after.append(sum(int(pool.kept().max()) for pool in cache.layers if pool.is_initialized))
        slots_after.append(sum(pool.keys.shape[2] for pool in cache.layers if pool.is_initialized))

    hooks = [layer.self_attn.register_forward_hook(look) for layer in model.model.layers]
    feed(model, cache, tokens)
    for hook in hooks:
        hook.remove()
    total = 20 * 8
    stages = cake_budgets(model, tokens[0], 20, 4, 0.1, 0.15)[::-1]
    assert held_after == [sum(stage) for stage in stages]
    assert max(held_after) <= total == held_after[-1]
    assert all(slots <= total + layers for layers, slots in enumerate(slots_after, 1)), "and a free slot each"


def test_bytes_are_those_of_the_budget(model: Any) -> None:
    cache = read(model, "h2o", budget(), tiny.ids(1, 90))
    slots = [tokens + 1 for [tokens] in limits(cache)]
    assert sum(slots) == LAYERS * 21
    keys_and_values, position, mass, free, seen = 2 * 8 * 8, 4, 8, 8, 4
    assert cache.nbytes() == sum(2 * (n * (keys_and_values + position + mass) + free) + seen for n in slots)


# -- rows of a batch ---------------------------------------------------------------------------------------


def alike(model: Any, policy: Any, its: Any, lengths: list[int], calls: list[int], **options: Any) -> list[Any]:
    """Feeds rows padded on the left together and each alone; budgets and kept sets must agree after each call."""
    tokens, mask = tiny.left_pad(lengths)
    more = tiny.ids(len(lengths), sum(calls), seed=7)
    tokens, mask = torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    together = EvictionCache(model, policy, its, **options)
    alone = [EvictionCache(model, policy, its, **options) for _ in lengths]
    at, found = 0, []
    for call in (max(lengths), *calls):
        feed(model, together, tokens[:, at : at + call], mask[:, : at + call])
        for row, cache in enumerate(alone):
            feed(model, cache, tokens[row : row + 1, max(at, max(lengths) - lengths[row]) : at + call])
            assert [each[row] for each in limits(together)] == [each for [each] in limits(cache)], (row, at)
            assert [layer[row] for layer in held(together)] == [layer for [layer] in held(cache)], (row, at)
        at += call
        found.append(limits(together))
    return found


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", {"kind": "cake", "window": 4}], ids=str)
def test_padded_rows_are_as_if_alone(model: Any, policy: Any) -> None:
    found = alike(model, policy, budget(), [60, 33, 41], [1] * 10 + [12] + [1] * 3)
    assert all(rows == found[0] for rows in found), "what comes later keeps the parts"
    assert len({tuple(row) for row in zip(*found[0], strict=True)}) == 3, "each row has its own"


def test_padded_rows_with_shares_of_their_own(model: Any) -> None:
    its = {"share": 0.5, "max": 22, "min": 9, "layers": SHARP}
    found = alike(model, "h2o", its, [60, 33, 6], [1] * 3 + [12] + [1] * 12)
    assert [sum(row) for row in zip(*found[0], strict=True)] == [22 * LAYERS, 17 * LAYERS, 9 * LAYERS]
    row = [[each[2] for each in limits] for limits in found]
    assert row[0] == row[3] == [9] * LAYERS, "nine tokens fit"
    assert sum(row[4]) == 9 * LAYERS
    assert row[4] != row[0], "a chunk brings more"
    assert row[4] == row[-1]


def test_what_exceeds_the_budget_one_by_one_is_divided_equally_for_good(model: Any) -> None:
    found = alike(model, "h2o", budget(12), [40, 10], [1] * 5 + [20] + [1] * 3)
    assert {each[1] for limits in found for each in limits} == {12}
    assert {each[0] for each in found[-1]} != {12}


def test_a_prompt_that_fits_leaves_all_layers_equal(model: Any) -> None:
    cache = read(model, "h2o", budget(), tiny.ids(1, 20))
    for step in range(8):
        feed(model, cache, tiny.ids(1, 1, step))
    assert {int(cache.kept(layer).max()) for layer in range(LAYERS)} == {20}


def test_beams_and_repeated_rows(model: Any) -> None:
    def run(rows: list[int], change: Any) -> tuple[Any, Any, torch.Tensor]:
        cache = read(model, "h2o", budget(), tiny.ids(3, 50)[rows])
        change(cache)
        for step in range(4):
            logits = feed(model, cache, tiny.ids(1, 1, step).expand(3, 1))
        feed(model, cache, tiny.ids(1, 6).expand(3, 6))
        return limits(cache), held(cache), logits

    expected = run([2, 0, 0], lambda cache: None)
    found = run([0, 1, 2], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])))
    assert found[:2] == expected[:2]
    torch.testing.assert_close(found[2], expected[2])

    def pick(cache: EvictionCache) -> None:
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 1]))

    assert run([0, 1, 2], pick)[:2] == expected[:2]


def test_a_row_that_still_fits_is_reordered_with_its_average(model: Any) -> None:
    tokens, mask = tiny.left_pad([40, 9])
    cache = read(model, "h2o", {"share": 0.5, "min": 11, "layers": SHARP}, tokens, mask)
    cache.reorder_cache(torch.tensor([1, 0]))
    feed(model, cache, tiny.ids(2, 30), torch.cat([mask.flip(0), torch.ones(2, 30, dtype=torch.long)], 1))
    first, second = (list(row) for row in zip(*limits(cache), strict=True))
    assert sum(first) == 11 * LAYERS
    assert sum(second) == 20 * LAYERS
    assert first != [11] * LAYERS, "it was divided when the chunk came"


# -- prompts in chunks, and what goes with it --------------------------------------------------------------


def test_chunks_are_divided_when_they_exceed_the_budget(model: Any) -> None:
    tokens = tiny.ids(1, 60)
    cache = read(model, "h2o", {"share": 0.3, "layers": SHARP}, tokens[:, :16], prompt_length=60)
    assert limits(cache) == [[18]] * LAYERS, "sixteen fit"
    feed(model, cache, tokens[:, 16:45])
    found = limits(cache)
    expected = cake_budgets(model, tokens[0, :45], 18, 4, 0.1, 0.15)[0]
    assert max(expected) < 45, "otherwise the length of the prompt would matter"
    assert [each for [each] in found] == expected
    feed(model, cache, tokens[:, 45:])
    assert limits(cache) == found


def test_reset_measures_anew(model: Any) -> None:
    cache = read(model, "h2o", budget(), tiny.ids(1, 60))
    cache.reset()
    other = tiny.ids(1, 60, seed=3)
    feed(model, cache, other)
    assert limits(cache) == limits(read(model, "h2o", budget(), other))


def test_layers_that_evict_nothing_take_no_part(model: Any) -> None:
    policy = {"kind": "layers", "at": {"1,3": "full"}, "default": "streaming_llm"}
    tokens = tiny.ids(1, 50)
    cache = read(model, policy, budget(), tokens)
    assert [int(cache.kept(layer).max()) for layer in (1, 3)] == [50, 50]
    expected = final(model, tokens[0], evicting=[0, 2, 4])
    assert [int(cache.kept(layer).max()) for layer in (0, 2, 4)] == expected
    assert sum(expected) == 60


def test_no_layer_falls_below_what_must_stay(model: Any) -> None:
    tokens = tiny.ids(1, 60)
    free = min(each for [each] in limits(read(model, "streaming_llm", budget(), tokens)))
    for policy, options in (
        ({"kind": "streaming_llm", "sinks": 18}, {}),
        ("streaming_llm", {"prefix": 18}),
    ):
        cache = read(model, policy, budget(), tokens, **options)
        found = [each for [each] in limits(cache)]
        assert min(found) >= 18 > free
        assert sum(found) == 20 * LAYERS
        assert all(set(range(17)) <= set(head) for layer in held(cache) for [*heads] in layer for head in heads)
    with pytest.raises(BudgetError, match="a budget of 20 tokens cannot hold the 21"):
        EvictionCache(model, {"kind": "streaming_llm", "sinks": 21}, budget())


@pytest.mark.parametrize(
    ("policy", "most"),
    [({"kind": "every", "tokens": 6, "of": "h2o"}, 5), ({"kind": "phases", "prefill": "h2o", "decode": "full"}, 30)],
)
def test_policies_that_hold_more_than_the_budget(model: Any, policy: Any, most: int) -> None:
    tokens = tiny.ids(1, 60)
    cache = read(model, policy, budget(), tokens)
    expected = final(model, tokens[0])
    assert [int(cache.kept(layer).max()) for layer in range(LAYERS)] == expected
    for step in range(30):
        feed(model, cache, tiny.ids(1, 1, step))
        now = [int(cache.kept(layer).max()) for layer in range(LAYERS)]
        assert all(tokens <= each <= tokens + most for tokens, each in zip(expected, now, strict=True))


def test_a_prompt_that_is_not_cut_is_measured_all_the_same(model: Any) -> None:
    policy = {"kind": "phases", "prefill": "full", "decode": "h2o"}
    tokens = tiny.ids(1, 60)
    cache = read(model, policy, budget(), tokens)
    assert {int(cache.kept(layer).max()) for layer in range(LAYERS)} == {60}
    feed(model, cache, tiny.ids(1, 1))
    assert [int(cache.kept(layer).max()) for layer in range(LAYERS)] == final(model, tokens[0])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"heads": "adaptive"}, "layers: cake cuts layers more than once, and heads: adaptive divides"),
        ({"of": "seen"}, "layers: cake is measured once, while a prompt is read"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        Budget.parse({"share": 0.5, "layers": "cake", **more})


@pytest.mark.parametrize(
    "policy", ["h2o", {"kind": "streaming_llm", "sinks": 6}, {"kind": "cake", "window": 9}], ids=str
)
def test_an_explanation_knows_the_total_and_the_floors(model: Any, policy: Any) -> None:
    found = explain(policy, model.config, 90, budget=budget(), dtype="float64")
    cache = read(model, policy, budget(), tiny.ids(1, 90))
    assert {layer.tokens for layer in found.layers} == {20}
    assert found.bytes.total == cache.nbytes()
    assert Need.window(4) in found.needs
    for layer, numbers in enumerate(found.layers):
        assert numbers.least is not None
        assert 4 <= numbers.least <= int(cache.kept(layer).min())
        certain = {p for first, last in numbers.certain for p in range(first, last + 1)}
        assert certain
        assert all(certain <= set(head) for head in held(cache)[layer][0])
    assert {layer.least for layer in explain(policy, model.config, 15, budget=budget()).layers} == {20}


# -- a decode step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "cake"])
@pytest.mark.parametrize("padded", [False, True])
def test_no_synchronisation_in_a_decode_step(policy: str, padded: bool) -> None:
    model = tiny.family("llama", dtype=torch.float32, layers=3)
    waits_for_nothing(model, policy, {"share": 0.5, "layers": SHARP}, padded, [25, 17])


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "cake"])
def test_a_steady_step_compiles_once_to_the_same_tokens(policy: str) -> None:
    compiles_once(tiny.family("llama", dtype=torch.float32, layers=3), policy, budget(10), 20, 12)


# -- an allocator of one's own -----------------------------------------------------------------------------


class Widening(MeasuredLayerAllocator):
    """In proportion to all attention that keys are given, weighed by layer; it wants lower layers to rise again."""

    kind: Literal["widening"] = "widening"
    needs = frozenset({Need.ATTENTION_SUM})

    def measure(self, view: View) -> torch.Tensor:
        return view.attention.sum().sum((1, 2)).unsqueeze(-1)

    def shares(
        self, measured: Sequence[Sequence[float]], average: int, layers: int, prompt: int
    ) -> Collection[Fraction | int]:
        count = len(measured)
        assert all(mass == pytest.approx(2 * prompt) for [mass] in measured), "two heads, a sum of one for each query"
        weights = range(1, count + 1) if count % 2 else range(count, 0, -1)
        total = min(average * layers, (count + 1) * average)
        return [Fraction(weight * total, sum(weights)) for weight in weights]


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "lru", {"kind": "snapkv", "window": 3}], ids=str)
def test_one_that_sums_blocks_and_changes_its_mind(model: Any, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tiny.ids(1, 60)
    its = Budget(tokens=12, layers=Widening())
    cache = read(model, policy, its, tokens)
    found = [each for [each] in limits(cache)]
    assert sum(found) == 12 * LAYERS
    assert held(cache) == held(read(model, policy, Budget(tokens=12, layers=Fixed(tokens=found)), tokens))
    monkeypatch.setattr(blocks, "_CPU_BLOCK_BYTES", 1)
    assert held(read(model, policy, its, tokens)) == held(cache)
