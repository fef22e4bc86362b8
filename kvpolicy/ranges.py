"""Ranges of layers or heads, as written in files: ``0``, ``0-1``, ``-4:``, ``:50%``, ``0,3,5-7``."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator

from kvpolicy.errors import ConfigError

_INDEX = re.compile(r"\d+")
_SPAN = re.compile(r"(\d+)-(\d+)")
_SLICE = re.compile(r"(-?\d+%?)?:(-?\d+%?)?")


def _checked(value: Any, named: str) -> Any:
    text = str(value).replace(" ", "") if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    parts = text.split(",")
    if not all(_INDEX.fullmatch(part) or _SPAN.fullmatch(part) or _SLICE.fullmatch(part) for part in parts):
        raise ValueError(
            f"needs {named}, such as 0, 0-1 (both included), -4: (the last four), :50% (the lower half) or 0,3,5-7"
        )
    for part in parts:
        if (span := _SPAN.fullmatch(part)) and int(span[1]) > int(span[2]):
            raise ValueError(f"{part} ends before it starts")
    return text


LayerRange = Annotated[str, BeforeValidator(partial(_checked, named="layers"))]
"""A key that names layers. ``0-1`` includes both ends; with a colon it is a slice as in Python, percents allowed."""
HeadRange = Annotated[str, BeforeValidator(partial(_checked, named="KV heads"))]
"""A key that names KV heads, written likewise."""


def layers_in(text: str, layers: int) -> list[int]:
    """The layers that `text` names in a model of so many.

    Raises:
        ConfigError: it names one that the model does not have. (A slice takes what there is.)
    """
    return _named(text, layers, "layers", "the model has")


def heads_in(text: str, heads: int) -> list[int]:
    """The KV heads that `text` names in a layer of so many; errors as of :func:`layers_in`."""
    return _named(text, heads, "heads", "a layer of the model has KV")


def _named(text: str, count: int, noun: str, has: str) -> list[int]:
    found: set[int] = set()
    for part in text.split(","):
        if span := _SLICE.fullmatch(part):
            found.update(range(count)[slice(_bound(span[1], count), _bound(span[2], count))])
            continue
        first, _, last = part.partition("-")
        if int(last or first) >= count:
            raise ConfigError(f"{noun} {text}: {has} {noun} 0 to {count - 1}")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


def _bound(text: str | None, count: int) -> int | None:
    if text is None:
        return None
    return (2 * count * int(text[:-1]) + 100) // 200 if text.endswith("%") else int(text)
