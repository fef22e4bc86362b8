"""A plain, slow reference: the full cache, and an additive mask over what a policy has evicted.

Nothing of kvpolicy's storage, attention or selection is used here. A model runs with transformers' own growing
cache and an attention function that masks the evicted entries of each layer, row and KV head; the rules below
decide with Python lists and dictionaries, token by token, as the definitions read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from statistics import mean, variance
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

    defaults: dict[str, Any] = {}
    selective = False
    output: list[Tensor]
    """Of each query head of the group, what projects its output, ``[hidden, value_dim]``."""

    def __init__(self, layer: int, row: int, head: int, layers: int = 2, **options: Any) -> None:
        self.place = (layer, row, head, layers)
        self.layer, self.row, self.head = layer, row, head
        self.options = {**self.defaults, **options}

    def told(self, output: list[Tensor]) -> None:
        """The weights of the output projection; comes first."""
        self.output = output

    def store(self, position: int, key: Tensor, value: Tensor) -> None:
        """Key and value of a new token, as cached. Comes before what its call observes."""

    def heads(self, query: int, probs: list[dict[int, float]], logits: list[dict[int, float]], mine: slice) -> None:
        """What every query head of the layer gave to each key it could see; `mine` are this KV head's.

        Comes before `observe` of the same query.
        """

    def ask(self, vectors: Tensor, scaling: float, spun: Spun | None) -> None:
        """A query of each query head of this KV head, before it is rotated, ``[group, head_dim]``.

        `spun` rotates; it is ``None`` where the model does not.
        """

    def observe(self, query: int, probs: dict[int, float]) -> None:
        """The probabilities query `query` gave to each key it could see, averaged over the query group."""

    def finish(self, rows: list[dict[int, float]], seen: int, decoding: bool) -> None:
        """All rows of a call, at its end."""

    def stay(self, held: list[int], seen: int, budget: int) -> list[int]:
        """Sinks and recents; the newest token first, then sinks, then the other recents, as the budget allows."""
        sinks = tokens_of(self.options.get("sinks", 0), budget)
        recent = tokens_of(self.options.get("recent", 0), budget)
        if sinks:
            sinks = min(sinks, budget - min(recent, 1))
            recent = min(recent, budget - sinks)
        return [p for p in held if p < sinks or p >= seen - recent]

    def worth(self, position: int, seen: int) -> tuple:
        """Higher is better, compared in order; the lower position wins what ties remain."""
        raise NotImplementedError

    def wants(self, position: int) -> bool:
        return True

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        """The best first."""
        first = self.stay(held, seen, budget)
        rest = [p for p in held if p not in first]
        return first + sorted(rest, key=lambda p: (*(-w for w in self.worth(p, seen)), p))

    def room(self, decoding: bool) -> float:
        return 0

    def attends(self, queries: list[Tensor], held: list[int], budget: int) -> list[list[int]]:
        """What each query head of the group attends to in a decode step; the newest of the `held` is the query's."""
        return [held] * len(queries)


class FullRule(Rule):
    def room(self, decoding: bool) -> float:
        return math.inf


class SinksRule(Rule):
    def worth(self, position: int, seen: int) -> tuple:
        return (-position,)


class RecentRule(Rule):
    defaults = {"recent": 1}

    def worth(self, position: int, seen: int) -> tuple:
        return (position,)


class SpanRule(SinksRule):
    selective = True

    def wants(self, position: int) -> bool:
        return self.options.get("start", 0) <= position < self.options["stop"]

    def worth(self, position: int, seen: int) -> tuple:
        return (-position if self.wants(position) else -math.inf,)


class StreamingRule(RecentRule):
    defaults = {"sinks": 4, "recent": 1}


class HeavyRule(Rule):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mass: dict[int, float] = defaultdict(float)

    def observe(self, query: int, probs: dict[int, float]) -> None:
        for key, p in probs.items():
            self.mass[key] += p

    def worth(self, position: int, seen: int) -> tuple:
        return (self.mass[position],)


class FadingRule(HeavyRule):
    """Mass that fades with each query, of one query group, by its mean or its maximum."""

    defaults = {"recent": 0.5, "decay": 1.0}

    def heads(self, query: int, probs: list[dict[int, float]], logits: list[dict[int, float]], mine: slice) -> None:
        self.mine = probs[mine]

    def observe(self, query: int, probs: dict[int, float]) -> None:
        for key in self.mass:
            self.mass[key] *= self.options["decay"]
        if self.options.get("group") == "max":
            probs = {key: max(head[key] for head in self.mine) for key in probs}
        super().observe(query, probs)


class H2ORule(FadingRule):
    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        order = super().rank(held, seen, budget, decoding)
        old = seen - tokens_of(self.options["recent"], budget) - 1
        if self.options.get("promote") == "always" and decoding and old in order:
            first = self.stay(held, seen, budget)
            order.remove(old)  # what has just left the window comes right after what stays
            order.insert(len(first) - (old in first), old)
        return order

    def worth(self, position: int, seen: int) -> tuple:
        if self.options.get("normalise") != "visible":
            return super().worth(position, seen)
        return (self.mass[position] / sum(self.options["decay"] ** age for age in range(seen - position)),)


class A2SFRule(FadingRule):
    defaults = {"recent": 0.5, "decay": 0.9}


class LRURule(HeavyRule):
    defaults = {"recent": 0.25}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.last: dict[int, int] = defaultdict(lambda: -1)

    def observe(self, query: int, probs: dict[int, float]) -> None:
        super().observe(query, probs)
        for key, p in probs.items():
            if p >= self.options.get("tau", 1.0) / len(probs):
                self.last[key] = query

    def worth(self, position: int, seen: int) -> tuple:
        if self.options.get("ties") == "age":
            return self.last[position], position
        return self.last[position], self.mass[position], position


