"""A plain, slow reference: the full cache, and an additive mask over what a policy has evicted.

Nothing of kvpolicy's storage, attention or selection is used here. A model runs with transformers' own growing
cache and an attention function that masks the evicted entries of each layer, row and KV head; the rules below
decide with Python lists and dictionaries, token by token, as the definitions read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from kvpolicy.draw import uniform
from tests.tiny import cache_argument

NAME = "kvpolicy_test_reference"


def tokens_of(amount: int | float, budget: int) -> int:
    """A share of the budget, rounded half up, at least one where positive."""
    if isinstance(amount, int):
        return min(amount, budget)
    return min(budget, max(math.floor(amount * budget + 0.5), 1 if amount > 0 else 0))


class Rule:
    """One policy for one layer, row and KV head. Positions count a row's real tokens."""

    def __init__(self, budget: int, layer: int, row: int, head: int, **options: Any) -> None:
        self.budget, self.layer, self.row, self.head, self.options = budget, layer, row, head, options

    def observe(self, query: int, probs: dict[int, float]) -> None:
        """The probabilities query `query` gave to each key it could see, averaged over the query group."""

    def keep(self, held: list[int], seen: int) -> list[int]:
        raise NotImplementedError

    def best(self, candidates: list[int], count: int, *keys: Any) -> list[int]:
        """The `count` best by `keys`, higher is better, the lower position winning what ties remain."""
        return sorted(candidates, key=lambda p: (*(-key(p) for key in keys), p))[: max(count, 0)]

    def fixed(self, held: list[int], seen: int) -> list[int]:
        """Sinks and recents; the newest token first, then sinks, then the other recents, as the budget allows."""
        sinks = tokens_of(self.options.get("sinks", 0), self.budget)
        recent = tokens_of(self.options.get("recent", 0), self.budget)
        if sinks:
            sinks = min(sinks, self.budget - min(recent, 1))
            recent = min(recent, self.budget - sinks)
        return [p for p in held if p < sinks or p >= seen - recent]


class FullRule(Rule):
    def keep(self, held: list[int], seen: int) -> list[int]:
        return held


class StreamingRule(Rule):
    def keep(self, held: list[int], seen: int) -> list[int]:
        sinks = min(self.options["sinks"], self.budget - 1)
        return [p for p in held if p < sinks or p >= seen - (self.budget - sinks)]


class H2ORule(Rule):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mass: dict[int, float] = defaultdict(float)

    def observe(self, query: int, probs: dict[int, float]) -> None:
        for key, p in probs.items():
            self.mass[key] += p

    def keep(self, held: list[int], seen: int) -> list[int]:
        stay = self.fixed(held, seen)
        heavy = [p for p in held if p not in stay]
        return stay + self.best(heavy, self.budget - len(stay), lambda p: self.mass[p])


class LRURule(Rule):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.last: dict[int, int] = defaultdict(lambda: -1)
        self.mass: dict[int, float] = defaultdict(float)

    def observe(self, query: int, probs: dict[int, float]) -> None:
        for key, p in probs.items():
            self.mass[key] += p
            if p >= self.options.get("tau", 1.0) / len(probs):
                self.last[key] = query

    def keep(self, held: list[int], seen: int) -> list[int]:
        stay = self.fixed(held, seen)
        rest = [p for p in held if p not in stay]
        return stay + self.best(
            rest, self.budget - len(stay), lambda p: self.last[p], lambda p: self.mass[p], lambda p: p
        )


class RandomRule(Rule):
    def keep(self, held: list[int], seen: int) -> list[int]:
        lanes = [self.layer, torch.tensor(self.head)]
        if self.options.get("rows", "independent") == "independent":
            lanes.append(torch.tensor(self.row))
        fresh = [torch.tensor(seen)] if self.options.get("draw") == "fresh" else []

        def ticket(p: int) -> float:
            return float(uniform(self.options.get("seed", 0), *lanes, torch.tensor(p), *fresh))

        stay = self.fixed(held, seen)
        rest = [p for p in held if p not in stay]
        return stay + self.best(rest, self.budget - len(stay), ticket)


RULES: dict[str, tuple[type[Rule], dict[str, Any]]] = {
    "full": (FullRule, {}),
    "h2o": (H2ORule, {"recent": 0.5}),
    "lru": (LRURule, {"recent": 0.25}),
    "random": (RandomRule, {"sinks": 4, "recent": 0.5}),
    "streaming_llm": (StreamingRule, {"sinks": 4}),
}


class Reference:
    """Runs a model under a rule. Call it like the model; read `kept(layer)` as sets of positions."""

    def __init__(self, model: Any, kind: str, budget: int, **options: Any) -> None:
        self.model, self.budget = model, budget
        self.rule, defaults = RULES[kind]
        self.options = {**defaults, **options}
        self.cache = DynamicCache()
        self.real: Tensor | None = None
        self.held: dict[tuple[int, int, int], list[int]] = {}
        self.rules: dict[tuple[int, int, int], Rule] = {}
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, lambda **kwargs: None)

    def __call__(self, ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        columns = self.cache.get_seq_length() + ids.shape[1]
        self.real = (
            torch.ones(ids.shape[0], columns, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        )
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = NAME
        AttentionInterface.register(NAME, self._attend)
        try:
            with torch.no_grad():
                return self.model(
                    ids, attention_mask=attention_mask, use_cache=True, **cache_argument(self.cache), **kwargs
                ).logits
        finally:
            self.model.config._attn_implementation = before

    def kept(self, layer: int) -> list[list[list[int]]]:
        rows = 1 + max(row for _, row, _ in self.held)
        heads = 1 + max(head for _, _, head in self.held)
        return [[sorted(self.held[layer, row, head]) for head in range(heads)] for row in range(rows)]

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any):
        layer = module.layer_idx
        batch, query_heads, rows, _ = query.shape
        heads, columns = key.shape[1:3]
        group = query_heads // heads
        position = self.real.cumsum(-1) - 1
        position[~self.real] = -1
        first = columns - rows
        allowed = torch.zeros(batch, heads, rows, columns, dtype=torch.bool)
        for row in range(batch):
            for head in range(heads):
                held = set(self.held.get((layer, row, head), ()))
                for i in range(rows):
                    for j in range(columns):
                        real, new = bool(self.real[row, j]), j >= first
                        allowed[row, head, i, j] = real and j <= first + i and (new or int(position[row, j]) in held)
        logits = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * scaling
        logits = logits.masked_fill(~allowed.repeat_interleave(group, 1), torch.finfo(query.dtype).min)
        probs = logits.softmax(-1)
        output = (probs @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous()
        mean = probs.double().unflatten(1, (heads, group)).mean(2)
        for row in range(batch):
            for head in range(heads):
                self._decide(layer, row, head, position[row], allowed[row, head], mean[row, head], first)
        return output, probs

    def _decide(self, layer, row, head, position, allowed, mean, first) -> None:
        at = (layer, row, head)
        rule = self.rules.setdefault(at, self.rule(self.budget, layer, row, head, **self.options))
        held = self.held.setdefault(at, [])
        columns = len(position)
        for i in range(columns - first):
            query = int(position[first + i])
            if query < 0:
                continue
            held.append(query)
            rule.observe(query, {int(position[j]): float(mean[i, j]) for j in range(columns) if allowed[i, j]})
        if len(held) > self.budget:
            seen = int((position >= 0).sum())
            self.held[at] = rule.keep(held, seen)
