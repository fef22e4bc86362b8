"""The configurations in docs/recipes: each runs, stays in bounds, and one is followed token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpolicy import EvictionCache, load
from kvpolicy.config import read
from tests import tiny
from tests.chat import RECIPE, check_chat

RECIPES = sorted(RECIPE.parent.glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_every_recipe_runs_and_stays_in_bounds(file: Path, family: str) -> None:
    config = read(file)
    model = tiny.family(family, torch.float32, layers=3)
    cache = EvictionCache(model, file, prefix=10 if file == RECIPE else None)
    prompt, steps, layers = 700, 40, 3
    with torch.no_grad():
        model(tiny.ids(1, prompt), **tiny.cache_argument(cache))
        for step in range(steps):
            logits = model(tiny.ids(1, 1, step), **tiny.cache_argument(cache)).logits
    assert logits.isfinite().all()
    assert config.budget is not None
    room = config.policy.room(decoding=True)
    most = config.budget.resolve(prompt + steps)
    if (storage := config.policy.storage) is not None:
        most = storage.tokens(most, width=8, itemsize=4, beside=4)
    most += min(room, steps)
    kept = [cache.kept(layer).float().mean().item() for layer in range(layers)]
    assert sum(kept) <= layers * most
    assert cache.positions(2)[0, 0, -1] == prompt + steps - 1


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_the_chat_keeps_what_each_rule_says(family: str) -> None:
    check_chat(tiny.family(family, layers=4), tiny.ids(1, 600), steps=30)


def test_expressions_are_the_policies_they_are_named_after() -> None:
    model, tokens = tiny.family("llama"), tiny.ids(1, 340)

    def kept(policy: object) -> list[object]:
        cache = EvictionCache(model, policy, budget=256)
        found = []
        with torch.no_grad():
            for part in tokens.split([300, *[1] * 40], dim=1):
                model(part, **tiny.cache_argument(cache))
                found.append(cache.positions(1).tolist())
        return found

    for name, kind in (("streaming-llm", "streaming_llm"), ("h2o", "h2o")):
        assert kept(load(RECIPE.parent / f"{name}.yaml")) == kept(kind)
