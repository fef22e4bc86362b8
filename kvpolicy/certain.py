"""Which tokens stay whatever attention finds, by a policy of one idea: what it protects, or all if position decides."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, View
from kvpolicy.select import top


def certain(policy: EvictionPolicy, view: View) -> Tensor:
    """Slots of `view` that stay when a prompt is cut to ``view.budget``, ``[batch, kv_heads, slots]``."""
    if _goes_by_position(policy, view):
        return top(policy.ranking(view), view.eligible, view.positions, view.budget)
    protected = policy.protected(view)
    if protected is None:
        return torch.zeros_like(view.valid)
    found = protected & view.eligible
    return found & (found.sum(-1, keepdim=True) <= view.budget)  # what parts of a blend protect may be too much


def _goes_by_position(policy: EvictionPolicy, view: View) -> bool:
    """Whether nothing but positions decides."""
    return not (policy.needs or policy.slot_fields() or policy.head_fields() or _reads_keys(policy, view))


def _reads_keys(policy: EvictionPolicy, view: View) -> bool:
    read = False

    def keys() -> Tensor:
        nonlocal read
        read = True
        return torch.zeros((*view.positions.shape, 1))

    policy.ranking(View({}, view.positions, view.seen, view.budget, keys, keys, view.layer, prefix=view.prefix))
    return read
