"""Wrong files, one mistake each: one line says where it is, what it is about and what would be right."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvpolicy import config
from kvpolicy.check import check
from kvpolicy.config import examine
from kvpolicy.plugins import Registry, registry

KINDS = ", ".join(sorted(registry().policies))
ALLOCATORS = ", ".join(sorted(registry().allocators))
SHARE = "needs a number of tokens >= 0 (4) or a share of the budget from 0.0 to 1.0 (0.5)"
REMEDY = (
    "is no budget; give a number of tokens, 1 or more (64), "
    "or a share of the prompt, above 0.0 and up to 1.0 (0.25 or 25%)"
)
BUDGET = "tokens, share, of, min, max, layers, heads"

CASES = {
    "unknown kind": (
        "kind: h2oo\n",
        f"own.yaml:1:7: kind: unknown policy 'h2oo'; did you mean 'h2o'? installed: {KINDS}",
    ),
    "no kind": ("recent: 0.5\n", f"own.yaml:1:1: kind: is missing; installed: {KINDS}"),
    "typo in kind": ("knd: h2o\n", "own.yaml:1:1: kind: is missing; is 'knd' meant to be it?"),
    "a kind that is a list": (
        "kind: [h2o]\n",
        f"own.yaml:1:7: kind: needs the name of a policy, not ['h2o']; installed: {KINDS}",
    ),
    "typo in an option": (
        "kind: h2o\nrecnt: 0.5\n",
        "own.yaml:2:1: recnt: unknown option 'recnt'; did you mean 'recent'? "
        "h2o has: recent, sinks, decay, normalise, group, promote",
    ),
    "wrong type": ("kind: h2o\nsinks: four\n", "own.yaml:2:8: sinks: must be a valid integer, not 'four'"),
    "no value": ("kind: h2o\nsinks:\n", "own.yaml:2:1: sinks: must be a valid integer, not None"),
    "a share above one": ("kind: h2o\nrecent: 1.5\n", f"own.yaml:2:9: recent: {SHARE}"),
    "negative tokens": (
        "kind: streaming_llm\nsinks: -4\n",
        "own.yaml:2:8: sinks: must be greater than or equal to 0, not -4",
    ),
    "a boolean where tokens go": (
        "kind: h2o\nsinks: true\n",
        "own.yaml:2:8: sinks: must be a valid integer, not True",
    ),
    "not a number": ("kind: h2o\nrecent: .nan\n", "own.yaml:2:9: recent: must be a finite number, not nan"),
    "infinite": ("kind: lru\ntau: .inf\n", "own.yaml:2:6: tau: must be a finite number, not inf"),
    "a choice that is none": (
        "kind: random\ndraw: frsh\n",
        "own.yaml:2:7: draw: must be 'fixed' or 'fresh', not 'frsh'; did you mean 'fresh'?",
    ),
    "a key that is given twice": (
        "kind: h2o\nrecent: 4\nsinks: 1\nrecent: 5\n",
        "own.yaml:4:1: recent: is given twice, first in line 2",
    ),
    "empty": ("", "own.yaml:1:1: is empty; it needs a policy, such as kind: h2o"),
    "a list at the top": ("- h2o\n", "own.yaml:1:1: needs a mapping with a kind, such as kind: h2o; not a list"),
    "a tab": (
        "kind: h2o\n\tsinks: 3\n",
        "own.yaml:2:1: is not valid YAML: found character '\\t' that cannot start any token",
    ),
    "an alias of what holds it": (
        "kind: every\nof: &x {kind: every, of: *x}\n",
        "own.yaml:2:5: of.of: contains itself",
    ),
    # Budgets
    "no budget": ("kind: h2o\nbudget: 1.5\n", f"own.yaml:2:9: budget: 1.5 {REMEDY}"),
    "a budget below what is protected": (
        "kind: h2o\nsinks: 4\nrecent: 2\nbudget: 5\n",
        "own.yaml:4:9: budget: h2o: a budget of 5 tokens cannot hold the 6 it must protect (sinks=4 + recent=2)"
        "; raise the budget, or lower them or give them as shares (0.5)",
    ),
    "a budget in tokens and as a share": (
        "kind: h2o\nbudget:\n  tokens: 64\n  share: 0.5\n",
        "own.yaml:3:3: budget: a budget is either tokens (tokens: 64) or a share (share: 0.25), one of the two",
    ),
    "a budget that is neither": (
        "kind: h2o\nbudget: {layers: pyramid}\n",
        "own.yaml:2:9: budget: a budget is either tokens (tokens: 64) or a share (share: 0.25), one of the two",
    ),
    "min above max": (
        "kind: h2o\nbudget: {share: 0.5, min: 64, max: 32}\n",
        "own.yaml:2:9: budget: min (64) is above max (32)",
    ),
    "tokens that are a share": (
        "kind: h2o\nbudget: {tokens: 0.5}\n",
        "own.yaml:2:18: budget.tokens: must be a valid integer, not 0.5",
    ),
    "typo in a budget": (
        "kind: h2o\nbudget:\n  tokens: 64\n  laiers: pyramid\n",
        f"own.yaml:4:3: budget.laiers: unknown option 'laiers'; did you mean 'layers'? budget has: {BUDGET}",
    ),
    "unknown allocator": (
        "kind: h2o\nbudget: {share: 0.5, layers: pyramd}\n",
        f"own.yaml:2:30: budget.layers: unknown allocator 'pyramd'; did you mean 'pyramid'? installed: {ALLOCATORS}",
    ),
    "typo in an allocator": (
        "kind: h2o\nbudget:\n  share: 0.5\n  layers: {kind: pyramid, bta: 20}\n",
        "own.yaml:4:27: budget.layers.bta: unknown option 'bta'; did you mean 'beta'? pyramid has: beta, window",
    ),
    "an allocator of layers for heads": (
        "kind: h2o\nbudget: {share: 0.5, heads: pyramid}\n",
        "own.yaml:2:29: budget.heads: 'pyramid' does not divide a budget over heads; these do: adaptive, uniform",
    ),
    "an allocator that is a number": (
        "kind: h2o\nbudget: {share: 0.5, layers: 20}\n",
        "own.yaml:2:30: budget.layers: needs an allocator: an object, a kind, or a mapping with one; not 20",
    ),
    # Policies made of policies
    "shares that are more than all": (
        "kind: union\nparts:\n- {take: 0.75, of: sinks}\n- {take: 0.5, of: heavy}\n",
        "own.yaml:3:1: parts: the shares come to 1.25, which is more than all (1.0)",
    ),
    "a union of nothing": ("kind: union\nparts: []\n", "own.yaml:2:8: parts: must have at least 1, not 0"),
    "a part for the list of them": (
        "kind: union\nparts: {take: 4, of: h2o}\n",
        "own.yaml:2:8: parts: must be a list, not {'take': 4, 'of': 'h2o'}",
    ),
    "a policy for the mapping of them": (
        "kind: layers\nat: h2o\ndefault: h2o\n",
        "own.yaml:2:5: at: must be a mapping, not 'h2o'",
    ),
    "unknown option of a part": (
        "kind: union\nparts:\n- sinks\n- {take: 4, tke: 5, of: heavy}\n",
        "own.yaml:4:13: parts.1.tke: unknown option 'tke'; did you mean 'take'? part has: take, of",
    ),
    "unknown option in a nested part": (
        "kind: union\nparts:\n- sinks\n- of:\n    kind: protect\n    of: {kind: h2o, recnt: 1}\n",
        "own.yaml:6:21: parts.1.of.of.recnt: unknown option 'recnt'; did you mean 'recent'? "
        "h2o has: recent, sinks, decay, normalise, group, promote",
    ),
    "unknown option in a bare part": (
        "kind: union\nparts:\n- kind: protect\n  of: h2o\n  rcent: 3\n",
        "own.yaml:5:3: parts.0.rcent: unknown option 'rcent'; did you mean 'recent'? "
        "protect has: sinks, recent, spans, prefix, of",
    ),
    "a part without a policy": ("kind: union\nparts:\n- {take: 4}\n", "own.yaml:3:3: parts.0.of: is missing"),
    "a policy that is a number": (
        "kind: every\ntokens: 8\nof: 3\n",
        "own.yaml:3:5: of: needs a policy: an object, a kind, or a mapping with one; not 3",
    ),
    "a range that is none": (
        'kind: layers\nat: {"0": full, "2-": h2o}\ndefault: h2o\n',
        "own.yaml:2:17: at.2-: needs layers, such as 0, 0-1 (both included), -4: (the last four), "
        ":50% (the lower half) or 0,3,5-7",
    ),
    "unknown option beside a range": (
        "kind: layers\nat:\n  ':50%': {kind: lru, taw: 1}\ndefault: h2o\n",
        "own.yaml:3:23: at.:50%.taw: unknown option 'taw'; did you mean 'tau'? lru has: tau, recent, ties",
    ),
    "a span that ends before it starts": (
        "kind: protect\nspans: [[0, 4], [9, 8]]\nof: h2o\n",
        "own.yaml:2:8: spans: [9, 8] must start at or after 4 and stop after its start",
    ),
    # Files that extend others
    "a base that is not there": (
        "extends: none.yaml\nkind: h2o\n",
        "own.yaml:1:10: extends: none.yaml: cannot be read: No such file or directory",
    ),
    "a base that is a number": ("kind: h2o\nextends: 3\n", "own.yaml:2:10: extends: needs a file, or a list of files"),
    "a file that extends itself": (
        "kind: h2o\nextends: own.yaml\n",
        "own.yaml:2:10: extends: a file cannot extend itself: own.yaml -> own.yaml",
    ),
    "files in a circle": (
        {"own.yaml": "extends: sub/b.yaml\nkind: h2o\n", "sub/b.yaml": "sinks: 4\nextends: [../own.yaml]\n"},
        "sub/b.yaml:2:11: extends.0: a file cannot extend itself: own.yaml -> sub/b.yaml -> own.yaml",
    ),
    "a mistake in a base": (
        {"own.yaml": "extends: base.yaml\nrecent: 4\n", "base.yaml": "kind: h2o\nsinks: -1\n"},
        "base.yaml:2:8: sinks: must be greater than or equal to 0, not -1",
    ),
    "an option that the kind of a base does not have": (
        {"own.yaml": "extends: base.yaml\ntau: 4\n", "base.yaml": "kind: h2o\n"},
        "own.yaml:2:1: tau: unknown option 'tau'; h2o has: recent, sinks, decay, normalise, group, promote",
    ),
}


def write(files):
    for name, text in ({"own.yaml": files} if isinstance(files, str) else files).items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("files", "expected"), CASES.values(), ids=CASES)
def test_one_mistake_is_one_located_line(files, expected):
    write(files)
    _, problems = examine("own.yaml")
    assert [str(problem) for problem in problems] == [expected]
    right, told = check(Path("own.yaml"))
    assert not right
    said, source, caret = told.split("\n")
    assert said == expected
    file, line, column = said.split(": ")[0].split(":")
    assert source == [*Path(file).read_text().split("\n"), ""][int(line) - 1]
    assert caret.endswith("^") and len(caret) == int(column)


def mine(kind):
    return f"""
