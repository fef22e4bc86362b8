"""Keys and values as numbers to compute with."""

import torch
from torch import Tensor
from torch.nn import functional as F


def wide(vectors: Tensor) -> Tensor:
    """`vectors` in float32 at least."""
    return vectors.float() if vectors.dtype.itemsize < 4 else vectors


def unit(vectors: Tensor, held: Tensor) -> Tensor:
    """`vectors` ``[batch, kv_heads, slots, dim]`` of length one; zero where no token is `held`."""
    return torch.where(held.unsqueeze(-1), F.normalize(wide(vectors), dim=-1), 0.0)
