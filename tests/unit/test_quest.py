"""Policies that select what a step attends to, Quest before all: everything is kept, and some of it is seen."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy import EvictionCache, EvictionPolicy, Need, SlotField, load
from kvpolicy.errors import BudgetError, ConfigError
from kvpolicy.quantised import Quantised
from kvpolicy.testing import check_policy
from kvpolicy.testing.models import feed
from tests import tiny
from tests.unit.test_policies import Trace
from tests.unit.test_reference import compare
from tests.unit.test_step import waits_for_nothing

SMALL = {"kind": "quest", "page": 4, "least": 1, "full_layers": 0}
SPECS: dict[str, dict[str, Any]] = {
    "quest": {"kind": "quest"},
    "pages of 4": SMALL,
    "one layer in full": {**SMALL, "full_layers": 1},
    "a group together, by the mean": {**SMALL, "group": "mean"},
    "a group together, by the maximum": {**SMALL, "group": "max", "page": 3},
    "single tokens": {**SMALL, "page": 1},
    "three pages at the least": {**SMALL, "least": 3, "page": 5},
}
every = pytest.mark.parametrize("name", list(SPECS))


# -- worked example --------------------------------------------------------------------------------------------

KEYS = torch.tensor([[1.0, 0], [0, 1], [2, 2], [-1, -1], [0.5, -0.5], [0, 0]])


def read(keys: Tensor, budget: int, **options: Any) -> Trace:
    """A prompt of tokens with such keys."""
    trace = Trace(load({"kind": "quest", "full_layers": 0, **options}), budget, keys)
    trace.observe([[1 / (i + 1)] * (i + 1) for i in range(len(keys))])
    return trace


def bounds_of(trace: Trace, query: Tensor) -> Tensor:
    view = trace.view()
    view.holes = False
    found: Tensor = trace.policy._bounds(view, query)  # type: ignore[attr-defined]
    return found


def test_worked_example() -> None:
    trace = Trace(load({"kind": "quest", "page": 2, "least": 1, "full_layers": 0}), 4, KEYS)
    for last in range(6):  # token by token
        trace.observe([[1.0] * (last + 1)])
    assert trace.fields["low"][0, 0].tolist() == [[0, 0], [-1, -1], [0, -0.5]]
    assert trace.fields["high"][0, 0].tolist() == [[1, 1], [2, 2], [0.5, 0]]
    for name, pages in read(KEYS, 4, page=2).fields.items():
        assert torch.equal(pages, trace.fields[name]), "and all at once"
    query = torch.tensor([1.0, -2.0]).view(1, 1, 1, 2)
    high, low = query.clamp(min=0) @ trace.fields["high"].mT, query.clamp(max=0) @ trace.fields["low"].mT
    assert (high + low).flatten().tolist() == [1, 4, 1.5]
    assert bounds_of(trace, query).flatten().tolist() == [1, 4, torch.inf]
    # The newest page, and page 1, which wins by its bound though the third holds the largest product.
    chosen = trace.policy.select(trace.view(), query)
    assert chosen is not None and chosen.flatten().tolist() == [4, 5, 2, 3]
    whole = read(KEYS, 6, page=2)
    assert whole.policy.select(whole.view(), query) is None, "a budget that holds everything selects nothing"


@settings(max_examples=60, deadline=None)
@given(page=st.integers(1, 7), tokens=st.integers(1, 40), group=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_the_bound_is_above_every_product_of_its_page(page: int, tokens: int, group: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(tokens, 6, generator=generator)
    trace = read(keys, 1, page=page, least=1)
    query = torch.randn(1, 1, group, 6, generator=generator)
    bounds = bounds_of(trace, query)[0, 0]
    products = query[0, 0] @ keys.T
    for index, exact in enumerate(products.split(page, dim=1)):
        assert bool((bounds[:, index] >= exact.amax(1) - 1e-5).all())
    whole_pages = tokens // page - (tokens % page == 0)
    if page == 1 and whole_pages:
        torch.testing.assert_close(bounds[:, :whole_pages], products[:, :whole_pages])


# -- against the definition ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@every
def test_prompt_and_fifty_steps(name: str, family: str) -> None:
    compare(SPECS[name], tiny.family(family), 12, tiny.ids(1, 90), [40] + [1] * 50)


@every
def test_chunks_a_second_turn_and_a_padded_batch(name: str) -> None:
    tokens, mask = tiny.left_pad([37, 5, 21])
    more = tiny.ids(3, 30, seed=7)
    tokens, mask = torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    compare(SPECS[name], tiny.family("llama"), 9, tokens, [20, 17, 1, 1, 1, 9, 1, 1, 6, 1, 1, 8], mask)


@every
def test_a_row_that_pauses(name: str) -> None:
    tokens, mask = tiny.ids(2, 55), torch.ones(2, 55, dtype=torch.long)
    mask[1, 32:42] = 0
    calls = [26, 4, 1, 1, 7, 1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1]
    compare(SPECS[name], tiny.family("llama"), 9, tokens, calls, mask)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    page=st.integers(1, 9),
    least=st.integers(1, 4),
    group=st.sampled_from(["each", "mean", "max"]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 2)]),
    budget=st.integers(1, 40),
    calls=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    steps=st.integers(1, 30),
    rows=st.integers(1, 2),
    seed=st.integers(0, 10_000),
)
def test_any_sizes(
    page: int, least: int, group: str, heads: tuple[int, int], budget: int, calls: list[int], steps: int, rows: int,
    seed: int,
) -> None:  # fmt: skip
    model = tiny.family("llama", seed=seed, heads=heads[0], kv_heads=heads[1])
    policy = {"kind": "quest", "page": page, "least": least, "group": group, "full_layers": 0}
    calls = [*calls, *[1] * steps]
    compare(policy, model, budget, tiny.ids(rows, sum(calls), seed), calls)


def test_single_tokens_are_the_exact_top_k() -> None:
    """With pages of one token each query head attends to the newest token and its largest products."""
    model = tiny.family("llama", layers=1)
    cache = EvictionCache(model, {**SMALL, "page": 1}, budget=7)
    attention, shown = model.model.layers[0].self_attn, {}
    attention.register_forward_pre_hook(lambda own, args, kwargs: shown.update(kwargs), with_kwargs=True)
    for part in tiny.ids(2, 40).split([30, *[1] * 10], 1):
        with torch.no_grad():
            model(part, use_cache=True, **tiny.cache_argument(cache))
    hidden, (cos, sin) = shown["hidden_states"], shown["position_embeddings"]
    query = attention.q_proj(hidden).view(2, 1, 2, 2, 8).transpose(1, 2)[:, :, 0]  # [batch, kv_heads, group, 8]
    turned = torch.cat([-query[..., 4:], query[..., :4]], -1)
    query = query * cos[:, :, None] + turned * sin[:, :, None]
    products = query @ cache.layers[0].active_keys.mT
    products[..., -1] = torch.inf
    assert torch.equal(cache.attended(0), products.topk(7).indices.sort().values)


# -- beside the whole ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("budget", [50, 1.0])
def test_a_budget_that_holds_everything_is_the_model_itself(family: str, budget: Any) -> None:
    model = tiny.family(family)
    tokens = tiny.ids(2, 50)
    cache = EvictionCache(model, SMALL, budget, prompt_length=50)
    with torch.no_grad():
        expected = model(tokens).logits
        found = [
            model(part, use_cache=True, **tiny.cache_argument(cache)).logits
            for part in tokens.split([20, *[1] * 30], 1)
        ]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-9, atol=1e-9)


@every
def test_a_padded_batch_is_its_rows_alone(name: str) -> None:
    model, lengths = tiny.family("llama"), [33, 9, 22]
    tokens, mask = tiny.left_pad(lengths)
    steps = tiny.ids(3, 20, seed=3)

    def run(ids: Tensor, mask: Tensor | None, more: Tensor) -> tuple[Tensor, Tensor]:
        cache = EvictionCache(model, SPECS[name], budget=0.5)
        with torch.no_grad():
            feed(model, cache, ids, mask)
            for token in more.split(1, 1):
                mask = None if mask is None else torch.cat([mask, torch.ones_like(token)], 1)
                found = feed(model, cache, token, mask)
        return found, cache.attended(1)

    together, seen = run(tokens, mask, steps)
    for row, length in enumerate(lengths):
        alone, its = run(tokens[row : row + 1, -length:], None, steps[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-9, atol=1e-9)
        assert attended(seen[row]) == attended(its[0])


def attended(positions: Tensor) -> list[list[list[int]]]:
    """Of each KV head and each of its two query heads."""
    return [[[p for p in own if p >= 0] for own in head] for head in positions.expand(-1, 2, -1).tolist()]


def run_over(cache: EvictionCache, model: Any, tokens: Tensor, calls: list[int]) -> Tensor:
    with torch.no_grad():
        return torch.cat(
            [model(part, use_cache=True, **tiny.cache_argument(cache)).logits for part in tokens.split(calls, 1)], 1
        )


def test_everything_is_kept_and_pages_are_attended() -> None:
    model, prompt, steps = tiny.family("llama"), 90, 10
    cache = EvictionCache(model, SMALL, budget=13)
    run_over(cache, model, tiny.ids(2, prompt + steps), [prompt, *[1] * steps])
    assert cache.kept(1).tolist() == [[100, 100], [100, 100]]
    seen = cache.attended(1)
    assert seen.shape == (2, 2, 2, 12)
    assert bool((seen >= 96).sum(-1).eq(4).all()), "the newest page is whole and always there"
    full = EvictionCache(model, "full")
    run_over(full, model, tiny.ids(2, prompt + steps), [prompt, *[1] * steps])
    assert full.nbytes() < cache.nbytes() < 2.1 * full.nbytes(), "pages of 4 are half as many numbers as keys"
    assert full.attended(1).tolist() == full.positions(1).unsqueeze(2).tolist()


def test_pages_are_what_they_are_of_a_prompt_at_once() -> None:
    model, tokens = tiny.family("llama"), tiny.ids(2, 60)
    caches = [EvictionCache(model, SMALL, budget=100) for _ in range(3)]
    for cache, calls in zip(caches, ([60], [1] * 60, [20, 1, 1, 1, 30, *[1] * 7]), strict=True):
        run_over(cache, model, tokens, calls)
    first = caches[0].scores(1)
    keys = caches[0].layers[1].active_keys.unflatten(2, (15, 4))
    torch.testing.assert_close(first["low"], keys.amin(3), rtol=0, atol=0)
    for other in caches[1:]:
        for name, pages in other.scores(1).items():
            torch.testing.assert_close(pages, first[name])


def test_beams_and_reset() -> None:
    model, tokens, more = tiny.family("llama"), tiny.ids(3, 40), tiny.ids(3, 10, seed=1)
    order = torch.tensor([2, 0, 0])
    cache = EvictionCache(model, SMALL, budget=9)
    run_over(cache, model, tokens, [37, 1, 1, 1])
    cache.reorder_cache(order)
    again = EvictionCache(model, SMALL, budget=9)
    run_over(again, model, tokens[order], [37, 1, 1, 1])
    assert torch.equal(cache.attended(1), again.attended(1))
    expected = run_over(again, model, more, [1] * 10)
    torch.testing.assert_close(run_over(cache, model, more, [1] * 10), expected)
    repeated = EvictionCache(model, SMALL, budget=9)
    run_over(repeated, model, tokens, [37, 1, 1, 1])
    repeated.batch_repeat_interleave(2)
    repeated.batch_select_indices(torch.tensor([5, 0, 1]))
    torch.testing.assert_close(run_over(repeated, model, more, [1] * 10), expected)
    cache.reset()
    run_over(cache, model, tokens[order], [37, 1, 1, 1])
    torch.testing.assert_close(run_over(cache, model, more, [1] * 10), expected)


@every
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [12, 0.5], ids=["tokens", "share"])
def test_no_synchronisation_in_a_decode_step(name: str, padded: bool, budget: Any) -> None:
    waits_for_nothing(tiny.family("llama", dtype=torch.float32), SPECS[name], budget, padded, [45, 37])


@every
def test_checks(name: str) -> None:
    check_policy(load(SPECS[name]))


# -- what it goes with -----------------------------------------------------------------------------------------


def test_the_first_layers_have_no_budget_and_at_least_one_selects() -> None:
    model = tiny.family("llama", layers=4)
    cache = EvictionCache(model, {**SMALL, "full_layers": 2}, budget=8)
    run_over(cache, model, tiny.ids(1, 30), [29, 1])
    assert [cache.attended(layer).shape[-1] for layer in range(4)] == [30, 30, 8, 8]
    by_default = {name: value for name, value in SMALL.items() if name != "full_layers"}
    small = EvictionCache(tiny.family("llama"), by_default, budget=8)
    assert [pool.policy.kind for pool in small.layers] == ["full", "quest"], "a default yields to a small model"
    with pytest.raises(ConfigError, match="full_layers=2 leaves no layer of 2"):
        EvictionCache(tiny.family("llama"), {**SMALL, "full_layers": 2}, budget=8)


def test_a_budget_is_needed_and_is_no_limit() -> None:
    with pytest.raises(BudgetError, match="quest needs a budget"):
        EvictionCache(tiny.family("llama"), SMALL)
    for part, kind in (("heads", "adaptive"), ("layers", "cake")):
        said = rf"quest keeps everything, and {kind} divides what is kept of a prompt: leave budget\.{part} out"
        with pytest.raises(BudgetError, match=said):
            EvictionCache(tiny.family("llama"), SMALL, {"tokens": 8, part: {"kind": kind}})


def test_positions_stay_as_they_are() -> None:
    with pytest.raises(ConfigError, match="positions='rolled' renumbers what is left, and quest chooses by keys as"):
        EvictionCache(tiny.family("llama"), SMALL, 8, positions="rolled")


def test_layers_may_select_and_others_evict() -> None:
    policy = {"kind": "layers", "at": {"0": "h2o"}, "default": SMALL}
    model = tiny.family("llama")
    cache = EvictionCache(model, policy, 8, prefix=2)
    run_over(cache, model, tiny.ids(1, 40), [20, *[1] * 20])
    assert cache.kept(0).tolist() == [[8, 8]] and cache.kept(1).tolist() == [[40, 40]]
    assert cache.positions(0)[0, :, :2].tolist() == [[0, 1], [0, 1]]
    assert cache.attended(1).shape[-1] == 8


@pytest.mark.parametrize(
    "policy",
    [
        {"kind": "union", "parts": ["quest", "recent"]},
        {"kind": "blend", "parts": ["quest", "recent"]},
        {"kind": "phases", "prefill": "snapkv", "decode": "quest"},
        {"kind": "every", "tokens": 4, "of": "quest"},
        {"kind": "kivi", "of": "quest"},
        {"kind": "cascade", "narrow": "h2o", "pick": "quest"},
        {"kind": "union", "parts": [{"kind": "layers", "at": {"0": "h2o"}, "default": "quest"}]},
    ],
)
def test_it_is_the_only_policy_of_a_layer(policy: Any) -> None:
    with pytest.raises(ConfigError, match="selects what a step attends to, so it is a layer's only policy"):
        load(policy)


def test_there_is_nothing_to_protect() -> None:
    with pytest.raises(ConfigError, match="quest keeps everything, so there is nothing to protect"):
        load({"kind": "protect", "sinks": 4, "of": "quest"})


# -- policies of one's own -------------------------------------------------------------------------------------


class Looked(EvictionPolicy):
    """Attends to what was attended to most, and to the newest."""

    kind: Literal["looked"] = "looked"
    bounded = False
    selects = True
    needs = {Need.ATTENTION_ROWS, Need.LOGITS}
    mass = SlotField()

    def observe(self, view: Any) -> dict[str, Tensor]:
        rows = view.attention.rows()
        if view.decoding:
            ROWS.append((rows, view.attention.logits(), view.attention.visible()))
        return {"mass": view["mass"] + rows.sum(-2)}

    def select(self, view: Any, query: Tensor) -> Tensor | None:
        mass = torch.where(view.is_recent(1), torch.inf, view["mass"])
        best = mass.topk(min(view.budget, mass.shape[-1])).indices.unsqueeze(2)
        return torch.nn.functional.pad(best, (0, 1), value=-1)


ROWS: list[tuple[Tensor, Tensor, Tensor]] = []


def test_statistics_of_what_was_selected_are_of_all_slots() -> None:
    ROWS.clear()
    model = tiny.family("llama", layers=1)
    cache = EvictionCache(model, Looked(), budget=5)
    run_over(cache, model, tiny.ids(2, 20), [18, 1, 1])
    for rows, logits, visible in ROWS:
        assert rows.shape[-1] == logits.shape[-1]
        torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows.sum(-1)))
        assert bool(((rows > 0).sum(-1) == 5).all()) and bool((visible == 5).all())
        torch.testing.assert_close(logits.softmax(-1).mean(2), rows)
    assert cache.attended(0).shape == (2, 2, 1, 6)
    seen = cache.attended(0)[..., 0, 1:]
    assert torch.equal((ROWS[-1][0][:, :, 0] > 0).nonzero()[:, -1].view(2, 2, 5), seen)


def test_an_entry_for_several_slots_is_for_those_that_keep_all() -> None:
    class Wrong(EvictionPolicy):
        kind: Literal["wrong"] = "wrong"
        pages = SlotField(every=4)

    class InBits(Wrong):
        bounded = False
        storage: ClassVar[Any] = Quantised()

    for policy in (Wrong(), InBits()):
        with pytest.raises(ConfigError, match=r"wrong: the slot field 'pages' has one entry for 4 slots.*as it comes"):
            EvictionCache(tiny.family("llama"), policy, budget=4)

    class Both(Everything):
        storage: ClassVar[Any] = Quantised()

    with pytest.raises(ConfigError, match="everything says how a layer is stored, and selects from it"):
        EvictionCache(tiny.family("llama"), Both(), budget=4)


def gemma(window: int | None) -> Any:
    from transformers import Gemma2Config

    config = Gemma2Config(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attn_logit_softcapping=2.0, sliding_window=window or 4096,
        layer_types=["sliding_attention" if window else "full_attention", "full_attention"],
    )  # fmt: skip
    return tiny.build(config)


def gpt_oss() -> Any:
    from transformers import GptOssConfig

    config = GptOssConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = tiny.build(config, torch.float32)  # experts are not multiplied in float64
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(1.0, 1.0)
    return model


class Everything(EvictionPolicy):
    """Selects all slots, in another order for each query head: the step that gathers, with nothing left out."""

    kind: Literal["everything"] = "everything"
    bounded = False
    selects = True
    group: bool = True

    def select(self, view: Any, query: Tensor) -> Tensor:
        choices = query.shape[2] if self.group else 1
        slots = torch.arange(view.positions.shape[-1])
        turned = torch.stack([slots.roll(shift) for shift in range(choices)])
        return turned.expand(*query.shape[:2], -1, -1)


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("make", [lambda: gemma(None), lambda: gemma(9), gpt_oss, lambda: tiny.family("llama")])
def test_caps_sinks_and_windows_count_where_slots_are_gathered(make: Any, padded: bool, group: bool) -> None:
    model = make()
    tokens, mask = tiny.left_pad([30, 19] if padded else [30, 30])
    found = []
    for policy, budget in (("full", None), (Everything(group=group), 8)):
        cache, seen = EvictionCache(model, policy, budget), mask[:, :20]
        with torch.no_grad():
            model(tokens[:, :20], attention_mask=seen, use_cache=True, **tiny.cache_argument(cache))
            for at in range(20, 30):
                seen = mask[:, : at + 1]
                found.append(
                    model(
                        tokens[:, at : at + 1], attention_mask=seen, use_cache=True, **tiny.cache_argument(cache)
                    ).logits
                )
    torch.testing.assert_close(torch.cat(found[10:]), torch.cat(found[:10]))
