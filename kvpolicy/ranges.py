"""Ranges of layers, as written in files: ``0``, ``0-1``, ``-4:``, ``:50%``, ``0,3,5-7``."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from kvpolicy.errors import ConfigError

_INDEX = re.compile(r"\d+")
_SPAN = re.compile(r"(\d+)-(\d+)")
_SLICE = re.compile(r"(-?\d+%?)?:(-?\d+%?)?")


def _checked(value: Any) -> Any:
    text = str(value).replace(" ", "") if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    parts = text.split(",")
    if not all(_INDEX.fullmatch(part) or _SPAN.fullmatch(part) or _SLICE.fullmatch(part) for part in parts):
        raise ValueError(
            "needs layers, such as 0, 0-1 (both included), -4: (the last four), :50% (the lower half) or 0,3,5-7"
        )
    for part in parts:
        if (span := _SPAN.fullmatch(part)) and int(span[1]) > int(span[2]):
            raise ValueError(f"{part} ends before it starts")
    return text


LayerRange = Annotated[str, BeforeValidator(_checked)]
"""A key that names layers. ``0-1`` includes both ends; with a colon it is a slice as in Python, percents allowed."""


def layers_in(text: str, layers: int) -> list[int]:
    """The layers that `text` names in a model of so many.

    Raises:
        ConfigError: it names one that the model does not have. (A slice takes what there is.)
    """
    found: set[int] = set()
    for part in text.split(","):
        if span := _SLICE.fullmatch(part):
            found.update(range(layers)[slice(_bound(span[1], layers), _bound(span[2], layers))])
            continue
        first, _, last = part.partition("-")
        if int(last or first) >= layers:
            raise ConfigError(f"layers {text}: the model has layers 0 to {layers - 1}")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


def _bound(text: str | None, layers: int) -> int | None:
    if text is None:
        return None
    return (2 * layers * int(text[:-1]) + 100) // 200 if text.endswith("%") else int(text)
