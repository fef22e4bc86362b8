"""Loading plugins: one by one, so that a broken or duplicate one is reported and never takes others down."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import pluggy

from kvpolicy import hooks
from kvpolicy.errors import PluginError

if TYPE_CHECKING:
    from kvpolicy.adapter import ModelAdapter
    from kvpolicy.policy import EvictionPolicy

T = TypeVar("T")

_HERE = "registered in this process"
_FAILURES = (Exception, SystemExit)  # a module that runs a script's main() when imported must not end ours


@dataclass
class Plugin:
    """One plugin, what it provides, and what went wrong with it."""

    name: str
    origin: str
    """Distribution and version, or how it was registered."""
    policies: dict[str, type[EvictionPolicy]] = field(default_factory=dict)
    adapters: dict[str, ModelAdapter] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """One line each. What they are about is missing; whatever else the plugin has is there."""
    source: Any = field(default=None, repr=False)
    """The module or object with the hooks; None if it could not be taken in."""


class Registry:
    """Everything installed, by name, and every problem met on the way.

    A name belongs to whoever brought it first: kvpolicy itself, then the other plugins by name.
    """

    def __init__(self, points: Iterable[EntryPoint] = ()) -> None:
        self._manager = pluggy.PluginManager(hooks.GROUP)
        self._manager.add_hookspecs(hooks)
        self.plugins: list[Plugin] = []
        self.policies: dict[str, type[EvictionPolicy]] = {}
        self.adapters: dict[str, ModelAdapter] = {}
        for point in sorted(points, key=_precedence):
            self._load(point)

    def _load(self, point: EntryPoint) -> None:
        origin = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        try:
            module = point.load()
        except _FAILURES as error:
            self.plugins.append(Plugin(point.name, origin, problems=[f"{point.value}: {_brief(error)}"]))
        else:
            self.register(module, point.name, origin)

    def register(self, module: Any, name: str, origin: str = _HERE) -> Plugin:
        """Take in what `module` (or any object with hooks) offers.

        Problems end up in the returned plugin, not in an exception. Registering a name again in one process
        replaces it, so that the cell of a notebook can be run twice.
        """
        if origin == _HERE:
            self._forget(name)
        plugin = Plugin(name, origin)
        self.plugins.append(plugin)
        if owner := next((p for p in self.plugins if p.name == name and p.source is not None), None):
            plugin.problems.append(f"another plugin is named {name!r}: {owner.origin}; this one is ignored")
            return plugin
        try:
            self._manager.register(module, name)
        except _FAILURES as error:
            plugin.problems.append(_brief(error))
            if self._manager.has_plugin(name):  # pluggy keeps what it had taken in when it failed
                self._manager.unregister(name=name)
            return plugin
        plugin.source = module
        plugin.problems += self._misnamed(module)
        self._collect(plugin, "policies", _kind)
        self._collect(plugin, "adapters", _adapter_name)
        return plugin

    def _forget(self, name: str) -> None:
        for plugin in [p for p in self.plugins if p.name == name and p.origin == _HERE]:
            self.plugins.remove(plugin)
            for kind in plugin.policies:
                del self.policies[kind]
            for adapter in plugin.adapters:
                del self.adapters[adapter]
            if plugin.source is not None:
                self._manager.unregister(name=name)

    def _misnamed(self, module: Any) -> list[str]:
        """Hooks that nobody will ever call. (pluggy's own check stops at the first one of all plugins.)"""
        callers = self._manager.get_hookcallers(module) or []
        known = sorted(name for name in vars(hooks) if name.startswith("kvpolicy_"))
        if not callers:
            return [f"it has no hooks; decorate {' or '.join(known)} with @kvpolicy.hookimpl"]
        return [
            unknown("hook", caller.name, "there are", known)
            for caller in callers
            if not caller.has_spec() and not all(i.optionalhook for i in caller.get_hookimpls() if i.plugin is module)
        ]

    def _collect(self, plugin: Plugin, what: str, name_of: Callable[[Any], str]) -> None:
        hook = f"kvpolicy_{what}"
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            if implementation.plugin is not plugin.source:
                continue
            reading = _reading.set(plugin)
            try:
                for thing in _items(implementation.function()):
                    self._claim(plugin, what, name_of, thing)
            except _FAILURES as error:
                plugin.problems.append(f"{hook}: {_brief(error)}")
            finally:
                _reading.reset(reading)

    def _claim(self, plugin: Plugin, what: str, name_of: Callable[[Any], str], thing: Any) -> None:
        try:
            name = name_of(thing)
        except _FAILURES as error:
            plugin.problems.append(f"kvpolicy_{what}: {_brief(error)}")
            return
        if owner := next((p for p in self.plugins if name in getattr(p, what)), None):
            by = "this plugin" if owner is plugin else f"{owner.name} ({owner.origin})"
            plugin.problems.append(f"{name!r} is already provided by {by}; {_called(thing)} is ignored")
        else:
            getattr(plugin, what)[name] = getattr(self, what)[name] = thing

    def policy(self, kind: str) -> type[EvictionPolicy]:
        """The policy class named `kind`; an error that lists what there is, and what failed to load."""
        if kind in self.policies:
            return self.policies[kind]
        message = unknown("policy", kind, "installed", sorted(self.policies))
        if broken := [f"{p.name}: {problem}" for p in self.plugins for problem in p.problems]:
            message += f"; plugins with problems: {'; '.join(broken)}"
        elif not did_you_mean(kind, self.policies):
            message += "; a new entry point is seen once its package is reinstalled"
        raise PluginError(message)


def _precedence(point: EntryPoint) -> tuple[bool, str, str, str]:
    owner = point.dist.name if point.dist else ""
    return owner != "kvpolicy", point.name, owner, point.value


def _brief(error: BaseException) -> str:
    """An exception in one line. Our own speak for themselves; others need their name to be understood."""
    text = " ".join(str(error).partition("For further information visit")[0].split())  # pydantic's
    text = text if len(text) <= 300 else f"{text[:297]}..."
    return text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}".rstrip(": ")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What follows an unknown name in a message: a suggestion, if a known one is near."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown(what: str, name: str, label: str, known: Iterable[str]) -> str:
    """The message about a name that is none of the `known` ones."""
    known = list(known)
    hint = did_you_mean(name, known) or ";"
    return f"unknown {what} {name!r}{hint} {label}: {', '.join(known) or 'none'}"


