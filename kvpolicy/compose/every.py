"""Every: evict seldom, and several tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from kvpolicy.compose._base import Composite
from kvpolicy.policy import EvictionPolicy, Policy, View


class Every(Composite):
    """Lets up to ``tokens - 1`` tokens more than the budget gather before it is cut to the budget again.

    Less work a step, for that many slots more. Whatever divides a budget over heads divides it anew at each cut.
    """

    kind: Literal["every"] = "every"
    tokens: Annotated[int, Field(ge=1, strict=True)]
    """Evict each so many tokens; 1 is every step."""
    of: Policy
    """The policy that decides what goes."""

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        yield "of", self.of

    def with_parts(self, change: Callable[[EvictionPolicy], EvictionPolicy]) -> EvictionPolicy:
        return self.replaced(of=change(self.of))

    def room(self, decoding: bool) -> float:
        return self.of.room(decoding) + self.tokens - 1

    def protected(self, view: View) -> Tensor | None:
        return self.of.protected(view.part("of"))

    def certain(self, view: View) -> Tensor:
        return self.certain_of("of", view)

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        return self.of.ranking(view.part("of"))
