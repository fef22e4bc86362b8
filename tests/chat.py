"""What docs/recipes/chat.yaml must keep of a prompt, worked out from the attention of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy import EvictionCache
from tests import tiny

RECIPE = Path(__file__).parent.parent / "docs" / "recipes" / "chat.yaml"
PREFIX, SINKS, RECENT, WINDOW, KERNEL = 20, 4, 64, 32, 5


def check_chat(model: Any, tokens: Tensor, steps: int) -> None:
    """Run the recipe on one row of `tokens` and as many steps; each rule must have kept what it says."""
    layers, prompt = model.config.num_hidden_layers, tokens.shape[1]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(tokens, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(before)
    cache = EvictionCache(model, RECIPE, prefix=PREFIX)
    with torch.no_grad():
        model(tokens, **tiny.cache_argument(cache))
    budgets = [int(cache.kept(layer).max()) for layer in range(layers)]
    assert sum(budgets) == 256 * layers
    assert {budget - 341 for budget in budgets[: layers // 2]} <= {0, 1}, "lower layers: twice as much"
    assert {budget - 170 for budget in budgets[layers // 2 :]} <= {0, 1}, "upper layers"
    for layer, probs in enumerate(attentions):
        kept = cache.positions(layer)[0]
        group = probs.shape[1] // len(kept)
        for head, rows in enumerate(probs[0].unflatten(0, (-1, group)).mean(1)):
            expected = _streaming(prompt, budgets[layer]) if layer < 2 else _rules(rows, budgets[layer])
            assert set(kept[head].tolist()) == expected, (layer, head)
    with torch.no_grad():
        for step in range(steps):
            model(tokens[:, step : step + 1], **tiny.cache_argument(cache))
    for layer in range(layers):
        always = {*range(PREFIX), *range(prompt + steps - RECENT, prompt + steps)}
        assert all(always <= set(head.tolist()) for head in cache.positions(layer)[0])
        assert int(cache.kept(layer).max()) == budgets[layer]


def _streaming(prompt: int, budget: int) -> set[int]:
    return {*range(PREFIX), *range(prompt - (budget - PREFIX), prompt)}


def _rules(rows: Tensor, budget: int) -> set[int]:
    """`rows` are the probabilities of one KV head, ``[queries, keys]``."""
    prompt = len(rows)
    kept = {*range(max(PREFIX, SINKS)), *range(prompt - RECENT, prompt)}
    rest = budget - len(kept)
    mass = rows.double().sum(0).tolist()
    kept |= set(_best(mass, rest - rest // 2, kept))
    votes = rows[-WINDOW:].double().sum(0)[: prompt - WINDOW]
    pooled = torch.nn.functional.avg_pool1d(votes[None, None], KERNEL, stride=1, padding=KERNEL // 2)[0, 0]
    votes = [*pooled.tolist(), *rows[-WINDOW:].double().sum(0)[prompt - WINDOW :].tolist()]
    return kept | set(_best(votes, rest // 2, kept))


def _best(scores: list[float], count: int, taken: set[int]) -> list[int]:
    left = [position for position in range(len(scores)) if position not in taken]
    return sorted(left, key=lambda position: (-scores[position], position))[:count]
