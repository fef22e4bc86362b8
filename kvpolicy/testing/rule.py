"""A policy's definition in plain Python, to hold the policy against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpolicy.policy import EvictionPolicy, share_of


class Rule:
    """What a policy means, for one layer, row and KV head: lists and dictionaries, one token at a time.

    Subclass, and override :meth:`keep`; for policies that follow attention :meth:`observe`, with :meth:`begin` for
    what is remembered, and :meth:`finish` where calls matter. Positions count a row's real tokens from 0.
    """

    def __init__(self, policy: EvictionPolicy, budget: int, layer: int = 0, row: int = 0, head: int = 0) -> None:
        self.policy: Any = policy
        """The policy, whose options the rule follows."""
        self.budget = budget
        self.layer, self.row, self.head = layer, row, head
        self.begin()

    def begin(self) -> None:
        """Set up what is remembered: ``self.mass = defaultdict(float)``."""

    def observe(self, query: int, probs: dict[int, float]) -> None:
        """The probabilities that the query at position `query` gave to each key it saw, itself included.

        They are averaged over the query heads that share the KV head. Queries come in order, each once.
        """

    def finish(self, seen: int) -> None:
        """A call of the model has ended, a prompt or a single token; `seen` tokens have been seen."""

    def keep(self, held: list[int], seen: int) -> list[int]:
        """Which of the `held` positions stay, `budget` of them; `seen` tokens have been seen.

        Asked whenever more than the budget are held: after each call of the model, a prompt or a single token.
        """
        raise NotImplementedError(f"{type(self).__name__} must define keep(held, seen)")

    def tokens(self, amount: int | float) -> int:
        """A share in tokens, as ``view.tokens`` has it."""
        resolved: int = share_of(amount, self.budget)
        return resolved

    def protect(self, held: list[int], seen: int, sinks: int | float = 0, recent: int | float = 0) -> list[int]:
        """Sinks and recents among the `held`, as ``view.protect`` has it."""
        first, last = self.tokens(sinks), self.tokens(recent)
        if first:
            first = min(first, self.budget - min(last, 1))
            last = min(last, self.budget - first)
        return [position for position in held if position < first or position >= seen - last]

    def best(self, candidates: list[int], count: int, *keys: Callable[[int], Any]) -> list[int]:
        """The `count` candidates with the highest `keys`, the first deciding; then the lower position wins."""
        ordered = sorted(candidates, key=lambda position: (*(-key(position) for key in keys), position))
        return ordered[: max(count, 0)]
