"""Scoring one policy: token by token, as a model decodes, against what the full cache predicted.

Scoring a text in one call would leak the future: a policy could evict by attention from tokens still to come.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from kvpolicy.budget import Budget
from kvpolicy.cache import EvictionCache
from kvpolicy.errors import EvaluationError
from kvpolicy.evaluate.models import cache_argument, last_logits_only
from kvpolicy.evaluate.together import Together
from kvpolicy.policy import UNBOUNDED, EvictionPolicy


class Tape:
    """The full cache's log-probabilities, in a temporary file: written once, read by each policy.

    A file rather than memory: 1,000 tokens of a vocabulary of 50,000 are 200 MB. It is gone when closed.
    """

    def __init__(self, folder: Path, tokens: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by close()
        self._folder = folder
        self._tokens = tokens
        self.complete = False

    def write(self, log_probs: Tensor) -> None:
        """Add the next rows, ``[rows, vocabulary]``."""
        if self._file.tell() == 0:
            self._check_room(self._tokens * log_probs.shape[-1] * log_probs.element_size())
        log_probs.cpu().numpy().tofile(self._file)

    def read(self, like: Tensor) -> Tensor:
        """The next rows, of the shape of `like`."""
        block = np.fromfile(self._file, np.float32, like.numel())
        return torch.from_numpy(block).view(like.shape).to(like.device)

    def rewind(self) -> None:
        """Back to the first rows."""
        self._file.seek(0)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _check_room(self, needed: int) -> None:
        if (free := shutil.disk_usage(self._folder).free) < needed:
            raise EvaluationError(
                f"the full cache's predictions need {needed / 1e9:.1f} GB in {self._folder}, "
                f"where {free / 1e9:.1f} GB are free: lower --samples or --tokens, or use a larger disk"
            )


@dataclass
class Measurement:
    """What one run found. Sums are over scored tokens."""

    sample_nll: list[float] = field(default_factory=list)
    """Mean negative log-likelihood of each sample."""
    kl: float = 0.0
    agreed: int = 0
    scored: int = 0
    decode_seconds: float = 0.0
    decode_calls: int = 0
    seconds: float = 0.0
    cache_bytes: int = 0
    kept: int = 0
    """The most that any layer, row and head held at the end."""
    fewest: int = 2**31
    """The fewest."""
    mean_kept: float = 0.0
    attended: float | None = None
    """What the last step attended to in the layers that select it: their mean, over query heads too."""
    seen: int = 0


@dataclass(frozen=True)
class Setup:
    """What all runs of a comparison have in common: the model, the tokens, and which of them are scored."""

    model: Any
    windows: Tensor
    """``[samples, length]``."""
    scored_from: int
    batch: int
    prefix: int | None = None
    """First tokens that always stay."""
    positions: str | None = None
    """The mode of positions; by default what a policy says."""

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.windows.shape[1]

    @property
    def scored(self) -> int:
        """Scored tokens of all samples."""
        return len(self.windows) * (self.length - self.scored_from)

    def cache(self, policy: EvictionPolicy, budget: Budget | None) -> EvictionCache:
        """A cache for a batch of samples."""
        return EvictionCache(
            self.model, policy, budget, prompt_length=self.length, prefix=self.prefix, positions=self.positions
        )

    def held_at_first(self, policy: EvictionPolicy, budget: Budget | None) -> int:
        """How many tokens of a sample are fed in one call, before anything is evicted."""
        return min(_without_eviction(self.cache(policy, budget)), self.scored_from - 1)


@torch.inference_mode()
def measure(
    setup: Setup,
    cells: Sequence[tuple[EvictionPolicy, Budget | None]],
    tape: Tape,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[Measurement]:
    """Run policies under their budgets over all samples. The first run through a tape is the reference.

    Several cells are rows of one batch: much faster for all of them, and the time of each is then not known. They must
    be able to hold equally many tokens before they evict (:func:`held_at_first`).
    """
    started = perf_counter()
    found = [Measurement() for _ in cells]
    tape.rewind()
    for rows in setup.windows.split(setup.batch):
        caches = [setup.cache(policy, budget) for policy, budget in cells]
        cache = caches[0] if len(caches) == 1 else Together(caches, len(rows))
        first = min(*(_without_eviction(cache) for cache in caches), setup.scored_from - 1)
        losses = torch.zeros(len(cells), len(rows), dtype=torch.float64)
        for index, logits, seconds in decode(setup.model, cache, rows.repeat(len(cells), 1), first):
            if index >= setup.scored_from:
                losses += _score(logits.unflatten(0, losses.shape), rows[:, index], tape, found).double().cpu()
                if len(cells) == 1:
                    found[0].decode_seconds += seconds
                    found[0].decode_calls += 1
            advance(len(cells) * len(rows) * (first if index == first else 1))
        for own, cache, loss, (policy, budget) in zip(found, caches, losses, cells, strict=True):
            _check_finite(loss, policy, budget, setup.model)
            own.sample_nll += (loss / (setup.length - setup.scored_from)).tolist()
            _look_into(cache, own, len(rows) / len(setup.windows))
    tape.complete = True
    for own in found:
        own.seconds = (perf_counter() - started) / len(cells)
    return found


def _look_into(cache: EvictionCache, found: Measurement, part: float) -> None:
    """Add to `found` what `cache` holds at the end, for a `part` of the samples."""
    found.cache_bytes = max(found.cache_bytes, cache.nbytes())
    kept = torch.cat([cache.kept(layer).flatten().cpu() for layer in range(len(cache.layers))]).double()
    found.kept = max(found.kept, int(kept.max()))
    found.fewest = min(found.fewest, int(kept.min()))
    found.mean_kept += float(kept.mean()) * part
    if selecting := [layer for layer, pool in enumerate(cache.layers) if pool.policy.selects]:
        counts = [(cache.attended(layer) >= 0).sum(-1).double().mean() for layer in selecting]
        found.attended = (found.attended or 0.0) + float(sum(counts)) / len(counts) * part
    found.seen = int(cache.get_seq_length())


def decode(model: Any, cache: Any, rows: Tensor, first: int) -> Iterator[tuple[int, Tensor, float]]:
    """Feed `first` tokens of each row in one call, the others one by one.

    Yields the index of the token that a call predicts, its logits ``[rows, vocabulary]`` in float32, and the
    seconds the call took. The last token has nothing left to predict and is not fed.
    """
    options = {cache_argument(model): cache, "use_cache": True, **last_logits_only(model)}
    fed = 0
    while fed < rows.shape[1] - 1:
        chunk = rows[:, fed : fed + (1 if fed else first)]
        started = _now(rows.device)
        logits = model(input_ids=chunk, **options).logits[:, -1]
        seconds = _now(rows.device) - started
        fed += chunk.shape[1]
        yield fed, logits.float(), seconds


def _without_eviction(cache: EvictionCache) -> int:
    """How many tokens can be fed before any layer evicts."""
    budgets = [
        pool.budget for pool in cache.layers if pool.budget is not None and (pool.bounded or pool.policy.budgeted)
    ]
    return min((budget.resolve(1) for budget in budgets), default=UNBOUNDED)


def _score(logits: Tensor, targets: Tensor, tape: Tape, found: Sequence[Measurement]) -> Tensor:
    """Negative log-likelihoods ``[cells, rows]`` of `targets`, from `logits` ``[cells, rows, vocabulary]``.

    Divergence and agreement are added to `found`.
    """
    losses = logits.new_empty(logits.shape[:2])
    reference = tape.read(logits[0]) if tape.complete else None
    for loss, own, measured in zip(losses, logits, found, strict=True):
        log_probs = own.log_softmax(-1)
        if reference is not None:
            divergences = kl_div(log_probs, reference, reduction="none", log_target=True).sum(-1)
            measured.kl += float(divergences.clamp(min=0).sum())  # below zero it is rounding
            measured.agreed += int((log_probs.argmax(-1) == reference.argmax(-1)).sum())
        else:
            tape.write(log_probs)
            measured.agreed += len(targets)
        measured.scored += len(targets)
        loss.copy_(-log_probs.gather(-1, targets[:, None])[:, 0])
    return losses


def _check_finite(losses: Tensor, policy: EvictionPolicy, budget: Budget | None, model: Any) -> None:
    if not losses.isfinite().all():
        under = "" if budget is None else f" with a budget of {budget}"
        dtype = str(model.dtype).removeprefix("torch.")
        raise EvaluationError(f"{policy.kind}{under}: predictions are not finite in {dtype}; try --dtype float32")


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()
