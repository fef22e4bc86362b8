"""What becomes of keys and values that are stored in a few bits, number by number, for the plain reference.

A head has numbered slots for what is quantised, in groups, and beside them tokens in full precision. Everything here is
lists of Python floats.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.reference import Reference


def nearest(x: float, zero: float, step: float, top: int) -> int:
    return 0 if step == 0 else min(max(round((x - zero) / step), 0), top)


class Head:
    """One layer, row and KV head."""

    def __init__(self, bits: int, group: int, residual: int) -> None:
        self.top, self.group, self.residual = 2**bits - 1, group, residual
        self.slots: list[int | None] = []
        """The position in each quantised slot."""
        self.ranges: dict[int, list[tuple[float, float]]] = {}
        """Zero and step of each channel of each group of slots."""
        self.codes: dict[int, list[int]] = {}
        self.values: dict[int, list[float]] = {}
        self.full: dict[int, list[float]] = {}
        """Keys that are in full precision."""

    def key(self, p: int) -> list[float]:
        if p in self.full:
            return self.full[p]
        ranges = self.ranges[self.slots.index(p) // self.group]
        return [zero + code * step for code, (zero, step) in zip(self.codes[p], ranges, strict=True)]

    def keep(self, held: list[int]) -> None:
        self.slots = [p if p in held else None for p in self.slots]
        for of in (self.codes, self.values, self.full):
            for p in [p for p in of if p not in held]:
                del of[p]

    def groups(self, tokens: int) -> int:
        return math.ceil(max(tokens - self.residual, 0) / self.group)

    def loosen(self) -> None:
        self.full.update({p: self.key(p) for p in self.slots if p is not None})
        self.slots, self.codes, self.ranges = [], {}, {}

    def move(self, most: float) -> None:
        """Quantise all but the newest, in as many groups as `most` tokens need."""
        leaving = sorted(self.full)[: len(self.full) - self.residual] if len(self.full) > self.residual else []
        groups = len(self.slots) // self.group + math.ceil(len(leaving) / self.group)
        groups = groups if most == math.inf else max(len(self.slots) // self.group, min(groups, self.groups(int(most))))
        self.slots += [None] * (groups * self.group - len(self.slots))
        taken = [self.group - self.slots[g * self.group :][: self.group].count(None) for g in range(groups)]
        holes = sorted((taken[s // self.group], s) for s, p in enumerate(self.slots) if p is None)
        placed = {hole: p for (_, hole), p in zip(holes, leaving, strict=False)}
        assert len(placed) == len(leaving)
        for g in range(groups):
            self._join(g, {s: p for s, p in placed.items() if s // self.group == g})
        for p in leaving:
            self.values[p] = self._by_token(self.values[p])
            del self.full[p]

    def _join(self, g: int, comes: dict[int, int]) -> None:
        if not comes:
            return
        there = [p for p in self.slots[g * self.group :][: self.group] if p is not None]
        vectors = {p: self.key(p) for p in there} | {p: self.full[p] for p in comes.values()}
        before = self.ranges.get(g)
        ranges = []
        for c in range(len(next(iter(vectors.values())))):
            new = [self.full[p][c] for p in comes.values()]
            zero, step = before[c] if before and there else (math.inf, 0.0)
            high = zero + self.top * step if there else -math.inf
            if not there or min(new) < zero or max(new) > high:
                zero, high = min(zero, *new), max(high, *new)
                step = (high - zero) / self.top
                for p in there:
                    self.codes[p][c] = nearest(vectors[p][c], zero, step, self.top)
            ranges.append((zero, step))
            for p in comes.values():
                self.codes.setdefault(p, [0] * len(vectors[p]))[c] = nearest(self.full[p][c], zero, step, self.top)
        self.ranges[g] = ranges
        for s, p in comes.items():
            self.slots[s] = p

    def _by_token(self, value: list[float]) -> list[float]:
        found = []
        for start in range(0, len(value), self.group):
            part = value[start : start + self.group]
            zero, step = min(part), (max(part) - min(part)) / self.top
            found += [zero + step * nearest(x, zero, step, self.top) for x in part]
        return found


class Stored(Reference):
    """The reference of a `kivi`: rules decide who stays, and heads what is left of them."""

    def __init__(self, model: Any, policy: Any, budget: Any, *more: Any) -> None:
        super().__init__(model, policy, budget, *more)
        options = {} if isinstance(policy, str) else policy
        self.storage = options.get("bits", 2), options.get("group", 32), options.get("residual", 32)
        self.heads: dict[tuple[int, int, int], Head] = {}
        self.since: dict[int, int] = {}

    def shown(self, layer: int, position: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key, value = key.clone(), value.clone()
        for (at, row, head), stored in self.heads.items():
            for p in self.held[at, row, head] if at == layer else ():
                column = position[row].tolist().index(p)
                key[row, head, column] = torch.tensor(stored.key(p), dtype=key.dtype)
                value[row, head, column] = torch.tensor(stored.values[p], dtype=key.dtype)
        return key, value

    def keep(self, layer: int, position: Tensor, keys: Tensor, values: Tensor, decoding: bool) -> None:
        self.since[layer] = self.since.get(layer, 0) + 1
        moves = not decoding or self.since[layer] == self.storage[1]
        for (at, row, head), held in self.held.items():
            if at != layer:
                continue
            stored = self.heads.setdefault((layer, row, head), Head(*self.storage))
            for p, key, value in zip(
                position[row, -keys.shape[2] :].tolist(),
                keys[row, head].tolist(),
                values[row, head].tolist(),
                strict=True,
            ):
                stored.full[p], stored.values[p] = key, value
            before = len(stored.codes) + len(stored.full)
            stored.keep(held)
            rule, limit = self.rules[layer, row, head], self.budgets[layer]
            room = rule.room(True)
            excess = (
                before > len(held)
                and len(stored.slots) > stored.groups(limit + (0 if room == math.inf else room)) * stored.group
            )
            if excess:
                stored.loosen()
            if moves or excess:
                stored.move(max(limit + room, len(held)))
                for p in held:
                    rule.store(p, torch.tensor(stored.key(p)).to(keys), torch.tensor(stored.values[p]).to(keys))
                self.since[layer] = 0
