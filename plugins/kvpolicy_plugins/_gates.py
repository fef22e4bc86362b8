"""Profiles: a number for each KV head of each layer, made from a pass over texts and read by policies that tell heads
apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvpolicy.cache import EvictionCache
from kvpolicy.config import beside
from kvpolicy.document import Document, Loc, Unreadable, read_file
from kvpolicy.errors import EvaluationError
from kvpolicy.rehearsal import compress

HEADS = "heads"
Gate = Annotated[float, Field(ge=0, le=1, strict=True)]
Gates = Annotated[tuple[Annotated[tuple[Gate, ...], Field(min_length=1)], ...], Field(min_length=1)]
"""A number from 0 to 1 for each KV head, by layer."""

SCORES = {"kind": "kvzip", "budgets": "uniform"}
"""The policy whose scores make a profile: the most attention each token gets when the model repeats the context."""


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


# -- making one ------------------------------------------------------------------------------------------------


def measure_gates(
    model: Any, tokenizer: Any, contexts: Iterable[Tensor], join: Literal["max", "mean"] = "max"
) -> list[list[float]]:
    """A gate for each KV head, by layer: how much it looks back when the model repeats what it has read.

    Args:
        contexts: token ids, ``[tokens]`` each.
        join: how the scores of a head's tokens make its gate, ``max`` or ``mean``; gates of contexts are averaged.
            Sinks are left out: every head looks at them.
    """
    found = []
    for context in contexts:
        cache = EvictionCache(model, SCORES, 1.0)
        compress(model, tokenizer, cache, context[None])
        sinks = cache.policy.sinks  # type: ignore[attr-defined]
        scores = [cache.scores(layer)["score"][0, :, sinks:] for layer in range(len(cache.layers))]
        found.append([(score.amax(-1) if join == "max" else score.mean(-1)).tolist() for score in scores])
    return [torch.tensor(layer, dtype=torch.float64).mean(0).tolist() for layer in zip(*found, strict=True)]


def profile_text(gates: Sequence[Sequence[float]], about: Mapping[str, Any]) -> str:
    """A file that loads as ``duo_attention``; `about` says where the gates come from."""
    lines = ["kind: duo_attention", f"{HEADS}:"]
    lines += [f"  {layer}: [{', '.join(f'{gate:.6f}' for gate in its)}]" for layer, its in enumerate(gates)]
    lines += ["about:", *(f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in about.items())]
    return "\n".join(lines) + "\n"


def write_profile(file: Path, gates: Sequence[Sequence[float]], about: Mapping[str, Any]) -> None:
    """Write :func:`profile_text`, as JSON where the name of `file` says so.

    Raises:
        EvaluationError: it cannot be written.
    """
    text = profile_text(gates, about)
    if file.suffix == ".json":
        rounded = {str(layer): [round(gate, 6) for gate in its] for layer, its in enumerate(gates)}
        text = (
            json.dumps({"kind": "duo_attention", HEADS: rounded, "about": about}, indent=1, ensure_ascii=False) + "\n"
        )
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise EvaluationError(f"cannot write to {file}: {error.strerror or error}") from error
