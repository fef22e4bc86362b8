"""State of rows and heads, and queries as they were before the model rotated them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from kvpolicy import EvictionCache, EvictionPolicy, HeadField, Need, SlotField, View, load
from kvpolicy.attention import blocks
from kvpolicy.errors import ConfigError, UnsupportedModelError
from kvpolicy.explain import explain
from kvpolicy.testing import check_policy
from tests import tiny
from tests.unit import test_families as families
from tests.unit.test_rolled import ROTATED, scaled
from tests.unit.test_step import DIVIDED, compiles_once, waits_for_nothing


class Alike(EvictionPolicy):
    """Keeps the keys that are like the queries so far; knows their sum, and how many there were, by query head."""

    kind: Literal["alike"] = "alike"
    needs = {Need.QUERIES, Need.ROTATION}
    total = HeadField(shape=("group", "head_dim"))
    count = HeadField(dtype="int32", fill=7)
    since = SlotField(shape=("group",))

    def observe(self, view: View) -> Mapping[str, Tensor]:
        real = view.attention.positions >= 0
        queries = view.attention.queries(rotated=False) * real.unsqueeze(2)
        lengths = queries.square().sum(-1).transpose(-1, -2)  # [batch, kv_heads, rows, group]
        later = (view.attention.positions >= view.positions.unsqueeze(-2)).to(lengths.dtype)
        return {
            "total": view["total"] + queries.sum(-2),
            "count": view["count"] + real.sum((-2, -1)).int(),
            "since": view["since"] + later.mT @ lengths,
        }

    def priority(self, view: View) -> Tensor:
        return (view["total"] @ view.keys.to(view["total"].dtype).mT).sum(2)


def run(model: Any, cache: Any, tokens: Tensor, calls: list[int], mask: Tensor | None = None) -> Tensor:
    at, found = 0, []
    for part in tokens.split(calls, 1):
        at += part.shape[1]
        given = {} if mask is None else {"attention_mask": mask[:, :at]}
        with torch.no_grad():
            found.append(model(part, use_cache=True, **given, **tiny.cache_argument(cache)).logits)
    return torch.cat(found, 1)


def test_checks() -> None:
    check_policy(Alike())


@pytest.mark.parametrize("others", ["h2o", "recent", {"kind": "snapkv", "window": 3}])
def test_in_compositions(others: Any) -> None:
    check_policy(Alike().take(3) | load(others), skip={"configuration"})  # it is not installed


def test_shapes_and_fills() -> None:
    model = tiny.family("llama", heads=6, kv_heads=2)
    cache = EvictionCache(model, Alike(), 8)
    assert cache.head_state(0) == {}
    run(model, cache, tiny.ids(3, 20), [20])
    found = cache.head_state(1)
    assert found["total"].shape == (3, 2, 3, 8) and found["total"].dtype == torch.float64
    assert found["count"].tolist() == [[27, 27]] * 3
    assert set(cache.scores(0)) == {"since"} and cache.scores(0)["since"].shape == (3, 2, 8, 3)
    cache.reset()
    assert cache.head_state(1) == {}


@pytest.mark.parametrize("budget", [12, DIVIDED], ids=["even", "heads"])
def test_rows_take_their_state_along(budget: Any) -> None:
    model, tokens = tiny.family("llama"), tiny.ids(3, 30)
    order = [2, 0, 1, 1]
    cache, other = EvictionCache(model, Alike(), budget), EvictionCache(model, Alike(), budget)
    run(model, cache, tokens[:, :20], [20])
    run(model, other, tokens[order, :20], [20])
    cache.batch_select_indices(torch.tensor([2, 0, 1]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([0, 3, 5, 4, 1, 2]))
    cache.batch_select_indices(torch.tensor([0, 1, 2, 3]))
    more = tokens[order, 20:]
    torch.testing.assert_close(*(run(model, held, more, [4, *[1] * 6]) for held in (cache, other)))
    torch.testing.assert_close(cache.head_state(1), other.head_state(1))


def test_parts_of_compositions_have_their_own() -> None:
    model = tiny.family("llama")
    cache = EvictionCache(model, Alike().take(3) | Alike(), 8)
    run(model, cache, tiny.ids(1, 20), [20, *[]])
    assert set(cache.head_state(0)) == {"0.total", "0.count", "1.total", "1.count"}


def test_bytes_are_counted_and_foretold() -> None:
    model = tiny.family("llama", torch.float32)
    cache = EvictionCache(model, Alike(), 8)
    run(model, cache, tiny.ids(1, 20), [20])
    bare = EvictionCache(model, "h2o", 8)
    run(model, bare, tiny.ids(1, 20), [20])
    a_head, a_slot = 2 * 8 * 4 + 4, (2 - 1) * 4
    assert cache.nbytes() - bare.nbytes() == 2 * 2 * (a_head + 9 * a_slot)
    found = explain(Alike(), model.config, 20, budget=8, dtype="float32")
    assert found.bytes.total == cache.nbytes()
    assert found.as_dict()["head_fields"]["total"]["bytes"] == 64


def test_a_config_that_does_not_say_how_many_query_heads() -> None:
    model = tiny.family("llama")
    cache = EvictionCache(model, Alike(), 8)
    for pool in cache.layers:
        pool._query_heads = None
    with pytest.raises(ConfigError, match="alike keeps state for each query head"):
        run(model, cache, tiny.ids(1, 20), [20])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [10, 0.5, DIVIDED], ids=["tokens", "share", "divided"])
def test_no_synchronisation_in_a_decode_step(padded: bool, budget: Any) -> None:
    waits_for_nothing(tiny.family("llama", dtype=torch.float32), Alike(), budget, padded, [21, 13])


def test_a_steady_step_compiles_once_to_the_same_tokens() -> None:
    compiles_once(tiny.family("llama", dtype=torch.float32), Alike(), 10, 16, 20)


# -- queries before rotation -----------------------------------------------------------------------------------


class Asked(EvictionPolicy):
    """Notes the queries of each call, before rotation, and what the view knows of rotation."""

    kind: str = "asked"
    more: tuple[Any, ...] = ()
    queries: ClassVar[list[Tensor]] = []
    views: ClassVar[list[View]] = []
    keys: ClassVar[list[tuple[Tensor, Tensor]]] = []

    @property
    def needs(self) -> set[Need]:  # type: ignore[override]
        return {Need.QUERIES, Need.ROTATION, *self.more}

    def observe(self, view: View) -> dict[str, Tensor]:
        if view.layer == 0:
            self.queries.append(view.attention.queries(rotated=False))
            self.views.append(view)
            self.keys.append((view.keys.clone(), view.rotated(view.keys, view.positions).clone()))
        return {}

    def priority(self, view: View) -> Tensor:
        return view.positions


@pytest.fixture(autouse=True)
def _nothing_noted() -> None:
    Asked.queries.clear()
    Asked.views.clear()
    Asked.keys.clear()


def projected(model: Any, tokens: Tensor) -> Tensor:
    """Queries of the first layer of a Llama straight from its projection."""
    layer = model.model.layers[0]
    with torch.no_grad():
        queries = layer.self_attn.q_proj(layer.input_layernorm(model.model.embed_tokens(tokens)))
    return queries.unflatten(-1, (2, 2, 8)).permute(0, 2, 3, 1, 4)


@pytest.mark.parametrize("positions", ["original", "rolled"])
@pytest.mark.parametrize("more", [(), (Need.ATTENTION_ROWS,)], ids=["queries alone", "rows too"])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_queries_before_rotation(
    kind: str, more: tuple[Any, ...], positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_CPU_BLOCK_BYTES", 0)
    model = tiny.family("llama") if kind == "default" else scaled(kind)
    tokens, calls = tiny.ids(1, 60), [40, 7, *[1] * 13]
    run(model, EvictionCache(model, Asked(more=more), 9, positions=positions), tokens, calls)
    found = Asked.queries
    if more:  # one head after the other, in blocks of rows
        prompt, chunk = found[:6], found[6:8]
        heads = [torch.cat([*prompt[i : i + 3], chunk[i // 3]], 3) for i in (0, 3)]
        found = [torch.cat(heads, 1), *found[8:]]
    torch.testing.assert_close(torch.cat(found, 3), projected(model, tokens), rtol=1e-6, atol=1e-6)


def test_the_last_rows_alone() -> None:
    model, tokens = tiny.family("llama"), tiny.ids(1, 30)
    run(model, EvictionCache(model, Asked(), 9), tokens, [30])
    rows = Asked.views[0].attention.latest(4)
    torch.testing.assert_close(rows.queries(rotated=False), projected(model, tokens)[..., -4:, :])


def test_queries_where_nothing_is_rotated() -> None:
    model = tiny.family("opt")
    run(model, EvictionCache(model, Asked(), 9), tiny.ids(1, 30), [30])
    view = Asked.views[0]
    assert view.rotation is None
    assert torch.equal(view.attention.queries(rotated=False), view.attention.queries())
    assert torch.equal(*Asked.keys[0])


@pytest.mark.parametrize("positions", ["original", "rolled"])
@pytest.mark.parametrize("family", ROTATED)
def test_rotated_keys_and_future_angles(family: str, positions: str) -> None:
    """Keys are the model's own in either mode, and its next query is rotated as the rotation foretells."""
    model = families.build(family, families.implementation(family, None))
    run(model, EvictionCache(model, Asked(), 64, positions=positions), tiny.ids(1, 21), [20, 1])
    full = EvictionCache(model, "h2o", 64)
    run(model, full, tiny.ids(1, 20), [20])
    first, second = Asked.views
    torch.testing.assert_close(Asked.keys[0][1], full.layers[0].active_keys, rtol=1e-4, atol=1e-4)
    if first.rotation is not None:
        assert torch.equal(*Asked.keys[0]) is (positions == "original")
        foretold = first.rotation.at(torch.tensor([20]))
        query = second.attention.queries(rotated=False)
        if positions == "original":
            found = first.rotation.turned(query, foretold)
            torch.testing.assert_close(found, second.attention.queries(), rtol=1e-4, atol=1e-4)


class Unasked(EvictionPolicy):
    """Forgets to say that it needs to know how the model rotates."""

    kind: str = "unasked"
    what: str = "view.rotation"
    needs = {Need.QUERIES}

    def observe(self, view: View) -> dict[str, Tensor]:
        _ = view.rotation if self.what == "view.rotation" else view.attention.queries(rotated=False)
        return {}


@pytest.mark.parametrize("what", ["view.rotation", r"queries\(rotated=False\)"])
def test_needs_are_said(what: str) -> None:
    model = tiny.family("llama")
    with pytest.raises(RuntimeError, match=rf"{what} was not .*: add Need.ROTATION"):
        run(model, EvictionCache(model, Unasked(what=what), 9), tiny.ids(1, 20), [20])


def test_a_rotation_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"asked is not available for LlamaForCausalLM: .* 'dynamic'"):
        EvictionCache(scaled("dynamic"), Asked(), 9)
