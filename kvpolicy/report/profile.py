"""A profile for the terminal: the gates of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table


def profile_report(gates: Sequence[Sequence[float]]) -> Iterator[Any]:
    """A row for each layer, and what thresholds would do."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", justify="right")
    table.add_column("gates of its KV heads")
    for layer, its in enumerate(gates):
        table.add_row(str(layer), " ".join(f"{gate:.2f}" for gate in its))
    yield table
    every = torch.tensor([gate for its in gates for gate in its], dtype=torch.float64)
    quantiles = ", ".join(f"{share:g} below {float(every.quantile(share)):.3f}" for share in (0.25, 0.5, 0.75))
    yield f"{len(every)} KV heads; as sparsity: {quantiles}"
