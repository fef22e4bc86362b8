"""The contract between a model family and the framework; binding and unbinding a model.

Attaching registers an attention function and puts a forward pre-hook on each attention module. The hook hands
the module its layer of the :class:`~kvpolicy.EvictionCache` by keyword; no forward is replaced and nothing global
is patched. A cache that is not ours goes the way it went before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import transformers
from torch import nn
from torch.utils.hooks import RemovableHandle

from kvpolicy.attention import interface
from kvpolicy.cache import EvictionCache
from kvpolicy.errors import ConfigError, UnsupportedModelError

OLDEST = (5, 17)
POSITIONS = ("original", "rolled")


class ModelAdapter:
    """Binds the attention of one family of models. Subclass, and offer an instance by ``kvpolicy_adapters``."""

    name: ClassVar[str]
    """Unique name, shown by ``kvpolicy plugins``."""
    model_types: ClassVar[frozenset[str]] = frozenset()
    """``config.model_type`` values this adapter is for."""
    positions: ClassVar[frozenset[str]] = frozenset({"original"})
    """Position modes the family allows."""
    fallback: ClassVar[bool] = False
    """Whether to ask this adapter only after all others."""
    layer_types: ClassVar[frozenset[str]] = frozenset({"full_attention", "sliding_attention"})
    """Entries of ``config.layer_types`` it can serve."""

    def accepts(self, model: nn.Module) -> bool:
        """Whether this adapter is meant for `model`. Named adapters are asked before general ones."""
        return getattr(text_config(model), "model_type", None) in self.model_types

    def attention_modules(self, model: nn.Module) -> list[nn.Module]:
        """The self-attention modules in the order of their layers."""
        found = [m for m in model.modules() if type(m).__name__.endswith("Attention") and layer_index(m) is not None]
        return sorted(found, key=lambda m: layer_index(m) or 0)

    def refusal(self, model: nn.Module) -> str | None:
        """Why `model` cannot be served although it is of this family, or ``None``."""
        config = text_config(model)
        unknown = sorted(set(getattr(config, "layer_types", None) or ()) - self.layer_types)
        if unknown:
            return f"it has {', '.join(unknown)} layers"
        if getattr(model.config, "is_encoder_decoder", False):
            return "it is an encoder-decoder"
        return None

    def check_positions(self, positions: str) -> None:
        """Raise :class:`ConfigError` unless `positions` is a mode of this family."""
        if positions not in POSITIONS:
            raise ConfigError(f"positions={positions!r} is not one of {', '.join(POSITIONS)}")
        if positions not in self.positions:
            raise ConfigError(f"positions={positions!r} is not available for {self.name} models yet; use 'original'")


def text_config(model: nn.Module) -> Any:
    """The config of the language model inside `model`."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model (it has no config)")
    return config.get_text_config(decoder=True)


def layer_index(module: nn.Module) -> int | None:
    """Which layer of the cache an attention module uses."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else None


@dataclass(frozen=True)
class _Bound:
    """What attaching did to a model."""

    adapter: ModelAdapter
    layers: int
    handles: list[RemovableHandle]
    configs: list[Any]


_bound: WeakKeyDictionary[nn.Module, _Bound] = WeakKeyDictionary()  # by the first attention module
_wrapped: Counter[int] = Counter()  # how many attached models share a config, by its id


@dataclass(frozen=True)
class Attachment:
    """A model bound to kvpolicy. As a context manager it is undone at the end, unless it was there before."""

    model: nn.Module
    adapter: ModelAdapter
    layers: int
    owned: bool

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.owned:
            detach(self.model)


def attach(model: nn.Module) -> Attachment:
    """Bind `model` to kvpolicy, so that it works with an :class:`~kvpolicy.EvictionCache`. Idempotent.

    Without such a cache the model behaves as before. Use it as a context manager, or undo it by :func:`detach`.

    Raises:
        UnsupportedModelError: no adapter serves the model, or transformers is too old.
    """
    _check_version()
    adapter = _adapter_for(model)
    modules = adapter.attention_modules(model)
    name = f"{type(model).__name__} (model_type {text_config(model).model_type!r})"
    if reason := adapter.refusal(model):
        raise UnsupportedModelError(f"{name} is not supported: {reason}")
    if [layer_index(module) for module in modules] != list(range(len(modules))) or not modules:
        raise UnsupportedModelError(f"{name} is not supported: not every layer has exactly one self-attention")
    if bound := _bound.get(modules[0]):
        return Attachment(model, bound.adapter, bound.layers, owned=False)
    handles = [
        module.register_forward_pre_hook(partial(_hand_over, index), with_kwargs=True)
        for index, module in enumerate(modules)
    ]
    configs = list({id(module.config): module.config for module in modules}.values())
    for config in configs:
        _wrapped[id(config)] += 1
        config._attn_implementation = interface.register(config._attn_implementation or "eager")
    _bound[modules[0]] = _Bound(adapter, len(modules), handles, configs)
    return Attachment(model, adapter, len(modules), owned=True)


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`: hooks are removed and the attention implementation is what it was. Idempotent."""
    bound = next((_bound.pop(module) for module in list(model.modules()) if module in _bound), None)
    if bound is None:
        return
    for handle in bound.handles:
        handle.remove()
    for config in bound.configs:
        _wrapped[id(config)] -= 1
        if not _wrapped[id(config)]:
            del _wrapped[id(config)]
            config._attn_implementation = config._attn_implementation.removeprefix(interface.PREFIX)


def _adapter_for(model: nn.Module) -> ModelAdapter:
    from kvpolicy.plugins import registry

    config = text_config(model)
    adapters = sorted(registry().adapters.values(), key=lambda adapter: adapter.fallback)
    for adapter in adapters:
        if adapter.accepts(model):
            return adapter
    named = sorted({kind for adapter in adapters for kind in adapter.model_types})
    raise UnsupportedModelError(
        f"{type(model).__name__} (model_type {config.model_type!r}) is not supported: its attention does not go "
        f"through transformers' attention interface. Supported are {', '.join(named)}, and others that do"
    )


def _check_version() -> None:
    installed = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if installed < OLDEST:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} is too old: kvpolicy needs {OLDEST[0]}.{OLDEST[1]} or newer"
        )


def _hand_over(index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook: give the module its layer of our cache, if one is among its arguments."""
    for value in (*kwargs.values(), *args):
        if isinstance(value, EvictionCache):
            kwargs["kvpolicy_pool"] = value.expect(index)
            return args, kwargs
    return None
