"""Results as a table for the terminal."""

from __future__ import annotations

from itertools import zip_longest

from rich import box
from rich.table import Table

from kvpolicy.evaluate.results import Results
from kvpolicy.report.rows import Column, columns, ordered, table_rows

WIDTH = 128
"""Of the table where the output is not a terminal."""


def results_table(results: Results, width: int = WIDTH) -> Table:
    """The full cache first, then policies by budget; a gap between policies. Fits into `width` if it can."""
    rows = table_rows(results)
    found = columns(results)
    shown = _fitting(found, rows, width)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1 if len(shown) == len(found) else 0),
        collapse_padding=True,
        caption=caption(results),
        caption_justify="left",
    )
    for index in shown:
        column = found[index]
        table.add_column(column.name, justify="right" if column.numeric else "left", overflow="fold")
    for row, following in zip_longest(rows, rows[1:]):
        table.add_row(*(row[index] for index in shown), end_section=following is None or following[0] != row[0])
    return table


def _fitting(columns: list[Column], rows: list[list[str]], width: int) -> list[int]:
    """Which columns to show: what can be spared goes first."""
    headed = [[column.name for column in columns], *rows]
    widths = [max(len(line) for text in texts for line in text.split("\n")) for texts in zip(*headed, strict=True)]
    shown = list(range(len(columns)))
    while sum(widths[index] + 2 for index in shown) > width:
        spare = max(shown, key=lambda index: columns[index].spare)
        if not columns[spare].spare:
            break
        shown.remove(spare)
    return shown


def caption(results: Results) -> str:
    """What the numbers are from, and what to be careful about."""
    where = results.samples
    lines = [
        f"{results.model['spec']} ({results.model['dtype']}) on {results.text['spec']}: "
        f"{where['count']} samples of {where['length']} tokens, scored from token {where['scored_from']}; "
        f"batch {results.batch}, {results.threads} threads, {results.device}.",
    ]
    if where["count"] == 1:
        lines.append("One sample gives no interval: add --samples.")
    lines += [f"{cell.policy} {cell.budget}: {note}." for cell in ordered(results) for note in cell.notes]
    return "\n".join(lines)
