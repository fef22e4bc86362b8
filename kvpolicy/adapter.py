"""The contract between a model family and the framework; binding and unbinding a model.

Attaching registers an attention function and puts a forward pre-hook on each attention module. The hook hands
the module its layer of the :class:`~kvpolicy.EvictionCache` by keyword; no forward is replaced and nothing
global is patched. A cache that is not ours goes the way it went before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, ClassVar
from weakref import WeakSet, ref

import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvpolicy.attention import interface
from kvpolicy.cache import EvictionCache
from kvpolicy.errors import ConfigError, NotAttachedError, UnsupportedModelError
from kvpolicy.rotation import Rotation, rotation_of
from kvpolicy.source import handed, turned

OLDEST = (5, 17)
POSITIONS = ("original", "rolled")


class ModelAdapter:
    """Binds the attention of a family of models. Subclass, and offer an instance by ``kvpolicy_adapters``."""

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
    keywords: ClassVar[frozenset[str]] = frozenset(
        {"attention_mask", "scaling", "dropout", "sliding_window", "softcap", "s_aux", "position_ids"}
    )
    """What attention modules may pass to the attention function; anything else would go unheeded."""

    def accepts(self, model: nn.Module) -> bool:
        """Whether this adapter is meant for `model`. Named adapters are asked before general ones."""
        return getattr(text_config(model), "model_type", None) in self.model_types

    def attention_modules(self, model: nn.Module) -> list[nn.Module]:
        """The self-attention modules in the order of their layers."""
        found = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
        indexed = [(index, module) for module in found if (index := layer_index(module)) is not None]
        return [module for _, module in sorted(indexed, key=lambda pair: pair[0])]

    def refusal(self, model: nn.Module) -> str | None:
        """Why `model` cannot be served although it is of this family, or ``None``."""
        config, modules = text_config(model), self.attention_modules(model)
        if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - self.layer_types):
            return f"it has {', '.join(unknown)} layers"
        if [layer_index(module) for module in modules] != list(range(len(modules))) or not modules:
            return "not every layer has exactly one self-attention"
        if getattr(config, "num_kv_shared_layers", None):
            return "some of its layers share the keys and values of others"
        return next((reason for module in modules if (reason := self._module_refusal(module, config))), None)

    def _module_refusal(self, module: nn.Module, config: Any) -> str | None:
        kind, hands = type(module).__name__, handed(type(module).forward)
        if not hands.as_cached:
            return f"the source of {kind} does not show that it attends to the keys and values it caches"
        if not hands.mask_as_given:
            return f"{kind} makes a mask of its own"
        if unknown := sorted(hands.keywords - self.keywords):
            return f"{kind} passes {', '.join(unknown)} to attention, which kvpolicy does not honour"
        if not getattr(module, "is_causal", True):
            return f"{kind} is not causal"
        masked, passed = masked_window(module, config), passed_window(module)
        if masked == UNKNOWN or passed not in (UNKNOWN, masked):
            return f"{kind} does not mask by the sliding window of its config"
        return None

    def output_projection(self, module: nn.Module) -> nn.Module:
        """What projects the output of all heads of attention `module`: a linear layer with plain weights.

        Raises:
            UnsupportedModelError: something else comes in between, or the weights are not there as plain numbers.
        """
        kind, name = type(module).__name__, handed(type(module).forward).projected_by
        if name is None:
            raise UnsupportedModelError(f"{kind} changes what attention puts out before it is projected")
        projection = getattr(module, name)
        if type(projection) not in (nn.Linear, Conv1D):
            raise UnsupportedModelError(
                f"{kind}.{name} is a {type(projection).__name__} and no plain linear layer; "
                "merge adapters, and load the model unquantised"
            )
        weight = output_weight(projection)
        if weight.is_meta or not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
            raise UnsupportedModelError(
                f"the weights of {kind}.{name} are not in memory as float32, float16 or bfloat16 "
                f"({weight.device}, {weight.dtype}); load the model whole and unquantised"
            )
        return projection

    def check_positions(self, positions: str) -> None:
        """Raise :class:`ConfigError` unless `positions` is a mode of this family."""
        if positions not in POSITIONS:
            raise ConfigError(f"positions={positions!r} is not one of {', '.join(POSITIONS)}")
        if positions not in self.positions:
            raise ConfigError(f"positions={positions!r} is not available for {self.name} models; use 'original'")

    def rotations(self, model: nn.Module) -> list[Rotation | None]:
        """How each layer rotates its queries and keys; ``None`` for one that rotates nothing.

        Raises:
            UnsupportedModelError: it cannot be told, or not undone.
        """
        config = text_config(model)
        known: dict[Any, Rotation | str] = {}
        found: list[Rotation | None] = []
        for index, module in enumerate(self.attention_modules(model)):
            how = turned(type(module).forward)
            if not how.known:
                raise UnsupportedModelError(
                    f"the source of {type(module).__name__} does not show how it rotates queries and keys"
                )
            if not how.by(module):
                found.append(None)
                continue
            function = getattr(sys.modules[type(module).__module__], how.function or "")
            of = function, (getattr(config, "layer_types", None) or {index: None})[index]
            if of not in known:
                known[of] = rotation_of(model, config, function, index, _head_dim(module, config))
            if isinstance(rotation := known[of], str):
                raise UnsupportedModelError(rotation)
            found.append(rotation)
        return found


def _head_dim(module: nn.Module, config: Any) -> int:
    given = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


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


UNKNOWN = -1
"""A sliding window that cannot be told; ``None`` is no window."""


def masked_window(module: nn.Module, config: Any) -> int | None:
    """The sliding window of the mask that the model makes for the layer of `module`."""
    types = getattr(config, "layer_types", None)
    sliding = types[layer_index(module) or 0] == "sliding_attention" if types else True
    window: int | None = getattr(config, "sliding_window", None) if sliding else None
    file = sys.modules[type(module).__module__]
    makers = ("create_sliding_window_causal_mask", "create_masks_for_generate")
    return window if window is None or any(hasattr(file, maker) for maker in makers) else UNKNOWN


def passed_window(module: nn.Module) -> int | None:
    """The sliding window `module` passes to the attention function; unknown where it passes none."""
    if "sliding_window" not in handed(type(module).forward).keywords:
        return UNKNOWN
    if not getattr(module, "is_sliding", True):
        return None
    window: int | None = getattr(module, "sliding_window", getattr(_config(module), "sliding_window", None))
    return window


# An attribute of each attention module while its hook is there; a copy of the model has it too.
_HANDLE = "kvpolicy_handle"
_attached: WeakSet[nn.Module] = WeakSet()  # attention modules; models may share a config


@dataclass(frozen=True)
class Attachment:
    """A model bound to kvpolicy. As a context manager it is undone at the end, unless it was there before."""

    model: nn.Module
    adapter: ModelAdapter
    configs: list[Any]
    """The config of each layer's attention module."""
    owned: bool

    @property
    def layers(self) -> int:
        """How many layers of attention the model has."""
        return len(self.configs)

    def output(self, layer: int) -> Callable[[], Tensor]:
        """What gives the weights of a layer's output projection, without holding the model.

        Raises:
            UnsupportedModelError: there are none to give.
        """
        module = self.adapter.attention_modules(self.model)[layer]
        return partial(_output_of, ref(self.adapter.output_projection(module)))

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.owned:
            detach(self.model)


