"""Layers: different policies in different layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from kvpolicy.compose._base import Composite
from kvpolicy.policy import EvictionPolicy, Policy, View
from kvpolicy.ranges import LayerRange, layers_in
from kvpolicy.storage import Storage


class Layers(Composite):
    """Some layers have a policy of their own; where ranges overlap, the first counts.

    A layer whose policy evicts nothing (``full``) has no budget, and the others share theirs without it.
    """

    holds_selecting: ClassVar[bool] = True

    kind: Literal["layers"] = "layers"
    at: Annotated[dict[LayerRange, Policy], Field(min_length=1)]
    """Policies by range: ``0-1`` (both included), ``-4:`` (the last four), ``:50%`` (the lower half), ``0,3,5-7``."""
    default: Policy
    """The policy of all other layers."""

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        yield from self.at.items()
        yield "default", self.default

    def with_parts(self, change: Callable[[EvictionPolicy], EvictionPolicy]) -> EvictionPolicy:
        return self.replaced(at={name: change(part) for name, part in self.at.items()}, default=change(self.default))

    @property
    def storage(self) -> Storage | None:
        """That of some part: each layer is stored as its own policy says."""
        return next((part.storage for _, part in self.children() if part.storage is not None), None)

    def for_layer(self, layer: int, layers: int) -> EvictionPolicy:
        named = {name: layers_in(name, layers) for name in self.at}  # all of them, so that none goes unchecked
        policy = next((self.at[name] for name, found in named.items() if layer in found), self.default)
        return policy.for_layer(layer, layers)

    def room(self, decoding: bool) -> float:
        return max(part.room(decoding) for _, part in self.children())

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        raise TypeError("a cache asks each layer's policy, for_layer(), not the composition")
