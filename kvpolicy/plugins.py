"""Loading plugins: one by one, so that a broken or duplicate one is reported and never takes others down."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from kvpolicy import hooks
from kvpolicy.errors import PluginError

if TYPE_CHECKING:
    from kvpolicy.adapter import ModelAdapter
    from kvpolicy.policy import EvictionPolicy

T = TypeVar("T")


@dataclass
class Plugin:
    """One entry point and what became of it."""

    name: str
    origin: str
    """Distribution and version, or how it was registered."""
    policies: dict[str, type[EvictionPolicy]] = field(default_factory=dict)
    adapters: dict[str, ModelAdapter] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Registry:
    """Everything installed, by name, and every problem met on the way."""

    def __init__(self, points: Iterable[EntryPoint] = ()) -> None:
        self._manager = pluggy.PluginManager(hooks.GROUP)
        self._manager.add_hookspecs(hooks)
        self.plugins: list[Plugin] = []
        self.policies: dict[str, type[EvictionPolicy]] = {}
        self.adapters: dict[str, ModelAdapter] = {}
        for point in sorted(points, key=_first_party_first):
            origin = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            try:
                module = point.load()
            except Exception as error:
                self.plugins.append(Plugin(point.name, origin, problems=[f"{point.value}: {_brief(error)}"]))
            else:
                self.register(module, point.name, origin)

    def register(self, module: Any, name: str, origin: str = "registered in this process") -> Plugin:
        """Take in what `module` offers. Problems end up in the returned plugin, not in an exception."""
        plugin = Plugin(name, origin)
        self.plugins.append(plugin)
        try:
            self._manager.register(module, name=name)
        except ValueError as error:
            plugin.problems.append(f"plugin {name!r} is already registered ({_brief(error)})")
            return plugin
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            plugin.problems.append(f"not a hook of kvpolicy: {_brief(error)}")
        self._collect(plugin, module, "kvpolicy_policies", plugin.policies, self.policies, _kind)
        self._collect(plugin, module, "kvpolicy_adapters", plugin.adapters, self.adapters, _adapter_name)
        return plugin

    def _collect(self, plugin: Plugin, module: Any, hook: str, mine: Any, everyones: Any, name_of: Any) -> None:
        implementations = [i for i in getattr(self._manager.hook, hook).get_hookimpls() if i.plugin is module]
        for implementation in implementations:
            try:
                offered = list(implementation.function())
            except Exception as error:
                plugin.problems.append(f"{hook}: {_brief(error)}")
                continue
            for thing in offered:
                try:
                    name = name_of(thing)
                except Exception as error:
                    plugin.problems.append(f"{hook}: {_brief(error)}")
                    continue
                if name in everyones:
                    owner = next(p for p in self.plugins if name in p.policies or name in p.adapters)
                    plugin.problems.append(f"{name!r} is already provided by {owner.name} ({owner.origin}); ignored")
                else:
                    mine[name] = everyones[name] = thing

    def policy(self, kind: str) -> type[EvictionPolicy]:
        """The policy class named `kind`; an error that lists what there is, and what failed to load."""
        if kind in self.policies:
            return self.policies[kind]
        message = f"unknown policy {kind!r}"
        if close := get_close_matches(kind, self.policies, n=1):
            message += f"; did you mean {close[0]!r}?"
        message += f" Installed: {', '.join(sorted(self.policies)) or 'none'}."
        broken = [f"{p.name}: {problem}" for p in self.plugins for problem in p.problems]
        if broken:
            message += f" Plugins with problems: {'; '.join(broken)}."
        message += " A plugin's entry point is read when it is installed: reinstall it after adding one."
        raise PluginError(message)


def _first_party_first(point: EntryPoint) -> tuple[bool, str]:
    return not (point.dist and point.dist.name == "kvpolicy"), point.name


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")


def _kind(policy: Any) -> str:
    from kvpolicy.policy import EvictionPolicy

    if not (isinstance(policy, type) and issubclass(policy, EvictionPolicy)):
        raise TypeError(f"{policy!r} is not a subclass of EvictionPolicy")
    kind = policy.model_fields["kind"].default
    if not isinstance(kind, str):
        raise TypeError(f'{policy.__name__} needs a literal kind: kind: Literal["my_policy"] = "my_policy"')
    return kind


def _adapter_name(adapter: Any) -> str:
    return str(adapter.name)


def subclasses_in(package: str, path: Iterable[str], base: type[T]) -> list[type[T]]:
    """The subclasses of `base` defined in the modules of `package`, a file each."""
    found: list[type[T]] = []
    for module in sorted(info.name for info in pkgutil.iter_modules(path)):
        names = vars(import_module(f"{package}.{module}"))
        found += [
            thing
            for thing in names.values()
            if isinstance(thing, type) and issubclass(thing, base) and thing.__module__ == f"{package}.{module}"
        ]
    return found


@cache
def registry() -> Registry:
    """What is installed in this environment, loaded once."""
    return Registry(entry_points(group=hooks.GROUP))


def policies() -> MappingProxyType[str, type[EvictionPolicy]]:
    """The installed policies by kind, read-only."""
    return MappingProxyType(registry().policies)
