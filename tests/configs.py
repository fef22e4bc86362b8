"""Policies and budgets of every kind that comes with kvpolicy, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from kvpolicy_plugins.a2sf import A2SF
from kvpolicy_plugins.adaptive import Adaptive
from kvpolicy_plugins.ahakv import AhaKV
from kvpolicy_plugins.cake import CAKE
from kvpolicy_plugins.cake_layers import CAKELayers
from kvpolicy_plugins.duo_attention import DuoAttention
from kvpolicy_plugins.expected_attention import ExpectedAttention
from kvpolicy_plugins.full import Full
from kvpolicy_plugins.given import Given
from kvpolicy_plugins.h2o import H2O
from kvpolicy_plugins.heavy import Heavy
from kvpolicy_plugins.keydiff import KeyDiff
from kvpolicy_plugins.keyformer import Keyformer
from kvpolicy_plugins.kivi import KIVI
from kvpolicy_plugins.knorm import Knorm
from kvpolicy_plugins.kvzip import KVzip
from kvpolicy_plugins.lagkv import LagKV
from kvpolicy_plugins.lfu import LFU
from kvpolicy_plugins.lru import LRU
from kvpolicy_plugins.nacl import NACL
from kvpolicy_plugins.pyramid import Pyramid
from kvpolicy_plugins.random import Random
from kvpolicy_plugins.recent import Recent
from kvpolicy_plugins.rkv import RKV
from kvpolicy_plugins.scissorhands import Scissorhands
from kvpolicy_plugins.sinks import Sinks
from kvpolicy_plugins.snapkv import SnapKV
from kvpolicy_plugins.span import Span
from kvpolicy_plugins.streaming_llm import StreamingLLM
from kvpolicy_plugins.tova import TOVA
from kvpolicy_plugins.uniform import Uniform

from kvpolicy.budget import Budget
from kvpolicy.compose import Blend, Cascade, Composite, Every, Heads, Layers, Part, Phases, Protect, Rolled, Union
from kvpolicy.compose.blend import Weighted
from kvpolicy.policy import EvictionPolicy

Strategy = st.SearchStrategy[Any]

tokens = st.integers(0, 512)
counts = st.integers(1, 512)
shares = tokens | st.floats(0, 1)
positive = st.floats(1e-9, 1e9)
ranges = st.sampled_from(["0", "0-1", "-4:", ":50%", "50%:", "0,3,5-7", ":", "7"])

simple: Strategy = st.one_of(
    *(st.builds(cls) for cls in (Full, H2O, Heavy, LRU, Random, Recent, Sinks, SnapKV, StreamingLLM)),
    *(st.builds(cls) for cls in (A2SF, AhaKV, CAKE, ExpectedAttention, KeyDiff, Keyformer, Knorm)),
    *(st.builds(cls) for cls in (LagKV, LFU, NACL, RKV, Scissorhands, TOVA)),
    st.builds(H2O, recent=shares, sinks=tokens),
    st.builds(H2O, decay=st.floats(0, 1), normalise=st.sampled_from(["none", "visible"])),
    st.builds(A2SF, decay=st.floats(0, 1), group=st.sampled_from(["mean", "max"])),
    st.builds(LFU, tau=positive, normalise=st.sampled_from(["none", "visible"])),
    st.builds(AhaKV, window=counts, length=st.none() | counts),
    st.builds(CAKE, window=counts, gamma=st.floats(0, 1e6)),
    st.builds(ExpectedAttention, future=counts, every=counts, covariance=st.booleans(), epsilon=st.floats(0, 1)),
    st.builds(Keyformer, start=positive, end=positive, noise=st.sampled_from(["gumbel", "none"])),
    st.builds(LagKV, lag=st.integers(2, 99), compare=st.sampled_from(["lag", "all"])),
    st.builds(KIVI, bits=st.sampled_from([2, 4, 8, 16]), residual=tokens),
    st.builds(NACL, proxies=counts, drawn=shares, seed=st.integers(-(2**63), 2**63)),
    st.builds(RKV, window=counts, weight=st.floats(0, 1), alike=st.floats(-1, 1)),
    st.builds(Scissorhands, window=counts, recent=shares),
    st.builds(TOVA, heads=st.sampled_from(["layer", "each"])),
    st.builds(LRU, tau=positive, recent=shares),
    st.builds(Random, seed=st.integers(-(2**63), 2**63), draw=st.sampled_from(["fixed", "fresh"])),
    st.builds(StreamingLLM, sinks=tokens, positions=st.sampled_from(["original", "rolled"])),
    st.builds(SnapKV, window=counts, kernel=st.integers(0, 8).map(lambda half: 2 * half + 1)),
    st.builds(KVzip, chunk=counts, budgets=st.sampled_from(["global", "uniform"]), decode=st.just("bounded")),
    st.tuples(tokens, counts).map(lambda span: Span(start=span[0], stop=sum(span))),
)


gates = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=4)
divided: Strategy = st.one_of(
    st.builds(KVzip),
    st.builds(DuoAttention, heads=gates, sparsity=st.none() | st.floats(0, 1), sinks=tokens, recent=counts),
)
"""Policies that not all combinators may hold."""


def _spans(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return tuple(zip(ends[::2], ends[1::2], strict=False))


def _blended(parts: list[Weighted], normalise: str) -> Blend:
    mixed = any(isinstance(part.of, Composite) for part in parts)
    return Blend(parts=parts, normalise="rank" if mixed else normalise)


def compositions(inner: Strategy) -> Strategy:
    """Every combinator, of policies from `inner`."""
    plain = inner.filter(lambda policy: policy.storage is None)
    choosers = plain.filter(_evicts_at_once)
    in_phases = plain.filter(lambda policy: not policy.divided)
    in_heads = choosers.filter(lambda policy: not policy.together) | st.builds(Full)
    takes = st.none() | tokens | st.floats(0, 0.25)  # shares of up to four parts, which are one at most
    parts = st.builds(Part, take=takes, of=choosers) | choosers
    weighted = st.builds(Weighted, of=choosers, weight=positive) | st.builds(Weighted, of=choosers)
    return st.one_of(
        st.builds(Union, parts=st.lists(parts, min_size=1, max_size=4)),
        st.builds(_blended, st.lists(weighted, min_size=1, max_size=3), st.sampled_from(["rank", "zscore", "sum"])),
        st.builds(Cascade, narrow=choosers, to=counts | st.floats(1, 100), pick=choosers),
        st.builds(Phases, prefill=in_phases, decode=in_phases),
        st.builds(
            Heads,
            at=st.dictionaries(ranges, in_heads, min_size=1, max_size=3),
            default=in_heads,
            tokens=st.none() | counts,
        ),
        st.builds(Layers, at=st.dictionaries(ranges, inner, min_size=1, max_size=3), default=inner),
        st.builds(Protect, sinks=tokens, recent=shares, spans=st.lists(counts, max_size=5).map(_spans), of=inner),
        st.builds(Protect, prefix=st.booleans(), of=inner),
        st.builds(Every, tokens=counts, of=inner),
        st.builds(Rolled, of=inner),
        st.builds(KIVI, bits=st.sampled_from([2, 4, 8, 16]), group=counts, residual=tokens, of=plain),
    )


def _evicts_at_once(policy: EvictionPolicy) -> bool:
    return not policy.divided and not policy.room(True) and not policy.room(False)


def nested(depth: int) -> Strategy:
    """Policies made of policies, up to so many deep."""
    return simple if depth == 0 else simple | divided | compositions(nested(depth - 1))


over_layers = st.one_of(
    st.builds(Uniform),
    st.builds(Pyramid),
    st.builds(Pyramid, beta=st.floats(1, 1e6), window=tokens),
    st.builds(Given, weights=st.dictionaries(ranges, positive, min_size=1)),
)
over_heads = st.builds(Uniform) | st.builds(Adaptive) | st.builds(Adaptive, alpha=st.floats(0, 1))
fractions = st.floats(0, 1, exclude_min=True)
bounds = {"share": fractions, "min": st.none() | st.integers(1, 9), "max": st.none() | st.integers(9, 512)}
budgets: Strategy = st.one_of(
    (counts | fractions).map(Budget.parse),
    st.builds(Budget, tokens=counts, layers=st.none() | over_layers, heads=st.none() | over_heads),
    st.builds(Budget, **bounds, layers=st.none() | over_layers, heads=st.none() | over_heads),
    st.builds(Budget, **bounds, of=st.just("seen")),
    st.builds(Budget, **bounds, layers=st.builds(CAKELayers) | st.builds(CAKELayers, tau1=positive, window=counts)),
)