def output_weight(projection: Any) -> Tensor:
    """The weights of a linear layer, ``[hidden, query_heads * value_dim]``."""
    weight: Tensor = projection.weight.detach()
    return weight.T if isinstance(projection, Conv1D) else weight


def _output_of(projection: ref[nn.Module]) -> Tensor:
    if (there := projection()) is None:
        raise NotAttachedError("the output projection of the model was exchanged: make a new EvictionCache for it")
    return output_weight(there)


def attach(model: nn.Module) -> Attachment:
    """Bind `model` to kvpolicy, so that it works with an :class:`~kvpolicy.EvictionCache`. Idempotent.

    Without such a cache the model behaves as before. A context manager; or undo it by :func:`detach`.

    Raises:
        UnsupportedModelError: no adapter serves the model, or transformers is too old.
    """
    _check_version()
    if reason := _whole_model_refusal(model):
        raise UnsupportedModelError(f"{_named(model)} is not supported: {reason}")
    adapter = _adapter_for(model)
    if reason := adapter.refusal(model):
        raise UnsupportedModelError(f"{_named(model)} is not supported: {reason}")
    modules = adapter.attention_modules(model)
    owned = not hasattr(modules[0], _HANDLE)
    for index, module in enumerate(modules):
        if owned:
            # Some families only put the window into the mask.
            window = masked_window(module, text_config(model)) if passed_window(module) == UNKNOWN else None
            hook = partial(_hand_over, index, {} if window is None else {"sliding_window": window})
            setattr(module, _HANDLE, module.register_forward_pre_hook(hook, with_kwargs=True))
        _attached.add(module)
        config = _config(module)
        config._attn_implementation = interface.register(config._attn_implementation or "eager")
    return Attachment(model, adapter, [_config(module) for module in modules], owned)


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`: hooks are removed and the attention implementation is what it was. Idempotent."""
    modules = [module for module in model.modules() if hasattr(module, _HANDLE)]
    for module in modules:
        getattr(module, _HANDLE).remove()
        delattr(module, _HANDLE)
        _attached.discard(module)
    for config in map(_config, modules):
        if not any(_config(other) is config for other in _attached):
            config._attn_implementation = config._attn_implementation.removeprefix(interface.PREFIX)


def _named(model: nn.Module) -> str:
    return f"{type(model).__name__} (model_type {_config(model).model_type!r})"


def _whole_model_refusal(model: nn.Module) -> str | None:
    """What rules `model` out whatever its attention is like."""
    config = text_config(model)
    if getattr(_config(model), "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if config is not _config(model):
        named = ((name, getattr(module, "config", None)) for name, module in model.named_modules())
        inner = next((f", model.{name}" for name, its in named if name and its is config), "")
        return f"it is a multimodal model; give kvpolicy its language model{inner}"
    causal = getattr(config, "is_causal", True)
    if not causal or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "its attention is not causal"
    return None


def _adapter_for(model: nn.Module) -> ModelAdapter:
    from kvpolicy.plugins import registry

    adapters = sorted(registry().adapters.values(), key=lambda adapter: adapter.fallback)
    for adapter in adapters:
        if adapter.accepts(model):
            return adapter
    named = sorted({kind for adapter in adapters for kind in adapter.model_types})
    raise UnsupportedModelError(
        f"{_named(model)} is not supported: it has no attention that goes through transformers' attention "
        f"interface. Supported are {', '.join(named)}, and others that do"
    )


def _check_version() -> None:
    version, oldest = transformers.__version__, ".".join(map(str, OLDEST))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise UnsupportedModelError(f"transformers {version} is too old; kvpolicy needs {oldest} or newer")


def _config(module: nn.Module) -> Any:
    return module.config


def _hand_over(
    index: int, more: dict[str, Any], module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook: give the module its layer of our cache, if one is among its arguments."""
    for value in (*kwargs.values(), *args):
        if isinstance(value, EvictionCache):
            implementation = _config(module)._attn_implementation
            if not implementation.startswith(interface.PREFIX):
                raise NotAttachedError(
                    f"the attention implementation was set to {implementation!r} after attaching; "
                    "call kvpolicy.attach(model) again"
                )
            pool = value.expect(index, _config(module), kwargs.get("position_embeddings"))
            return args, {**kwargs, **more, "kvpolicy_pool": pool}
    return None
