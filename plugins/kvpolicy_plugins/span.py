"""Span: the tokens at given positions. A part for compositions."""

from typing import ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Tokens, View, extremes


class Span(EvictionPolicy):
    """Tokens at positions from `start` up to, not including, `stop`; the first of them where not all may stay.

    It wants no others: what it may take beyond them goes to the next part.
    """

    kind: Literal["span"] = "span"
    start: Tokens = 0
    """The first position."""
    stop: Tokens
    """The position after the last."""

    selective: ClassVar[bool] = True

    @model_validator(mode="after")
    def _not_empty(self) -> "Span":
        if self.start >= self.stop:
            raise ValueError(f"stop ({self.stop}) must be above start ({self.start})")
        return self

    def protected(self, view: View) -> None:
        return None

    def priority(self, view: View) -> Tensor:
        inside = (view.positions >= self.start) & (view.positions < self.stop)
        return torch.where(inside, -view.positions, extremes(view.positions.dtype)[0])
