"""Cascade: one policy narrows the choice, another makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from torch import Tensor

from kvpolicy.budget import portion
from kvpolicy.compose._base import Chooser, Composite
from kvpolicy.policy import EvictionPolicy, View
from kvpolicy.select import top


def _multiple(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < 1e9:
        raise ValueError("needs a number of tokens (256), or how many times the budget, 1.0 or more (2.0)")
    return value


class Cascade(Composite):
    """`narrow` chooses more than the budget, and `pick` the budget among them.

    It makes a difference where much is cut at once: prompts, chunks, and each `n` tokens under ``every``. In a decode
    step, where one token has to go, `pick` decides alone.
    """

    kind: Literal["cascade"] = "cascade"
    narrow: Chooser
    """The policy that chooses first."""
    to: Annotated[int | float, BeforeValidator(_multiple, json_schema_input_type=Annotated[float, Field(ge=1)])] = 2.0
    """How many it chooses: tokens, or so many times the budget; never less than the budget."""
    pick: Chooser
    """The policy that chooses among them."""

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        yield "narrow", self.narrow
        yield "pick", self.pick

    def with_parts(self, change: Callable[[EvictionPolicy], EvictionPolicy]) -> EvictionPolicy:
        return self.replaced(narrow=change(self.narrow), pick=change(self.pick))

    def split(self, budget: int, prefix: int = 0) -> list[tuple[str, EvictionPolicy, int]]:
        return [("narrow", self.narrow, self._narrowed(budget)), ("pick", self.pick, budget)]

    def _narrowed(self, budget: Any) -> Any:
        if isinstance(self.to, float):
            return portion(self.to, budget)
        return max(self.to, budget) if isinstance(budget, int) else budget.clamp(min=self.to)

    def certain(self, view: View) -> Tensor:
        return self.certain_of("narrow", view) & self.certain_of("pick", view)

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        among, tokens = view.eligible, self._narrowed(view.budget)
        if not (isinstance(tokens, int) and tokens >= view.positions.shape[-1]):
            among = top(self.narrow.ranking(view.part("narrow", tokens)), among, view.positions, tokens)
        return among.char(), *self.pick.ranking(view.part("pick", candidates=among))
