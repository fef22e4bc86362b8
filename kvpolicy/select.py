"""The one place that decides who stays: valid slots before empty ones, protected first, then by priority."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, View


def lowest(policy: EvictionPolicy, view: View) -> Tensor:
    """The slot to give up, ``[batch, kv_heads, 1]``: an empty one where there is room, else the victim.

    Fixed shapes and no synchronisation: this runs in every decode step.
    """
    first, *rest = _keys(policy, view)
    low, high = _extremes(first.dtype)
    if isinstance(view.budget, Tensor):
        # Rows of different budgets share one pool: a row that is full gives up a token and keeps its empty slots.
        valid = view.valid
        full = valid.sum(-1, keepdim=True) > view.budget
        first = torch.where(valid, first, torch.where(full, high, low).to(first.dtype))
    elif view.holes:
        first = first.masked_fill(view.positions < 0, low)
    tied = first == first.amin(-1, keepdim=True)
    for key in rest:
        key = key.masked_fill(~tied, _extremes(key.dtype)[1])
        tied = tied & (key == key.amin(-1, keepdim=True))
    return torch.where(tied, view.positions, -2).argmax(-1, keepdim=True)


def survivors(policy: EvictionPolicy, view: View, count: int) -> tuple[Tensor, Tensor]:
    """The `count` slots to keep in order of position, and their positions: both ``[batch, kv_heads, count]``.

    Where a head has fewer tokens, or a smaller budget, the rest of its slots come last with position -1.
    """
    first, *rest = _keys(policy, view)
    first = first.masked_fill(view.positions < 0, _extremes(first.dtype)[0])
    order = view.positions.argsort(dim=-1, stable=True)
    for key in reversed([first, *rest]):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    order = order[..., :count]
    positions = view.positions.gather(-1, order)
    if isinstance(view.budget, Tensor):
        positions = positions.masked_fill(torch.arange(count, device=order.device) >= view.budget, -1)
    by_age = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions).argsort(dim=-1, stable=True)
    return order.gather(-1, by_age), positions.gather(-1, by_age)


def _keys(policy: EvictionPolicy, view: View) -> list[Tensor]:
    """Priorities, most significant first, with the protected raised above all."""
    priority = policy.priority(view)
    first, *rest = priority if isinstance(priority, tuple) else (priority,)
    return [first.masked_fill(policy.protected(view), _extremes(first.dtype)[1]), *rest]


def _extremes(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    info = torch.iinfo(dtype)
    return info.min, info.max