from typing import Literal
from kvpolicy import EvictionPolicy, hookimpl

class Mine(EvictionPolicy):
    kind: Literal["{kind}"] = "{kind}"

@hookimpl
def kvpolicy_policies():
    return [Mine]
"""


PLUGINS = {
    "a plugin that raises": (
        {"raising": f"{mine('wanted')}\n1 / 0"},
        {"raising": "raising"},
        "raising: raising: ZeroDivisionError: division by zero",
    ),
    "two plugins of one name": (
        {"first": mine("other"), "second": mine("wanted")},
        {"same": "first", "Same": "second"},
        "same: another plugin is named 'same': first; this one is ignored",
    ),
    "an entry point to nothing": (
        {},
        {"gone": "not_there_at_all"},
        "gone: not_there_at_all: ModuleNotFoundError: No module named 'not_there_at_all'",
    ),
    "an entry point to no such object": (
        {"first": mine("other")},
        {"gone": "first:nothing"},
        "gone: first:nothing: AttributeError: module 'first' has no attribute 'nothing'",
    ),
    "a policy without a kind": (
        {"first": mine("wanted").replace('Literal["wanted"]', "str")},
        {"kindless": "first"},
        'kindless: kvpolicy_policies: first.Mine needs a literal kind: kind: Literal["my_name"] = "my_name"',
    ),
}


@pytest.mark.parametrize(("modules", "points", "problem"), PLUGINS.values(), ids=PLUGINS)
def test_a_kind_that_a_broken_plugin_would_have(modules, points, problem, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in modules.items():
        Path(f"{name}.py").write_text(text)
    installed = Registry(EntryPoint(name.lower(), value, "kvpolicy") for name, value in points.items())
    monkeypatch.setattr(config, "registry", lambda: installed)
    write("# mine\nkind: wanted\n")
    _, problems = examine("own.yaml")
    known = ", ".join(sorted(installed.policies)) or "none"
    assert [str(found) for found in problems] == [
        f"own.yaml:2:7: kind: unknown policy 'wanted'; installed: {known}; plugins with problems: {problem}"
    ]
    for name in modules:
        sys.modules.pop(name, None)


def test_everything_wrong_is_told_at_once():
    write(
        {
            "own.yaml": (
                "extends: [base.yaml, none.yaml]\n"
                "kind: union\n"
                "parts:\n"
                "- {take: 2.0, of: sinks}\n"
                "- {take: 4, tke: 5, of: {kind: h2o, recnt: 1, sinks: -1}}\n"
                "- {kind: protect, recent: 1}\n"
                "- h2oo\n"
                "budget: {share: 2.0, layers: {kind: pyramid, beta: x}, heads: pyramid}\n"
                "kind: blend\n"
                "nope: 1\n"
            ),
            "base.yaml": "budget:\n  max: 0\n",
        }
    )
    _, problems = examine("own.yaml")
    assert [str(problem) for problem in problems] == [
        "own.yaml:1:22: extends.1: none.yaml: cannot be read: No such file or directory",
        f"own.yaml:4:10: parts.0.take: {SHARE}",
        "own.yaml:5:13: parts.1.tke: unknown option 'tke'; did you mean 'take'? part has: take, of",
        "own.yaml:5:37: parts.1.of.recnt: unknown option 'recnt'; did you mean 'recent'? "
        "h2o has: recent, sinks, decay, normalise, group, promote",
        "own.yaml:5:54: parts.1.of.sinks: must be greater than or equal to 0, not -1",
        f"own.yaml:7:3: parts.3: unknown policy 'h2oo'; did you mean 'h2o'? installed: {KINDS}",
        "own.yaml:8:17: budget.share: needs a share above 0.0 and up to 1.0 (0.25 or 25%)",
        "own.yaml:8:52: budget.layers.beta: must be a valid number, not 'x'",
        "own.yaml:8:63: budget.heads: 'pyramid' does not divide a budget over heads; these do: adaptive, uniform",
        "own.yaml:9:1: kind: is given twice, first in line 2",
        "own.yaml:10:1: nope: unknown option 'nope'; union has: parts",
        "base.yaml:2:8: budget.max: must be greater than or equal to 1, not 0",
    ]