def _called(thing: Any) -> str:
    cls = thing if isinstance(thing, type) else type(thing)
    return f"{cls.__module__}.{cls.__qualname__}"


def _items(offered: Any) -> Iterable[Any]:
    if isinstance(offered, str) or not isinstance(offered, Iterable):
        raise PluginError(f"returned {offered!r}; it must return a list")
    return offered


def _kind(policy: Any) -> str:
    from kvpolicy.policy import EvictionPolicy

    if not (isinstance(policy, type) and issubclass(policy, EvictionPolicy)):
        raise PluginError(f"{policy!r} is not a subclass of EvictionPolicy")
    policy.model_rebuild()  # an annotation that cannot be resolved shows now, not when the policy is used
    kind = policy.model_fields["kind"]
    if not isinstance(kind.default, str) or get_args(kind.annotation) != (kind.default,):
        raise PluginError(f'{_called(policy)} needs a literal kind: kind: Literal["my_policy"] = "my_policy"')
    return kind.default


def _adapter_name(adapter: Any) -> str:
    name = getattr(adapter, "name", None)
    if isinstance(adapter, type) or not isinstance(name, str) or not name:
        raise PluginError(f"{adapter!r} is not an adapter (an object with a name)")
    return name


_reading: ContextVar[Plugin | None] = ContextVar("the plugin being read", default=None)


def report(problem: str) -> None:
    """For hooks: say what could not be loaded, and go on with the rest."""
    if (plugin := _reading.get()) is None:
        raise PluginError(problem)
    plugin.problems.append(problem)


def subclasses_in(package: str, path: Iterable[str], base: type[T]) -> list[type[T]]:
    """The subclasses of `base` defined in the modules of `package`, a file each.

    Names that start with an underscore are left out. A file that cannot be imported is reported, and the
    others are found nevertheless.
    """
    found: list[type[T]] = []
    for info in sorted(pkgutil.iter_modules(path), key=lambda info: info.name):
        name = f"{package}.{info.name}"
        if info.name.startswith("_"):
            continue
        try:
            module = import_module(name)
        except _FAILURES as error:
            report(f"{name}: {_brief(error)}")
            continue
        found += [
            thing
            for thing in dict.fromkeys(t for t in vars(module).values() if isinstance(t, type))
            if issubclass(thing, base) and thing.__module__ == name and not thing.__name__.startswith("_")
        ]
    return found


@cache
def registry() -> Registry:
    """What is installed in this environment, loaded once."""
    return Registry(entry_points(group=hooks.GROUP))


def policies() -> MappingProxyType[str, type[EvictionPolicy]]:
    """The installed policies by kind, read-only."""
    return MappingProxyType(registry().policies)
