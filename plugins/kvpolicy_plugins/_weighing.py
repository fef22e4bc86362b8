"""Scores weighed by what a token has beside them."""

import torch
from torch import Tensor


def weighed(score: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
    """`score` times `weights`, all ``[batch, kv_heads, slots]``; more weight is worth more, whatever the sign.

    A score below zero is divided by the weight, and a weight of nothing counts as next to nothing.
    """
    weights = torch.where(valid, weights, 1.0).clamp(min=torch.finfo(weights.dtype).tiny)
    score = score.to(torch.promote_types(score.dtype, weights.dtype))
    return torch.where(score < 0, score / weights, score * weights)
