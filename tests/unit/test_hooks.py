"""Every hook is documented, has a table to end up in, and does something here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from kvpolicy import EvictionCache, EvictionPolicy, ModelAdapter, hookimpl, hooks, load, plugins
from kvpolicy.allocator import LayerAllocator
from kvpolicy.errors import KVPolicyError
from kvpolicy.evaluate.task import EvaluationTask
from kvpolicy.observer import Observer, installed
from kvpolicy.plugins import Registry, registry
from tests import tiny

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"
HOOKS = {name: hook for name, hook in vars(hooks).items() if name.startswith("kvpolicy_")}


def signature(name: str) -> str:
    """The line that declares a hook, as in its source."""
    [line] = [line for line in inspect.getsource(HOOKS[name]).splitlines() if line.startswith("def ")]
    return line.partition("  #")[0]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented_with_its_signature(name: str) -> None:
    assert f"\n{signature(name)}\n" in DOCS.read_text("utf-8"), f"docs/plugins.md must have: {signature(name)}"
    assert inspect.getdoc(HOOKS[name])


def test_every_hook_has_a_table_and_every_table_a_hook() -> None:
    assert {name.removeprefix("kvpolicy_") for name in HOOKS} == set(plugins.NAMES)
    assert set(plugins.NAMES) == set(vars(plugins.Provided()))


@pytest.mark.parametrize("variable", [plugins.CHOICE, plugins.TRACE])
def test_every_variable_is_documented(variable: str) -> None:
    assert f"`{variable}`" in DOCS.read_text("utf-8")


# -- what each hook is for -------------------------------------------------------------------------------------


class Mine(EvictionPolicy):
    kind: Literal["test_hooks"] = "test_hooks"

    def priority(self, view: Any) -> Any:
        return view.positions


class Mirror(LayerAllocator):
    kind: Literal["test_hooks"] = "test_hooks"

    def quotas(self, average: int, layers: Any, of: int, prompt: int | None) -> list[int]:
        return [average + 1, average - 1]


class Ear(Observer):
    name = "test_hooks"

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.listens = True

    def active(self) -> bool:
        return self.listens

    def observed(self, layer: int, view: Any) -> None:
        self.heard.append(f"{layer} holds {view.positions.shape[-1]}")

    def evicted(self, layer: int, positions: Any) -> None:
        self.heard.append(f"{layer} gives up {positions.tolist()}")


class Odd(ModelAdapter):
    name = "test_hooks"
    model_types = frozenset({"odd"})

    def refusal(self, model: Any) -> str:
        return "it is odd"


EAR = Ear()
MODEL = tiny.family("llama")


class Needle(EvaluationTask):
    name = "test_hooks"


class Plugin:
    """One thing for each hook."""

    @hookimpl
    def kvpolicy_policies(self) -> list[type[EvictionPolicy]]:
        return [Mine]

    @hookimpl
    def kvpolicy_adapters(self) -> list[ModelAdapter]:
        return [Odd()]

    @hookimpl
    def kvpolicy_allocators(self) -> list[type[LayerAllocator]]:
        return [Mirror]

    @hookimpl
    def kvpolicy_observers(self) -> list[Observer]:
        return [EAR]

    @hookimpl
    def kvpolicy_tasks(self) -> list[EvaluationTask]:
        return [Needle()]


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    EAR.heard.clear()
    EAR.listens = True
    plugin = registry().register(Plugin(), "test-hooks")
    assert plugin.problems == []
    yield
    registry()._forget("test-hooks")


def read(cache: EvictionCache, tokens: int) -> None:
    MODEL(tiny.ids(1, tokens), use_cache=True, **tiny.cache_argument(cache))


def policies() -> None:
    assert type(load("test_hooks")) is Mine


def adapters() -> None:
    EvictionCache(MODEL, "h2o", 4)
    MODEL.config.model_type = "odd"
    try:
        with pytest.raises(KVPolicyError, match=r"\(model_type 'odd'\) is not supported: it is odd"):
            EvictionCache(MODEL, "h2o", 4)
    finally:
        del MODEL.config.model_type


def allocators() -> None:
    assert registry().allocator("test_hooks") is Mirror
    cache = EvictionCache(MODEL, "h2o", {"tokens": 4, "layers": "test_hooks"})
    read(cache, 9)
    assert [int(cache.kept(layer).max()) for layer in (0, 1)] == [5, 3]


def observers() -> None:
    assert EAR in installed()
    cache = EvictionCache(MODEL, "test_hooks", 4)
    EAR.listens = False
    assert EAR not in installed()
    silent = EvictionCache(MODEL, "test_hooks", 4)
    read(cache, 6)
    read(cache, 1)
    assert EAR.heard[:2] == ["0 holds 6", "0 gives up [[[1, 0], [1, 0]]]"]
    assert EAR.heard[4:] == ["0 holds 5", "0 gives up [[[2], [2]]]", "1 holds 5", "1 gives up [[[2], [2]]]"]
    EAR.heard.clear()
    read(silent, 6)
    assert EAR.heard == []


def tasks() -> None:
    assert isinstance(registry().task("test_hooks"), Needle)


USES: dict[str, Callable[[], None]] = {
    "kvpolicy_policies": policies,
    "kvpolicy_adapters": adapters,
    "kvpolicy_allocators": allocators,
    "kvpolicy_observers": observers,
    "kvpolicy_tasks": tasks,
}


def test_every_hook_is_used_here() -> None:
    assert set(USES) == set(HOOKS), "a new hook needs a test in USES and a place in Plugin"


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("hook", USES)
def test_what_a_hook_provides_works(hook: str) -> None:
    USES[hook]()


def test_observers_do_nothing_by_default() -> None:
    observer = Observer()
    assert observer.active()
    assert observer.observed(0, None) is None  # type: ignore[arg-type, func-returns-value]
    assert observer.evicted(0, None) is None  # type: ignore[arg-type, func-returns-value]
    assert installed() == tuple(registry().observers.values())
    assert Registry().observers == {}
