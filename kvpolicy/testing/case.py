"""What is being checked, how it is run, and how a check says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from kvpolicy.cache import EvictionCache
from kvpolicy.errors import BudgetError
from kvpolicy.policy import EvictionPolicy
from kvpolicy.rehearsal import compress
from kvpolicy.testing import models
from kvpolicy.testing.rule import Rule

Held = list[list[list[int]]]
"""Positions held in a layer: a list for each row, in it one for each KV head."""

MakeRule = Callable[[EvictionPolicy, int, int, int, int], Rule]
"""From policy, budget, layer, row and KV head to a rule: a subclass of :class:`Rule`, usually."""


class Violation(AssertionError):
    """An invariant that does not hold: what was tried, what was expected, what came."""

    def __init__(self, tried: str, expected: str, came: str) -> None:
        super().__init__(f"\n  tried:    {tried}\n  expected: {expected}\n  came:     {came}")
        self.tried, self.expected, self.came = tried, expected, came


class NotApplicable(Exception):
    """A check that says nothing about this policy, and why."""


class NotConforming(AssertionError):
    """All that is wrong with a policy, by the name of the check that found it."""

    def __init__(self, policy: EvictionPolicy, found: Mapping[str, Exception]) -> None:
        self.found = dict(found)
        lines = [f"{name}: {_said(error)}" for name, error in self.found.items()]
        super().__init__(f"{policy!r} fails {len(found)} of the checks\n" + "\n".join(lines))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Case:
    """A policy to be checked, and what its author says about it."""

    policy: EvictionPolicy
    reference: MakeRule | None = None
    """Its definition in plain Python."""
    draws_by: frozenset[str] = frozenset()
    """``"row"`` and ``"head"`` where the policy draws random numbers that depend on these, and so may differ when
    they change places."""

    @cached_property
    def least(self) -> int:
        """The smallest budget that holds what the policy promises to protect."""
        return next(budget for budget in count(1) if self._accepts(budget))

    def _accepts(self, budget: int) -> bool:
        try:
            self.policy.check(budget)
        except BudgetError as error:
            if budget >= 1 << 16:
                raise Violation(f"{self.policy!r}, budgets up to {budget}", "one it accepts", str(error)) from error
            return False
        return True

    @cached_property
    def budget(self) -> int:
        """An ordinary budget."""
        return max(self.least, 7)

    @property
    def budgets(self) -> list[int]:
        """Small budgets, from the smallest on."""
        return list(range(self.least, self.least + 6))

    def even(self, budget: int, layer: int) -> int:
        """The budget of a head of `layer` if all have the same."""
        own = self._of(layer).own_budget
        return budget if own is None else own

    def most(self, budget: int, layer: int, decoding: bool, heads: int) -> Tensor:
        """How many tokens each head of `layer` may hold after a call, ``[1, heads]``."""
        even = torch.tensor([[[self.even(budget, layer)]]])
        return self._of(layer).shares(even, heads)[..., 0] + self._of(layer).room(decoding)

    def _of(self, layer: int) -> EvictionPolicy:
        return self.policy.for_layer(layer, models.LAYERS)

    @property
    def gathers(self) -> bool:
        """Whether some layer lets tokens gather before it is cut. The rows of a batch are cut at the same time."""
        rooms = [self._of(layer).room(decoding) for layer in range(models.LAYERS) for decoding in (False, True)]
        return any(0 < room < inf for room in rooms)

    def must_be_exact(self) -> None:
        """Raise :class:`NotApplicable` where some layer stores no more than approximations."""
        for layer in range(models.LAYERS):
            storage = self.policy.for_layer(layer, models.LAYERS).storage
            if storage is not None and not storage.lossless:
                raise NotApplicable(f"layer {layer} stores approximations of keys and values: {storage}")

    def prompt(self, budget: int | None = None) -> int:
        """The length of a prompt of which a good part must go."""
        budget = self.budget if budget is None else budget
        most = [self.even(budget, layer) + self._of(layer).room(decoding=False) for layer in range(models.LAYERS)]
        return int(max(filter(isfinite, most), default=budget)) + 14

    def cache(
        self,
        model: Any,
        budget: int | None = None,
        policy: EvictionPolicy | None = None,
        positions: str | None = None,
    ) -> EvictionCache:
        """A cache for `model` with the policy, or with `policy` in its place."""
        limit = (self.budget if budget is None else budget) if self.policy.budgeted else None
        return EvictionCache(model, policy or self.policy, limit, prefix=0, positions=positions)

    def tried(self, what: str, budget: int | None = None) -> str:
        """The policy, the budget and `what` was done with them, for a message."""
        limit = self.budget if budget is None else budget
        with_budget = f"budget {limit}, " if self.policy.budgeted else ""
        return f"{self.policy!r}, {with_budget}{what}"


@dataclass
class Run:
    """A run of a model over tokens, call by call."""

    model: Any
    cache: EvictionCache
    tokens: Tensor
    calls: Sequence[int]
    """How many tokens each call takes; a prompt and single steps, usually."""
    mask: Tensor | None = None
    logits: Tensor = field(init=False)

    def each(self) -> Iterator[str]:
        """Make the calls; after each, say which it was."""
        at, logits = 0, []
        for number, length in enumerate(self.calls):
            mask = None if self.mask is None else self.mask[:, : at + length]
            logits.append(self._feed(self.tokens[:, at : at + length], mask))
            at += length
            self.logits = torch.cat(logits, 1)
            yield f"call {number + 1} ({length} {'token' if length == 1 else 'tokens'}, {at} seen)"

    def _feed(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """One call; a policy that chooses by a pass over its first prompt gets it."""
        if not getattr(self.cache, "awaiting", ()):
            return models.feed(self.model, self.cache, tokens, mask)
        with self.cache.held():
            logits = models.feed(self.model, self.cache, tokens, mask)
        compress(self.model, models.Tokenizer(), self.cache, tokens, mask)
        return logits

    def all(self) -> Run:
        """Make all calls."""
        with torch.no_grad():
            for _ in self.each():
                pass
        return self

    @property
    def layers(self) -> range:
        return range(len(self.cache.layers))

    def held(self) -> list[Held]:
        """What each layer holds now."""
        return [held(self.cache, layer) for layer in self.layers]


def held(cache: EvictionCache, layer: int) -> Held:
    """The positions that a layer of `cache` holds."""
    positions = cache.positions(layer).tolist()
    return [[[position for position in head if position >= 0] for head in row] for row in positions]


def prompt_and_steps(prompt: int, steps: int = 10) -> list[int]:
    """The calls of a prompt and some decode steps."""
    return [prompt] + [1] * steps


def compare_held(tried: str, why: str, found: list[Held], wanted: list[Held]) -> None:
    """Raise where two runs hold different tokens, `wanted` being what `why` says."""
    for layer, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        for row, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            for head, (one, two) in enumerate(zip(mine, other, strict=True)):
                if one != two:
                    place = f"layer {layer}, row {row}, head {head}"
                    raise Violation(tried, f"{why}; {place} keeps {two}", f"{place} keeps {one}")


def compare_values(tried: str, what: str, why: str, found: Tensor, wanted: Tensor, tolerance: float = 1e-7) -> None:
    """Raise where two tensors of numbers differ."""
    if found.shape != wanted.shape:
        raise Violation(tried, f"{why}; {what} of shape {list(wanted.shape)}", f"shape {list(found.shape)}")
    close = torch.isclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not bool(close.all()):
        index = tuple(int(i) for i in (~close).nonzero()[0])
        place = f"{what}{list(index)}"
        raise Violation(tried, f"{why}; {place} = {_number(wanted[index])}", f"{place} = {_number(found[index])}")


def compare_runs(tried: str, why: str, found: Run, wanted: Run, rows: Sequence[int] | None = None) -> None:
    """Raise unless both runs hold the same tokens with the same scores and gave the same logits.

    With `rows`, row ``i`` of `found` is row ``rows[i]`` of `wanted`.
    """
    take = list(range(found.tokens.shape[0])) if rows is None else list(rows)
    compare_held(tried, why, found.held(), [[layer[row] for row in take] for layer in wanted.held()])
    for layer in found.layers:
        theirs = wanted.cache.scores(layer) | wanted.cache.head_state(layer)
        for name, score in (found.cache.scores(layer) | found.cache.head_state(layer)).items():
            # Scores are promised in float32, and a policy may compute them in it whatever the model's type.
            compare_values(tried, f"{name} of layer {layer}", why, score, theirs[name][take], tolerance=1e-6)
    real = slice(None) if found.mask is None else found.mask.bool()
    compare_values(tried, "logits", why, found.logits[real], wanted.logits[take][real])


def _number(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.dtype.is_floating_point else str(value.item())
