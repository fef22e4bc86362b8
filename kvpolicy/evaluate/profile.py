"""Making a profile of a model's KV heads from texts: what ``kvpolicy profile`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvpolicy.errors import EvaluationError
from kvpolicy.evaluate.models import check_model, load_model
from kvpolicy.evaluate.results import command_line, versions
from kvpolicy.evaluate.texts import load_text, windows_of
from kvpolicy.profile import measure_gates, write_profile
from kvpolicy.report.progress import Progress

SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Request:
    """What to profile, and on what."""

    model: str
    texts: Sequence[str]
    """Text files, or ``builtin:`` ones; samples are taken from each."""
    tokens: int = 512
    """Length of a sample."""
    samples: int = 4
    """How many of each text."""
    join: Literal["max", "mean"] = "max"
    """How the scores of a head's tokens make its gate."""
    seed: int = 0
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.texts:
            raise EvaluationError("no text given: name files, or builtin:python-docs")
        for name, least in {"tokens": 16, "samples": 1, "threads": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise EvaluationError(f"{name} must be at least {least}, not {value}")


def make_profile(
    request: Request, out: Path, *, overwrite: bool = False, progress: Progress | None = None
) -> list[list[float]]:
    """Write the file `out`, which loads as ``duo_attention``; return its gates.

    Raises:
        EvaluationError: a model, text or file that it cannot work with; as far as possible before anything is loaded.
    """
    progress = progress or Progress()
    _check_out(out, overwrite)
    texts = [load_text(text) for text in request.texts]
    check_model(request.model, request.dtype, request.device)
    if request.threads:
        torch.set_num_threads(request.threads)
    progress.stage(f"loading {request.model}")
    model, tokenizer, record = load_model(request.model, request.dtype, request.device)
    contexts = [
        torch.tensor(window, device=model.device)
        for text, _ in texts
        for window in windows_of(text, tokenizer, request.tokens, request.samples, request.seed)[0]
    ]
    with torch.inference_mode():
        gates = measure_gates(model, tokenizer, _told(contexts, progress), request.join)
    about = {
        "command": command_line(),
        "model": record,
        "texts": [found for _, found in texts],
        "tokens": request.tokens,
        "samples": request.samples,
        "join": request.join,
        "seed": request.seed,
        "versions": versions(),
    }
    write_profile(out, gates, about)
    return gates


def _told(contexts: list[Tensor], progress: Progress) -> Iterator[Tensor]:
    for number, context in enumerate(contexts, 1):
        progress.stage(f"sample {number} of {len(contexts)}")
        yield context


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix not in SUFFIXES:
        raise EvaluationError(f"--out {out} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, to be read again")
    if not out.parent.is_dir():
        raise EvaluationError(f"cannot write to {out}: there is no folder {out.parent}")
    if out.exists() and not overwrite:
        raise EvaluationError(f"{out} is there already: add --overwrite, or give another --out")
