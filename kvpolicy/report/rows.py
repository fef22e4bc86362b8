"""The table of a comparison, as text: one place decides order, columns and formats for terminal and page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpolicy.evaluate.plan import BASELINE, given_text
from kvpolicy.evaluate.results import Cell, Results

LEAST = 5
"""What can be spared first."""


@dataclass(frozen=True)
class Column:
    """A heading (in several lines, if it has some), what it means, and the text of a cell beside the full cache's."""

    name: str
    meaning: str
    text: Callable[[Cell, Cell], str]
    numeric: bool = True
    spare: int = 0
    """Left out where a terminal is narrow, the highest first; 0 stays."""


def ordered(results: Results) -> list[Cell]:
    """The full cache once, then by policy as named, the largest budget first."""
    names = list(dict.fromkeys(cell.policy for cell in results.cells))
    others = [cell for cell in results.cells if cell.policy != BASELINE]
    others.sort(key=lambda cell: (names.index(cell.policy), -cell.budget_tokens))
    return [cell for cell in results.cells if cell.policy == BASELINE][:1] + others


def table_rows(results: Results) -> list[list[str]]:
    """One list of texts per row, in the order of :func:`columns`; a policy that keeps everything has one row."""
    cells, shown = ordered(results), columns(results)
    once = {cell.policy: cell for cell in reversed(cells) if cell.keeps_all}
    rows = [cell for cell in cells if not cell.keeps_all or once[cell.policy] is cell]
    return [[column.text(cell, cells[0]) for column in shown] for cell in rows]


def columns(results: Results) -> list[Column]:
    """Those that every comparison has, and one for each metric of its tasks."""
    selecting = [ATTENDS] if selects(results) else []
    return [*COLUMNS, *selecting, *(metric.column() for metric in task_metrics(results))]


def selects(results: Results) -> bool:
    """Whether a policy among them selects what a step attends to."""
    return any(cell.attended_tokens is not None for cell in results.cells)


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task, as results record it."""

    task: str
    name: str
    meaning: str
    unit: str
    better: str | None
    leading: bool
    """Whether it is the first of its task."""

    def found(self, cell: Cell) -> float | None:
        """The number of `cell`, if it has one yet."""
        return cell.tasks.get(self.task, {}).get(self.name)

    def text(self, number: float | None) -> str:
        """A number with its unit."""
        if number is None:
            return "–"
        if self.unit == "share":
            return f"{100 * number:.1f} %"
        text = f"{number:,.0f}" if number == int(number) else f"{number:.4g}"
        return f"{text} {self.unit}".rstrip()

    def about(self) -> str:
        """What it means, and which values are good."""
        return f"{self.meaning}; {self.better} is better" if self.better else self.meaning

    def column(self) -> Column:
        """The column that shows it."""
        return Column(
            f"{self.task}\n{self.name}",
            self.about(),
            lambda cell, full: self.text(self.found(cell)),
            spare=0 if self.leading else LEAST,
        )


def task_metrics(results: Results) -> list[TaskMetric]:
    """All metrics of all tasks, in the order they were asked for."""
    return [
        TaskMetric(task, name, metric["meaning"], metric["unit"], metric["better"], leading=not index)
        for task, record in results.tasks.items()
        for index, (name, metric) in enumerate(record["metrics"].items())
    ]


def percent(share: float, digits: int = 1) -> str:
    """A share as a signed percentage: ``+12.3 %``; large ones without decimals."""
    digits = digits if abs(share) < 1 else 0
    text = f"{100 * share:+,.{digits}f}"
    return ("0" if not any(digit in text for digit in "123456789") else text) + " %"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def budget_text(cell: Cell) -> str:
    """A budget as given, and in tokens where that is something else."""
    if cell.policy == BASELINE or cell.keeps_all:
        return "–"
    given = given_text(cell.budget)
    return given if isinstance(cell.budget, int) else f"{given} = {cell.budget_tokens}"


def interval_text(cell: Cell) -> str:
    """The 95 % interval of the increase."""
    if cell.policy == BASELINE:
        return "–"
    if cell.interval is None:
        return "one sample"
    return " to ".join(percent(end).removesuffix(" %") for end in cell.interval) + " %"


def _increase(cell: Cell, full: Cell) -> str:
    return "–" if cell.policy == BASELINE else percent(cell.perplexity_increase)


def _rate(cell: Cell, full: Cell) -> str:
    return "–" if cell.tokens_per_second is None else f"{cell.tokens_per_second:.1f}"


def _times(cell: Cell, full: Cell) -> str:
    if cell.tokens_per_second is None or full.tokens_per_second is None:
        return "–"
    return f"{cell.tokens_per_second / full.tokens_per_second:.2f}×"


def _share(cell: Cell, full: Cell) -> str:
    return f"{100 * cell.cache_bytes / full.cache_bytes:.0f} %"


COLUMNS = [
    Column("policy", "as named in the command", lambda c, f: c.policy, numeric=False),
    Column("budget", "as given, and in tokens", lambda c, f: budget_text(c)),
    Column("perplexity", "exponent of the mean negative log-likelihood", lambda c, f: f"{c.perplexity:.2f}"),
    Column("increase", "of perplexity over the full cache", _increase),
    Column("95 % interval", "of the increase, over samples", lambda c, f: interval_text(c)),
    Column("KL", "divergence from the full cache, nats per token", lambda c, f: f"{c.kl:.3g}", spare=1),
    Column("agreement", "same likeliest token", lambda c, f: f"{100 * c.agreement:.1f} %", spare=3),
    Column("tokens/s", "decoding, whole batch", _rate),
    Column("speed", "beside the full cache", _times, spare=4),
    Column("cache", "bytes allocated for one batch at the end", lambda c, f: size(c.cache_bytes)),
    Column("of full", "bytes beside the full cache's", _share, spare=2),
]
ATTENDS = Column(
    "attends to",
    "tokens, in the last step and the layers that select them",
    lambda c, f: "all kept" if c.attended_tokens is None else f"{c.attended_tokens:.0f}",
)
"""Shown where a policy selects."""