class LFURule(LRURule):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.uses: dict[int, int] = defaultdict(int)

    def observe(self, query: int, probs: dict[int, float]) -> None:
        super().observe(query, probs)
        for key in probs:
            self.uses[key] += self.last[key] == query

    def worth(self, position: int, seen: int) -> tuple:
        chances = seen - position if self.options.get("normalise") == "visible" else 1
        return self.uses[position] / chances, *super().worth(position, seen)


class TOVARule(Rule):
    def heads(self, query: int, probs: list[dict[int, float]], logits: list[dict[int, float]], mine: slice) -> None:
        heads = probs if self.options.get("heads", "layer") == "layer" else probs[mine]
        self.last = {p: sum(head.get(p, 0.0) for head in heads) / len(heads) for head in heads for p in head}

    def worth(self, position: int, seen: int) -> tuple:
        return (self.last.get(position, 0.0),)


class KeysRule(Rule):
    """Knows keys and values."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def store(self, position: int, key: Tensor, value: Tensor) -> None:
        self.keys[position], self.values[position] = key, value


class KnormRule(KeysRule):
    def worth(self, position: int, seen: int) -> tuple:
        return (-float(self.keys[position].norm()),)


class KeyDiffRule(KeysRule):
    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        self.mean = sum(self.keys[p] / self.keys[p].norm() for p in held) / len(held)
        return super().rank(held, seen, budget, decoding)

    def worth(self, position: int, seen: int) -> tuple:
        return -float(torch.cosine_similarity(self.keys[position], self.mean, dim=0)), position


class QuestRule(KeysRule):
    """Pages of positions; what the newest key is like is no matter, as its page is always there."""

    defaults = {"page": 16, "least": 3, "full_layers": 2, "group": "each"}

    def room(self, decoding: bool) -> float:
        return math.inf

    def attends(self, queries: list[Tensor], held: list[int], budget: int) -> list[list[int]]:
        layers, page = self.place[3], self.options["page"]
        if self.layer < min(self.options["full_layers"], layers - 1) or budget >= len(held):
            return [held] * len(queries)
        pages = [held[start : start + page] for start in range(0, len(held), page)]
        bounds = [[self.bound(query, tokens) for tokens in pages[:-1]] for query in queries]
        if self.options["group"] != "each":
            join = max if self.options["group"] == "max" else lambda *x: sum(x) / len(x)
            bounds = [[join(*of_page) if len(of_page) > 1 else of_page[0] for of_page in zip(*bounds, strict=True)]]
            bounds *= len(queries)
        count = max(budget // page, self.options["least"]) - 1
        chosen = [sorted(range(len(pages) - 1), key=lambda i, own=own: -own[i])[:count] for own in bounds]
        return [sorted(p for i in own for p in pages[i]) + pages[-1] for own in chosen]

    def bound(self, query: Tensor, tokens: list[int]) -> float:
        total = 0.0
        for channel, q in enumerate(query.tolist()):
            numbers = [float(self.keys[p][channel]) for p in tokens]
            total += max(q * min(numbers), q * max(numbers))
        return total


class RandomRule(Rule):
    defaults = {"sinks": 4, "recent": 0.5}

    def worth(self, position: int, seen: int) -> tuple:
        return (self.ticket(position, *[seen] * (self.options.get("draw") == "fresh")),)

    def ticket(self, *numbers: int) -> float:
        lanes = [self.layer, torch.tensor(self.head)]
        if self.options.get("rows", "independent") == "independent":
            lanes.append(torch.tensor(self.row))
        return float(uniform(self.options.get("seed", 0), *lanes, *map(torch.tensor, numbers)))


def softmax(logits: dict[int, float]) -> dict[int, float]:
    most = max(logits.values(), default=0.0)
    weights = {p: math.exp(logit - most) for p, logit in logits.items()}
    return {p: weight / sum(weights.values()) for p, weight in weights.items()}


def gumbel(number: float) -> float:
    return -math.log(-math.log(max(number, 2.0**-25)))


def mean_of(rows: list[dict[int, float]]) -> dict[int, float]:
    return {p: sum(row[p] for row in rows) / len(rows) for p in rows[0]}


class ScissorhandsRule(Rule):
    defaults = {"window": 400, "recent": 10}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: list[dict[int, float]] = []

    def observe(self, query: int, probs: dict[int, float]) -> None:
        self.rows = [*self.rows, probs][-self.options["window"] :]

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        self.average = 1 / len(held)
        return super().rank(held, seen, budget, decoding)

    def worth(self, position: int, seen: int) -> tuple:
        given = [row[position] for row in self.rows if position in row]
        return -sum(p < self.average for p in given), sum(given) / len(given), position


class KeyformerRule(RandomRule):
    defaults = {"recent": 0.3, "start": 1.0, "end": 2.0, "steps": 100, "noise": "gumbel"}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.score: dict[int, float] = defaultdict(float)
        self.call: list[tuple[int, list[dict[int, float]]]] = []
        self.tickets: dict[int, int] = {}
        self.read = 0

    def heads(self, query: int, probs: list[dict[int, float]], logits: list[dict[int, float]], mine: slice) -> None:
        self.call.append((query, logits[mine]))

    def finish(self, rows: list[dict[int, float]], seen: int, decoding: bool) -> None:
        start, end, steps = (self.options[name] for name in ("start", "end", "steps"))
        heat = start + (end - start) * min(seen - self.read - 1, steps) / steps if decoding else start
        for query, heads in self.call:
            for head, logits in enumerate(heads):
                noise = self.noise(head, query, list(logits))
                for p, x in softmax({p: (z + noise[p]) / heat for p, z in logits.items()}).items():
                    self.score[p] += x / len(heads)
        self.call = []
        self.read = self.read if decoding else seen

    def noise(self, head: int, query: int, keys: list[int]) -> dict[int, float]:
        if self.options["noise"] == "none":
            return dict.fromkeys(keys, 0.0)
        self.tickets.update((p, int(self.ticket(p) * 2**24)) for p in keys if p not in self.tickets)
        tickets = torch.tensor([self.tickets[p] for p in keys])
        lanes = (tickets, torch.tensor(head), torch.tensor(query), torch.tensor(keys))
        drawn = uniform(self.options.get("seed", 0), *lanes).tolist()
        return {p: gumbel(u) for p, u in zip(keys, drawn, strict=True)}

    def worth(self, position: int, seen: int) -> tuple:
        return (self.score[position],)


class LagKVRule(KeysRule):
    defaults = {"lag": 128, "sinks": 16, "recent": 1, "compare": "lag"}

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        lag, sinks = self.options["lag"], self.options["sinks"]
        lags = [held[i : i + lag] for i in range(sinks, len(held) - lag + 1, lag)]
        self.scores: dict[int, float] = {}
        for these, following in pairwise(lags):
            keys, values = (self.deviations(kind, these, following) for kind in (self.keys, self.values))
            scores = {p: (keys[p] + values[p]) / 2 for p in these}
            if self.options["compare"] == "lag":
                scores = {p: place / lag for place, p in enumerate(sorted(these, key=lambda p: scores[p]))}
            self.scores.update(scores)
        return super().rank(held, seen, budget, decoding)

    @staticmethod
    def deviations(vectors: dict[int, Tensor], these: list[int], following: list[int]) -> dict[int, float]:
        ahead = torch.stack([vectors[p] for p in following])
        least, most = ahead.min(0).values, ahead.max(0).values
        return softmax({p: float(((vectors[p] - least) / (most - least)).std()) for p in these})

    def worth(self, position: int, seen: int) -> tuple:
        return self.scores.get(position, 2.0), position


class VotesRule(Rule):
    """Sums over the last queries of a prompt or chunk, and a running sum of the same length while decoding."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.votes: dict[int, float] = defaultdict(float)

    def vote(self, rows: list[dict[int, float]], window: int, decoding: bool) -> None:
        if rows:
            left = 1 - 1 / window if decoding else 0
            self.votes = defaultdict(float, {p: x * left for p, x in self.votes.items()})
        for row in rows[-window:]:
            for p, x in row.items():
                self.votes[p] += x


