"""What mkdocs does beside: names in docstrings as pages show them, and tables made from the schema of what is there."""

import os
import re
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|data|attr):<code>~?(?:[\w.]+\.)?(\w+)</code>")
_TABLE = re.compile(r"<!-- options: (\S+) -->")


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things by Sphinx roles; pages show the name alone."""
    return _ROLE.sub(r"<code>\1</code>", html)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """``<!-- options: policy -->`` becomes a table of the options of every policy, the same for ``allocator``."""
    return _TABLE.sub(lambda found: _options(found[1]), markdown)


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
