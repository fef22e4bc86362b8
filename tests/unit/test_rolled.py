"""Rolled positions: what is held is numbered anew, exactly and for ever."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from kvpolicy import EvictionCache, EvictionPolicy, Need, View, load
from kvpolicy.errors import ConfigError, UnsupportedModelError
from kvpolicy.rotation import FIXED, Layout, places
from kvpolicy.source import Turned, turned
from kvpolicy.testing import check_policy
from tests import tiny
from tests.reference import Recomputed, Spun
from tests.unit import test_families as families
from tests.unit.test_reference import compare
from tests.unit.test_step import DIVIDED, compiles_once, waits_for_nothing

SIZES = families.SIZES
NOT_ROTATED = ("gpt2", "gpt2 scaled", "gpt2 upcast", "opt", "llama4_text without chunks", "gptj")
ROTATED = {name: config for name, config in families.SERVED.items() if name not in NOT_ROTATED}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def scaled(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    rope = {"rope_theta": 1e4, **SCALED[kind]}
    return tiny.build(transformers.LlamaConfig(**SIZES, rope_parameters=rope), dtype)


def logits(model: Any, cache: Any, tokens: Tensor, calls: list[int]) -> Tensor:
    with torch.no_grad():
        found = [model(part, use_cache=True, **tiny.cache_argument(cache)).logits for part in tokens.split(calls, 1)]
    return torch.cat(found, 1)


# -- nothing evicted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[13], [13, 9, 4]], ids=["one row", "padded"])
@pytest.mark.parametrize("family", ROTATED)
def test_as_the_model_while_everything_fits(family: str, lengths: list[int]) -> None:
    model = families.build(family, families.implementation(family, None))
    expected = families.run(model, DynamicCache(config=model.config), lengths, 8)
    cache = EvictionCache(model, "h2o", 64, positions="rolled")
    families.assert_close(families.run(model, cache, lengths, 8), expected)


@pytest.mark.parametrize("kind", sorted(FIXED - {"default"}))
def test_scaled_frequencies(kind: str) -> None:
    model, tokens, calls = scaled(kind), tiny.ids(2, 90), [40, 9, *[1] * 41]
    expected = logits(model, DynamicCache(config=model.config), tokens, calls)
    found = logits(model, EvictionCache(model, "h2o", 128, positions="rolled"), tokens, calls)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    evicting = EvictionCache(model, "h2o", 16, positions="rolled")
    reference = Recomputed(model, evicting)
    for part in tokens.split(calls, 1):
        wanted = reference(part)
        torch.testing.assert_close(logits(model, evicting, part, [part.shape[1]]), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "cohere2", "glm4", "gpt_neox"])
def test_low_precision(family: str) -> None:
    model = families.build(family, None).to(torch.bfloat16)
    tokens = tiny.ids(2, 30)
    expected = logits(model, DynamicCache(config=model.config), tokens, [20, *[1] * 10]).float()
    found = logits(model, EvictionCache(model, "h2o", 64, positions="rolled"), tokens, [20, *[1] * 10]).float()
    exact = logits(model.double(), DynamicCache(config=model.config), tokens, [20, *[1] * 10]).float()
    scale = float(exact.abs().max())
    # Keys are rounded thrice rather than once.
    assert float((found - exact).abs().mean()) < 3 * float((expected - exact).abs().mean()) + 1e-3 * scale


# -- against a recomputation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "random", "keydiff", {"kind": "snapkv", "window": 3}])
def test_prompt_and_steps(policy: Any, family: str) -> None:
    # No token twice: before they are rotated, the keys of equal tokens are equal in the first layer, and tie.
    tokens = 2 + torch.randperm(tiny.VOCAB - 2, generator=torch.Generator().manual_seed(0))[None, :70]
    compare(policy, tiny.family(family), 12, tokens, [20] + [1] * 50, positions="rolled")


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "tova"])
def test_chunks_a_second_turn_and_a_padded_batch(policy: str) -> None:
    tokens, mask = tiny.left_pad([17, 5, 11])
    more = tiny.ids(3, 30, seed=7)
    tokens, mask = torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    calls = [10, 7, 1, 1, 1, 9, 1, 1, 6, 1, 1, 8]
    compare(policy, tiny.family("llama"), 9, tokens, calls, mask, positions="rolled")


def test_a_row_that_pauses() -> None:
    tokens, mask = tiny.ids(2, 45), torch.ones(2, 45, dtype=torch.long)
    mask[1, 22:32] = 0
    calls = [16, 4, 1, 1, 7, 1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1]
    compare("h2o", tiny.family("llama"), 9, tokens, calls, mask, positions="rolled")


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    policy=st.sampled_from(["h2o", "lru", "streaming_llm", "tova", {"kind": "every", "tokens": 4, "of": "h2o"}]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2)]),
    budget=st.integers(1, 20),
    calls=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_any_sizes(policy: Any, heads: tuple[int, int], budget: int, calls: list[int], seed: int) -> None:
    calls = [*calls, *[1] * 30]
    model = tiny.family("llama", seed=seed, heads=heads[0], kv_heads=heads[1])
    compare(policy, model, budget, tiny.ids(2, sum(calls), seed), calls, positions="rolled")


HEADS = {"tokens": 10, "heads": {"kind": "adaptive", "alpha": 0.1}}
MIXED = {"kind": "layers", "at": {"0": "streaming_llm"}, "default": {"kind": "every", "tokens": 3, "of": "h2o"}}


@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        ("h2o", HEADS),
        ({"kind": "every", "tokens": 7, "of": "h2o"}, HEADS),
        ("h2o", {"tokens": 10, "layers": {"kind": "pyramid", "beta": 3}}),
        ("h2o", {"tokens": 10, "layers": {"kind": "cake", "window": 4}}),
        ({"kind": "expected_attention", "every": 5}, {"tokens": 10, "layers": {"kind": "cake", "window": 4}}),
        (MIXED, 9),
        ("h2o", {"share": 0.4, "of": "seen"}),
        ({"kind": "phases", "prefill": "h2o", "decode": "full"}, 9),
        ({"kind": "union", "parts": [{"take": 3, "of": "sinks"}, "heavy"]}, 9),
    ],
)
def test_budgets_and_compositions(policy: Any, budget: Any) -> None:
    """Whatever is held, the next call is what a recomputation over it gives."""
    model, tokens = tiny.family("llama"), tiny.ids(1, 90)
    cache = EvictionCache(model, policy, budget, positions="rolled")
    reference = Recomputed(model, cache)
    for part in tokens.split([30, *[1] * 25, 6, *[1] * 29], 1):
        wanted = reference(part)
        torch.testing.assert_close(logits(model, cache, part, [part.shape[1]]), wanted, rtol=1e-6, atol=1e-6)


def test_thousands_of_steps_in_float32() -> None:
    """Far beyond the positions of the model; nothing adds up."""
    policy, tokens, budget = {"kind": "streaming_llm", "positions": "rolled"}, tiny.ids(1, 2150), 48
    model = tiny.build(transformers.LlamaConfig(**SIZES | {"max_position_embeddings": 64}), torch.float32)
    exact = copy.deepcopy(model).double()
    cache = EvictionCache(model, policy, budget)
    reference = Recomputed(exact, cache)
    apart = []
    for part in tokens.split([100, *[1] * 2050], 1):
        wanted = reference(part)
        found = logits(model, cache, part, [part.shape[1]])
        apart.append(float((found - wanted).abs().max() / wanted.abs().max()))
    assert max(apart) < 2e-5
    assert sum(apart[-500:]) < 1.5 * sum(apart[:500])


def test_it_makes_a_difference() -> None:
    model, tokens = tiny.family("llama"), tiny.ids(1, 60)
    one, two = (EvictionCache(model, "streaming_llm", 12, positions=how) for how in ("original", "rolled"))
    first, second = (logits(model, cache, tokens, [20, *[1] * 40]) for cache in (one, two))
    torch.testing.assert_close(first[:, :20], second[:, :20])
    assert float((first - second)[:, 20:].abs().amax(-1).min()) > 1e-2
    assert torch.equal(one.positions(0), two.positions(0))


# -- rows, beams, steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [9, HEADS], ids=["even", "heads"])
def test_a_padded_batch_is_its_rows_alone(budget: Any) -> None:
    model, lengths = tiny.family("llama"), [23, 14, 5]
    tokens, mask = tiny.left_pad(lengths)
    steps = tiny.ids(3, 20, seed=3)
    cache = EvictionCache(model, "h2o", budget, positions="rolled")
    with torch.no_grad():
        model(tokens, attention_mask=mask, **tiny.cache_argument(cache))
        for step in steps.split(1, 1):
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            together = model(step, attention_mask=mask, **tiny.cache_argument(cache)).logits
    for row, length in enumerate(lengths):
        alone = EvictionCache(model, "h2o", budget, positions="rolled")
        whole = torch.cat([tokens[row : row + 1, -length:], steps[row : row + 1]], 1)
        found = logits(model, alone, whole, [length, *[1] * 20])[:, -1]
        torch.testing.assert_close(together[row], found, rtol=1e-6, atol=1e-6)


def test_rows_change_places() -> None:
    model, tokens = tiny.family("llama"), tiny.ids(2, 30)
    cache, other = (EvictionCache(model, "h2o", 8, positions="rolled") for _ in range(2))
    logits(model, cache, tokens[:, :20], [20])
    logits(model, other, tokens[[1, 1, 0], :20], [20])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 3, 1, 0]))
    cache.batch_select_indices(torch.tensor([0, 1, 2]))
    more = tokens[[1, 1, 0], 20:]
    torch.testing.assert_close(*(logits(model, held, more, [4, *[1] * 6]) for held in (cache, other)))


def test_beams() -> None:
    model = tiny.family("llama", torch.float32)
    more = {"num_beams": 3, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    whole = EvictionCache(model, "h2o", 64, positions="rolled")
    found = model.generate(tiny.ids(2, 10), **tiny.cache_argument(whole), **more)
    assert torch.equal(found, model.generate(tiny.ids(2, 10), **more))
    cut = EvictionCache(model, "h2o", 6, positions="rolled")
    assert model.generate(tiny.ids(2, 10), **tiny.cache_argument(cut), **more).shape == found.shape


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [10, 0.5, DIVIDED], ids=["tokens", "share", "divided"])
def test_no_synchronisation_in_a_decode_step(family: str, padded: bool, budget: Any) -> None:
    policy = {"kind": "streaming_llm", "positions": "rolled"}
    waits_for_nothing(tiny.family(family, dtype=torch.float32), policy, budget, padded, [21, 13])


@pytest.mark.parametrize("budget", [10, DIVIDED], ids=["tokens", "divided"])
def test_a_steady_step_compiles_once_to_the_same_tokens(budget: Any) -> None:
    policy = {"kind": "streaming_llm", "positions": "rolled"}
    compiles_once(tiny.family("llama", dtype=torch.float32), policy, budget, 16, 20)


def test_a_sliding_window_goes_by_what_was_seen() -> None:
    """What a query of such a layer may look at is the same in both modes."""
    model = families.build("mistral", "eager").double()
    window = model.config.sliding_window
    cache = EvictionCache(model, _Seen(), 40, positions="rolled")
    _Seen.least.clear()
    logits(model, cache, tiny.ids(1, 60), [1] * 60)
    assert max(_Seen.least) == window


class _Seen(EvictionPolicy):
    """Keeps the first and the recent, and notes how far back attention reaches."""

    kind: str = "seen"
    needs = {Need.ATTENTION_LAST}
    least: ClassVar[list[int]] = []

    def observe(self, view: View) -> dict[str, Tensor]:
        looked = view.positions.masked_fill(view.attention.last() == 0, 10**6).min()
        _Seen.least.append(int(view.seen.max() - looked))
        return {}

    def priority(self, view: View) -> Tensor:
        return torch.where(view.positions < 9, 10**6, view.positions)


def test_checks() -> None:
    check_policy(load({"kind": "streaming_llm", "sinks": 2, "positions": "rolled"}))


# -- what is asked, and refused --------------------------------------------------------------------------------


def test_a_policy_says_so_unless_the_user_does() -> None:
    model = tiny.family("llama")
    rolled = load({"kind": "streaming_llm", "positions": "rolled"})
    assert rolled.rolled and not load("streaming_llm").rolled

    def rolls(policy: Any, **more: Any) -> list[bool]:
        return [pool.turn.rolls for pool in EvictionCache(model, policy, 12, **more).layers]

    assert rolls(rolled) == [True, True]
    assert rolls(rolled, positions="original") == [False, False]
    assert rolls("streaming_llm", positions="rolled") == [True, True]
    assert rolls({"kind": "layers", "at": {"0": rolled}, "default": "h2o"}) == [True, False]
    assert rolls(rolled | load("heavy"), prefix=3) == [True, True]
    assert rolls({"kind": "layers", "at": {"1": {"kind": "rolled", "of": "lru"}}, "default": "h2o"}) == [False, True]
    assert rolls({"kind": "rolled", "of": "h2o"}, positions="original") == [False, False]


@pytest.mark.parametrize(
    ("of", "budget"),
    [("h2o", 12), ("h2o", HEADS), (MIXED, 12), ({"kind": "kivi", "group": 4, "residual": 3, "of": "lru"}, 12)],
)
def test_said_in_a_file(of: Any, budget: Any) -> None:
    """A policy that says it is the policy in a cache that says it."""
    model, tokens, calls = tiny.family("llama"), tiny.ids(1, 60), [20, *[1] * 30, 10]
    here = EvictionCache(model, {"kind": "rolled", "of": of}, budget)
    there = EvictionCache(model, of, budget, positions="rolled")
    assert torch.equal(logits(model, here, tokens, calls), logits(model, there, tokens, calls))
    assert torch.equal(here.positions(1), there.positions(1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("opt", "not available for opt models"),
        ("gpt2", "GPT2LMHeadModel: it does not rotate its keys"),
        ("llama4_text without chunks", "Llama4ForCausalLM: .*Llama4TextAttention does not show how it rotates"),
    ],
)
def test_refused_by_name(model: str, message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=f"positions='rolled' is {message}|{message}"):
        EvictionCache(families.build(model, None), "h2o", 8, positions="rolled")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_length_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM: .* of the type '{kind}'; known are default"):
        EvictionCache(scaled(kind), "h2o", 8, positions="rolled")
    EvictionCache(scaled(kind), "h2o", 8)


def test_positions_of_several_dimensions_are_refused() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2VLTextConfig(**SIZES, rope_parameters=rope, pad_token_id=0)
    model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel(config).eval()
    with pytest.raises(UnsupportedModelError, match="Qwen2VLTextModel"):
        EvictionCache(model, "h2o", 8, positions="rolled")


# -- the parts -------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 99), unique=True, max_size=20), st.integers(0, 3), st.randoms())
def test_places(held: list[int], empty: int, shuffle: Any) -> None:
    slots = held + [-1] * empty
    shuffle.shuffle(slots)
    found = places(torch.tensor(slots, dtype=torch.int32).view(1, 1, -1)).flatten().tolist()
    assert [place for p, place in zip(slots, found, strict=True) if p >= 0] == [
        sorted(held).index(p) for p in slots if p >= 0
    ]
    assert sorted(found) == list(range(len(slots)))


@pytest.mark.parametrize("family", ROTATED)
def test_undone_and_done_again(family: str) -> None:
    """Whatever angle it was turned by, a vector comes back; at its own position it is what it was."""
    model = families.build(family, families.implementation(family, None))
    cache = EvictionCache(model, "h2o", 8, positions="rolled")
    rotation = next(pool.turn.rotation for pool in cache.layers if pool.turn.rolls)
    vectors = torch.randn(2, 3, 7, rotation_dim(model), generator=torch.Generator().manual_seed(0)).double()
    angles = rotation.at(torch.tensor([0, 1, 5, 60, 999, 12345, 100000]), torch.float64)
    there = rotation.turned(vectors, angles)
    torch.testing.assert_close(rotation.unturned(there, angles), vectors)
    assert float((there - vectors)[:, :, 1:].abs().amax(-1).min()) > 1e-3


def rotation_dim(model: Any) -> int:
    return int(getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads)


def test_a_function_that_is_no_rotation_is_not_taken_for_one() -> None:
    model = tiny.family("llama")
    cos, sin = Spun(model).embedding(torch.empty(0), torch.arange(5)[None])

    def halved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos.unsqueeze(1) / 2, k * cos.unsqueeze(1) / 2

    assert Layout.of(halved, (cos, sin), 8) is None


class Follows:
    def forward(self, query, key, value, position_embeddings, attention_mask, cache):
        cos, sin = position_embeddings
        query, key = turn(query, key, cos, sin)
        key, value = cache.update(key, value, 0)
        return interface(self, query, key, value, attention_mask)


class Changes:
    def forward(self, query, key, value, position_embeddings, attention_mask, cache):
        cos, sin = position_embeddings
        query, key = turn(query, key, cos, sin)
        key = self.norm(key)
        key, value = cache.update(key, value, 0)
        return interface(self, query, key, value, attention_mask)


class Sometimes:
    def forward(self, query, key, value, position_embeddings, attention_mask, cache):
        if self.window is not None and not self.plain:
            cos, sin = position_embeddings
            query, key = turn(query, key, cos, sin)
        key, value = cache.update(key, value, 0)
        return interface(self, query, key, value, attention_mask)


class Unclear:
    def forward(self, query, key, value, position_embeddings, attention_mask, cache):
        if query.shape[2] > 1:
            cos, sin = position_embeddings
            query, key = turn(query, key, cos, sin)
        key, value = cache.update(key, value, 0)
        return interface(self, query, key, value, attention_mask)


class Never:
    def forward(self, query, key, value, attention_mask, cache):
        key, value = cache.update(key, value, 0)
        return interface(self, query, key, value, attention_mask)


def interface(*args: Any) -> None: ...


def turn(*args: Any) -> Any: ...


def test_reading_how_a_forward_rotates() -> None:
    assert turned(Follows.forward) == Turned(known=True, function="turn")
    assert turned(Never.forward) == Turned(known=True)
    assert turned(Changes.forward) == turned(Unclear.forward) == Turned()
    sometimes = turned(Sometimes.forward)
    assert sometimes.known and sometimes.function == "turn"
    for window, plain, expected in ((4, False, True), (4, True, False), (None, False, False)):
        module = Sometimes()
        module.window, module.plain = window, plain  # type: ignore[attr-defined]
        assert sometimes.by(module) is expected
