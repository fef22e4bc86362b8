"""Attention over slots that also hands out statistics, without ever building the S x S matrix.

Queries are taken in blocks whose probabilities fit a processor cache; each block gives its part of the output
and of the statistics, and is gone. A decode step is a block of one row.
"""

from __future__ import annotations

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.attention.rows import AttentionRows
from kvpolicy.policy import Need

if TYPE_CHECKING:
    from kvpolicy.cache import SlotPool

_CPU_BLOCK_BYTES = 1 << 20  # about one core's cache
_GPU_BLOCK_BYTES = 1 << 26


@dataclass(frozen=True)
class Scoring:
    """How a layer turns queries and keys into logits."""

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """A learned logit per query head that takes part in the softmax and has no value, ``[query_heads]``."""
    window: int | None = None
    """Sliding window: a query sees keys less than this far back, by logical position."""

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None and self.window is None


@dataclass(frozen=True)
class Wants:
    """What the needs of a policy ask of attention, taken together."""

    total: bool = False
    """Column sums over all rows."""
    blocks: bool = False
    """Every row: the policy observes each block."""
    window: int = 0
    """At least this many last rows in the final block."""

    @classmethod
    def of(cls, needs: Iterable[Need]) -> Wants:
        needs = set(needs)
        rows = needs - {Need.ATTENTION_SUM}
        return cls(
            total=Need.ATTENTION_SUM in needs,
            blocks=any(need.rows is None for need in rows),
            window=max((need.rows or 0 for need in rows), default=0),
        )

    @property
    def nothing(self) -> bool:
        return not (self.total or self.blocks or self.window)


@dataclass(frozen=True)
class Slice:
    """Part of batch and KV heads, and the bounds of its blocks of rows."""

    batch: slice
    heads: slice
    bounds: list[tuple[int, int]]


def attend(pool: SlotPool, query: Tensor, scoring: Scoring) -> Tensor:
    """Attention of the call's queries over the pool; the policy observes what it needs on the way.

    `query` is ``[batch, query_heads, rows, head_dim]``, the result ``[batch, query_heads, rows, value_dim]``.
    """
    keys, values, wants = pool.active_keys, pool.active_values, pool.wants
    rows = query.shape[2]
    if rows > 1 and pool.is_causal and scoring.plain and not (wants.total or wants.blocks):
        # Nothing but the final rows is asked for: the fused kernel gives the output.
        output = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scoring.scaling, enable_gqa=query.shape[1] != keys.shape[1]
        )
        if wants.window:
            _observe(pool, query.unflatten(1, (keys.shape[1], -1)), scoring, first=max(0, rows - wants.window))
        else:
            pool.observe(None)
        return output
    query = query.unflatten(1, (keys.shape[1], -1))
    output = query.new_empty((*query.shape[:-1], values.shape[-1]))
    _observe(pool, query, scoring, output=output)
    return output.flatten(1, 2)


def _observe(pool: SlotPool, query: Tensor, scoring: Scoring, first: int = 0, output: Tensor | None = None) -> None:
    """Walk the rows from `first` on in blocks, filling `output` and letting the policy observe.

    `query` is ``[batch, kv_heads, group, rows, head_dim]``.
    """
    wants, rows = pool.wants, query.shape[3]
    before = pool.used - rows  # slots that were there before this call
    for part in _slices(query, pool.used, first, wants.window):
        keys = pool.active_keys[part.batch, part.heads]
        values = pool.active_values[part.batch, part.heads]
        total = keys.new_zeros(keys.shape[:3], dtype=pool.score_dtype) if wants.total and not wants.blocks else None
        for start, stop in part.bounds:
            # New tokens lie behind the older slots in order, so later ones need not be looked at.
            seen = slice(before + stop) if rows > 1 else slice(pool.used)
            block = query[part.batch, part.heads, :, start:stop]
            queries = pool.query_positions[part.batch, :, start:stop]
            logits = _logits(block, keys[:, :, seen], scoring)
            hidden = _hidden(pool, part, seen, queries, scoring.window)
            if hidden is None:
                logits[..., before + start :].masked_fill_(_later(stop - start, logits.device), _least(logits))
            else:
                logits.masked_fill_(hidden, _least(logits))
            probs = _softmax(logits, scoring.sinks, part.heads)
            if output is not None:
                weights = probs.to(values.dtype).flatten(2, 3)
                output[part.batch, part.heads, :, start:stop] = torch.matmul(weights, values[:, :, seen]).unflatten(
                    2, probs.shape[2:4]
                )
            if pool.padded:
                probs = probs * (queries >= 0).unsqueeze(2)
            if total is not None:
                total[:, :, seen] += probs.sum((2, 3)) / probs.shape[2] if probs.shape[3] > 1 else probs[:, :, :, 0].mean(2)
            if wants.blocks or stop == rows:
                statistics = AttentionRows(
                    queries,
                    probs=probs,
                    logits=logits,
                    queries=block,
                    visible=_visible(hidden, queries, logits) if wants.blocks else None,
                    total=total if total is None else total[:, :, seen],
                    final=stop == rows,
                )
                pool.observe(None if wants.nothing else statistics, part.batch, part.heads, seen)


