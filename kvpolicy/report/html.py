"""Results as one page that needs nothing else: no network, no script, no fonts to fetch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from math import log10
from typing import Any

from kvpolicy.evaluate.plan import BASELINE
from kvpolicy.evaluate.results import Cell, Results
from kvpolicy.report import plot
from kvpolicy.report.rows import COLUMNS, interval_text, ordered, percent, size, table_rows

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
{_list(READING)}
<h2>What this does not show</h2>
{_list(LIMITS)}
<h2>Where the numbers come from</h2>
{_provenance(results)}
<h2>The command</h2>
<pre>{escape(results.command)}</pre>
</body>
</html>
"""


def _notes(results: Results) -> str:
    notes = [f"{cell.policy} {cell.budget}: {note}." for cell in ordered(results) for note in cell.notes]
    if results.samples["count"] == 1:
        notes.append("One sample gives no interval: differences may be chance.")
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _plots(results: Results) -> str:
    full, *cells = ordered(results)
    if not cells:
        return "<p>No policy has been measured yet, only the full cache.</p>"
    names = list(dict.fromkeys(cell.policy for cell in cells))
    x = plot.budgets_scale([cell.budget_tokens for cell in cells])

    def draw(
        title: str,
        y_label: str,
        value: Callable[[Cell], float],
        text: Callable[[Cell], str],
        scale: Callable[[Sequence[float]], plot.Scale],
        interval: Callable[[Cell], tuple[float, float] | None] = lambda cell: None,
        baseline: bool = True,
    ) -> str:
        def point(cell: Cell) -> plot.Point:
            low, high = interval(cell) or (None, None)
            title = f"{cell.policy}, {cell.budget_tokens} tokens: {text(cell)}"
            return plot.Point(cell.budget_tokens, value(cell), title, low, high)

        series = [
            plot.Series(style, [point(cell) for cell in cells if cell.policy == name])
            for style, name in enumerate(names)
        ]
        flat = plot.Point(0, value(full), f"{BASELINE}: {text(full)}") if baseline else None
        points = [p for one in series for p in one.points] + ([flat] if flat else [])
        heights = [h for p in points for h in (p.y, p.low, p.high) if h is not None]
        return plot.chart(title, y_label, series, x, scale(heights), flat)

    charts = [
        draw(
            "Perplexity increase",
            "over the full cache",
            lambda cell: cell.perplexity_increase,
            lambda cell: f"{percent(cell.perplexity_increase)} ({interval_text(cell)})",
            _increase_scale,
            lambda cell: cell.interval if cell.policy != BASELINE else None,
        ),
        draw(
            "KL divergence from the full cache",
            "nats per token",
            lambda cell: cell.kl,
            lambda cell: f"{cell.kl:.4f} nats, same top token {100 * cell.agreement:.1f} %",
            lambda values: plot.logarithmic(values, "{:g}".format),
            baseline=False,
        ),
        draw(
            "Decoding speed",
            f"tokens per second, batch {results.batch}",
            lambda cell: cell.tokens_per_second,
            lambda cell: f"{cell.tokens_per_second:.1f} tokens/s",
            lambda values: plot.linear(values, "{:g}".format),
        ),
        draw(
            "Cache size",
            f"bytes, batch {results.batch}",
            lambda cell: cell.cache_bytes,
            lambda cell: size(cell.cache_bytes),
            lambda values: plot.linear(values, size),
        ),
    ]
    legend = [f"<li>{plot.marker(style)}{escape(name)}</li>" for style, name in enumerate(names)]
    legend.append(f"<li>{plot.flat_marker()}{BASELINE} cache</li>")
    return f'<ul class="legend">{"".join(legend)}</ul>\n<div class="plots">{"".join(charts)}</div>'


def _increase_scale(values: Sequence[float]) -> plot.Scale:
    """Ratios of perplexities on a logarithmic axis, labelled as increases: small and huge ones both show."""
    return plot.fitted(values, _INCREASES, lambda tick: percent(tick, 0), lambda value: log10(1 + value))


def _table(results: Results) -> str:
    head = "".join(f'<th scope="col" title="{escape(c.meaning)}">{escape(c.name)}</th>' for c in COLUMNS)
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
        "machine": f"{results.device}, {results.threads} threads, {results.batch} samples in a batch",
        "versions": _facts(results.versions),
        "measured": f"{results.started}, {results.seconds:.0f} s in all",
    }
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items()) + "</dl>"


def _facts(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.items() if value is not None)


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
