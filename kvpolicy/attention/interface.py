"""Where transformers meets our attention: the two functions registered with it.

The name under which they are registered carries the implementation the model had before (``kvpolicy|sdpa``), so
that a call without an :class:`~kvpolicy.EvictionCache` goes there unchanged and no state is needed to know it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpolicy.attention.blocks import Scoring
from kvpolicy.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvpolicy.pool import SlotPool

PREFIX = "kvpolicy|"
UNORDERED = -1
"""The offset an :class:`~kvpolicy.EvictionCache` reports for its masks: slots hold tokens in no order, so they
have none. The mask function knows our cache by it, since transformers hands over sizes only."""

_REFUSED = {
    "position_bias": "an additive position bias",
    "head_mask": "a head mask",
    "cu_seq_lens_q": "packed sequences",
    "block_table": "paged storage",
    "block_indices": "a choice of blocks",
    "indices": "a choice of tokens",
}


def register(implementation: str) -> str:
    """Make our attention known as a wrapper of `implementation`; returns the name to put in a config."""
    if implementation.startswith(PREFIX):
        return implementation
    name = PREFIX + implementation
    AttentionInterface.register(name, partial(attention, implementation))
    AttentionMaskInterface.register(name, partial(mask, implementation))
    return name


def attention(
    implementation: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    kvpolicy_pool: SlotPool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention over an :class:`~kvpolicy.EvictionCache`; without one, whatever the model used before."""
    if kvpolicy_pool is None:
        return _previous(implementation, module)(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if module.training:
        raise UnsupportedModelError("EvictionCache is for inference and passes no gradients: call model.eval() first")
    scoring = _scoring(module, query, scaling, kwargs)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedModelError(
            f"EvictionCache takes a 2-D attention mask [batch, tokens], not one of shape {list(attention_mask.shape)}"
        )
    if key.shape != kvpolicy_pool.handed:
        raise UnsupportedModelError(
            f"{type(module).__name__} changes the keys it gets from the cache, so it does not attend to what is kept"
        )
    with torch.no_grad():
        output = kvpolicy_pool.answer(query, attention_mask, scoring)
    return output.transpose(1, 2).contiguous(), None


def _scoring(module: torch.nn.Module, query: Tensor, scaling: float | None, kwargs: dict[str, Any]) -> Scoring:
    for name, meaning in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {meaning} ({name}), which EvictionCache does not honour"
            )
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError(
            "output_attentions=True: the attention matrix is never formed with an EvictionCache"
        )
    return Scoring(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        window=kwargs.get("sliding_window"),
    )


def _previous(implementation: str, module: torch.nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    # Eager attention lives in each model's own file, beside its attention class.
    default = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, default)


def mask(
    implementation: str,
    *,
    q_length: Any,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """For our cache: which of the new tokens are real, ``[batch, tokens]``, or ``None`` where all are."""
    if not (isinstance(kv_offset, int) and kv_offset == UNORDERED):
        return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
            q_length=q_length,
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            **kwargs,
        )
    if not allow_is_causal_skip:  # transformers' own sign that the mask is more than causal and padding
        raise UnsupportedModelError(
            "the model lets some tokens see later ones (image blocks, or a mask function of its own), "
            "which EvictionCache does not honour"
        )
    if attention_mask is None:
        return None
    new = attention_mask[:, -q_length:].bool()
    if q_length > 1 and bool(new.all()):
        return None
    return new
