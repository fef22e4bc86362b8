"""Pyramid: lower layers keep more than upper ones."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from kvpolicy.allocator import LayerAllocator
from kvpolicy.policy import Tokens


class Pyramid(LayerAllocator):
    """PyramidKV's budgets (Cai et al., 2024, arXiv 2406.02069): from layer to layer they fall by the same step.

    With an average of ``C`` tokens and a window of ``W`` that every layer keeps, the last layer has
    ``(C - W) / beta + W`` and the first as much above the average as the last is below it. No layer gets more than
    the prompt has; the others then get what is over. A prompt shorter than ``2 (C - W)`` leaves all layers equal.

    The official code rounds the step down and so exceeds the total (by 4.6 % at 32 layers, C=128, W=8); here quotas
    are exact and rounded by largest remainder.
    """

    kind: Literal["pyramid"] = "pyramid"
    beta: Annotated[float, Field(ge=1, strict=True)] = 20.0
    """How many times less than the average the last layer keeps; 1 is uniform."""
    window: Tokens = 0
    """Tokens each layer keeps in any case, such as SnapKV's observation window."""

    def quotas(self, average: int, layers: Sequence[int], of: int, prompt: int | None) -> list[Fraction]:
        window = min(self.window, average)
        mean, count = Fraction(average - window), len(layers)
        last = mean / Fraction(str(self.beta))
        if count == 1 or (prompt is not None and prompt < 2 * mean):
            last = mean
        elif prompt is not None:
            last = min(max(last, 2 * mean - (prompt - window)), mean)
        fall = 2 * (mean - last) / max(count - 1, 1)
        return [2 * mean - last - index * fall + window for index in range(count)]
