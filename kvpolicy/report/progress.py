"""What is shown while a comparison runs: a bar in a terminal, else a line per finished run, or nothing."""

from __future__ import annotations

import sys
from typing import Any, TextIO


class Progress:
    """Shows nothing; the others say more."""

    def stage(self, text: str) -> None:
        """Something begins that has no measure, like loading a model."""

    def start(self, runs: int, tokens: int) -> None:
        """`runs` runs that feed `tokens` tokens together are about to begin."""

    def begin(self, label: str) -> None:
        """A run begins."""

    def advance(self, tokens: int) -> None:
        """A run has fed more tokens."""

    def task(self, name: str) -> None:
        """The run has fed all its tokens and goes on with a task."""

    def finish(self, label: str, seconds: float, perplexity: float) -> None:
        """A run is finished, and on disk."""

    def close(self) -> None:
        """Nothing more will come, be it through an error."""


class Lines(Progress):
    """A line per finished run, for logs."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._runs = self._done = 0

    def start(self, runs: int, tokens: int) -> None:
        self._runs = runs

    def finish(self, label: str, seconds: float, perplexity: float) -> None:
        self._done += 1
        print(
            f"[{self._done}/{self._runs}] {label}: perplexity {perplexity:.2f} ({seconds:.0f} s)",
            file=self._stream,
            flush=True,
        )


class Bar(Progress):
    """A bar over all tokens of all runs, with the time left."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._bar: Any = None
        self._runs = self._done = 0

    def stage(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False)

    def start(self, runs: int, tokens: int) -> None:
        from rich import progress

        self._runs = runs
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.completed:.0f}/{task.total:.0f} tokens"),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=tokens)
        self._bar.start()

    def begin(self, label: str) -> None:
        self._label = label
        self._describe(label)

    def task(self, name: str) -> None:
        self._describe(f"{self._label}, {name}")

    def _describe(self, text: str) -> None:
        from rich.markup import escape

        self._bar.update(self._task, description=escape(f"[{self._done + 1}/{self._runs}] {text}"))

    def advance(self, tokens: int) -> None:
        self._bar.advance(self._task, tokens)

    def finish(self, label: str, seconds: float, perplexity: float) -> None:
        self._done += 1

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def progress_for(stream: TextIO) -> Progress:
    """A bar where somebody watches, lines where not."""
    return Bar() if stream.isatty() else Lines(stream)