class NACLRule(VotesRule, RandomRule):
    defaults = {"proxies": 32, "drawn": 0.35, "sinks": 4, "recent": 0.05}

    def finish(self, rows: list[dict[int, float]], seen: int, decoding: bool) -> None:
        self.vote(rows, self.options["proxies"], decoding)

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        first = self.stay(held, seen, budget)
        score = {p: self.votes[p] / self.options["proxies"] for p in held}
        rest = sorted((p for p in held if p not in first), key=lambda p: (-score[p], p))
        sure = max(budget - len(first) - tokens_of(self.options["drawn"], budget), 0)
        drawn = sorted(rest[sure:], key=lambda p: -score[p] - gumbel(self.ticket(p)))
        return first + rest[:sure] + drawn


class RKVRule(KeysRule):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.window = self.options.get("window", 8)
        self.options["recent"] = self.window
        self.rows: list[dict[int, float]] = []

    def heads(self, query: int, probs: list[dict[int, float]], logits: list[dict[int, float]], mine: slice) -> None:
        best = {p: max(head[p] for head in logits[mine]) for p in logits[mine][0]}
        self.rows = [*self.rows, best][-self.window :]

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        past = [p for p in held if p < seen - self.window]
        given = mean_of([softmax({p: row[p] for p in past}) for row in self.rows])
        reach = self.options.get("kernel", 7) // 2
        important = {p: max(given[q] for q in past[max(0, i - reach) : i + reach + 1]) for i, p in enumerate(past)}
        redundant, weight = self.redundant(held), self.options.get("weight", 0.1)
        self.scores = {p: weight * important[p] - (1 - weight) * redundant[p] for p in past}
        return super().rank(held, seen, budget, decoding)

    def redundant(self, held: list[int]) -> dict[int, float]:
        total = dict.fromkeys(held, 0.0)
        for p in held:
            cosines = {q: float(torch.cosine_similarity(self.keys[p], self.keys[q], dim=0)) for q in held if q != p}
            newest = max((q for q, c in cosines.items() if c > self.options.get("alike", 0.5)), default=None)
            for q, c in cosines.items():
                total[q] += 0.0 if q == newest else c
        return softmax({p: x / len(held) for p, x in total.items()})

    def worth(self, position: int, seen: int) -> tuple:
        return (self.scores[position],)


