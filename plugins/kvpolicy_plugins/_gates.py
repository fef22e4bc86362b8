"""Gates: a number for each KV head of each layer, read from options or files, or measured on texts."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvpolicy.cache import EvictionCache
from kvpolicy.config import beside
from kvpolicy.document import Document, Loc, Unreadable, read_file
from kvpolicy.rehearsal import compress
from kvpolicy_plugins.kvzip import KVzip

HEADS = "heads"
Join = Literal["max", "mean"]
Gate = Annotated[float, Field(ge=0, le=1, strict=True)]
Gates = Annotated[tuple[Annotated[tuple[Gate, ...], Field(min_length=1)], ...], Field(min_length=1)]
"""A number from 0 to 1 for each KV head, by layer."""

DIGITS = 6
"""Decimals of a gate that is measured."""


def gates_from(value: Any) -> Any:
    """Gates as lists by layer, from a mapping of layers or from a file (YAML or JSON) that has one.

    The numbers are checked where a field is of :data:`Gates`, or here where they come from a file.

    Raises:
        ValueError: layers are missing, or the file is wrong: then with its line and column.
    """
    if isinstance(value, str):
        return _from_file(beside(value))
    return _in_order(value) if isinstance(value, Mapping) else value


def _in_order(layers: Mapping[Any, Any]) -> list[Any]:
    named = {str(layer).strip(): gates for layer, gates in layers.items()}
    if wrong := [layer for layer in named if not layer.isdecimal()]:
        raise ValueError(f"needs numbers of layers (0, 1, ...) and their gates, not {wrong[0]!r}")
    numbers = {int(layer): gates for layer, gates in named.items()}
    missing = sorted(set(range(max(numbers, default=0) + 1)) - set(numbers))
    if missing:
        raise ValueError(f"layer {missing[0]} is missing; each layer needs its list of gates")
    return [numbers[layer] for layer in sorted(numbers)]


def _from_file(file: str) -> Any:
    try:
        document = read_file(file)
    except Unreadable as error:
        raise ValueError(str(error.problem)) from None
    loc: Loc = (HEADS,) if HEADS in document.value else ()
    layers = document.value[HEADS] if loc else document.value
    if not isinstance(layers, (Mapping, list)):
        raise _wrong(document, loc, "needs gates by layer, such as 0: [0.9, 0.2]")
    try:
        found = _in_order(layers) if isinstance(layers, Mapping) else layers
    except ValueError as error:
        raise _wrong(document, loc, str(error)) from None
    for layer, gates in enumerate(found):
        if not isinstance(gates, list) or not gates:
            raise _wrong(document, (*loc, layer), "needs a list of gates, one for each KV head")
        for head, gate in enumerate(gates):
            if isinstance(gate, bool) or not isinstance(gate, (int, float)) or not 0 <= gate <= 1:
                raise _wrong(document, (*loc, layer, head), f"needs a number from 0 to 1, not {gate!r}")
    return found


def _wrong(document: Document, loc: Loc, message: str) -> ValueError:
    return ValueError(str(document.problem(loc, message)))


def measured_gates(model: Any, tokenizer: Any, contexts: Iterable[Tensor], join: Join) -> list[list[float]]:
    """How much each KV head looks back when the model repeats what it has read, by layer.

    Args:
        contexts: token ids, ``[tokens]`` each; their gates are averaged.
        join: how the scores that :class:`KVzip` gives to a head's tokens make its gate. Sinks are left out: every head
            looks at them.
    """
    policy = KVzip(budgets="uniform")
    found = []
    for context in contexts:
        cache = EvictionCache(model, policy, 1.0)
        compress(model, tokenizer, cache, context[None])
        scores = [cache.scores(layer)["score"][0, :, policy.sinks :] for layer in range(len(cache.layers))]
        found.append([(score.amax(-1) if join == "max" else score.mean(-1)).tolist() for score in scores])
    means = [torch.tensor(layer, dtype=torch.float64).mean(0) for layer in zip(*found, strict=True)]
    return [[round(gate, DIGITS) for gate in layer.tolist()] for layer in means]
