"""Votes of the last queries of a prompt or chunk, and a running sum of the same length while decoding."""

import torch
from torch import Tensor

from kvpolicy.policy import View


def voted(votes: Tensor, rows: Tensor, view: View, window: int) -> Tensor:
    """`votes` after the last `rows` of a call, ``[batch, kv_heads, rows, slots]``. Rows of padding are zero."""
    if view.decoding:
        row = rows[:, :, -1]
        return torch.where(row.sum(-1, keepdim=True) > 0, votes * (1 - 1 / window) + row, votes)
    total = rows.sum(-2)
    return torch.where(total.sum(-1, keepdim=True) > 0, total, votes)
