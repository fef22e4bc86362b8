"""Adaptive: heads whose attention is spread keep more than heads that look at few tokens."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvpolicy.allocator import HeadAllocator, largest_remainder_rows
from kvpolicy.budget import ratio
from kvpolicy.policy import View
from kvpolicy.select import best_first


class Adaptive(HeadAllocator):
    """Ada-KV (Feng et al., NeurIPS 2025, arXiv 2407.11550): the best tokens of all heads together, counted by head.

    Scores must be comparable across heads: probabilities are, norms are not. A part `alpha` of the budget is divided
    equally all the same. The official code rounds parts down and loses slots; here totals are exact.
    """

    kind: Literal["adaptive"] = "adaptive"
    alpha: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.2
    """The part that is divided equally; 1 is uniform."""

    def divide(self, keys: Sequence[Tensor], view: View, budget: Tensor) -> Tensor:
        batch, heads, slots = view.positions.shape
        first = best_first(keys, view.valid, view.positions)[..., :1]  # no head is left with nothing
        certain = torch.zeros_like(view.valid).scatter_(-1, first, True)
        together = [key.reshape(batch, 1, -1) for key in (certain.char(), *keys)]
        order = best_first(together, view.valid.reshape(batch, 1, -1), view.positions.reshape(batch, 1, -1))
        head = order[:, 0] // slots  # [batch, heads * slots], the best first
        chosen = torch.arange(heads * slots, device=head.device) < heads * budget[:, 0]
        counts = torch.zeros_like(head[:, :heads]).scatter_add_(1, head, chosen.long())
        over, under = ratio(self.alpha)
        return largest_remainder_rows((under - over) * counts + over * budget[:, 0], under).unsqueeze(-1)
