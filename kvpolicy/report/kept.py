"""Which tokens a cache kept, for people: every survivor with its position, and how many heads hold it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from kvpolicy.cache import EvictionCache
from kvpolicy.evaluate.generate import Written
from kvpolicy.explain import runs

BAR = 20


def kept_report(written: Written) -> Iterator[Any]:
    """A summary, the tokens, and a line for each layer."""
    counts = survivors(written.cache, len(written.tokens))
    heads = int(written.cache.kept(0).shape[1])
    seen, layers = len(written.tokens), len(counts)
    most = max(int(written.cache.kept(layer).max()) for layer in range(layers))
    yield Text(f"\n{most} of {seen} tokens kept by each of {layers} layers with {heads} heads", style="bold")
    for layer in range(layers):
        if written.cache.layers[layer].policy.selects:
            attended = (written.cache.attended(layer) >= 0).sum(-1).double().mean()
            yield Text(f"layer {layer} attends to {attended:.0f} of them in the last step", style="dim")
    yield _tokens_table(written.tokens, counts.sum(0).tolist(), layers * heads)
    yield _layers_table(counts, heads)


def survivors(cache: EvictionCache, seen: int) -> torch.Tensor:
    """How many heads of each layer hold each position of the first row, ``[layers, seen]``."""
    rows = []
    for layer in range(len(cache.layers)):
        positions = cache.positions(layer)[0].flatten()
        rows.append(torch.bincount(positions[positions >= 0].cpu(), minlength=seen))
    return torch.stack(rows)


def ranges(positions: list[int]) -> str:
    """``0-3 7 9-12`` for people."""
    return runs_text(runs(positions))


def runs_text(runs: Iterable[tuple[int, int]]) -> str:
    """The same from first and last of each run."""
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _tokens_table(tokens: list[str], counts: list[int], places: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("position", justify="right")
    table.add_column("token")
    table.add_column(f"heads of {places}", justify="right")
    table.add_column("")
    gone = 0
    for position, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        if not count:
            gone += 1
            continue
        _add_gap(table, gone)
        gone = 0
        table.add_row(str(position), Text(repr(token)), str(count), Text("█" * max(1, round(BAR * count / places))))
    _add_gap(table, gone)
    return table


def _add_gap(table: Table, gone: int) -> None:
    if gone:
        table.add_row("", Text(f"… {gone} evicted everywhere", style="dim"), "", "")


def _layers_table(counts: torch.Tensor, heads: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", justify="right")
    table.add_column(f"positions kept by all {heads} heads" if heads > 1 else "positions kept")
    if heads > 1:
        table.add_column("by some")
    for layer, row in enumerate(counts):
        every = ranges(torch.nonzero(row == heads).flatten().tolist())
        some = ranges(torch.nonzero((row > 0) & (row < heads)).flatten().tolist())
        table.add_row(str(layer), every, *([some] if heads > 1 else []))
    return table
