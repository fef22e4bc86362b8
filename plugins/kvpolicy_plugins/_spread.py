"""Mean and variance of what the queries of a window gave to each token."""

import torch
from torch import Tensor


def mean_and_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Over the real ones of `rows` ``[..., rows, slots]``, both ``[..., slots]``. Rows of padding are zero.

    The variance is the sample's (divided by one less than the rows), and zero of a single row.
    """
    real = rows.sum(-1, keepdim=True) > 0
    count = real.sum(-2).clamp(min=1)
    mean = rows.sum(-2) / count
    squares = torch.where(real, rows - mean.unsqueeze(-2), 0.0).square().sum(-2)
    return mean, squares / (count - 1).clamp(min=1)
