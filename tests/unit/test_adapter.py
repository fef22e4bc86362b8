"""Attaching and detaching: reversible, leaving no trace, and clear about what it cannot do."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import kvpolicy
from kvpolicy import EvictionCache, adapter
from kvpolicy.adapter import ModelAdapter
from kvpolicy.errors import ConfigError, NotAttachedError, UnsupportedModelError
from kvpolicy.source import Handed, handed
from tests import tiny


@pytest.fixture
def model() -> Any:
    return tiny.family("llama", torch.float32)


def call(model: Any, cache: Any, tokens: Tensor | None = None, **more: Any) -> Tensor:
    tokens = tiny.ids(2, 12) if tokens is None else tokens
    with torch.no_grad():
        return model(tokens, use_cache=True, **tiny.cache_argument(cache), **more).logits


def evicting(model: Any) -> EvictionCache:
    return EvictionCache(model, "h2o", budget=6)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def assert_untouched(model: Any) -> None:
    assert model.config._attn_implementation == "sdpa"
    assert hooks(model) == 0
    assert not any("kvpolicy" in name for module in model.modules() for name in vars(module))


# -- reversible ----------------------------------------------------------------------------------------------


def test_attach_and_detach_are_idempotent(model: Any) -> None:
    assert [kvpolicy.attach(model).owned for _ in range(3)] == [True, False, False]
    assert hooks(model) == 2
    kvpolicy.detach(model)
    kvpolicy.detach(model)
    assert_untouched(model)


def test_the_outer_context_undoes_it(model: Any) -> None:
    with kvpolicy.attach(model), kvpolicy.attach(model):
        evicting(model)
    assert_untouched(model)


def test_the_inner_context_leaves_it(model: Any) -> None:
    kvpolicy.attach(model)
    with kvpolicy.attach(model):
        pass
    call(model, evicting(model))
    kvpolicy.detach(model)
    assert_untouched(model)


def test_an_exception_undoes_it(model: Any) -> None:
    with pytest.raises(UnsupportedModelError), kvpolicy.attach(model):
        call(model, evicting(model), output_attentions=True)
    assert_untouched(model)


def test_a_refused_model_is_untouched() -> None:
    model = tiny.build(tiny.llama(layer_types=["full_attention", "linear_attention"]))
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        kvpolicy.attach(model)
    assert_untouched(model)


def test_models_that_share_a_config() -> None:
    config = tiny.llama()
    first, second = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    assert first.model.layers[0].self_attn.config is second.model.layers[0].self_attn.config
    expected = call(second, DynamicCache())
    with kvpolicy.attach(first):
        kvpolicy.attach(second)
    assert torch.equal(call(second, DynamicCache()), expected)
    call(second, evicting(second))
    kvpolicy.detach(second)
    assert_untouched(second)


def test_a_model_dies_although_it_was_never_detached() -> None:
    model = tiny.family("llama", torch.float32)
    call(model, cache := evicting(model))
    gone = weakref.ref(model.model.layers[0].self_attn)
    del model, cache
    gc.collect()
    assert gone() is None


# -- copies and files ----------------------------------------------------------------------------------------


def duplicate(model: Any, way: str) -> Any:
    if way == "deepcopy":
        return copy.deepcopy(model)
    if way == "pickle":
        return pickle.loads(pickle.dumps(model))
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_an_attached_model_is_attached_and_independent(model: Any, way: str) -> None:
    expected = call(model, evicting(model))
    copied = duplicate(model, way)
    kvpolicy.detach(model)
    assert torch.equal(call(copied, evicting(copied)), expected)
    assert hooks(copied) == 2
    kvpolicy.detach(copied)
    assert_untouched(copied)


def test_saving_an_attached_model_writes_what_it_would_have_written(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "before")
    with kvpolicy.attach(model):
        model.save_pretrained(tmp_path / "attached")
    written = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "attached")]
    assert written[0] == written[1]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "attached").config._attn_implementation == "sdpa"


# -- caches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "none"])
def test_a_cache_that_is_not_ours_sees_no_difference(model: Any, kind: str, attention: str) -> None:
    model.set_attn_implementation(attention)
    tokens, mask = tiny.left_pad([12, 7])

    def logits() -> Tensor:
        if kind == "none":
            with torch.no_grad():
                return model(tokens, attention_mask=mask, use_cache=False).logits
        cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=20)
        parts = [call(model, cache, tokens, attention_mask=mask)]
        longer = torch.cat([mask, mask.new_ones(2, 1)], 1)
        return torch.cat([*parts, call(model, cache, tiny.ids(2, 1), attention_mask=longer)], 1)

    expected = logits()
    with kvpolicy.attach(model):
        assert torch.equal(logits(), expected)


def test_a_cache_given_to_a_model_that_is_not_attached(model: Any) -> None:
    with pytest.raises(NotAttachedError, match="not attached"):
        call(tiny.family("llama", torch.float32), evicting(model))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_cache_given_to_another_model(model: Any, layers: int) -> None:
    other = tiny.family("llama", torch.float32, layers=layers)
    kvpolicy.attach(other)
    with pytest.raises(ConfigError, match="made for another model"):
        call(other, evicting(model))


def test_a_cache_of_a_model_detached_meanwhile(model: Any) -> None:
    cache = evicting(model)
    call(model, cache)
    kvpolicy.detach(model)
    with pytest.raises(NotAttachedError, match=r"kvpolicy.attach\(model\) again"):
        call(model, cache, tiny.ids(2, 1))
    kvpolicy.attach(model)
    assert call(model, cache, tiny.ids(2, 1)).isfinite().all()


def test_the_attention_implementation_changed_after_attaching(model: Any) -> None:
    cache = evicting(model)
    model.set_attn_implementation("eager")
    with pytest.raises(NotAttachedError, match="set to 'eager' after attaching"):
        call(model, cache)
    assert call(model, evicting(model)).isfinite().all()
    kvpolicy.detach(model)
    assert model.config._attn_implementation == "eager"


# -- refused -------------------------------------------------------------------------------------------------


def test_dropout() -> None:
    model = tiny.build(tiny.llama(attention_dropout=0.5)).train()
    with pytest.raises(UnsupportedModelError, match=r"model.eval\(\)"):
        call(model, evicting(model))


def test_a_mask_of_four_dimensions(model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="2-D attention mask"):
        call(model, evicting(model), attention_mask=torch.zeros(2, 1, 12, 12))


def test_the_attention_matrix(model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="output_attentions=True"):
        call(model, evicting(model), output_attentions=True)


def test_a_module_that_is_not_of_transformers() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        kvpolicy.attach(nn.Linear(2, 2))


def test_a_transformers_too_old(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.transformers, "__version__", "5.16.2")
    with pytest.raises(UnsupportedModelError, match=r"5\.16\.2 is too old; kvpolicy needs 5\.17"):
        kvpolicy.attach(model)


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0.dev0", "6.0.0rc1", "5.100"])
def test_a_transformers_new_enough(model: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(adapter.transformers, "__version__", version)
    kvpolicy.attach(model)


def test_positions() -> None:
    adapter = ModelAdapter()
    adapter.name = "some"  # type: ignore[misc]
    adapter.check_positions("original")
    with pytest.raises(ConfigError, match="is not one of"):
        adapter.check_positions("relative")
    with pytest.raises(ConfigError, match="not available for some models"):
        adapter.check_positions("rolled")


# -- what a forward says -------------------------------------------------------------------------------------


class Plain(nn.Module):
    def forward(self, query, key, value, attention_mask, cache):
        key, value = cache.update(key, value, 0)
        return interface(self, query, key, value, attention_mask, scaling=1.0, softcap=2.0)


class Expands(nn.Module):
    def forward(self, query, key, value, attention_mask, cache):
        key, value = cache.update(key, value, 0)
        key = key.repeat(1, 2, 1, 1)
        return interface(self, query, key, value, attention_mask)


class Masks(nn.Module):
    def forward(self, query, key, value, attention_mask, cache):
        key, value = cache.update(key, value, 0)
        attention_mask = attention_mask + 1
        return interface(self, query, key, value, attention_mask)


class Inline(nn.Module):
    def forward(self, query, key, value, attention_mask):
        return (query @ key.mT + attention_mask).softmax(-1) @ value


def interface(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Plain, Handed(frozenset({"scaling", "softcap"}), as_cached=True, mask_as_given=True)),
        (Expands, Handed(as_cached=False, mask_as_given=True)),
        (Masks, Handed(as_cached=True, mask_as_given=False)),
        (Inline, Handed()),
        (type("Unreadable", (nn.Module,), {"forward": eval("lambda self: None")}), Handed()),
    ],
)
def test_reading_a_forward(kind: type[nn.Module], expected: Handed) -> None:
    assert handed(kind.forward) == expected
