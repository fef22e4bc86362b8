"""Union: each part keeps its share of the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from torch import Tensor

from kvpolicy.allocator import largest_remainder, largest_remainder_of, largest_remainder_rows
from kvpolicy.budget import ratio
from kvpolicy.compose._base import Chooser, Composite, spelled_out
from kvpolicy.policy import EvictionPolicy, Policy, Share, View, extremes
from kvpolicy.select import others, raised, top

_MOST = 10**9  # tokens times this are whole numbers of 64 bits


class Part(BaseModel):
    """A policy and how much of a union's budget it may keep."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    take: Share | None = None
    """Tokens, or a share of what the parts with tokens leave. By default what is left is split equally."""
    of: Chooser
    """The policy that chooses them."""

    def __or__(self, other: EvictionPolicy | Part | Union) -> Union:
        return Union.joined(self, other)


class Union(Composite):
    """The best by the first part, then the best of the rest by the second, and so on, each as many as it may take.

    A token that a part keeps is no longer there for the next, so none is counted twice. What a part does not want
    goes on to the next, and what is left in the end to the last. Shares are of what the parts with tokens leave,
    rounded by largest remainder.
    """

    kind: Literal["union"] = "union"
    parts: Annotated[
        tuple[Annotated[Part, BeforeValidator(spelled_out, json_schema_input_type=Part | Policy)], ...],
        Field(min_length=1),
    ]
    """The parts, in order: ``{take: 4, of: sinks}``, or a bare policy."""

    @field_validator("parts")
    @classmethod
    def _at_most_all(cls, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if (total := sum(_share(part) for part in parts)) > 1:
            raise ValueError(f"the shares come to {float(total):g}, which is more than all (1.0)")
        return parts

    @classmethod
    def joined(cls, *parts: EvictionPolicy | Part) -> Union:
        """The union of policies and parts; the parts of a union are taken in."""
        found: list[Part] = []
        for part in parts:
            found += part.parts if isinstance(part, Union) else [part if isinstance(part, Part) else Part(of=part)]
        return cls(parts=tuple(found))

    @property
    def selective(self) -> bool:  # type: ignore[override]
        return all(part.of.selective for part in self.parts)

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        return ((str(index), part.of) for index, part in enumerate(self.parts))

    @cached_property
    def _named(self) -> list[tuple[str, EvictionPolicy]]:
        return list(self.children())

    def with_parts(self, change: Callable[[EvictionPolicy], EvictionPolicy]) -> EvictionPolicy:
        return self.replaced(parts=tuple(Part.model_construct(take=p.take, of=change(p.of)) for p in self.parts))

    def required(self) -> int:
        return sum(part.take for part in self.parts if isinstance(part.take, int))

    def split(self, budget: int, prefix: int = 0) -> list[tuple[str, EvictionPolicy, int]]:
        return [(name, part, tokens) for (name, part), tokens in zip(self.children(), self._taken(budget), strict=True)]

    @cached_property
    def _weights(self) -> tuple[list[int], int]:
        """The share of each part in what the parts with tokens leave, over a common denominator."""
        free = [index for index, part in enumerate(self.parts) if part.take is None]
        shares = [_share(part) for part in self.parts]
        rest = 1 - sum(shares, Fraction(0))
        for index in free or [len(shares) - 1]:
            shares[index] += rest / max(len(free), 1)
        under = lcm(*(share.denominator for share in shares))
        if under > _MOST:
            return largest_remainder([share * _MOST for share in shares]), _MOST
        return [int(share * under) for share in shares], under

    def _taken(self, budget: Any) -> list[Any]:
        """Tokens of each part: an ``int``, or a tensor like `budget`."""
        fixed = [part.take if isinstance(part.take, int) else 0 for part in self.parts]
        over, under = self._weights
        if isinstance(budget, int):
            left = max(budget - sum(fixed), 0)
            shared = largest_remainder_of([left * share for share in over], under)
            return [tokens + more for tokens, more in zip(fixed, shared, strict=True)]
        left = (budget - sum(fixed)).clamp(min=0)
        rows = largest_remainder_rows(torch.stack([left * share for share in over], -1), under)
        return [tokens + more for tokens, more in zip(fixed, rows.unbind(-1), strict=True)]

    def certain(self, view: View) -> Tensor:
        found = torch.zeros_like(view.valid)
        for name, _ in self.children():  # what a part is certain of and an earlier one takes stays all the same
            found = found | self.certain_of(name, view)
        return found

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        left, spare = view.eligible, 0
        *firsts, (last, its) = zip(self._named, self._taken(view.budget), strict=True)
        for (name, part), tokens in firsts:
            tokens = tokens + spare
            ranking = part.ranking(view.part(name, tokens, left))
            if part.selective:
                wanted = left & (ranking[0] > extremes(ranking[0].dtype)[0])
                kept = top(ranking, wanted, view.positions, tokens)
                left, spare = left & ~kept, tokens - kept.sum(-1, keepdim=True)
            else:
                left, spare = others(ranking, left, view.positions, tokens), 0
        name, part = last
        return raised(part.ranking(view.part(name, its + spare, left)), ~left)


def _share(part: Part) -> Fraction:
    return Fraction(*ratio(part.take)) if isinstance(part.take, float) else Fraction(0)
