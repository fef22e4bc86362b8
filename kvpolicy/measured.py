"""Budgets measured while a prompt runs through the layers, so that no more than the total is ever held.

Rows are divided in the first call that brings them more tokens than a layer has on average. After each layer the budget
is divided anew over the layers so far, and the earlier ones are cut again: together they hold no more than the total,
beside them is the layer under way. Calls that follow keep the parts. Where a row exceeded its budget in a decode step,
which measures nothing, its layers stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvpolicy.allocator import MeasuredLayerAllocator, largest_remainder_within
from kvpolicy.attention.blocks import Part, Wants
from kvpolicy.errors import BudgetError
from kvpolicy.policy import EvictionPolicy, View, as_if_alone

if TYPE_CHECKING:
    from kvpolicy.pool import SlotPool


@dataclass
class Row:
    """A row of the batch whose budget is divided in the call under way."""

    average: int
    """Tokens that each layer would have if all had the same."""
    prompt: int
    """Tokens of its prompt."""
    tokens: list[int] = field(default_factory=list)
    """Parts of the layers so far."""

    def divide(
        self, allocator: MeasuredLayerAllocator, measured: Sequence[Sequence[float]], layers: int, least: Sequence[int]
    ) -> None:
        """Divide over the layers `measured` so far, one more than before; none gets back what it gave up."""
        quotas = allocator.shares(measured, self.average, layers, self.prompt)
        self.tokens = largest_remainder_within(quotas, least, [*self.tokens, self.prompt])


class Cascade:
    """The layers of one cache between which a budget is divided, in the order in which a call comes to them."""

    def __init__(self, pools: Sequence[SlotPool], allocator: MeasuredLayerAllocator) -> None:
        self.pools, self.allocator = pools, allocator
        self.wants = Wants.of(allocator.needs)
        self._least: dict[tuple[int, int], int] = {}
        self._begin({})

    @classmethod
    def over(cls, pools: Sequence[SlotPool], allocator: MeasuredLayerAllocator) -> None:
        """Have `allocator` divide the budget of those of `pools` that evict."""
        evicting = [pool for pool in pools if pool.budget is not None and pool.policy.bounded]
        cascade = cls(evicting, allocator)
        for pool in evicting:
            pool.cascade = cascade

    def _begin(self, rows: dict[int, Row]) -> None:
        self._rows = rows
        self._measured: list[Any] = []
        """Of each layer so far the numbers of each row of the batch, ``[batch][n]``."""
        self._before: list[int] = []
        """Slots that each of them had in use before it was cut."""
        self._limits: list[list[int]] = []
        """Tokens that each of them may hold in each row."""
        self._sums: Tensor | None = None
        """What was measured of the layer under way, ``[batch, n]``."""

    def begin(self, pool: SlotPool) -> None:
        """`pool` has placed the tokens of a call that is no decode step: it is measured if some row is divided."""
        if pool is self.pools[0]:
            self._begin(_exceeding(pool))
        self._sums = None
        pool.measured = bool(self._rows)
        if pool.measured:
            pool.wants = pool.policy.wants | self.wants

    def observe(self, pool: SlotPool, view: View, part: Part | None) -> None:
        """Measure what `view` shows of the layer under way: all of it, or some `part`."""
        if (shown := as_if_alone(view, self.wants)) is None:
            return
        found = self.allocator.measure(shown)
        if self._sums is None:
            self._sums = found.new_zeros(pool.seen.shape[0], found.shape[1])
        self._sums[slice(None) if part is None else part.batch] += found

    def settle(self, pool: SlotPool) -> None:
        """`pool` has been attended: set its budget, after earlier layers are cut to what is left to them.

        It waits for the device, but not for each of the earlier layers.
        """
        pool.measured, pool.wants = False, pool.policy.wants
        assert self._sums is not None
        self._measured.append(self._sums.tolist())
        self._before.append(pool.used)
        self._limits.append(_each_row(pool, pool.limit if pool.limits is None else pool.limits))
        for index, row in self._rows.items():
            least = [self._least_of(layer, row.average) for layer in range(len(self._measured))]
            row.divide(self.allocator, [numbers[index] for numbers in self._measured], len(self.pools), least)
        for index, earlier in enumerate(self.pools[: len(self._before) - 1]):
            if self._limit(index):
                earlier.cut_again(self._before[index])
        self._limit(len(self._before) - 1)

    def _least_of(self, index: int, average: int) -> int:
        key = (index, average)
        if key not in self._least:
            pool = self.pools[index]
            self._least[key] = least_tokens(self.allocator, pool.policy, average, pool.most_prefix)
        return self._least[key]

    def _limit(self, index: int) -> bool:
        """Give the pool at `index` its budget; whether that is another than it had."""
        before = self._limits[index]
        after = [self._rows[i].tokens[index] if i in self._rows else tokens for i, tokens in enumerate(before)]
        if changed := after != before:
            self.pools[index].limit_to(after)
            self._limits[index] = after
        return changed


def least_tokens(allocator: MeasuredLayerAllocator, policy: EvictionPolicy, average: int, prefix: int = 0) -> int:
    """What a layer with `policy` has at least of a budget of `average` tokens, which its policy accepts."""
    low, high = allocator.least(average), average
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _accepts(policy, middle, prefix) else (middle + 1, high)
    return low


def _accepts(policy: EvictionPolicy, budget: int, prefix: int) -> bool:
    try:
        policy.check(budget, prefix)
    except BudgetError:
        return False
    return True


def _exceeding(pool: SlotPool) -> dict[int, Row]:
    """Rows that have more tokens than a layer holds on average, by the call under way and not before."""
    seen = _each_row(pool, pool.seen)
    added = (pool.query_positions >= 0).sum((1, 2, 3)).tolist()
    averages = _each_row(pool, pool.average)
    prompt = pool.budget.prompt or 0 if pool.budget is not None else 0
    return {
        index: Row(average, max(tokens, prompt))
        for index, (tokens, new, average) in enumerate(zip(seen, added, averages, strict=True))
        if tokens - new <= average < tokens
    }


def _each_row(pool: SlotPool, number: int | Tensor | None) -> list[int]:
    """`number`, an ``int`` or ``[batch, 1, 1]``, for each row of `pool`."""
    assert number is not None
    return number.flatten().tolist() if isinstance(number, Tensor) else [number] * pool.seen.shape[0]
