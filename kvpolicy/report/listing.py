"""What is installed: policies with their options, plugins with what became of them."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic_core import PydanticUndefined
from rich import box
from rich.table import Table
from rich.text import Text

from kvpolicy.plugins import NAMES, registry
from kvpolicy.policy import EvictionPolicy


def policies_table() -> Table:
    """A row for each policy: kind, what it does, options with defaults, needs, plugin."""
    owners = {kind: plugin for plugin in registry().plugins for kind in plugin.policies}
    table = _table("kind", "what it keeps", "options", "needs from attention", "plugin")
    for kind, policy in sorted(registry().policies.items()):
        table.add_row(kind, _summary(policy), _options(policy), _needs(policy), owners[kind].name)
    return table


def plugins_table() -> Table:
    """A row for each plugin: name, where from, what it provides, problems."""
    table = _table("plugin", "from", "provides", "problems")
    for plugin in registry().plugins:
        provided = {what: ", ".join(sorted(getattr(plugin, what))) for what in NAMES}
        listed = "\n".join(f"{what}: {names}" for what, names in provided.items() if names)
        problems = Text(str(len(plugin.problems)), style="red") if plugin.problems else "none"
        table.add_row(plugin.name, plugin.origin, listed or "–", problems)
    return table


def problems() -> list[str]:
    """Everything wrong with plugins, a line each."""
    return [f"{plugin.name}: {problem}" for plugin in registry().plugins for problem in plugin.problems]


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _summary(policy: type[EvictionPolicy]) -> str:
    return (inspect.getdoc(policy) or "").partition("\n")[0]


def _options(policy: type[EvictionPolicy]) -> str:
    fields = {name: field for name, field in policy.model_fields.items() if name != "kind"}
    return "\n".join(f"{name} = {_default(field)}" for name, field in fields.items()) or "–"


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, EvictionPolicy):
        return value.kind
    return "(required)" if value is PydanticUndefined else repr(value)


def _needs(policy: type[EvictionPolicy]) -> str:
    needs: Any = policy.needs
    if isinstance(needs, property):
        try:
            needs = policy().needs  # type: ignore[call-arg]
        except ValueError:
            return "depends on options"
    texts = (need.name + (f" (last {need.rows})" if need.rows else "") for need in needs)
    return ", ".join(sorted(texts)) or "nothing"
