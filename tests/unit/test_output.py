"""The output projection in the view: what policies get, what is refused, and CriticalKV, which weighs by it."""

from __future__ import annotations

import gc
import weakref
from fractions import Fraction
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpolicy_plugins import criticalkv
from kvpolicy_plugins.criticalkv import reach
from torch import nn
from transformers import GPT2Config, Qwen3NextConfig
from transformers.models.bitnet.modeling_bitnet import BitNetAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.opt.modeling_opt import OPTAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from kvpolicy import EvictionCache, EvictionPolicy, Need, load
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.source import handed
from tests import tiny
from tests.unit.test_policies import Trace
from tests.unit.test_reference import compare

CRITICAL = {"kind": "criticalkv", "of": {"kind": "h2o", "recent": 1}}


# -- where it is found -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (LlamaAttention, "o_proj"),
        (OPTAttention, "out_proj"),
        (GPTNeoXAttention, "dense"),
        (GPT2Attention, "c_proj"),
        (Qwen3NextAttention, None),  # a gate comes first
        (BitNetAttention, "attn_sub_norm"),  # a norm comes first
    ],
)
def test_the_source_says_what_projects(module: Any, name: str | None) -> None:
    assert handed(module.forward).projected_by == name


class Shown(EvictionPolicy):
    """Checks that each head's output, projected and added up, is what the layer puts out."""

    kind: Literal["shown"] = "shown"
    needs = {Need.ATTENTION_ROWS, Need.OUTPUT}

    def observe(self, view: Any) -> dict[str, Any]:
        heads = torch.einsum("bhgrs,bhsd->bhgrd", view.attention.heads(), view.values)
        SEEN[view.layer] = torch.einsum("bhgrd,hgod->bro", heads, view.output)
        return {}

    def priority(self, view: Any) -> Any:
        return view.positions


SEEN: dict[int, torch.Tensor] = {}
PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj")


def gpt2() -> Any:
    return tiny.build(GPT2Config(vocab_size=tiny.VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256))


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "gpt2"])
def test_heads_projected_add_up_to_the_output_of_the_layer(family: str) -> None:
    model = gpt2() if family == "gpt2" else tiny.family(family)
    modules = [m for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "layer_idx")]
    out: dict[int, torch.Tensor] = {}
    for module in modules:
        projection = next(getattr(module, name) for name in PROJECTIONS if hasattr(module, name))
        projection.register_forward_hook(
            lambda own, args, result, index=module.layer_idx: out.update(
                {index: result - own.bias if own.bias is not None else result}
            )
        )
    cache = EvictionCache(model, Shown(), budget=64)
    with torch.no_grad():
        model(tiny.ids(2, 12), use_cache=True, **tiny.cache_argument(cache))
    assert set(SEEN) == {0, 1}
    for layer, found in SEEN.items():
        torch.testing.assert_close(found, out[layer])
    SEEN.clear()


# -- what is refused -------------------------------------------------------------------------------------------


def test_a_gate_before_the_projection_is_refused_when_the_cache_is_made() -> None:
    config = Qwen3NextConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["full_attention"] * 2, decoder_sparse_step=2,
    )  # fmt: skip
    model = tiny.build(config)
    assert EvictionCache(model, "h2o", budget=8)
    with pytest.raises(UnsupportedModelError, match=r"^criticalkv needs the output projection of layer 0: .*changes"):
        EvictionCache(model, CRITICAL, budget=8)


