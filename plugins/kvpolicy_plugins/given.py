"""Given: weights that say which layers keep more."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from kvpolicy.allocator import LayerAllocator
from kvpolicy.ranges import LayerRange, layers_in

Weight = Annotated[float, Field(gt=0, strict=True)]


class Given(LayerAllocator):
    """Layers keep tokens in proportion to the weights given; layers that no range names have weight 1.

    ``weights: {":50%": 2}`` gives the lower half twice as much as the upper. The average stays the budget. Where
    ranges overlap, the first counts.
    """

    kind: Literal["given"] = "given"
    weights: Annotated[dict[LayerRange, Weight], Field(min_length=1)]
    """Weights by range of layers."""

    def quotas(self, average: int, layers: Sequence[int], of: int, prompt: int | None) -> list[Fraction]:
        weights = [Fraction(1)] * of
        for text, weight in reversed(self.weights.items()):
            for layer in layers_in(text, of):
                weights[layer] = Fraction(str(weight))
        own = [weights[layer] for layer in layers]
        return [average * len(layers) * weight / sum(own) for weight in own]
