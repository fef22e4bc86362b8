"""The page on policies says what the code says, and every policy on it has a worked example."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "policies.md").read_text("utf-8")
_HEADING = re.compile(r"^##+ (.+)$", re.M)


def _script() -> ModuleType:
    spec = spec_from_file_location("policy_tables", ROOT / "docs" / "policy_tables.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()
TABLES = SCRIPT.Tables()
POLICIES, ALLOCATORS = PAGE.split("\n## Allocators\n")
"""Its parts: a policy and an allocator may have the same name."""
DOCUMENTED: list[tuple[str, type[BaseModel], str]] = [
    *((kind, of, POLICIES) for kind, of in TABLES.policies.items()),
    *((kind, of, ALLOCATORS) for kind, of in TABLES.allocators.items()),
]
each = pytest.mark.parametrize(("kind", "of", "page"), DOCUMENTED, ids=[of.__name__ for _, of, _ in DOCUMENTED])


def section(kind: str, page: str = POLICIES) -> str:
    """What stands below the heading of a kind."""
    headings = list(_HEADING.finditer(page))
    found = [i for i, heading in enumerate(headings) if heading[1] == f"`{kind}`"]
    assert len(found) == 1, f"{kind} has {len(found)} sections in docs/policies.md"
    following = headings[found[0] + 1 : found[0] + 2]
    return page[headings[found[0]].end() : following[0].start() if following else None]


def options(text: str) -> dict[str, str]:
    """Options and defaults of the table in a section; a row may hold several."""
    found: dict[str, str] = {}
    _, _, table = text.partition("| option | default | meaning |")
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        names, defaults, meaning = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4])
        assert meaning, f"{names} has no meaning"
        found.update(zip(_quoted(names), _quoted(defaults) or [""], strict=True))
    return found


def _quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def in_code(of: type[BaseModel]) -> dict[str, Any]:
    fields = {name: field for name, field in of.model_fields.items() if name != "kind"}
    defaults = {name: "required" if its.is_required() else its.default for name, its in fields.items()}
    return {name: getattr(default, "kind", default) for name, default in defaults.items()}


def test_tables_are_up_to_date() -> None:
    script = [sys.executable, str(ROOT / "docs" / "policy_tables.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@each
def test_options_and_defaults_are_those_of_the_code(kind: str, of: type[BaseModel], page: str) -> None:
    told, true = options(section(kind, page)), in_code(of)
    assert list(told) == list(true), "in the order of the class"
    for name, default in told.items():
        assert (yaml.safe_load(default) if default else "required") == true[name], name


@each
def test_the_paper_is_that_of_the_docstring(kind: str, of: type[BaseModel], page: str) -> None:
    link = re.search(r"arXiv (\d{4}\.\d{4,5})", " ".join((of.__doc__ or "").split()))
    if link:
        assert f"[arXiv {link[1]}](https://arxiv.org/abs/{link[1]})" in section(kind, page)
    else:
        assert "arxiv.org" not in section(kind, page)


NUMBERS = {"4": "four", "8": "eight", "12": "twelve"}


@pytest.mark.parametrize("kind", sorted(TABLES.policies))
def test_costs_are_told(kind: str) -> None:
    cost = re.search(r"\*\*Cost\.\*\* (.*?)\n\n", section(kind) + "\n\n", re.S)
    assert cost, "no cost"
    facts = SCRIPT.Facts(TABLES.policies[kind])
    said = " ".join(cost[1].split())
    if "group" in facts.nbytes():
        assert f"`{facts.nbytes()}` bytes per slot" in said
    elif not facts.wraps and facts.nbytes() != "0":
        number = facts.nbytes()
        assert f"{NUMBERS.get(number, number)} bytes per slot" in said.lower() or number in said, said


@pytest.mark.parametrize("kind", sorted(set(TABLES.policies) - {"full", "random"}))
def test_others_of_the_name_are_told_apart(kind: str) -> None:
    """Where paper and published code deviate, and which of them is followed."""
    assert re.search(r"\*\*(Paper and code|Beside others?[^*]*)\.\*\*", section(kind))


# -- worked examples -------------------------------------------------------------------------------------------

BY_HAND = {"Trace", "kept", "observed", "by_keys"}
"""What feeds slots by hand, in modules that know :class:`tests.unit.test_policies.Trace`."""


@cache
def worked() -> set[str]:
    """Every text in tests that feed slots by hand; kinds among them."""
    found: set[str] = set()
    for file in (ROOT / "tests" / "unit").glob("test_*.py"):
        tree = ast.parse(text := file.read_text("utf-8"))
        if "Trace" in text and file != Path(__file__):
            for test in tree.body:
                nodes = list(ast.walk(test))
                if BY_HAND & {node.id for node in nodes if isinstance(node, ast.Name)}:
                    found |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return found


@pytest.mark.parametrize("kind", sorted({**TABLES.policies, **TABLES.primitives}))
def test_every_policy_has_a_worked_example(kind: str) -> None:
    assert kind in worked(), f"no test feeds {kind} by hand (Trace), with numbers that one can follow on paper"
