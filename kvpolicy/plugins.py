"""Loading plugins: one by one, so that a broken or duplicate one is reported and never takes others down."""

from __future__ import annotations

import os
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
    from kvpolicy.allocator import Allocator
    from kvpolicy.evaluate.task import EvaluationTask
    from kvpolicy.observer import Observer
    from kvpolicy.policy import EvictionPolicy

T = TypeVar("T")

CHOICE = "KVPOLICY_PLUGINS"
"""Environment variable: names of plugins or distributions to load beside kvpolicy's own, separated by commas."""
TRACE = "KVPOLICY_TRACE_PLUGINS"
"""Environment variable: where it is set, each call of a hook is told on stderr."""

_HERE = "registered in this process"
_FAILURES = (Exception, SystemExit)  # a module that runs a script's main() when imported must not end ours


@dataclass(kw_only=True)
class Provided:
    """What plugins bring, by name; a field for each hook."""

    policies: dict[str, type[EvictionPolicy]] = field(default_factory=dict)
    adapters: dict[str, ModelAdapter] = field(default_factory=dict)
    allocators: dict[str, type[Allocator]] = field(default_factory=dict)
    observers: dict[str, Observer] = field(default_factory=dict)
    tasks: dict[str, EvaluationTask] = field(default_factory=dict)


@dataclass
class Plugin(Provided):
    """One plugin, what it provides, and what went wrong with it."""

    name: str
    origin: str
    """Distribution and version, or how it was registered."""
    problems: list[str] = field(default_factory=list)
    """One line each. What they are about is missing; whatever else the plugin has is there."""
    source: Any = field(default=None, repr=False)
    """The module or object with the hooks; None if it could not be taken in."""


class Registry(Provided):
    """Everything installed, by name, and every problem met on the way.

    A name belongs to whoever brought it first: kvpolicy itself, then the other plugins by name.
    """

    def __init__(self, points: Iterable[EntryPoint] = (), only: Collection[str] | None = None) -> None:
        super().__init__()
        self._manager = pluggy.PluginManager(hooks.GROUP)
        self._manager.add_hookspecs(hooks)
        self.plugins: list[Plugin] = []
        points = sorted(points, key=_precedence)
        for point in points:
            if only is None or _first_party(point) or not _names_of(point).isdisjoint(map(_normal, only)):
                self._load(point)
        self.plugins += _not_there(only or (), points)

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
        for what, name_of in NAMES.items():
            self._collect(plugin, what, name_of)
        return plugin

    def _forget(self, name: str) -> None:
        for plugin in [p for p in self.plugins if p.name == name and p.origin == _HERE]:
            self.plugins.remove(plugin)
            for what in NAMES:
                for provided in getattr(plugin, what):
                    del getattr(self, what)[provided]
            if plugin.source is not None:
                self._manager.unregister(name=name)

    def _misnamed(self, module: Any) -> list[str]:
        """Hooks that nobody will ever call. (pluggy's own check stops at the first one of all plugins.)"""
        callers = self._manager.get_hookcallers(module) or []
        known = sorted(f"kvpolicy_{what}" for what in NAMES)
        if not callers:
            return [f"it has no hooks; decorate one of {', '.join(known)} with @kvpolicy.hookimpl"]
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
            given: list[Any] = []
            try:
                for thing in _items(implementation.function()):
                    given.append(thing)
                    self._claim(plugin, what, name_of, thing)
            except _FAILURES as error:
                given.append(error)
                plugin.problems.append(f"{hook}: {_brief(error)}")
            finally:
                _reading.reset(reading)
            if os.environ.get(TRACE):
                print(f"kvpolicy: {hook}: {plugin.name}: {given}", file=sys.stderr)

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
        return self._get("policy", self.policies, kind)

    def allocator(self, kind: str) -> type[Allocator]:
        """The allocator class named `kind`; errors are as those of :meth:`policy`."""
        return self._get("allocator", self.allocators, kind)

    def task(self, name: str) -> EvaluationTask:
        """The evaluation task named `name`; errors are as those of :meth:`policy`."""
        return self._get("task", self.tasks, name)

    def _get(self, noun: str, provided: Mapping[str, T], name: str) -> T:
        if name in provided:
            return provided[name]
        message = unknown(noun, name, "installed", sorted(provided))
        if broken := [f"{p.name}: {problem}" for p in self.plugins for problem in p.problems]:
            message += f"; plugins with problems: {'; '.join(broken)}"
        elif not did_you_mean(name, provided):
            message += "; a new entry point is seen once its package is reinstalled"
        raise PluginError(message)


def _first_party(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "kvpolicy"


def _precedence(point: EntryPoint) -> tuple[bool, str, str, str]:
    return not _first_party(point), point.name, point.dist.name if point.dist else "", point.value


def _normal(name: str) -> str:
    """A name of a distribution as installers compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _names_of(point: EntryPoint) -> set[str]:
    return {_normal(name) for name in (point.name, point.dist.name if point.dist else point.name)}


def _not_there(only: Iterable[str], points: Iterable[EntryPoint]) -> Iterator[Plugin]:
    """What was asked for and is not installed, as plugins with a problem."""
    known = sorted({point.name for point in points})
    for name in only:
        if not any(_normal(name) in _names_of(point) for point in points):
            yield Plugin(name, CHOICE, problems=[unknown("plugin", name, "installed", known)])


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


def _by_kind(home: str, base: str) -> Callable[[Any], str]:
    """How to name classes derived from `base` in module `home`: by the literal ``kind`` that each declares."""

    def kind_of(thing: Any) -> str:
        if not (isinstance(thing, type) and issubclass(thing, getattr(import_module(home), base))):
            raise PluginError(f"{thing!r} is not a subclass of {base}")
        model: Any = thing
        model.model_rebuild()  # an annotation that cannot be resolved shows now, not when the class is used
        kind = model.model_fields["kind"]
        if not isinstance(kind.default, str) or get_args(kind.annotation) != (kind.default,):
            raise PluginError(f'{_called(thing)} needs a literal kind: kind: Literal["my_name"] = "my_name"')
        return kind.default

    return kind_of


def _by_name(noun: str) -> Callable[[Any], str]:
    """How to name objects: by their attribute ``name``."""

    def name_of(thing: Any) -> str:
        name = getattr(thing, "name", None)
        if isinstance(thing, type) or not isinstance(name, str) or not name:
            raise PluginError(f"{thing!r} is not {noun} (an object with a name)")
        return name

    return name_of


NAMES: dict[str, Callable[[Any], str]] = {
    "policies": _by_kind("kvpolicy.policy", "EvictionPolicy"),
    "adapters": _by_name("an adapter"),
    "allocators": _by_kind("kvpolicy.allocator", "Allocator"),
    "observers": _by_name("an observer"),
    "tasks": _by_name("an evaluation task"),
}
"""What hooks provide: ``kvpolicy_<this>``, and how a thing that it returns is named."""


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
    chosen = os.environ.get(CHOICE)
    only = None if chosen is None else [name.strip() for name in chosen.split(",") if name.strip()]
    return Registry(entry_points(group=hooks.GROUP), only)


def policies() -> MappingProxyType[str, type[EvictionPolicy]]:
    """The installed policies by kind, read-only."""
    return MappingProxyType(registry().policies)
