"""A decode step of a full cache has fixed shapes, waits for nothing and compiles to one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpolicy import EvictionCache
from tests import tiny
from tests.reference import RULES

DEEP = {
    "kind": "protect",
    "sinks": 1,
    "recent": 2,
    "of": {
        "kind": "layers",
        "at": {"0": "streaming_llm"},
        "default": {
            "kind": "union",
            "parts": [{"take": 0.5, "of": "heavy"}, {"take": 0.5, "of": {"kind": "snapkv", "window": 1}}],
        },
    },
}
BLEND = {"kind": "blend", "parts": ["h2o", "recent"]}
POLICIES = {**{kind: kind for kind in RULES if kind != "full"}, "composition": DEEP, "blend": BLEND}
DIVIDED = {"tokens": 10, "heads": {"kind": "adaptive", "alpha": 0.1}, "layers": {"kind": "pyramid", "beta": 2}}
# What waits for the device, or makes shapes depend on data.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal.default")


class Strict(TorchDispatchMode):
    """Refuses operations that synchronise or have data-dependent shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if any(name in str(func) for name in WAITING):
            raise AssertionError(f"a decode step called {func}")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def waits_for_nothing(model: Any, policy: Any, budget: Any, padded: bool, lengths: list[int]) -> None:
    """Three decode steps after prompts of these lengths, none of which may synchronise."""
    cache = EvictionCache(model, policy, budget=budget)
    tokens, mask = tiny.left_pad(lengths)
    model(tokens, attention_mask=mask if padded else None, **tiny.cache_argument(cache))
    for step in range(3):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        places = torch.full((2, 1), max(lengths) + step)
        with Strict() as strict:
            model(
                tiny.ids(2, 1, step),
                attention_mask=mask if padded else None,
                position_ids=places,
                **tiny.cache_argument(cache),
            )
        assert strict.calls > 20


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("kind", list(POLICIES))
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [10, 0.5, DIVIDED], ids=["tokens", "share", "divided"])
def test_no_synchronisation_in_a_decode_step(kind: str, family: str, padded: bool, budget: Any) -> None:
    waits_for_nothing(tiny.family(family, dtype=torch.float32), POLICIES[kind], budget, padded, [21, 13])


def test_the_strict_mode_would_notice() -> None:
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Strict():
        bool(torch.ones(1).sum() > 0)


@torch.no_grad()
def compiles_once(model: Any, policy: Any, budget: Any, prompt: int, steps: int, backend: str = "eager") -> None:
    """Decode steps after a prompt are one graph, compiled once, and write what they write uncompiled."""

    def run(step: Any) -> tuple[list[int], list[Any], int]:
        cache = EvictionCache(model, policy, budget=budget)
        token = model(tiny.ids(1, prompt), **tiny.cache_argument(cache)).logits[:, -1:].argmax(-1)
        tokens = []
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(steps):
                token = step(token, **tiny.cache_argument(cache)).logits[:, -1:].argmax(-1)
                tokens.append(int(token))
        return tokens, cache.positions(1).tolist(), cache.get_seq_length()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = run(torch.compile(model.forward, fullgraph=True, backend=backend))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert compiled == run(model.forward)
    assert compiled[2] == prompt + steps


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("kind", list(POLICIES))
@pytest.mark.parametrize("budget", [10, DIVIDED], ids=["tokens", "divided"])
def test_a_steady_step_compiles_once_to_the_same_tokens(kind: str, family: str, budget: Any) -> None:
    # The inductor backend once, since it is slow to start; tracing, guards and recompilation are dynamo's.
    backend = "inductor" if (kind, family, budget) == ("h2o", "llama", 10) else "eager"
    compiles_once(tiny.family(family, dtype=torch.float32), POLICIES[kind], budget, 16, 50, backend)
