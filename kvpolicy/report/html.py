"""Results as one page that needs nothing else: no network, no script, no fonts to fetch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from math import log10
from typing import Any

from kvpolicy.evaluate.plan import BASELINE, given_text
from kvpolicy.evaluate.results import Cell, Results
from kvpolicy.report import plot
from kvpolicy.report.rows import (
    TaskMetric,
    columns,
    interval_text,
    ordered,
    percent,
    selects,
    size,
    table_rows,
    task_metrics,
)

_INCREASES = [
    0,
    1,
    10,
    100,
    1000,
    10**4,
    10**6,
    0.5,
    0.2,
    0.1,
    2,
    5,
    0.05,
    0.02,
    20,
    50,
    -0.1,
    -0.2,
    -0.5,
    -0.05,
    -0.02,
]
"""Ticks of the increase, in order of importance."""

READING = [
    "<b>Perplexity increase</b> is how much more surprised the model is by the next token than with the full "
    "cache, on the same tokens; 0 % is nothing lost. Whiskers are 95 % intervals over samples. Where those "
    "of two policies overlap widely, this run does not tell them apart: take more samples.",
    "<b>KL divergence</b> is how far the predictions have moved from the full cache's. It moves even where "
    "perplexity happens not to. <b>Agreement</b> is how often both find the same next token most likely.",
    "<b>Tokens per second</b> are for decoding the scored tokens on this machine with this batch, all work "
    "of the policy included; other work on the machine spoils them. What is saved grows with the length and "
    "the batch; a short context may gain nothing.",
    "<b>Cache bytes</b> are what is allocated at the end for one batch: keys, values, positions, and what "
    "the policy remembers about each token.",
]
SELECTING = (
    "<b>Attends to</b>: a policy that selects what each step attends to keeps every token. Its budget is of what it "
    "attends to; what it may save is time, and its cache takes no fewer bytes than the full one."
)
LIMITS = [
    "Predicting running text leans on recent tokens. A policy can look good here and still have dropped the "
    "one sentence that a question asks for later.",
    "It is one model, one text and one length. Other models, longer contexts and other kinds of text may "
    "rank policies differently.",
    "Tokens are evicted one at a time as they come. Cutting down a long prompt that was read at once, with "
    "every attention score at hand, is another situation.",
]


def report(results: Results) -> str:
    """The page, as text."""
    where = results.samples
    lead = (
        f"{where['count']} samples of {where['length']} tokens from {results.text['spec']}, decoded "
        f"token by token by {results.model['spec']} ({results.model['dtype']}) on {results.device}."
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="kvpolicy {escape(results.kvpolicy)}">
<title>KV-cache policies on {escape(str(results.model["spec"]))}</title>
<style>{files(__package__).joinpath("page.css").read_text("utf-8")}</style>
</head>
<body>
<h1>KV-cache policies on {escape(str(results.model["spec"]))}</h1>
<p class="soft">{escape(lead)}</p>
{_notes(results)}
{_plots(results)}
<h2>All numbers</h2>
{_table(results)}
<h2>How to read this</h2>
{_list([*READING, *([SELECTING] if selects(results) else []), *_about_tasks(results)])}
<h2>What this does not show</h2>
{_list(LIMITS)}
<h2>Where the numbers come from</h2>
{_provenance(results)}
<h2>The command</h2>
<pre>{escape(results.command)}</pre>
</body>
</html>
"""


def _about_tasks(results: Results) -> list[str]:
    texts = []
    for task, record in results.tasks.items():
        metrics = "; ".join(f"{m.name} is {m.about()}" for m in task_metrics(results) if m.task == task)
        texts.append(f"<b>{escape(task)}</b>: {escape(record['about'])} {escape(metrics)}.")
    return texts


def _notes(results: Results) -> str:
    notes = [f"{cell.policy} {given_text(cell.budget)}: {note}." for cell in ordered(results) for note in cell.notes]
    if results.samples["count"] == 1:
        notes.append("One sample gives no interval: differences may be chance.")
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _plots(results: Results) -> str:
    full, *cells = ordered(results)
    if not cells:
        return "<p>No policy has been measured yet, only the full cache.</p>"
    charts = _Charts(full, cells)
    drawn = [
        charts.draw(
            "Perplexity increase",
            "over the full cache",
            lambda cell: cell.perplexity_increase,
            lambda cell: f"{percent(cell.perplexity_increase)} ({interval_text(cell)})",
            _increase_scale,
            lambda cell: cell.interval if cell.policy != BASELINE else None,
        ),
        charts.draw(
            "KL divergence from the full cache",
            "nats per token",
            lambda cell: cell.kl if cell.policy != BASELINE else None,
            lambda cell: f"{cell.kl:.4f} nats, same top token {100 * cell.agreement:.1f} %",
            lambda values: plot.logarithmic(values, "{:g}".format),
        ),
        *(charts.of_task(metric) for metric in task_metrics(results) if metric.leading),
        charts.draw(
            "Decoding speed",
            f"tokens per second, batch {results.batch}",
            lambda cell: cell.tokens_per_second,
            lambda cell: f"{cell.tokens_per_second:.1f} tokens/s",
            lambda values: plot.linear(values, "{:g}".format),
        ),
        charts.draw(
            "Cache size",
            f"bytes, batch {results.batch}",
            lambda cell: cell.cache_bytes,
            lambda cell: size(cell.cache_bytes),
            lambda values: plot.linear(values, size),
        ),
    ]
    legend = [f"<li>{plot.marker(style)}{escape(name)}</li>" for style, name in enumerate(charts.names)]
    legend.append(f"<li>{plot.flat_marker()}{BASELINE} cache</li>")
    return f'<ul class="legend">{"".join(legend)}</ul>\n<div class="plots">{"".join(drawn)}</div>'


