"""Files checked, and what is wrong shown where it is, as compilers do."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from kvpolicy.config import examine
from kvpolicy.document import Place


def check(file: Path) -> tuple[bool, str]:
    """Whether `file` is right, and what there is to say about it."""
    config, problems = examine(file)
    if config is not None:
        return True, f"{file}: ok, {config.policy.kind}"
    return False, "\n".join("\n".join((str(problem), *_excerpt(problem.place))) for problem in problems)


def _excerpt(place: Place | None) -> list[str]:
    """The line at `place` and a caret below its column; nothing for a file that has no such line."""
    if place is None or not place.line:
        return []
    try:
        lines = re.split(r"\r\n?|\n", Path(place.file).read_text("utf-8-sig", errors="replace"))
        line = lines[place.line - 1]
    except (OSError, IndexError):
        return []
    return [line, "".join(map(_blank, line[: place.column - 1])) + "^"]


def _blank(character: str) -> str:
    """As much space as `character` takes."""
    if character == "\t":
        return character
    if unicodedata.combining(character):
        return ""
    return "  " if unicodedata.east_asian_width(character) in "WF" else " "
