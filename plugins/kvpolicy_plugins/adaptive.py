"""Adaptive: heads whose attention is spread keep more than heads that look at few tokens."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from kvpolicy.allocator import HeadAllocator, largest_remainder_rows
from kvpolicy.budget import ratio
from kvpolicy.policy import View
from kvpolicy.select import counted


class Adaptive(HeadAllocator):
    """Ada-KV (Feng et al., NeurIPS 2025, arXiv 2407.11550): the best tokens of all heads together, counted by head.

    Scores must be comparable across heads: probabilities are, norms are not. A part `alpha` of the budget is divided
    equally all the same. The official code rounds parts down and loses slots; here totals are exact.
    """

    kind: Literal["adaptive"] = "adaptive"
    alpha: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.2
    """The part that is divided equally; 1 is uniform."""

    def divide(self, keys: Sequence[Tensor], view: View, budget: Tensor) -> Tensor:
        counts = counted(keys, view.valid, view.positions, view.positions.shape[1] * budget[:, 0])
        over, under = ratio(self.alpha)
        return largest_remainder_rows((under - over) * counts + over * budget[:, 0], under).unsqueeze(-1)