class _Charts:
    """Draws numbers of cells over their budgets: a line for each policy, and one all across for the full cache."""

    def __init__(self, full: Cell, cells: Sequence[Cell]) -> None:
        self.full = full
        self.cells = cells
        self.names = list(dict.fromkeys(cell.policy for cell in cells))
        self.budgets = plot.budgets_scale([cell.budget_tokens for cell in cells])

    def draw(
        self,
        title: str,
        y_label: str,
        value: Callable[[Cell], float | None],
        text: Callable[[Cell], str],
        scale: Callable[[Sequence[float]], plot.Scale],
        interval: Callable[[Cell], tuple[float, float] | None] = lambda cell: None,
    ) -> str:
        """A chart of the cells that have a value; nothing where none has."""

        def points(cells: Iterable[Cell]) -> list[plot.Point]:
            found = []
            for cell in cells:
                if (number := value(cell)) is not None:
                    label = f"{cell.policy}, {cell.budget_tokens} tokens: {text(cell)}"
                    found.append(plot.Point(cell.budget_tokens, number, label, *(interval(cell) or ())))
            return found

        lines = [points(cell for cell in self.cells if cell.policy == name) for name in self.names]
        series = [plot.Series(style, line) for style, line in enumerate(lines) if line]
        flat = value(self.full)
        across = None if flat is None else plot.Point(0, flat, f"{BASELINE}: {text(self.full)}")
        drawn = [point for one in series for point in one.points] + ([across] if across else [])
        heights = [height for point in drawn for height in (point.y, point.low, point.high) if height is not None]
        return plot.chart(title, y_label, series, self.budgets, scale(heights), across) if heights else ""

    def of_task(self, metric: TaskMetric) -> str:
        """A chart of a task's numbers, from zero; nothing where some are below."""
        found = [number for cell in (self.full, *self.cells) if (number := metric.found(cell)) is not None]
        if min(found, default=-1) < 0:
            return ""
        title = f"{metric.task}: {metric.name}"
        return self.draw(
            title[:1].upper() + title[1:],
            f"{metric.better} is better" if metric.better else metric.unit,
            metric.found,
            lambda cell: metric.text(metric.found(cell)),
            lambda values: plot.linear(values, metric.text),
        )


def _increase_scale(values: Sequence[float]) -> plot.Scale:
    """Ratios of perplexities on a logarithmic axis, labelled as increases: small and huge ones both show."""
    return plot.fitted(values, _INCREASES, lambda tick: percent(tick, 0), lambda value: log10(1 + value))


def _table(results: Results) -> str:
    head = "".join(f'<th scope="col" title="{escape(c.meaning)}">{escape(c.name)}</th>' for c in columns(results))
    groups = []
    for _, rows in groupby(table_rows(results), key=lambda row: row[0]):
        lines = ("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
        groups.append(f'<tbody class="group">{"".join(lines)}</tbody>')
    table = f"<table><thead><tr>{head}</tr></thead>{''.join(groups)}</table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _provenance(results: Results) -> str:
    configs = {cell.policy: cell.config for cell in results.cells}
    where = results.samples
    facts: dict[str, Any] = {
        "model": _facts(results.model),
        "text": _facts(results.text),
        "samples": f"{where['count']} of {where['length']} tokens, seed {where['seed']}, from tokens "
        f"{', '.join(map(str, where['positions']))} of the text; scored from token {where['scored_from']} on",
        "policies": "; ".join(f"{name}: {_facts(config)}" for name, config in configs.items()),
        "budget": results.budget_rule,
        "phase": results.phase,
        "interval": results.interval_rule,
        "tasks": "; ".join(" ".join([name, _facts(task["options"])]).strip() for name, task in results.tasks.items()),
        "machine": f"{results.device}, {results.threads} threads, {results.batch} samples in a batch",
        "versions": _facts(results.versions),
        "measured": f"{results.started}, {results.seconds:.0f} s in all",
    }
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items() if v) + "</dl>"


def _facts(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.items() if value is not None)


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
