"""Attention over slots that also hands out statistics, without ever building the S x S matrix.

Queries are taken in blocks whose probabilities fit a processor cache; each block gives its part of the output
and of the statistics, and is gone. A decode step is a block of one row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.attention.rows import AttentionRows
from kvpolicy.policy import Need

if TYPE_CHECKING:
    from kvpolicy.pool import SlotPool

_CPU_BLOCK_BYTES = 1 << 22  # smaller blocks spend more on calls, larger ones leave the processor's caches
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
    queries: bool = False
    """Query vectors and nothing else: they are shown all at once, and no row has to be computed."""

    @classmethod
    def of(cls, needs: Iterable[Need]) -> Wants:
        needs = set(needs) - {Need.ROTATION, Need.OUTPUT}
        if needs == {Need.QUERIES}:
            return cls(queries=True)
        rows = needs - {Need.ATTENTION_SUM}
        return cls(
            total=Need.ATTENTION_SUM in needs,
            blocks=any(need.rows is None for need in rows),
            window=max((need.rows or 0 for need in rows), default=0),
        )

    def __or__(self, other: Wants) -> Wants:
        """What both want."""
        queries = self.queries or other.queries
        alone = queries and self.nothing and other.nothing
        return Wants(
            total=self.total or other.total,
            blocks=self.blocks or other.blocks or (queries and not alone),
            window=max(self.window, other.window),
            queries=alone,
        )

    @property
    def nothing(self) -> bool:
        """Whether no statistic of rows is asked for."""
        return not (self.total or self.blocks or self.window)


class Part(NamedTuple):
    """A part of a layer: some rows, some heads, the first slots."""

    batch: slice
    heads: slice
    slots: slice

    def of(self, state: Tensor) -> Tensor:
        return state[self.batch, self.heads, self.slots]


def attend(pool: SlotPool, query: Tensor, scoring: Scoring) -> Tensor:
    """Attention of the call's queries over the pool; the policy observes what it needs on the way.

    `query` is ``[batch, query_heads, rows, head_dim]``, the result ``[batch, query_heads, rows, value_dim]``.
    """
    heads, rows = pool.active_positions.shape[1], query.shape[2]
    grouped = pool.turned(query.unflatten(1, (heads, -1)))
    if rows == 1:
        return _step(pool, grouped, scoring).flatten(1, 2)
    if pool.is_causal and scoring.plain and not (pool.wants.total or pool.wants.blocks):
        # At most the final rows are asked for: the fused kernel gives the output.
        output = F.scaled_dot_product_attention(
            grouped.flatten(1, 2),
            pool.attended_keys,
            pool.active_values,
            is_causal=True,
            scale=scoring.scaling,
            enable_gqa=query.shape[1] != heads,
        )
        if pool.wants.window:
            _walk(pool, grouped, scoring, max(0, rows - pool.wants.window))
        else:
            _show(pool, grouped, scoring)
        return output
    output = query.new_empty((*grouped.shape[:-1], pool.active_values.shape[-1]))
    _walk(pool, grouped, scoring, 0, output)
    return output.flatten(1, 2)


def _show(pool: SlotPool, query: Tensor, scoring: Scoring) -> None:
    """Let the policy observe where no rows are computed: the queries, if it wants them."""
    if not pool.wants.queries:
        pool.observe(None)
        return
    rows = AttentionRows(pool.query_positions, queries=query, unrotated=pool.unrotated(), scaling=scoring.scaling)
    pool.observe(rows)


def _step(pool: SlotPool, query: Tensor, scoring: Scoring) -> Tensor:
    """One row, all of it at once. `query` is ``[batch, kv_heads, group, 1, head_dim]``."""
    if (slots := pool.selected(query.squeeze(3))) is not None:
        return _step_over(pool, query, scoring, slots)
    logits = _logits(pool.dot(query * scoring.scaling), scoring)
    hidden = None
    if pool.holes or scoring.window is not None:
        hidden = _hidden(pool.active_positions, pool.query_positions, scoring.window)
        logits.masked_fill_(hidden, _least(logits))
    probs = _softmax(logits, scoring.sinks)
    if pool.wants.nothing:
        _show(pool, query, scoring)
    else:
        positions = pool.query_positions if pool.wants.blocks or pool.padded else None
        seen = probs * (positions >= 0).unsqueeze(2) if pool.padded and positions is not None else probs
        visible = _visible(hidden, positions, pool.used) if pool.wants.blocks and positions is not None else None
        rows = AttentionRows(
            positions,
            probs=seen,
            logits=logits,
            queries=query,
            unrotated=pool.unrotated(),
            scaling=scoring.scaling,
            visible=visible,
        )
        pool.observe(rows)
    return pool.mix(probs)


def _step_over(pool: SlotPool, query: Tensor, scoring: Scoring, slots: Tensor) -> Tensor:
    """One row that sees some `slots` ``[batch, kv_heads, choices, n]``: one choice for a query group, or one a head."""
    keys, values, held = pool.taken(slots)
    alike = query.flatten(1, 2).unflatten(1, (keys.shape[1], -1))  # query heads of the same choice
    logits = _logits(dot(alike * scoring.scaling, keys), scoring)
    hidden = _hidden(held, pool.query_positions, scoring.window)
    logits.masked_fill_(hidden, _least(logits))
    probs = _softmax(logits, scoring.sinks)
    if pool.wants.nothing:
        _show(pool, query, scoring)
    else:
        pool.observe(_spread(pool, query, scoring, slots, probs, logits, hidden))
    return mix(probs, values).view(*query.shape[:-1], -1)


def _spread(
    pool: SlotPool, query: Tensor, scoring: Scoring, slots: Tensor, probs: Tensor, logits: Tensor, hidden: Tensor
) -> AttentionRows:
    """The statistics of a row that sees some slots, as of all: what it does not see has no probability."""
    shape = (*query.shape[:3], slots.shape[-1])
    where = torch.where(slots < 0, pool.used, slots).expand(shape)  # nobody's slot comes after the last

    def over_all(state: Tensor, fill: float) -> Tensor:
        whole = state.new_full((*shape[:3], pool.used + 1), fill)
        return whole.scatter_(-1, where, state.reshape(shape))[..., None, :-1]

    seen = over_all(probs, 0.0) * (pool.query_positions >= 0).unsqueeze(2)
    counts = (~hidden).sum(-1).view(*slots.shape[:3], 1).amax(2, keepdim=True)[..., 0, :, None]
    return AttentionRows(
        pool.query_positions,
        probs=seen,
        logits=over_all(logits, _least(logits)),
        queries=query,
        unrotated=pool.unrotated(),
        scaling=scoring.scaling,
        visible=counts.clamp(min=1),
    )


def _walk(pool: SlotPool, query: Tensor, scoring: Scoring, first: int, output: Tensor | None = None) -> None:
    """Go through the rows from `first` on in blocks, filling `output` and letting the policy observe.

    `query` is ``[batch, kv_heads, group, rows, head_dim]``.
    """
    wants, rows = pool.wants, query.shape[3]
    before = pool.used - rows  # slots that were there before this call; the new tokens follow in order
    positions = pool.query_positions
    bounds, slices = _plan(query, pool.used, first, wants.window)
    held = pool.attended_keys, pool.active_values, pool.active_positions
    for batch, heads in slices:
        part = (batch, heads)
        keys, values, slots = (state[part] for state in held)
        sinks = None if scoring.sinks is None else scoring.sinks.unflatten(0, (-1, query.shape[2]))[heads].flatten()
        total = keys.new_zeros(keys.shape[:3], dtype=pool.score_dtype) if wants.total and not wants.blocks else None
        for start, stop in bounds:
            seen = slice(before + stop)  # what comes later need not be looked at
            block, queries = query[batch, heads, :, start:stop], positions[batch, :, start:stop]
            logits = _logits(dot(block * scoring.scaling, keys[:, :, seen]), scoring)
            if pool.is_causal and scoring.window is None:
                hidden = None
                logits[..., start:].masked_fill_(_later(stop - start, logits.device), _least(logits))
            else:
                hidden = _hidden(slots[:, :, seen], queries, scoring.window, causal=True)
                logits.masked_fill_(hidden, _least(logits))
            probs = _softmax(logits, sinks)
            if output is not None:
                output[batch, heads, :, start:stop] = mix(probs, values[:, :, seen])
            if pool.padded:
                probs = probs * (queries >= 0).unsqueeze(2)
            if total is not None:
                total[:, :, seen] += probs.sum((2, 3)) / probs.shape[2]
            if wants.nothing:
                continue
            if wants.blocks or stop == rows:
                statistics = AttentionRows(
                    queries,
                    probs=probs,
                    logits=logits,
                    queries=block,
                    unrotated=pool.unrotated(batch, heads, slice(start, stop)),
                    scaling=scoring.scaling,
                    visible=_visible(hidden, queries) if wants.blocks else None,
                    total=total,
                    final=stop == rows,
                )
                pool.observe(statistics, Part(batch, heads, seen))
    if wants.nothing:
        _show(pool, query, scoring)


def _plan(
    query: Tensor, slots: int, first: int, window: int
) -> tuple[list[tuple[int, int]], list[tuple[slice, slice]]]:
    """Bounds of the blocks of rows, and slices of batch and heads: blocks near the size fastest on the device."""
    batch, heads, group, rows, _ = query.shape
    room = (_CPU_BLOCK_BYTES if query.device.type == "cpu" else _GPU_BLOCK_BYTES) // (4 * group * slots)
    last = max(first, rows - window) if window else rows
    step = max(room, 16)
    bounds = [(start, min(start + step, last)) for start in range(first, last, step)]
    if last < rows:
        bounds.append((last, rows))
    heads_at_once = min(max(room // rows, 1), heads)
    rows_at_once = min(max(room // (rows * heads), 1), batch)
    return bounds, [
        (slice(row, row + rows_at_once), slice(head, head + heads_at_once))
        for row in range(0, batch, rows_at_once)
        for head in range(0, heads, heads_at_once)
    ]


def dot(query: Tensor, keys: Tensor) -> Tensor:
    """Products ``[batch, kv_heads, group, rows, slots]`` of queries and keys.

    Queries are ``[batch, kv_heads, group, rows, head_dim]``, keys ``[batch, kv_heads, slots, head_dim]``.
    """
    return torch.matmul(query.flatten(2, 3), keys.transpose(-1, -2)).unflatten(2, query.shape[2:4])


def mix(probs: Tensor, values: Tensor) -> Tensor:
    """The mean of `values` by `probs` ``[batch, kv_heads, group, rows, slots]``: ``[..., rows, value_dim]``."""
    return torch.matmul(probs.to(values.dtype).flatten(2, 3), values).unflatten(2, probs.shape[2:4])


def _logits(product: Tensor, scoring: Scoring) -> Tensor:
    """Logits in float32 at least, from products of scaled queries and keys."""
    logits = product.float() if product.dtype.itemsize < 4 else product
    if scoring.softcap is not None:
        logits = torch.tanh(logits / scoring.softcap) * scoring.softcap
    return logits


def _hidden(slots: Tensor, queries: Tensor, window: int | None, causal: bool = False) -> Tensor:
    """Slots that each query must not see, ``[batch, kv_heads, 1, rows, slots]``: empty, later or too far back."""
    slots, queries = slots[:, :, None, None], queries.unsqueeze(2)
    hidden = slots < 0
    if causal:
        hidden = hidden | (slots > queries)
    if window is not None:
        hidden = hidden | (slots <= queries - window)
    return hidden


def _later(rows: int, device: torch.device) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool, device=device).triu_(1)


def _least(logits: Tensor) -> float:
    # Finite, so that a query that sees nothing (padding) stays finite as well.
    return torch.finfo(logits.dtype).min


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.to(logits.dtype).view(1, *logits.shape[1:3], 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


def _visible(hidden: Tensor | None, queries: Tensor, slots: int | None = None) -> Tensor:
    """How many slots each query sees, ``[batch, 1 or kv_heads, rows, 1]``."""
    if hidden is not None:
        return (~hidden).sum(-1, keepdim=True)[:, :, 0].clamp(min=1)
    return queries + 1 if slots is None else torch.full_like(queries, slots)
