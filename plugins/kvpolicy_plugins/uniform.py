"""Uniform: the same for every layer, and for every head."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from kvpolicy.allocator import HeadAllocator, LayerAllocator
from kvpolicy.policy import View


class Uniform(LayerAllocator, HeadAllocator):
    """The same budget for every layer or head; what a budget does by itself."""

    kind: Literal["uniform"] = "uniform"

    def quotas(self, average: int, layers: Sequence[int], of: int, prompt: int | None) -> list[int]:
        return [average] * len(layers)

    def divide(self, keys: Sequence[Tensor], view: View, budget: Tensor) -> Tensor:
        return budget.expand(-1, view.positions.shape[1], -1)
