"""The one place that decides who stays: valid slots before empty ones, then by the policy's ranking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, View, extremes


def lowest(policy: EvictionPolicy, view: View) -> Tensor:
    """The slot to give up, ``[batch, kv_heads, 1]``: an empty one where there is room, else the victim.

    Fixed shapes and no synchronisation: this runs in every decode step.
    """
    first, *rest = policy.ranking(view)
    low, high = extremes(first.dtype)
    ages = view.positions
    if view.holes:
        empty = view.positions < 0
        room: Tensor = empty
        if isinstance(view.budget, Tensor) or ages.shape[-1] > view.budget + 1:
            # There are more slots than a row may use: a full one gives up a token and keeps its empty slots.
            full = (~empty).sum(-1, keepdim=True) > view.budget
            first, room = first.masked_fill(empty & full, high), empty & ~full
        first = first.masked_fill(room, low)
        rest = [key.masked_fill(room, extremes(key.dtype)[0]) for key in rest]
        ages = ages.masked_fill(room, torch.iinfo(ages.dtype).max)
    tied = first == first.amin(-1, keepdim=True)
    for key in rest:
        key = key.masked_fill(~tied, extremes(key.dtype)[1])
        tied = tied & (key == key.amin(-1, keepdim=True))
    return torch.where(tied, ages, -2).argmax(-1, keepdim=True)


def survivors(ranking: Sequence[Tensor], view: View, count: int) -> tuple[Tensor, Tensor]:
    """The `count` slots to keep in order of position, and their positions: both ``[batch, kv_heads, count]``.

    Where a head has fewer tokens, or a smaller budget, the rest of its slots come last with position -1.
    """
    order = best_first(ranking, view.positions >= 0, view.positions)[..., :count]
    positions = view.positions.gather(-1, order)
    if isinstance(view.budget, Tensor):
        positions = positions.masked_fill(torch.arange(count, device=order.device) >= view.budget, -1)
    by_age = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions).argsort(dim=-1, stable=True)
    return order.gather(-1, by_age), positions.gather(-1, by_age)


def top(ranking: Sequence[Tensor], among: Tensor, positions: Tensor, count: Any) -> Tensor:
    """Mask of the `count` best slots of `among`; all of them where there are not so many.

    `count` is an ``int``, or a tensor that broadcasts to ``[batch, kv_heads, 1]``.
    """
    return among & ~others(ranking, among, positions, count)


def others(ranking: Sequence[Tensor], among: Tensor, positions: Tensor, count: Any) -> Tensor:
    """Mask of the slots of `among` that are not among the `count` best."""
    if isinstance(count, int):
        if count >= positions.shape[-1]:
            return torch.zeros_like(among)
        if count <= 0:
            return among
        if (packed := _packed(ranking, among, positions)) is not None:
            return among.scatter(-1, packed.topk(count, dim=-1, sorted=False).indices, False)
    order = best_first(ranking, among, positions)
    left = torch.arange(positions.shape[-1], device=positions.device) >= count
    return torch.zeros_like(among).scatter_(-1, order, left.expand(order.shape)) & among


def counted(ranking: Sequence[Tensor], among: Tensor, positions: Tensor, total: Tensor) -> Tensor:
    """How many of the `total` ``[batch, 1]`` best slots of all heads together are in each head, ``[batch, heads]``.

    The best slot of each head comes first, so that none is left with nothing.
    """
    batch, heads, slots = positions.shape
    certain = torch.zeros_like(among).scatter_(-1, best_first(ranking, among, positions)[..., :1], True)
    together = [key.reshape(batch, 1, -1) for key in (certain.char(), *ranking)]
    order = best_first(together, among.reshape(batch, 1, -1), positions.reshape(batch, 1, -1))
    head = order[:, 0] // slots  # [batch, heads * slots], the best first
    chosen = torch.arange(heads * slots, device=head.device) < total
    return torch.zeros_like(head[:, :heads]).scatter_add_(1, head, chosen.long())


def best_first(ranking: Sequence[Tensor], among: Tensor, positions: Tensor) -> Tensor:
    """Slots in the order of `ranking`, the best of `among` first, ``[batch, kv_heads, slots]``."""
    if (packed := _packed(ranking, among, positions)) is not None:
        return packed.argsort(dim=-1, descending=True)
    order = positions.argsort(dim=-1, stable=True)
    for key in (*reversed(ranking), among):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    return order


def _packed(ranking: Sequence[Tensor], among: Tensor, positions: Tensor) -> Tensor | None:
    """One whole number a slot that compares as (in `among`, ranking, lower position), where 64 bits suffice."""
    if len(ranking) > 1:
        return None
    key = ranking[0]
    if key.dtype.is_floating_point and key.dtype.itemsize <= 4:
        bits = (key.float() + 0.0).view(torch.int32)  # adding 0.0 makes -0.0 equal to 0.0
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats compare as these whole numbers do
    elif key.dtype.itemsize > 4 or key.dtype.is_floating_point:
        return None
    packed = (key.long() << 32).sub_(positions)
    return torch.where(among, packed, torch.iinfo(torch.int64).min)


def raised(ranking: Sequence[Tensor], slots: Tensor) -> tuple[Tensor, ...]:
    """The same ranking with `slots` above all others."""
    first, *rest = ranking
    return torch.where(slots, extremes(first.dtype)[1], first), *rest
