"""What the last queries gave to each slot, kept in as many columns: query number `n` writes column ``n % window``."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.policy import View


def written(ring: Tensor, rows: Tensor, probs: Tensor, view: View) -> Tensor:
    """`ring` ``[batch, kv_heads, slots, window]`` after the last `rows` of a call, ``[..., rows, slots]``.

    `probs` are their probabilities, of which those of padding are zero; it is not written.
    """
    window = ring.shape[-1]
    real = probs.sum(-1) > 0
    since = real.flip(-1).cumsum(-1).flip(-1)
    column = torch.where(real & (since <= window), (view.seen - since) % window, window)
    index = column.unsqueeze(-2).expand(*ring.shape[:-1], -1)
    return F.pad(ring, (0, 1)).scatter(-1, index, rows.transpose(-1, -2))[..., :-1]


def queries(view: View, window: int) -> Tensor:
    """The query that wrote each column last, ``[batch, 1, 1, window]``; negative where none did."""
    columns = torch.arange(window, dtype=torch.int32, device=view.positions.device)
    last = view.seen.unsqueeze(-1) - 1
    return last - (last - columns) % window
