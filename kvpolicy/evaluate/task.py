"""Evaluation tasks: what a comparison measures of each cell beside perplexity. They come as plugins."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from kvpolicy.errors import EvaluationError, KVPolicyError
from kvpolicy.plugins import registry

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicy.budget import Budget
    from kvpolicy.cache import EvictionCache
    from kvpolicy.policy import EvictionPolicy


@dataclass(frozen=True)
class Metric:
    """One number that a task finds: what it means, for tables and reports."""

    meaning: str
    unit: str = ""
    """``share`` is shown as a percentage; anything else as it is."""
    better: Literal["higher", "lower"] | None = "higher"
    """Which values are good; ``None``: neither, it is for information."""


@dataclass(frozen=True)
class Context:
    """What a task works with: a model, the policy and budget of one cell, and the comparison's limits."""

    model: Any
    tokenizer: Any
    policy: EvictionPolicy
    budget: Budget | None
    """As it was given: a share is a share of each prompt. ``None`` where the policy evicts nothing."""
    samples: Tensor
    """Token ids of the comparison's samples of its text, ``[samples, tokens]``: as long as a context may become."""
    batch: int
    """How many rows to decode together at most."""
    seed: int
    prefix: int | None = None
    """First tokens that always stay."""
    positions: str | None = None
    """The mode of positions; by default what the policy says."""

    def new_cache(self, prompt_length: int | None = None) -> EvictionCache:
        """An empty cache of this cell. A share refers to its first call, or to a prompt of `prompt_length` tokens."""
        from kvpolicy.cache import EvictionCache

        return EvictionCache(
            self.model,
            self.policy,
            self.budget,
            prompt_length=prompt_length,
            prefix=self.prefix,
            positions=self.positions,
        )

    def decode(self, rows: Tensor, first: int) -> Iterator[tuple[int, Tensor]]:
        """Read `rows` ``[batch, tokens]`` with a new cache: `first` tokens in one call, the others one by one.

        Yields the index of the token that a call predicts, and its logits ``[batch, vocabulary]``. The prediction of
        the first call has seen everything; those that follow see what the policy kept.
        """
        from kvpolicy.evaluate.score import decode

        for index, logits, _ in decode(self.model, self.new_cache(), rows, first):
            yield index, logits


class EvaluationTask:
    """Subclass, describe it in the docstring, and offer an instance by ``kvpolicy_tasks``.

    Where a task has options, make it a dataclass: they are then recorded beside its numbers.
    """

    name: str = ""
    """Unique name: what ``--tasks`` takes, and the heading of its columns."""
    metrics: Mapping[str, Metric] = {}
    """What :meth:`run` returns. The first one is drawn, and stays where a terminal is narrow."""
    least_tokens: int = 1
    """The length of sample that it needs; shorter ones are refused before a model is loaded."""

    def run(self, context: Context) -> Mapping[str, float]:
        """A number for each metric. Random numbers must follow from ``context.seed``; torch's are seeded by it."""
        raise NotImplementedError(f"{type(self).__name__} must define run()")


def chosen(tasks: Sequence[Any], tokens: int) -> list[EvaluationTask]:
    """The tasks that are named or given, each once, for samples of `tokens` tokens."""
    found: dict[str, EvaluationTask] = {}
    for given in tasks:
        task = registry().task(given) if isinstance(given, str) else given
        if not isinstance(task, EvaluationTask):
            raise EvaluationError(f"{task!r} is no evaluation task: give the name of one, or an EvaluationTask")
        if task.least_tokens > tokens:
            raise EvaluationError(
                f"task {task.name} needs samples of at least {task.least_tokens} tokens, not {tokens}: raise --tokens"
            )
        found[task.name] = task
    return list(found.values())


def record(task: EvaluationTask) -> dict[str, Any]:
    """What results say about a task, so that they can be read, and continued, without it."""
    return {
        "about": (inspect.getdoc(task) or "").partition("\n")[0],
        "options": asdict(task) if is_dataclass(task) else {},
        "metrics": {name: asdict(metric) for name, metric in task.metrics.items()},
    }


def run_task(task: EvaluationTask, context: Context, cell: str) -> dict[str, float]:
    """The numbers that `task` finds, every metric with one. torch's global random state is left as it was.

    Raises:
        EvaluationError: it failed, or returned something else. The error names the task and the `cell`.
    """
    import torch

    device = context.model.device
    try:
        with torch.inference_mode(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(context.seed)
            return _checked(task, task.run(context))
    except KVPolicyError as error:
        raise EvaluationError(f"task {task.name} under {cell}: {error}") from error
    except Exception as error:  # whatever a plugin does, the cells that are finished stay
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise EvaluationError(f"task {task.name} under {cell}: {said}") from error


def _checked(task: EvaluationTask, found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping) or set(found) != set(task.metrics):
        returned = f"{', '.join(map(str, found)) or 'none'}" if isinstance(found, Mapping) else repr(found)
        raise EvaluationError(f"it must return the metrics {', '.join(task.metrics)}, not {returned}")
    numbers = {name: float(found[name]) for name in task.metrics}
    for name, number in numbers.items():
        if not isfinite(number):
            raise EvaluationError(f"{name} is {number}, which is no number to compare")
    return numbers
