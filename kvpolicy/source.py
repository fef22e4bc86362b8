"""What the source of an attention module says it hands to the attention function.

Families differ in what they pass (windows, caps, sinks, biases) and in what they cache (latents, keys
yet to be repeated). It is read when attaching, so that what kvpolicy would get wrong is refused, not run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Handed:
    """What a forward hands to its attention function; all ``False`` where its source shows no such call."""

    keywords: frozenset[str] = frozenset()
    as_cached: bool = False
    """Whether keys and values go there just as the cache returned them."""
    mask_as_given: bool = False
    """Whether the mask goes there just as the model made it."""


@cache
def handed(forward: Callable[..., Any]) -> Handed:
    """Read the `forward` of a class of attention modules."""
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(forward)))))
    except (OSError, TypeError, SyntaxError):
        return Handed()
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_attention(node)]
    assigned = [(n, name) for n in nodes if isinstance(n, ast.Assign) for t in n.targets for name in _names(t)]
    updates = list(dict.fromkeys(n for n, _ in assigned if _is_update(n.value)))
    if not calls or len(updates) != 1:
        return Handed()
    cached = [name for n, name in assigned if n is updates[0]]
    changed = any(name in cached and n.lineno > updates[0].lineno for n, name in assigned)
    made = any(name == "attention_mask" and not isinstance(n.value, ast.Name) for n, name in assigned)
    return Handed(
        keywords=frozenset(keyword.arg for call in calls for keyword in call.keywords if keyword.arg),
        as_cached=not changed and all(_names(*call.args[2:4]) == cached for call in calls),
        mask_as_given=not made and all(_names(*_masks(call)) == ["attention_mask"] for call in calls),
    )


def _names(*nodes: ast.expr) -> list[str]:
    """The variables that `nodes` are, tuples taken apart."""
    flat = [part for node in nodes for part in (node.elts if isinstance(node, ast.Tuple) else [node])]
    return [node.id for node in flat if isinstance(node, ast.Name)]


def _is_attention(call: ast.Call) -> bool:
    """transformers' convention: ``attention_interface(self, query, key, value, attention_mask, ...)``."""
    return len(call.args) >= 4 and _names(call.args[0]) == ["self"]


def _masks(call: ast.Call) -> list[ast.expr]:
    return [*call.args[4:5], *(k.value for k in call.keywords if k.arg == "attention_mask")]


def _is_update(value: ast.expr) -> bool:
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr == "update"
