"""Heads: different policies in different KV heads of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from kvpolicy.budget import Count
from kvpolicy.compose._base import Composite, Undivided, by_rank
from kvpolicy.policy import UNBOUNDED, EvictionPolicy, View
from kvpolicy.ranges import HeadRange, heads_in


def _of_a_head(policy: EvictionPolicy) -> EvictionPolicy:
    if policy.together:
        raise ValueError(
            f"{policy.kind} divides its budget over all heads by itself: put it outside, or divide uniformly"
        )
    if policy.bounded and (policy.room(True) or policy.room(False)):
        raise ValueError(
            f"{policy.kind} decides when to evict, which only a whole layer can: put it outside (every may hold heads)"
        )
    return policy


OfAHead = Annotated[Undivided, AfterValidator(_of_a_head)]


class Heads(Composite):
    """Some KV heads have a policy of their own; where ranges overlap, the first counts.

    A head whose policy evicts nothing (``full``) grows as tokens come, and the others of its layer stay within the
    budget: each takes the memory of what it holds, and evicts at each step. Every layer has the same ranges;
    ``layers`` gives each its own.
    """

    kind: Literal["heads"] = "heads"
    at: Annotated[dict[HeadRange, OfAHead], Field(min_length=1)]
    """Policies by range of KV heads: ``0``, ``0-1`` (both included), ``-2:`` (the last two), ``0,3``."""
    default: OfAHead
    """The policy of all other heads."""
    tokens: Count | None = None
    """Tokens that a head which evicts may hold; by default what the budget of the cache says."""

    divided: ClassVar[bool] = True

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.tokens is None and self._evicts

    @property
    def own_budget(self) -> int | None:  # type: ignore[override]
        return self.tokens if self._evicts else None

    @cached_property
    def _evicts(self) -> bool:
        return any(part.bounded for _, part in self.children())

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        yield from self.at.items()
        yield "default", self.default

    def with_parts(self, change: Callable[[EvictionPolicy], EvictionPolicy]) -> EvictionPolicy:
        return self.replaced(at={name: change(part) for name, part in self.at.items()}, default=change(self.default))

    def room(self, decoding: bool) -> float:
        return 0 if self._evicts else math.inf

    def owners(self, heads: int) -> list[str]:
        """The name of the part that decides for each of so many heads.

        Raises:
            ConfigError: a head is named that is not there.
        """
        named = {name: heads_in(name, heads) for name in self.at}  # all of them, so that none goes unchecked
        return [next((name for name, found in named.items() if head in found), "default") for head in range(heads)]

    def shares(self, budget: Tensor, heads: int) -> Tensor:
        bounded = {name: part.bounded for name, part in self.children()}
        grows = torch.tensor([not bounded[name] for name in self.owners(heads)], device=budget.device)
        return torch.where(grows[:, None], UNBOUNDED, budget)

    def certain(self, view: View) -> Tensor:
        owners = self.owners(view.positions.shape[1])
        certain = {name: self.certain_of(name, view) for name in dict.fromkeys(owners)}
        return torch.cat([certain[name][:, head : head + 1] for head, name in enumerate(owners)], 1)

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        owners, parts = self.owners(view.positions.shape[1]), dict(self.children())
        deciding = [name for name in dict.fromkeys(owners) if parts[name].bounded]
        if not deciding:
            return (view.positions,)
        if len(deciding) == 1:
            return parts[deciding[0]].ranking(view.part(deciding[0]))
        ranks = {name: by_rank(parts[name], view.part(name)) for name in deciding}
        any_of_them = ranks[deciding[0]]  # for heads that evict nothing it is of no consequence
        return (torch.cat([ranks.get(name, any_of_them)[:, head : head + 1] for head, name in enumerate(owners)], 1),)