def _slices(query: Tensor, slots: int, first: int, window: int) -> Iterator[Slice]:
    """Cut the work so that a block's probabilities stay near the size that is fastest on the device."""
    batch, heads, group, rows, _ = query.shape
    if rows == 1:
        yield Slice(slice(batch), slice(heads), [(0, 1)])
        return
    room = (_CPU_BLOCK_BYTES if query.device.type == "cpu" else _GPU_BLOCK_BYTES) // (4 * group * slots)
    step = min(max(room, 16), rows)
    last = max(first, rows - window) if window else rows
    bounds = [(start, min(start + step, last)) for start in range(first, last, step)]
    if last < rows:
        bounds.append((last, rows))
    heads_at_once = min(max(room // rows, 1), heads)
    rows_at_once = min(max(room // (rows * heads), 1), batch)
    for row in range(0, batch, rows_at_once):
        for head in range(0, heads, heads_at_once):
            yield Slice(
                slice(row, min(row + rows_at_once, batch)), slice(head, min(head + heads_at_once, heads)), bounds
            )


def _logits(query: Tensor, keys: Tensor, scoring: Scoring) -> Tensor:
    """Scaled logits in float32 at least, ``[batch, kv_heads, group, rows, slots]``."""
    product = torch.matmul((query * scoring.scaling).flatten(2, 3), keys.transpose(-1, -2))
    logits = product.unflatten(2, query.shape[2:4])
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    if scoring.softcap is not None:
        logits = torch.tanh(logits / scoring.softcap) * scoring.softcap
    return logits


def _hidden(pool: SlotPool, part: Slice, seen: slice, queries: Tensor, window: int | None) -> Tensor | None:
    """Slots that each query must not see, ``[batch, kv_heads, 1, rows, slots]``; ``None``: only its later ones."""
    if pool.is_causal and window is None and queries.shape[2] > 1:
        return None
    slots = pool.active_positions[part.batch, part.heads, None, None, seen]
    hidden = slots < 0
    rows = queries.unsqueeze(2)
    if queries.shape[2] > 1:
        hidden = hidden | (slots > rows)
    if window is not None:
        hidden = hidden | (slots <= rows - window)
    return hidden


def _later(rows: int, device: torch.device) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool, device=device).triu_(1)


def _least(logits: Tensor) -> float:
    # Finite, so that a query that sees nothing (padding) stays finite as well.
    return torch.finfo(logits.dtype).min


def _softmax(logits: Tensor, sinks: Tensor | None, heads: slice) -> Tensor:
    if sinks is None:
        return logits.softmax(-1)
    batch, kv_heads, group, rows, _ = logits.shape
    column = sinks.unflatten(0, (-1, group))[heads].to(logits.dtype)[None, :, :, None, None]
    return torch.cat([logits, column.expand(batch, kv_heads, group, rows, 1)], -1).softmax(-1)[..., :-1]


def _visible(hidden: Tensor | None, queries: Tensor, logits: Tensor) -> Tensor:
    if hidden is None:
        return queries + 1  # nothing but the row's own past, no padding
    return (~hidden).sum(-1, keepdim=True)[:, :, 0].clamp(min=1)
