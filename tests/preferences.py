"""CAKE's layer budgets, recomputed from the whole attention of a model that evicts nothing: floats, lists, loops."""

from __future__ import annotations

import math
from fractions import Fraction
from statistics import variance
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "kvpolicy_test_preferences"


def plain_attention(model: Any, ids: Tensor) -> list[list[list[list[float]]]]:
    """What each query gives to each token, ``[layers][query_heads][rows][columns]``, for one unpadded row of `ids`."""
    found: list[Any] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any):
        group, length = query.shape[1] // key.shape[1], query.shape[2]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        probs = (query @ key.transpose(-1, -2) * scaling).masked_fill(later, -torch.inf).softmax(-1)
        found.append(probs[0].tolist())
        return (probs @ value).transpose(1, 2).contiguous(), probs

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda **kwargs: None)
    before, model.config._attn_implementation = model.config._attn_implementation, NAME
    try:
        with torch.no_grad():
            model(ids[None], use_cache=False)
    finally:
        model.config._attn_implementation = before
    return found


def entropy_and_variance(heads: list[list[list[float]]], window: int) -> tuple[float, float]:
    """Of the attention from the last `window` queries to the tokens before them."""
    entropy = spread = 0.0
    for rows in heads:
        past = [row[: len(rows) - window] for row in rows[-window:]]
        entropy -= sum(p * math.log(p) for row in past for p in row if p > 0)
        if window > 1:
            spread += sum(variance(column) for column in zip(*past, strict=True))
    return entropy, spread


def cake_budgets(
    model: Any,
    ids: Tensor,
    average: int,
    window: int,
    tau1: float = 1.0,
    tau2: float = 1.0,
    evicting: list[int] | None = None,
) -> list[list[int]]:
    """Tokens of the layers in the end, and before that after each layer: ``[stage][layer]``, the last one first."""
    attention = plain_attention(model, ids)
    evicting = list(range(len(attention))) if evicting is None else evicting
    length = len(attention[0][0])
    found = [entropy_and_variance(attention[layer], window) for layer in evicting]
    wanted = [h ** (1 / tau1) * v ** (1 / tau2) for h, v in found]
    stages: list[list[int]] = []
    for count in range(1, len(wanted) + 1):
        exact = filled(wanted[:count], (average - window) * len(wanted), length - window)
        held = [*(stages[-1] if stages else []), length]
        stages.append(rounded([part + window for part in exact], held))
    return stages[::-1]


def filled(wanted: list[float], amount: int, most: int) -> list[Fraction]:
    """In proportion; what is above `most` goes to the others, in proportion again."""
    parts = [Fraction(0)] * len(wanted)
    full: set[int] = set()
    while True:
        total = sum(Fraction(w) for i, w in enumerate(wanted) if i not in full)
        left = amount - most * len(full)
        for i, w in enumerate(wanted):
            parts[i] = Fraction(most) if i in full else Fraction(w) * left / total
        over = {i for i, part in enumerate(parts) if part > most}
        if not over:
            return parts
        full |= over
        if len(full) == len(wanted):
            return [Fraction(most)] * len(wanted)


def rounded(exact: list[Fraction], held: list[int]) -> list[int]:
    """One after the other to the one that has lost most by rounding down, as long as it still holds another."""
    tokens = [math.floor(part) for part in exact]
    for _ in range(round(sum(exact)) - sum(tokens)):
        able = [i for i in range(len(exact)) if tokens[i] < held[i]]
        tokens[max(able, key=lambda i: (exact[i] - tokens[i], -i))] += 1
    return tokens