class Wrapped(nn.Module):
    """As adapters and quantisers put it in place of a linear layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = inner.weight


def eight_bits(model: Any) -> None:
    projection = model.model.layers[1].self_attn.o_proj
    projection.weight = nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)


def wrapped(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.o_proj = Wrapped(attention.o_proj)


def nowhere(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.to("meta")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (eight_bits, r"the weights of LlamaAttention.o_proj are not in memory as float32.*int8"),
        (wrapped, r"LlamaAttention.o_proj is a Wrapped and no plain linear layer"),
        (nowhere, r"the weights of LlamaAttention.o_proj are not in memory.*meta"),
    ],
)
def test_weights_that_are_no_plain_numbers_are_refused(change: Any, said: str) -> None:
    model = tiny.family("llama")
    change(model)
    with pytest.raises(UnsupportedModelError, match=rf"^criticalkv needs the output projection of layer 1: {said}"):
        EvictionCache(model, CRITICAL, budget=8)
    assert EvictionCache(model, "h2o", budget=8), "who does not ask for it does not care"


def test_a_policy_that_did_not_ask_is_told_so() -> None:
    class Greedy(EvictionPolicy):
        kind: Literal["greedy"] = "greedy"

        def priority(self, view: Any) -> Any:
            return view.output

    model = tiny.family("llama")
    cache = EvictionCache(model, Greedy(), budget=4)
    with pytest.raises(RuntimeError, match=r"Need\.OUTPUT"), torch.no_grad():
        model(tiny.ids(1, 9), use_cache=True, **tiny.cache_argument(cache))


def test_attention_has_nothing_to_do_for_it() -> None:
    assert load({"kind": "criticalkv", "of": "knorm"}).wants.nothing


def test_the_cache_does_not_hold_the_model() -> None:
    model = tiny.family("llama")
    cache = EvictionCache(model, CRITICAL, budget=8)
    with torch.no_grad():
        model(tiny.ids(1, 12), use_cache=True, **tiny.cache_argument(cache))
    held = weakref.ref(model.model.layers[0].self_attn.o_proj)
    del model
    gc.collect()
    assert held() is None
    assert cache.kept(0).tolist() == [[8, 8]]


# -- CriticalKV ------------------------------------------------------------------------------------------------


def test_reach_is_the_length_of_what_a_value_adds_to_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, 11, 5, generator=generator, dtype=torch.float64)
    output = torch.randn(3, 2, 7, 5, generator=generator, dtype=torch.float64)
    expected = torch.einsum("bhnd,hgod->bhgno", values, output).abs().sum(-1).mean(2)
    torch.testing.assert_close(reach(values, output), expected)
    monkeypatch.setattr(criticalkv, "_NUMBERS", 3 * 7 * 4)  # four rows at once
    torch.testing.assert_close(reach(values, output), expected)


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (1.0, [0, 1, 2, 3]),  # by the score
        (0.5, [0, 1, 4, 5]),  # two by the score; of 2 to 5 those with .15 * 4 and .10 * 9, not .20 * 1 and .18 * 1
        (0, [1, 3, 4, 5]),  # all by .35 * 1, .25 * 2, .20 * 1, .18 * 3, .15 * 4, .10 * 9
        (3, [0, 1, 2, 5]),
    ],
)
def test_worked_example(first: float, expected: list[int]) -> None:
    scores, moved = [0.35, 0.25, 0.20, 0.18, 0.15, 0.10], [1.0, 2.0, 1.0, 1.0, 4.0, 9.0]
    if first == 0:
        moved[3] = 3.0

    class Given(EvictionPolicy):
        kind: Literal["given_scores"] = "given_scores"

        def protected(self, view: Any) -> None:
            return None

        def priority(self, view: Any) -> Any:
            return torch.tensor(scores).view(1, 1, -1)

    policy = load({"kind": "criticalkv", "of": Given(), "first": first})
    trace = Trace(policy, 4)
    trace.positions = torch.arange(6, dtype=torch.int32).view(1, 1, -1)
    trace.fields = {"reach": torch.tensor(moved).view(1, 1, -1)}
    trace.seen = 6
    assert trace.evict() == expected


@pytest.mark.parametrize("inner", ["h2o", "knorm", {"kind": "snapkv", "window": 3}])
def test_all_of_the_budget_first_is_the_policy_inside(inner: Any) -> None:
    model, tokens = tiny.family("llama"), tiny.ids(2, 50)
    caches = [EvictionCache(model, policy, 9) for policy in ({"kind": "criticalkv", "of": inner, "first": 1.0}, inner)]
    for part in tokens.split([20, *[1] * 30], 1):
        for cache in caches:
            with torch.no_grad():
                model(part, use_cache=True, **tiny.cache_argument(cache))
        assert torch.equal(*(cache.positions(1) for cache in caches))


@settings(max_examples=30, deadline=None)
@given(
    first=st.one_of(st.integers(0, 12), st.floats(0, 1, allow_nan=False)),
    recent=st.integers(0, 5),
    calls=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    budget=st.integers(6, 12),
    seed=st.integers(0, 1000),
)
def test_any_part_first(first: float, recent: int, calls: list[int], budget: int, seed: int) -> None:
    policy = {"kind": "criticalkv", "first": first, "of": {"kind": "h2o", "recent": recent}}
    calls = [*calls, *[1] * 20]
    compare(policy, tiny.family("llama", seed=seed), budget, tiny.ids(1, sum(calls), seed), calls)


def test_each_token_is_projected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(
        criticalkv, "reach", lambda values, output: counted.append(values.shape[2]) or reach(values, output)
    )
    model = tiny.family("llama", layers=1)
    cache = EvictionCache(model, CRITICAL, budget=8)
    for part in tiny.ids(1, 15).split([10, *[1] * 5], 1):
        with torch.no_grad():
            model(part, use_cache=True, **tiny.cache_argument(cache))
    assert counted == [10, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_heads_divide_the_budget_by_the_score_alone(family: str) -> None:
    budget = {"tokens": 10, "heads": {"kind": "adaptive", "alpha": 0.2}}
    spec = {"kind": "criticalkv", "of": {"kind": "h2o", "recent": 2}}
    compare(
        spec, tiny.family(family), budget, tiny.ids(2, 50), [30] + [1] * 20, budgets=[10, 10], alpha=Fraction("0.2")
    )
    model = tiny.family(family)
    shares = []
    for policy in (spec, spec["of"]):
        cache = EvictionCache(model, policy, budget)
        with torch.no_grad():
            model(tiny.ids(2, 30), use_cache=True, **tiny.cache_argument(cache))
        shares.append(cache.kept(0))
    assert torch.equal(*shares)
    assert len(shares[0].unique()) > 1


def test_only_scores_can_be_weighed() -> None:
    with pytest.raises(ValueError, match="needs a policy with a score, and union only has an order"):
        load({"kind": "criticalkv", "of": {"kind": "union", "parts": ["recent"]}})
