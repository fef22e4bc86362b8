"""What a comparison found, as it is written to ``results.json``: enough to read, repeat and continue it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvpolicy import __version__
from kvpolicy.errors import EvaluationError

FILE = "results.json"

IDENTITY = ("model", "text", "samples", "batch", "together", "device", "threads", "versions")
"""What must be the same for cells of two runs to stand in one table."""


@dataclass
class Cell:
    """One policy at one budget, beside the full cache on the same tokens."""

    policy: str
    """As it was named: a kind or a file."""
    config: dict[str, Any]
    budget: int | float | dict[str, Any]
    """As it was given: tokens (``int``), a share (``float``), or a mapping where there is more to say."""
    budget_tokens: int
    """The mean over layers and heads that this comes to for a sample."""
    kept_tokens: int
    """The most that any layer, row and head held at the end."""
    mean_kept_tokens: float
    """The mean of all of them."""
    evictions: int
    """Tokens seen less `kept_tokens`: how many every head gave up at least."""
    perplexity: float
    perplexity_increase: float
    """Relative to the full cache: 0.12 is 12 % more."""
    interval: tuple[float, float] | None
    """95 % of `perplexity_increase`, from the differences of samples; ``None`` for a single sample."""
    kl: float
    """Mean KL divergence of the policy's predictions from the full cache's, per token, in nats."""
    agreement: float
    """Share of tokens for which both think the same next token most likely."""
    tokens_per_second: float | None
    """Decoding the scored tokens, all rows of a batch together; ``None`` where cells shared a batch."""
    tokens_per_second_per_row: float | None
    cache_bytes: int
    """Allocated at the end, for one batch."""
    scored_tokens: int
    sample_perplexities: list[float]
    seconds: float
    attended_tokens: float | None = None
    """The mean that a query head attended to in the last step, in the layers that select it; ``None``: none does."""
    notes: list[str] = field(default_factory=list)
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    """What each task found, by metric."""

    @property
    def keeps_all(self) -> bool:
        """Whether each step attends to every token, whatever the budget, as where they are only stored otherwise."""
        return self.evictions == 0 and self.kept_tokens > self.budget_tokens and self.attended_tokens is None


@dataclass
class Results:
    """A whole comparison."""

    command: str
    model: dict[str, Any]
    text: dict[str, Any]
    samples: dict[str, Any]
    batch: int
    together: int
    """The most cells that shared a batch."""
    device: str
    threads: int
    budget_rule: str
    phase: str
    interval_rule: str
    versions: dict[str, str]
    started: str
    seconds: float = 0.0
    kvpolicy: str = __version__
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each task is about: its options, and for each metric meaning, unit and which values are better."""
    cells: list[Cell] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write ``results.json`` whole or not at all."""
        text = json.dumps(asdict(self), indent=2, allow_nan=False)
        scratch = folder / f".{FILE}.{os.getpid()}"
        scratch.write_text(text + "\n", "utf-8")
        os.replace(scratch, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Read what an earlier run left in `folder`."""
        path = folder / FILE
        try:
            found = json.loads(path.read_text("utf-8"))
            cells = [Cell(**_tupled(cell)) for cell in found.pop("cells")]
            return cls(**found, cells=cells)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise EvaluationError(
                f"{path} cannot be read as results of this version ({type(error).__name__}); "
                "use another --out, or --overwrite"
            ) from error

    def take(self, earlier: Results) -> None:
        """Go on from `earlier`. What a task found there is dropped if it is asked for and now another one."""
        changed = {name for name, task in self.tasks.items() if earlier.tasks.get(name, task) != task}
        self.tasks = {**earlier.tasks, **self.tasks}
        self.cells = [
            replace(cell, tasks={name: found for name, found in cell.tasks.items() if name not in changed})
            for cell in earlier.cells
        ]
        self.started = earlier.started
        self.seconds = earlier.seconds

    def differences(self, other: Results) -> list[str]:
        """How the settings of `other` differ, as ``name: mine -> theirs``; none where cells can be mixed."""
        mine, theirs = self._identity(), other._identity()
        return [
            f"{name}: {_short(mine.get(name))} -> {_short(theirs.get(name))}"
            for name in dict.fromkeys([*mine, *theirs])
            if mine.get(name) != theirs.get(name)
        ]

    def _identity(self) -> dict[str, Any]:
        return dict(_leaves({name: getattr(self, name) for name in IDENTITY}))


def _tupled(cell: dict[str, Any]) -> dict[str, Any]:
    return {**cell, "interval": cell["interval"] and tuple(cell["interval"])}


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def command_line() -> str:
    """The command that runs now, quoted for a shell."""
    program = Path(sys.argv[0]).name if sys.argv else "kvpolicy"
    return shlex.join([program, *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Everything that numbers may depend on."""
    return {
        "kvpolicy": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "platform": platform.platform(),
        "cpu": _cpu(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
