"""The debugging attention: the full cache, with evicted tokens masked, and every probability written down.

Nothing of kvpolicy's storage or attention takes part. The model runs with transformers' own growing cache and an
attention function that shows each KV head the tokens it is told to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from kvpolicy.testing.case import Held
from kvpolicy.testing.models import feed

NAME = "kvpolicy_testing"


class Rows(NamedTuple):
    """What one call's queries gave to which keys, in one layer."""

    probs: Tensor
    """``[batch, kv_heads, queries, columns]``, averaged over the query group."""
    allowed: Tensor
    """Which columns each query saw, of the same shape."""


class Masked:
    """A model over the full cache, told before each call what each head still holds."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.rows: dict[int, Rows] = {}
        """Of the last call, by layer."""
        self.positions = torch.empty(0, 0, dtype=torch.long)
        """Of every column so far, ``[batch, columns]``; -1 is padding."""
        self._held: list[Held] = []

    def call(self, tokens: Tensor, mask: Tensor | None, held: list[Held]) -> Tensor:
        """Logits of the next `tokens`, where each head sees of the earlier ones only those `held`."""
        columns = self.cache.get_seq_length() + tokens.shape[1]
        real = torch.ones(tokens.shape[0], columns, dtype=torch.bool) if mask is None else mask.bool()
        self.positions = (real.cumsum(-1) - 1).masked_fill(~real, -1)
        self._held = held
        config = self.model.config
        before, config._attn_implementation = config._attn_implementation, NAME
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, lambda **kwargs: None)
        try:
            with torch.no_grad():
                return feed(self.model, self.cache, tokens, mask)
        finally:
            config._attn_implementation = before

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        group = query.shape[1] // key.shape[1]
        allowed = self._allowed(module.layer_idx, key.shape[1], query.shape[2], key.shape[2])
        logits = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * scaling
        hidden = ~allowed.repeat_interleave(group, 1)
        probs = logits.masked_fill(hidden, torch.finfo(logits.dtype).min).softmax(-1)
        output = (probs @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous()
        self.rows[module.layer_idx] = Rows(probs.unflatten(1, (-1, group)).mean(2), allowed)
        return output, probs

    def _allowed(self, layer: int, heads: int, queries: int, columns: int) -> Tensor:
        """Real tokens that are held or new, and not later than the query."""
        before = columns - queries
        kept = torch.zeros(self.positions.shape[0], heads, columns, dtype=torch.bool)
        kept[..., before:] = True
        for row, by_head in enumerate(self._held[layer] if self._held else []):
            for head, positions in enumerate(by_head):
                kept[row, head] |= torch.isin(self.positions[row], torch.tensor(positions))
        causal = torch.ones(queries, columns, dtype=torch.bool).tril(before)
        return (kept & (self.positions >= 0)[:, None])[:, :, None] & causal