class CAKERule(Rule):
    defaults = {"window": 32, "gamma": 200.0, "kernel": 5}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.options["recent"] = self.options["window"]
        self.call: list[list[dict[int, float]]] = []
        self.scores: dict[int, float] = {}

    def heads(self, query: int, probs: list[dict[int, float]], logits: list[dict[int, float]], mine: slice) -> None:
        self.call.append(probs[mine])

    def finish(self, rows: list[dict[int, float]], seen: int, decoding: bool) -> None:
        window, self.call = self.call[-self.options["window"] :], []
        if decoding and rows:
            self.scores = dict(rows[-1])
        elif window:
            self.scores = self.pooled([self.of_head([row[i] for row in window]) for i in range(len(window[0]))], seen)

    def of_head(self, rows: list[dict[int, float]]) -> dict[int, float]:
        found = {}
        for p in rows[-1]:
            given = [row.get(p, 0.0) for row in rows]
            found[p] = mean(given) + self.options["gamma"] * (variance(given) if len(given) > 1 else 0.0)
        return found

    def pooled(self, heads: list[dict[int, float]], seen: int) -> dict[int, float]:
        past, kernel = sorted(p for p in heads[0] if p < seen - self.options["window"]), self.options["kernel"]
        near = {p: past[max(0, i - kernel // 2) : i + kernel // 2 + 1] for i, p in enumerate(past)}
        return {p: mean([sum(head[q] for q in near[p]) / kernel for head in heads]) for p in past}

    def worth(self, position: int, seen: int) -> tuple:
        return (self.scores.get(position, 0.0),)


class AhaKVRule(KeysRule, VotesRule):
    defaults = {"window": 64, "length": 256, "recent": 0.5}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.call: list[dict[int, float]] = []

    def heads(self, query: int, probs: list[dict[int, float]], logits: list[dict[int, float]], mine: slice) -> None:
        self.call.append(mean_of([self.sharpened(head) for head in logits[mine]]))

    def sharpened(self, logits: dict[int, float]) -> dict[int, float]:
        length, mean = self.options["length"], sum(logits.values()) / len(logits)
        variance = sum((z - mean) ** 2 for z in logits.values()) / len(logits)
        longer = math.log(len(logits) / length) if length is not None and len(logits) > length else 0.0
        gain = math.sqrt(1 + 2 * longer / variance) if longer else 1.0
        return softmax({p: gain * z for p, z in logits.items()})

    def finish(self, rows: list[dict[int, float]], seen: int, decoding: bool) -> None:
        self.vote(self.call, self.options["window"], decoding)
        self.call = []

    def worth(self, position: int, seen: int) -> tuple:
        return (self.votes[position] * float(self.values[position].norm()),)


class ExpectedAttentionRule(KeysRule):
    """Rotations are averaged as matrices; everything else as the formulas read."""

    defaults = {"sinks": 4, "future": 512, "epsilon": 0.0, "covariance": True, "values": True, "every": 32}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[Tensor] = []
        self.expected: dict[int, list[float]] = {}
        self.scored: dict[int, int] = defaultdict(lambda: -1)

    def ask(self, vectors: Tensor, scaling: float, spun: Spun | None) -> None:
        self.asked.append(vectors * scaling)
        self.spun = spun

    def finish(self, rows: list[dict[int, float]], seen: int, decoding: bool) -> None:
        if not rows:
            return
        held = sorted(rows[-1], key=lambda p: (self.scored[p], p))
        some = held[: math.ceil(len(held) / self.options["every"])] if decoding else held
        queries = torch.stack(self.asked[4:] or [torch.zeros_like(self.asked[0])])  # [queries, group, head_dim]
        turn = torch.eye(queries.shape[-1], dtype=queries.dtype)
        if self.spun is not None:
            ahead = torch.arange(seen, seen + self.options["future"])
            turn = torch.stack([self.spun.at(row.expand(len(ahead), -1), ahead).mean(0) for row in turn], -1)
        for p in some:
            self.scored[p], self.expected[p] = seen, []
            for of in queries.unbind(1):
                mean = turn @ of.mean(0)
                spread = turn @ ((of - of.mean(0)).T @ (of - of.mean(0)) / len(of)) @ turn.T
                square = self.keys[p] @ spread @ self.keys[p] / 2 if self.options["covariance"] else 0.0
                self.expected[p].append(float(mean @ self.keys[p] + square))

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        among = [p for p in held if p >= self.options["sinks"]]
        group = len(self.expected[held[0]])
        heads = [softmax({p: self.expected[p][head] for p in among}) for head in range(group)]
        most = [max(self.expected[p][head] for p in among) for head in range(group)] if among else []
        self.attention = mean_of(heads) if among else {}
        self.order = {
            p: [x - m - math.log(sum(math.exp(self.expected[q][h] - m) for q in among)) for h, (x, m) in found]
            for p in among
            for found in [list(enumerate(zip(self.expected[p], most, strict=True)))]
        }
        return super().rank(held, seen, budget, decoding)

    def worth(self, position: int, seen: int) -> tuple:
        length = float(self.values[position].norm()) if self.options["values"] else 1.0
        epsilon = self.options["epsilon"] if self.options["values"] else 0.0
        if position not in self.attention:
            return (epsilon * length, -math.inf)
        logs = self.order[position]
        log = max(logs) + math.log(sum(math.exp(x - max(logs)) for x in logs)) + math.log(length)
        return (self.attention[position] + epsilon) * length, log


class SnapKVRule(Rule):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.window, self.kernel = options.get("window", 32), options.get("kernel", 5)
        self.options["recent"] = self.window
        self.votes: dict[int, float] = defaultdict(float)

    def finish(self, rows: list[dict[int, float]], seen: int, decoding: bool) -> None:
        if not rows:
            return
        if decoding:
            for key in set(self.votes) | set(rows[-1]):
                self.votes[key] = self.votes[key] * (1 - 1 / self.window) + rows[-1].get(key, 0.0)
            return
        votes: dict[int, float] = defaultdict(float)
        for row in rows[-self.window :]:
            for key, p in row.items():
                votes[key] += p
        past = sorted(p for p in rows[-1] if p < seen - self.window) if rows else []
        reach = self.kernel // 2
        pooled = {}
        for i, p in enumerate(past):
            near = past[max(0, i - reach) : i + reach + 1]
            pooled[p] = sum(votes[q] for q in near) / self.kernel
        self.votes = defaultdict(float, {**votes, **pooled})

    def worth(self, position: int, seen: int) -> tuple:
        return (self.votes[position],)


class CompositeRule(Rule):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parts: list[Rule] = [self.made(spec) for spec in self.specs()]

    def specs(self) -> list[Any]:
        return [self.options["of"]]

    def made(self, spec: Any) -> Rule:
        return make(spec, *self.place)

    def told(self, output: list[Tensor]) -> None:
        super().told(output)
        for part in self.parts:
            part.told(output)

    def store(self, position: int, key: Tensor, value: Tensor) -> None:
        for part in self.parts:
            part.store(position, key, value)

    def heads(self, query: int, probs: list[dict[int, float]], logits: list[dict[int, float]], mine: slice) -> None:
        for part in self.parts:
            part.heads(query, probs, logits, mine)

    def ask(self, vectors: Tensor, scaling: float, spun: Spun | None) -> None:
        for part in self.parts:
            part.ask(vectors, scaling, spun)

    def observe(self, query: int, probs: dict[int, float]) -> None:
        for part in self.parts:
            part.observe(query, probs)

    def finish(self, rows: list[dict[int, float]], seen: int, decoding: bool) -> None:
        for part in self.parts:
            part.finish(rows, seen, decoding)


class UnionRule(CompositeRule):
    def specs(self) -> list[Any]:
        return [part["of"] for part in self.options["parts"]]

    def tokens(self, budget: int) -> list[int]:
        takes = [part.get("take") for part in self.options["parts"]]
        left = budget - sum(take for take in takes if type(take) is int)
        shares = [Fraction(str(take)) if type(take) is float else Fraction(0) for take in takes]
        free = [i for i, take in enumerate(takes) if take is None] or [len(takes) - 1]
        over = 1 - sum(shares)
        for i in free:
            shares[i] += over / len(free)
        exact = [share * left for share in shares]
        rounded = [math.floor(x) for x in exact]
        for i in sorted(range(len(exact)), key=lambda i: rounded[i] - exact[i])[: left - sum(rounded)]:
            rounded[i] += 1
        return [(take if type(take) is int else 0) + extra for take, extra in zip(takes, rounded, strict=True)]

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        chosen: list[int] = []
        spare = 0
        *firsts, last = zip(self.parts, self.tokens(budget), strict=True)
        for part, tokens in firsts:
            left = [p for p in held if p not in chosen]
            best = [p for p in part.rank(left, seen, tokens + spare, decoding) if part.wants(p)][: tokens + spare]
            spare = tokens + spare - len(best) if part.selective else 0
            chosen += best
        left = [p for p in held if p not in chosen]
        return chosen + last[0].rank(left, seen, last[1] + spare, decoding)


class BlendRule(CompositeRule):
    def specs(self) -> list[Any]:
        return [part["of"] for part in self.options["parts"]]

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        scores: dict[int, float] = defaultdict(float)
        for part, spec in zip(self.parts, self.options["parts"], strict=True):
            for p, score in self.normalised(part, held, seen, budget, decoding).items():
                scores[p] += spec.get("weight", 1.0) * score
        stay = {p for part in self.parts for p in part.stay(held, seen, budget)}
        newest = [p for p in stay if p == seen - 1]
        first = newest + sorted(stay - set(newest), key=lambda p: (-scores[p], p))
        return first + sorted((p for p in held if p not in stay), key=lambda p: (-scores[p], p))

    def normalised(self, part: Rule, held: list[int], seen: int, budget: int, decoding: bool) -> dict[int, float]:
        how = self.options.get("normalise", "rank")
        if how == "rank":
            order = part.rank(held, seen, budget, decoding)
            return {p: float(len(held) - i) for i, p in enumerate(order)}
        worth = {p: float(part.worth(p, seen)[0]) for p in held}
        if how == "sum":
            total = sum(abs(w) for w in worth.values())
            return {p: w / total if total else 0.0 for p, w in worth.items()}
        mean = sum(worth.values()) / len(worth)
        spread = math.sqrt(sum((w - mean) ** 2 for w in worth.values()) / len(worth))
        return {p: (w - mean) / spread if spread else 0.0 for p, w in worth.items()}


class VATPRule(CompositeRule, KeysRule):
    def store(self, position: int, key: Tensor, value: Tensor) -> None:
        super().store(position, key, value)
        self.values[position] = value

    def stay(self, held: list[int], seen: int, budget: int) -> list[int]:
        return self.parts[0].stay(held, seen, budget)

    def worth(self, position: int, seen: int) -> tuple:
        first, *rest = self.parts[0].worth(position, seen)
        length = float(self.values[position].norm(p=1 if self.options.get("norm") != "l2" else 2))
        return first / length if first < 0 else first * length, *rest

    def room(self, decoding: bool) -> float:
        return self.parts[0].room(decoding)


class CriticalKVRule(VATPRule):
    """Some by the score alone, the others by it times what the output projection makes of the value."""

    def worth(self, position: int, seen: int) -> tuple:
        return self.parts[0].worth(position, seen)

    def weighed(self, position: int, seen: int) -> tuple:
        first, *rest = self.worth(position, seen)
        moved = [float((weight @ self.values[position]).abs().sum()) for weight in self.output]
        reach = sum(moved) / len(moved)
        return first / reach if first < 0 else first * reach, *rest

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        first = max(tokens_of(self.options.get("first", 0.5), budget), len(self.stay(held, seen, budget)))
        chosen = self.parts[0].rank(held, seen, budget, decoding)[:first]
        rest = [p for p in held if p not in chosen]
        return chosen + sorted(rest, key=lambda p: (*(-w for w in self.weighed(p, seen)), p))


class CascadeRule(CompositeRule):
    def specs(self) -> list[Any]:
        return [self.options["narrow"], self.options["pick"]]

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        to = self.options.get("to", 2.0)
        most = math.floor(to * budget + 0.5) if isinstance(to, float) else max(to, budget)
        narrowed = self.parts[0].rank(held, seen, most, decoding)[:most]
        rest = [p for p in held if p not in narrowed]
        return self.parts[1].rank(sorted(narrowed), seen, budget, decoding) + rest


class PhasesRule(CompositeRule):
    def specs(self) -> list[Any]:
        return [self.options["prefill"], self.options["decode"]]

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        return self.parts[decoding].rank(held, seen, budget, decoding)

    def room(self, decoding: bool) -> float:
        return self.parts[decoding].room(decoding)


class LayersRule(CompositeRule):
    """Ranges are lists of layers here."""

    def specs(self) -> list[Any]:
        named = [spec for layers, spec in self.options["at"].items() if str(self.layer) in layers.split(",")]
        return [*named, self.options["default"]][:1]

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        return self.parts[0].rank(held, seen, budget, decoding)

    def room(self, decoding: bool) -> float:
        return self.parts[0].room(decoding)


class HeadsRule(CompositeRule):
    """Ranges are lists of heads here."""

    def specs(self) -> list[Any]:
        named = [spec for heads, spec in self.options["at"].items() if str(self.head) in heads.split(",")]
        return [*named, self.options["default"]][:1]

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        return self.parts[0].rank(held, seen, budget, decoding)

    def room(self, decoding: bool) -> float:
        return self.parts[0].room(decoding)


class ProtectRule(CompositeRule):
    def stay(self, held: list[int], seen: int, budget: int) -> list[int]:
        first, spans = self.options.get("sinks", 0), self.options.get("spans", [])
        fixed = set(range(first)) | {p for start, stop in spans for p in range(start, stop)}
        recent = min(tokens_of(self.options.get("recent", 0), budget), budget - len(fixed))
        self.taken = len(fixed) + recent
        return [p for p in held if p in fixed or p >= seen - recent]

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        first = self.stay(held, seen, budget)
        rest = [p for p in held if p not in first]
        return first + self.parts[0].rank(rest, seen, budget - self.taken, decoding)

    def room(self, decoding: bool) -> float:
        return self.parts[0].room(decoding)


class KIVIRule(CompositeRule):
    """Which tokens stay; `Stored` says what becomes of them."""

    defaults = {"of": "full"}

    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        return self.parts[0].rank(held, seen, budget, decoding)

    def room(self, decoding: bool) -> float:
        return self.parts[0].room(decoding)


class EveryRule(CompositeRule):
    def rank(self, held: list[int], seen: int, budget: int, decoding: bool) -> list[int]:
        return self.parts[0].rank(held, seen, budget, decoding)

    def room(self, decoding: bool) -> float:
        return self.parts[0].room(decoding) + self.options["tokens"] - 1


RULES: dict[str, type[Rule]] = {
    "full": FullRule,
    "h2o": H2ORule,
    "lru": LRURule,
    "random": RandomRule,
    "streaming_llm": StreamingRule,
}
"""Whole policies."""
MORE: dict[str, type[Rule]] = {
    "a2sf": A2SFRule,
    "ahakv": AhaKVRule,
    "cake": CAKERule,
    "expected_attention": ExpectedAttentionRule,
    "keydiff": KeyDiffRule,
    "keyformer": KeyformerRule,
    "knorm": KnormRule,
    "lagkv": LagKVRule,
    "lfu": LFURule,
    "nacl": NACLRule,
    "quest": QuestRule,
    "rkv": RKVRule,
    "scissorhands": ScissorhandsRule,
    "tova": TOVARule,
}
"""Whole policies with signals of other kinds."""
PRIMITIVES: dict[str, type[Rule]] = {
    "sinks": SinksRule,
    "recent": RecentRule,
    "heavy": HeavyRule,
    "span": SpanRule,
    "snapkv": SnapKVRule,
}
COMPOSITIONS: dict[str, type[Rule]] = {
    "union": UnionRule,
    "blend": BlendRule,
    "cascade": CascadeRule,
    "phases": PhasesRule,
    "heads": HeadsRule,
    "layers": LayersRule,
    "protect": ProtectRule,
    "every": EveryRule,
    "kivi": KIVIRule,
    "vatp": VATPRule,
    "criticalkv": CriticalKVRule,
}


def make(spec: Any, layer: int, row: int, head: int, layers: int) -> Rule:
    """The rule of a policy written as a kind or as a mapping."""
    options = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = options.pop("kind")
    return {**RULES, **MORE, **PRIMITIVES, **COMPOSITIONS}[kind](layer, row, head, layers, **options)


class Spun:
    """Rotary positions by complex numbers: the first half of what a head rotates is real, the second imaginary."""

    def __init__(self, model: Any) -> None:
        self.embedding = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))

    def angles(self, like: Tensor, places: Tensor) -> Tensor:
        """``exp(i * angle)`` for each of `places`, times what the model scales it by."""
        cos, sin = self.embedding(like.new_empty(0), places.reshape(1, -1))
        spins = torch.complex(cos, sin)[..., : cos.shape[-1] // 2]
        return spins.view(*places.shape, -1)

    @staticmethod
    def times(vectors: Tensor, spins: Tensor) -> Tensor:
        half = spins.shape[-1]
        turned = torch.complex(vectors[..., :half], vectors[..., half : 2 * half]) * spins
        return torch.cat([turned.real, turned.imag, vectors[..., 2 * half :]], -1)

    def bare(self, vectors: Tensor, columns: Tensor) -> Tensor:
        """`vectors` of tokens at `columns` of the input as they were before the model rotated them."""
        return self.times(vectors, 1 / self.angles(vectors, columns))

    def at(self, vectors: Tensor, places: Tensor) -> Tensor:
        return self.times(vectors, self.angles(vectors, places))

    def rolled(self, query: Tensor, key: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys at their places among the columns that are `there`, ``[batch, kv_heads, columns]``.

        And the keys before they were rotated. `key` is what a model has cached of all columns.
        """
        columns, rows = torch.arange(key.shape[2]), query.shape[2]
        places = (there.cumsum(-1) - 1).clamp(min=0)
        bare = self.bare(key, columns)
        asking = self.bare(query, columns[-rows:]).unflatten(1, (key.shape[1], -1))
        asking = self.at(asking, places[:, :, None, -rows:].expand(asking.shape[:-1]))
        return asking.flatten(1, 2), self.at(bare, places), bare


class Recomputed:
    """A model over all tokens ever seen, of which each query is shown those that a cache holds, at their places."""

    def __init__(self, model: Any, watched: Any) -> None:
        """`watched` is the cache; what it held before a call is what the call sees beside its own tokens."""
        self.model, self.watched, self.cache, self.spun = model, watched, DynamicCache(), Spun(model)
        self.shown: list[Tensor] = []

    def __call__(self, ids: Tensor) -> Tensor:
        """Come before the same call with the watched cache."""
        seen, layers = self.cache.get_seq_length(), len(self.watched.layers)
        self.shown = [self.watched.positions(layer) for layer in range(layers)] if seen else []
        before = self.model.config._attn_implementation
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, lambda **kwargs: None)
        self.model.config._attn_implementation = NAME
        try:
            with torch.no_grad():
                return self.model(ids, use_cache=True, **cache_argument(self.cache)).logits
        finally:
            self.model.config._attn_implementation = before

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any):
        (batch, heads, columns), rows = key.shape[:3], query.shape[2]
        there = torch.zeros(batch, heads, columns + 1, dtype=torch.bool)
        if self.shown:
            shown = self.shown[module.layer_idx]
            there.scatter_(2, shown.masked_fill(shown < 0, columns), True)
        there = there[..., :columns]
        there[..., columns - rows :] = True
        query, key, _ = self.spun.rolled(query, key, there)
        causal = torch.arange(columns) <= torch.arange(columns - rows, columns)[:, None]
        group = query.shape[1] // heads
        allowed = (there[:, :, None] & causal).repeat_interleave(group, 1)
        logits = query @ key.repeat_interleave(group, 1).mT * scaling
        probs = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        return (probs @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), probs


def projections(module: Any, heads: int) -> list[Tensor]:
    """What projects the output of each query head of an attention module."""
    found = next(getattr(module, name) for name in ("o_proj", "out_proj", "dense") if hasattr(module, name))
    return list(found.weight.detach().chunk(heads, dim=1))


class Reference:
    """Runs a model under a rule. Call it like the model; read `kept(layer)` as sets of positions."""

    def __init__(
        self,
        model: Any,
        policy: str | dict[str, Any],
        budget: int | list[Any],
        alpha: Fraction | None = None,
        rolled: bool = False,
    ) -> None:
        """`budget` is one for all layers, one for each, or a list for each with one for each row."""
        self.model, self.alpha = model, alpha
        rotates = any(type(module).__name__.endswith("RotaryEmbedding") for module in model.modules())
        self.spun = Spun(model) if rotates else None
        self.rolled = rolled
        self.shares: dict[tuple[int, int, int], int] = {}
        layers = model.config.num_hidden_layers
        self.budgets = budget if isinstance(budget, list) else [budget] * layers
        self.spec = policy
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
        key, value = self.shown(layer, position, key, value)
        allowed = torch.zeros(batch, heads, rows, columns, dtype=torch.bool)
        for row in range(batch):
            for head in range(heads):
                held = set(self.held.get((layer, row, head), ()))
                for i in range(rows):
                    for j in range(columns):
                        real, new = bool(self.real[row, j]), j >= first
                        allowed[row, head, i, j] = real and j <= first + i and (new or int(position[row, j]) in held)
        met, bare = key, query
        if self.spun is not None:
            bare = self.spun.bare(query, torch.arange(first, columns))
        if self.spun is not None and self.rolled:
            there = allowed[:, :, -1].clone()  # the last query sees all that are there, unless it is padding
            there[..., first:] = self.real[:, None, first:]
            for (_, row, head), held in ((at, held) for at, held in self.held.items() if at[0] == layer):
                there[row, head, :first] = torch.isin(position[row, :first], torch.tensor(held, dtype=torch.int64))
            query, met, key = self.spun.rolled(query, key, there)
        logits = query @ met.repeat_interleave(group, 1).transpose(-1, -2) * scaling
        each_may = allowed.repeat_interleave(group, 1)
        if rows == 1 and first:
            self._select(layer, position, query, each_may, group)
        logits = logits.masked_fill(~each_may, torch.finfo(query.dtype).min)
        probs = logits.softmax(-1)
        output = (probs @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous()
        mean = probs.double().unflatten(1, (heads, group)).mean(2)
        for row in range(batch):
            each = self._each_head(position[row], allowed[row], probs[row], logits[row], group)
            for head in range(heads):
                mine = slice(head * group, (head + 1) * group)
                self._make(layer, row, head, projections(module, query_heads)[mine])
                self._store(layer, row, head, position[row], key[row, head, first:], value[row, head, first:])
                for i in range(rows):
                    if self.real[row, first + i]:
                        self.rules[layer, row, head].ask(bare[row, mine, i], scaling, self.spun)
                self._observe(layer, row, head, position[row], allowed[row, head], mean[row, head], first, each, mine)
            self._decide(layer, row, heads, int((position[row] >= 0).sum()), decoding=rows == 1 and first > 0)
        self.keep(layer, position, key[:, :, first:], value[:, :, first:], decoding=rows == 1 and first > 0)
        return output, probs

    def shown(self, layer: int, position: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that attention sees, ``[batch, kv_heads, columns, width]``: those of the full cache."""
        return key, value

    def keep(self, layer: int, position: Tensor, keys: Tensor, values: Tensor, decoding: bool) -> None:
        """The call has ended in `layer`; it brought these keys and values."""

    def _select(self, layer, position, query, allowed, group) -> None:
        """Hide from each query head of a decode step what its rule does not attend to."""
        for row, places in enumerate(position.tolist()):
            if places[-1] < 0:
                continue
            for head in range(query.shape[1] // group):
                mine = list(range(head * group, (head + 1) * group))
                rule, held = self.rules[layer, row, head], [*self.held[layer, row, head], places[-1]]
                attended = rule.attends([query[row, h, 0] for h in mine], held, self.budgets[layer])
                for h, seen in zip(mine, attended, strict=True):
                    allowed[row, h, 0] &= torch.tensor([p in set(seen) for p in places])

    def _make(self, layer, row, head, output) -> None:
        at = (layer, row, head)
        if at not in self.rules:
            self.rules[at] = make(self.spec, *at, len(self.budgets))
            self.rules[at].told(output)

    def _store(self, layer, row, head, position, keys, values) -> None:
        at = (layer, row, head)
        for p, key, value in zip(position[-len(keys) :].tolist(), keys, values, strict=True):
            if p >= 0:
                self.rules[at].store(p, key, value)

    @staticmethod
    def _each_head(position, allowed, probs, logits, group):
        """For each row of the call: what each query head gave to the keys it could see, and its logits."""
        places, may = position.tolist(), allowed.tolist()

        def of(numbers: Tensor) -> list[list[dict[int, float]]]:
            return [
                [
                    {p: x for p, x, ok in zip(places, row, may[head // group][i], strict=True) if ok}
                    for head, row in enumerate(heads)
                ]
                for i, heads in enumerate(numbers.transpose(0, 1).tolist())
            ]

        return list(zip(of(probs), of(logits), strict=True))

    def _observe(self, layer, row, head, position, allowed, mean, first, each, mine) -> None:
        at = (layer, row, head)
        held = self.held.setdefault(at, [])
        columns, rows = len(position), []
        for i in range(columns - first):
            query = int(position[first + i])
            if query < 0:
                continue
            held.append(query)
            rows.append({int(position[j]): float(mean[i, j]) for j in range(columns) if allowed[i, j]})
            self.rules[at].heads(query, *each[i], mine)
            self.rules[at].observe(query, rows[-1])
        self.rules[at].finish(rows, int((position >= 0).sum()), columns - first == 1 and first > 0)

    def _decide(self, layer: int, row: int, heads: int, seen: int, decoding: bool) -> None:
        places = [(layer, row, head) for head in range(heads)]
        budget = self.budgets[layer]
        budget = budget[row] if isinstance(budget, list) else budget
        if self.alpha is not None and not decoding:
            over = len(self.held[places[0]]) > budget or len({len(self.held[at]) for at in places}) > 1
            self.shares.update(zip(places, self._divided(places, seen) if over else [budget] * heads, strict=True))
        for at in places:
            held, rule, share = self.held[at], self.rules[at], self.shares.get(at, budget)
            if len(held) > share + rule.room(decoding):
                self.held[at] = sorted(rule.rank(sorted(held), seen, share, decoding)[:share])

    def _divided(self, places: list[tuple[int, int, int]], seen: int) -> list[int]:
        """Ada-KV: the best tokens of all heads together, counted; a part alpha of the budget is divided equally."""
        budget, everyone = self.budgets[places[0][0]], []
        for index, at in enumerate(places):
            rule, held = self.rules[at], sorted(self.held[at])
            stay = rule.stay(held, seen, budget)
            for place, p in enumerate(rule.rank(held, seen, budget, False)):
                worth = tuple(-w for w in rule.worth(p, seen))
                everyone.append((place > 0, p not in stay, worth if p not in stay else (), p, index))
        best = sorted(everyone)[: budget * len(places)]
        counts = [sum(entry[-1] == index for entry in best) for index in range(len(places))]
        exact = [(1 - self.alpha) * count + self.alpha * budget for count in counts]
        shares = [math.floor(x) for x in exact]
        for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[: budget * len(places) - sum(shares)]:
            shares[i] += 1
        return shares
