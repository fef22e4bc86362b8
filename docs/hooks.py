"""What mkdocs does beside: names in docstrings as pages show them, tables from the schema and from results."""

import json
import os
import re
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|data|attr):<code>~?(?:[\w.]+\.)?(\w+)</code>")
_TABLE = re.compile(r"<!-- options: (\S+) -->")
_PEER = re.compile(r"<!-- peer: (\S+) -->")
_PEERS = Path(__file__).parent.parent / "tests" / "peers" / "results"


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things by Sphinx roles; pages show the name alone."""
    return _ROLE.sub(r"<code>\1</code>", html)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Tables take the place of comments.

    ``<!-- options: policy -->``: the options of every policy, the same for ``allocator``; ``<!-- peer: kvpress-0.5.5
    -->``: what ``make peers`` found.
    """
    markdown = _TABLE.sub(lambda found: _options(found[1]), markdown)
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
