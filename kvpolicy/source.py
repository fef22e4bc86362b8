"""What the source of an attention module says it hands to the attention function, and how it rotates before.

Families differ in what they pass (windows, caps, sinks, biases) and in what they cache (latents, keys
yet to be repeated). It is read when attaching, so that what kvpolicy would get wrong is refused, not run.
"""

from __future__ import annotations

import ast
import inspect
import re
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
    projected_by: str | None = None
    """The attribute that what comes back goes through, and nothing else before it but changes of shape."""


@cache
def handed(forward: Callable[..., Any]) -> Handed:
    """Read the `forward` of a class of attention modules."""
    nodes = list(ast.walk(_parsed(forward)))
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
        projected_by=_projection(nodes),
    )


@dataclass(frozen=True)
class Turned:
    """How a forward rotates its queries and keys."""

    known: bool = False
    """Whether its source shows it; the rest is of use only then."""
    function: str | None = None
    """The function of its file that does it; ``None``: nothing is rotated."""
    only_if: ast.expr | None = None
    """The condition under which it does so, on the module itself; ``None``: always."""

    def by(self, module: Any) -> bool:
        """Whether `module` rotates."""
        return self.function is not None and (self.only_if is None or bool(_value(self.only_if, module)))


@cache
def turned(forward: Callable[..., Any]) -> Turned:
    """Read the `forward` of a class of attention modules.

    Known are those that say nothing of rotation, and those that follow transformers' convention: ``cos, sin =
    position_embeddings``, one function that takes queries, keys, cos and sin, and after it nothing that changes
    queries or keys but the part of each head that is not rotated put back.
    """
    tree = _parsed(forward)
    if not handed(forward).as_cached:
        return Turned()
    if not any(_OF_ROTATION.search(name) for name in _mentioned(tree)):
        return Turned(known=True)
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    angles = [node for node in assigned if _names(*node.targets) == ["cos", "sin"]]
    calls = [node for node in assigned if _is_turn(node)]
    if len(calls) != 1 or len(angles) != 1 or _names(angles[0].value) != ["position_embeddings"]:
        return Turned()
    attention = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_attention(node))
    pairs = zip(_names(*attention.args[1:3]), _names(*calls[0].targets), strict=False)
    if not all(_stays(name, result, calls[0], assigned) for name, result in pairs):
        return Turned()
    conditions = [node for node in ast.walk(tree) if isinstance(node, ast.If) and calls[0] in ast.walk(node)]
    if conditions and not (len(conditions) == 1 and calls[0] in conditions[0].body and _of_self(conditions[0].test)):
        return Turned()
    function = calls[0].value.func.id  # type: ignore[attr-defined]
    return Turned(known=True, function=function, only_if=conditions[0].test if conditions else None)


_OF_ROTATION = re.compile("rot|rope|position_emb|freq|alibi|sinusoid", re.IGNORECASE)


def _is_turn(node: ast.Assign) -> bool:
    """``query, key = apply_rotary_pos_emb(query, key, cos, sin)``, by whatever names."""
    call = node.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        return False
    given = _names(*call.args)
    return len(call.args) == 4 and given[2:] == ["cos", "sin"] and _names(*node.targets) == given[:2]


def _stays(name: str, result: str, call: ast.Assign, assigned: list[ast.Assign]) -> bool:
    """Whether `name` is what `call` made as `result`, with nothing done to it but the rest of each head put back."""
    later = [node.value for node in assigned if node.lineno > call.lineno and name in _names(*node.targets)]
    later = [value for value in later if not _is_update(value)]
    return not later if name == result else len(later) == 1 and _puts_back(later[0], result)


def _puts_back(value: ast.expr, part: str) -> bool:
    """``torch.cat((part, rest), dim=-1)``."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr != "cat":
        return False
    return _names(*value.args)[:1] == [part] and [ast.unparse(keyword) for keyword in value.keywords] == ["dim=-1"]


def _of_self(test: ast.expr) -> bool:
    """Whether a condition is made of ``self.attribute``, constants, ``is``, ``not``, ``and`` and ``or``."""
    nodes = list(ast.walk(test))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names == {"self"} and all(isinstance(node, _SIMPLE) for node in nodes)


_SIMPLE = (
    *(ast.Attribute, ast.Name, ast.Load, ast.Constant, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not),
    *(ast.Compare, ast.Is, ast.IsNot),
)


def _value(test: ast.expr, module: Any) -> Any:
    """What such a condition comes to for `module`."""
    if isinstance(test, ast.BoolOp):
        values = (_value(part, module) for part in test.values)
        return all(values) if isinstance(test.op, ast.And) else any(values)
    if isinstance(test, ast.UnaryOp):
        return not _value(test.operand, module)
    if isinstance(test, ast.Compare):
        same = _value(test.left, module) is _value(test.comparators[0], module)
        return same == isinstance(test.ops[0], ast.Is)
    if isinstance(test, ast.Attribute):
        return getattr(_value(test.value, module), test.attr)
    return test.value if isinstance(test, ast.Constant) else module


def _parsed(forward: Callable[..., Any]) -> ast.AST:
    """The source of `forward`; an empty module where there is none to read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _mentioned(tree: ast.AST) -> set[str]:
    """Every name, argument and attribute in `tree`."""
    found = ((getattr(node, field, None) for field in ("id", "arg", "attr")) for node in ast.walk(tree))
    return {name for names in found for name in names if isinstance(name, str)}


def _names(*nodes: ast.expr) -> list[str]:
    """The variables that `nodes` are, tuples taken apart."""
    flat = [part for node in nodes for part in (node.elts if isinstance(node, ast.Tuple) else [node])]
    return [node.id for node in flat if isinstance(node, ast.Name)]


def _is_attention(call: ast.Call) -> bool:
    """transformers' convention: ``attention_interface(self, query, key, value, attention_mask, ...)``."""
    return len(call.args) >= 4 and _names(call.args[0]) == ["self"]


def _masks(call: ast.Call) -> list[ast.expr]:
    return [*call.args[4:5], *(k.value for k in call.keywords if k.arg == "attention_mask")]


def _projection(nodes: list[ast.AST]) -> str | None:
    """The first attribute called with what attention returned; ``None`` where it is changed before."""
    assigned = sorted((n for n in nodes if isinstance(n, ast.Assign)), key=lambda n: n.lineno)
    output = None
    for statement in assigned:
        if isinstance(statement.value, ast.Call) and _is_attention(statement.value):
            output = _names(*statement.targets)[:1]
        elif output and (name := _called_with(statement.value, output)):
            return name
        elif output and _names(*statement.targets)[:1] == output and not _is_method_of(statement.value, output):
            return None
    returned = (n.value for n in nodes if isinstance(n, ast.Return) and n.value is not None)
    parts = (part for value in returned for part in (value.elts if isinstance(value, ast.Tuple) else [value]))
    return next((name for part in parts if output and (name := _called_with(part, output))), None)


def _called_with(value: ast.expr, output: list[str]) -> str | None:
    """The name in ``self.name(output)``, where methods of `output` may be called on the way."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and len(value.args) == 1):
        return None
    is_own = _names(value.func.value) == ["self"]
    given = value.args[0]
    return value.func.attr if is_own and (_names(given) == output or _is_method_of(given, output)) else None


def _is_method_of(value: ast.expr, output: list[str]) -> bool:
    """``output.reshape(...).contiguous()`` and the like."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
        if _names(value) == output:
            return True
    return False


def _is_update(value: ast.expr) -> bool:
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr == "update"
