"""Scores pooled over neighbouring positions."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


def odd(value: int) -> int:
    """Check the width of a pooling."""
    if value % 2 == 0:
        raise ValueError(f"needs an odd number, so that a token is the middle of its neighbours; not {value}")
    return value


def pooled(scores: Tensor, positions: Tensor, kernel: int, how: Literal["average", "max"]) -> Tensor:
    """`scores` ``[batch, kv_heads, slots]``, of at least zero, pooled in order of `positions`; empty slots come first.

    There are zeros beyond both ends.
    """
    order = positions.argsort(dim=-1, stable=True)
    ordered = scores.gather(-1, order).flatten(0, 1)
    pool = F.avg_pool1d if how == "average" else F.max_pool1d
    found = pool(ordered, kernel, stride=1, padding=kernel // 2).view_as(scores)
    return torch.empty_like(scores).scatter_(-1, order, found)
