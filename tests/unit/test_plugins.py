"""Plugins come in one by one: what is broken is reported and leaves the others alone."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint
from textwrap import dedent
from types import SimpleNamespace
from typing import Literal

import pytest

import kvpolicy
from kvpolicy import config, hookimpl, plugins
from kvpolicy.errors import ConfigError, PluginError
from kvpolicy.plugins import Registry, registry, subclasses_in
from kvpolicy.policy import EvictionPolicy

FIRST_PARTY = {
    "a2sf", "ahakv", "cake", "criticalkv", "duo_attention", "expected_attention", "full", "h2o", "heavy", "keydiff",
    "keyformer", "kivi", "knorm", "kvzip", "lagkv", "lfu", "lru", "nacl", "quest", "random", "recent", "rkv",
    "scissorhands", "sinks", "snapkv", "span", "streaming_llm", "tova", "vatp",
}  # fmt: skip

IMPORTS = """
from typing import Literal
from kvpolicy import EvictionPolicy, hookimpl
"""


def source(kind: str, name: str = "Mine") -> str:
    """A module that provides one policy."""
    return f"""
    class {name}(EvictionPolicy):
        kind: Literal["{kind}"] = "{kind}"

    @hookimpl
    def kvpolicy_policies():
        return [{name}]
    """


class FakeDistribution(Distribution):
    def __init__(self, name):
        self.metadata_text = f"Name: {name}\nVersion: 1.2\n"

    def read_text(self, filename):
        return self.metadata_text if filename == "METADATA" else None

    def locate_file(self, path):
        raise NotImplementedError


def point(name: str, value: str, dist: str | None = None) -> EntryPoint:
    made = EntryPoint(name, value, "kvpolicy")
    return made._for(FakeDistribution(dist)) if dist else made


@pytest.fixture
def module(tmp_path, monkeypatch) -> Iterator:
    """Writes an importable module and returns an entry point to it."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name: str, code: str, dist: str | None = None) -> EntryPoint:
        file = tmp_path / (name.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(IMPORTS + dedent(code))
        written.append(name)
        return point(name.replace("_", "-"), name, dist)

    yield write
    for name in list(sys.modules):
        if name.split(".")[0] in {w.split(".")[0] for w in written}:
            del sys.modules[name]


def problems(registered: Registry) -> dict[str, list[str]]:
    return {p.name: p.problems for p in registered.plugins if p.problems}


def test_what_comes_with_kvpolicy():
    first = next(p for p in registry().plugins if p.name == "kvpolicy-plugins")
    assert set(first.policies) == FIRST_PARTY
    assert first.problems == []
    assert first.origin == f"kvpolicy {kvpolicy.__version__}"
    assert registry() is registry()


def test_policies_cannot_be_changed():
    assert kvpolicy.policies()["h2o"].__name__ == "H2O"
    with pytest.raises(TypeError):
        kvpolicy.policies()["mine"] = EvictionPolicy


def test_a_third_party_policy(module):
    registered = Registry([module("good_one", source("mine"), "good")])
    assert registered.policy("mine").__name__ == "Mine"
    assert registered.plugins[0].origin == "good 1.2"
    assert problems(registered) == {}


BROKEN = {
    "import": ("import not_there_at_all", "broken: ModuleNotFoundError: No module named 'not_there_at_all'"),
    "raises": ("1 / 0", "broken: ZeroDivisionError: division by zero"),
    "exits": ("raise SystemExit(3)", "broken: SystemExit: 3"),
    "syntax": ("def :", "broken: SyntaxError: invalid syntax (broken.py, line 4)"),
    "class": (
        """
        class Bad(EvictionPolicy):
            kind: Literal["bad"] = "bad"
            recent = 3
        """,
        "broken: PydanticUserError: ",
    ),
    "no hooks": (
        "def kvpolicy_policies(): return []",
        "it has no hooks; decorate one of kvpolicy_adapters, kvpolicy_allocators, kvpolicy_observers, "
        "kvpolicy_policies, kvpolicy_tasks with @kvpolicy.hookimpl",
    ),
    "unknown hook": (
        "@hookimpl\ndef kvpolicy_polices(): return []",
        "unknown hook 'kvpolicy_polices'; did you mean 'kvpolicy_policies'? "
        "there are: kvpolicy_adapters, kvpolicy_allocators, kvpolicy_observers, kvpolicy_policies, kvpolicy_tasks",
    ),
    "arguments": (
        "@hookimpl\ndef kvpolicy_policies(names): return []",
        "PluginValidationError: Plugin 'broken' for hook 'kvpolicy_policies' hookimpl definition: "
        "kvpolicy_policies(names) Argument(s) {'names'} are declared in the hookimpl",
    ),
    "hook raises": (
        "@hookimpl\ndef kvpolicy_policies(): raise OSError('no disk')",
        "kvpolicy_policies: OSError: no disk",
    ),
    "nothing": (
        "@hookimpl\ndef kvpolicy_policies(): pass",
        "kvpolicy_policies: returned None; it must return a list",
    ),
    "text": (
        "@hookimpl\ndef kvpolicy_policies(): return 'h2o'",
        "kvpolicy_policies: returned 'h2o'; it must return a list",
    ),
    "rubbish": (
        "@hookimpl\ndef kvpolicy_policies(): return [3]",
        "kvpolicy_policies: 3 is not a subclass of EvictionPolicy",
    ),
    "no literal": (
        "class Bad(EvictionPolicy):\n    kind: str = 'bad'\n@hookimpl\ndef kvpolicy_policies(): return [Bad]",
        'kvpolicy_policies: broken.Bad needs a literal kind: kind: Literal["my_name"] = "my_name"',
    ),
    "no kind": (
        "class Bad(EvictionPolicy): pass\n@hookimpl\ndef kvpolicy_policies(): return [Bad]",
        'kvpolicy_policies: broken.Bad needs a literal kind: kind: Literal["my_name"] = "my_name"',
    ),
    "unresolved": (
        """
        class Bad(EvictionPolicy):
            kind: Literal["bad"] = "bad"
            recent: "Share" = 0.5

        @hookimpl
        def kvpolicy_policies():
            return [Bad]
        """,
        "kvpolicy_policies: PydanticUndefinedAnnotation: name 'Share' is not defined",
    ),
    "adapter": (
        "@hookimpl\ndef kvpolicy_adapters(): return [object]",
        "kvpolicy_adapters: <class 'object'> is not an adapter (an object with a name)",
    ),
    "allocator": (
        "@hookimpl\ndef kvpolicy_allocators(): return [EvictionPolicy]",
        "kvpolicy_allocators: <class 'kvpolicy.policy.EvictionPolicy'> is not a subclass of Allocator",
    ),
    "observer": (
        "class Nameless: name = ''\n@hookimpl\ndef kvpolicy_observers(): return [Nameless()]",
        "kvpolicy_observers: <broken.Nameless object at ",
    ),
    "task": (
        "@hookimpl\ndef kvpolicy_tasks(): return ['needle']",
        "kvpolicy_tasks: 'needle' is not an evaluation task (an object with a name)",
    ),
}


@pytest.mark.parametrize(("code", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_reported_and_leaves_the_others_alone(module, monkeypatch, code, problem):
    points = [module("broken", code), module("after", source("late")), module("ante", source("early"))]
    registered = Registry(points)
    assert sorted(registered.policies) == ["early", "late"]
    assert list(problems(registered)) == ["broken"]
    assert problems(registered)["broken"][0].startswith(problem)
    assert "\n" not in problems(registered)["broken"][0]

    monkeypatch.setattr(config, "registry", lambda: registered)
    assert config.load("late").kind == "late"  # fails only if a configuration names it
    with pytest.raises(ConfigError) as caught:
        config.load("bad")
    message = "unknown policy 'bad'; installed: early, late; plugins with problems: broken: "
    assert str(caught.value).startswith(message + problem)


def test_an_entry_point_to_nothing():
    registered = Registry([point("gone", "not_there_at_all"), point("lost", "kvpolicy.hooks:nothing")])
    assert problems(registered) == {
        "gone": ["not_there_at_all: ModuleNotFoundError: No module named 'not_there_at_all'"],
        "lost": ["kvpolicy.hooks:nothing: AttributeError: module 'kvpolicy.hooks' has no attribute 'nothing'"],
    }
    assert registered.policies == {}


def test_what_is_good_in_a_plugin_with_a_problem_stays(module):
    code = """
    class Good(EvictionPolicy):
        kind: Literal["good"] = "good"

    @hookimpl
    def kvpolicy_policies():
        yield Good
        yield 3
        raise OSError("no disk")

    @hookimpl
    def kvpolicy_adapters():
        raise OSError("no model")
    """
    registered = Registry([module("half", code)])
    assert list(registered.policies) == ["good"]
    assert problems(registered)["half"] == [
        "kvpolicy_policies: 3 is not a subclass of EvictionPolicy",
        "kvpolicy_policies: OSError: no disk",
        "kvpolicy_adapters: OSError: no model",
    ]


def test_two_plugins_of_one_name(module):
    first, second = module("one", source("one"), "aaa"), module("two", source("two"), "bbb")
    points = [point("same", second.value, "bbb"), point("same", first.value, "aaa")]
    registered = Registry(points)
    assert list(registered.policies) == ["one"]
    assert problems(registered) == {"same": ["another plugin is named 'same': aaa 1.2; this one is ignored"]}
    assert [p.origin for p in registered.plugins] == ["aaa 1.2", "bbb 1.2"]


def test_a_broken_plugin_does_not_keep_its_name(module):
    broken, good = module("aaa", "1 / 0"), module("bbb", source("mine"))
    registered = Registry([point("same", broken.value), point("same", good.value)])
    assert list(registered.policies) == ["mine"]


def test_one_module_under_two_names(module):
    good = module("good_one", source("mine"))
    registered = Registry([good, point("other", good.value)])
    assert list(registered.policies) == ["mine"]
    assert list(problems(registered)) == ["other"]


@pytest.mark.parametrize("other", ["kvpolicy", "zzz"])
def test_two_plugins_of_one_kind(module, other):
    late = module("zzz_mine", source("mine", "Late"), other)
    early = module("aaa_mine", source("mine", "Early"), "aaa")
    registered = Registry([late, early])
    winner, loser = (late, early) if other == "kvpolicy" else (early, late)
    assert registered.policy("mine").__module__ == winner.value
    lost = f"{loser.value}.{'Early' if loser is early else 'Late'}"
    told = f"'mine' is already provided by {winner.name} ({winner.dist.name} 1.2); {lost} is ignored"
    assert problems(registered) == {loser.name: [told]}


def test_a_kind_twice_in_one_plugin(module):
    code = (
        source("mine").replace("[Mine]", "[Mine, Copy]")
        + """
    class Copy(Mine):
        pass
    """
    )
    registered = Registry([module("twice", code)])
    assert problems(registered) == {"twice": ["'mine' is already provided by this plugin; twice.Copy is ignored"]}


def test_policies_and_adapters_have_names_of_their_own(module):
    code = (
        source("same")
        + """
    @hookimpl
    def kvpolicy_adapters():
        from types import SimpleNamespace
        return [SimpleNamespace(name="same"), SimpleNamespace(name="other")]
    """
    )
    registered = Registry([module("both", code)])
    assert problems(registered) == {}
    assert list(registered.adapters) == ["same", "other"]


def test_optional_hooks_of_other_versions_are_no_problem(module):
    code = (
        source("mine")
        + """
    @hookimpl(optionalhook=True)
    def kvpolicy_hook_to_come():
        return []
    """
    )
    assert problems(Registry([module("ahead", code)])) == {}


EVERYTHING = (
    source("mine")
    + """
from types import SimpleNamespace
from kvpolicy.allocator import HeadAllocator
from kvpolicy.observer import Observer

class Even(HeadAllocator):
    kind: Literal["even"] = "even"

class Counter(Observer):
    name = "counter"

@hookimpl
def kvpolicy_adapters():
    return [SimpleNamespace(name="family")]

@hookimpl
def kvpolicy_allocators():
    return [Even]

@hookimpl
def kvpolicy_observers():
    return [Counter()]

@hookimpl
def kvpolicy_tasks():
    return [SimpleNamespace(name="needle")]
""".replace("\n", "\n    ")
)
NAMED = {"policies": "mine", "adapters": "family", "allocators": "even", "observers": "counter", "tasks": "needle"}


def test_everything_that_can_be_provided(module):
    registered = Registry([module("all_of_it", EVERYTHING)])
    assert problems(registered) == {}
    assert {what: "".join(getattr(registered, what)) for what in plugins.NAMES} == NAMED
    assert {what: "".join(getattr(registered.plugins[0], what)) for what in plugins.NAMES} == NAMED
    assert registered.allocator("even").__name__ == "Even"
    assert registered.task("needle").name == "needle"


@pytest.mark.parametrize("noun", ["policy", "allocator", "task"])
def test_a_name_that_nobody_has(module, noun):
    registered = Registry([module("all_of_it", EVERYTHING)])
    [known] = getattr(registered, {"policy": "policies"}.get(noun, f"{noun}s"))
    with pytest.raises(PluginError, match=f"unknown {noun} '{known}x'; did you mean '{known}'. installed: {known}"):
        getattr(registered, noun)(known + "x")
    with pytest.raises(PluginError, match=f"unknown {noun} 'zzz'; installed: .* seen once its package is reinstalled"):
        getattr(registered, noun)("zzz")


def test_registering_again_replaces_all_that_was_provided(module):
    code = module("all_of_it", EVERYTHING).load()
    registered = Registry()
    registered.register(code, "mine")
    assert registered.register(code, "mine").problems == []
    assert len(registered.plugins) == 1


def chosen(names: str | None, monkeypatch: pytest.MonkeyPatch, points: list[EntryPoint]) -> Registry:
    """The registry of an environment with these entry points, and with or without the variable."""
    monkeypatch.delenv("KVPOLICY_PLUGINS", raising=False)
    if names is not None:
        monkeypatch.setenv("KVPOLICY_PLUGINS", names)
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    return registry.__wrapped__()


@pytest.mark.parametrize(
    ("names", "loaded"),
    [
        (None, ["ours", "one", "other", "two"]),
        ("", ["ours"]),
        (" , ", ["ours"]),
        ("one", ["ours", "one"]),
        ("one,two", ["ours", "one", "two"]),
        ("dist-b", ["ours", "other", "two"]),
        (" Dist_B ,one", ["ours", "one", "other", "two"]),
    ],
)
def test_choosing_plugins(module, monkeypatch, names, loaded):
    dists = {"ours": "kvpolicy", "one": "dist-a", "two": "dist-b", "other": "dist.b"}
    points = [module(name, source(name), dist) for name, dist in dists.items()]
    registered = chosen(names, monkeypatch, points)
    assert list(registered.policies) == loaded
    assert problems(registered) == {}


def test_choosing_what_is_not_there(module, monkeypatch):
    registered = chosen("oen,one", monkeypatch, [module("one", source("one"))])
    assert list(registered.policies) == ["one"]
    assert problems(registered) == {"oen": ["unknown plugin 'oen'; did you mean 'one'? installed: one"]}
    assert registered.plugins[-1].origin == "KVPOLICY_PLUGINS"


def test_a_plugin_that_is_not_chosen_is_not_even_imported(module, monkeypatch):
    assert problems(chosen("", monkeypatch, [module("broken", "1 / 0")])) == {}
    assert "broken" not in sys.modules


def test_tracing(module, monkeypatch, capsys):
    points = [module("one", source("mine")), module("two", "@hookimpl\ndef kvpolicy_tasks(): return 1 / 0")]
    Registry(points)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("KVPOLICY_TRACE_PLUGINS", "1")
    Registry(points)
    assert capsys.readouterr().err.splitlines() == [
        "kvpolicy: kvpolicy_policies: one: [<class 'one.Mine'>]",
        "kvpolicy: kvpolicy_tasks: two: [ZeroDivisionError('division by zero')]",
    ]


def test_one_broken_file_of_a_package_is_reported_and_the_others_load(module):
    package = """
    from kvpolicy.plugins import subclasses_in

    @hookimpl
    def kvpolicy_policies():
        return subclasses_in(__name__, __path__, EvictionPolicy)
    """
    entry = module("pack.__init__", package)
    policy = source("{0}").split("@hookimpl")[0]
    for kind in "ac":
        module(f"pack.{kind}", policy.format(kind) + "\n    Alias = Mine\n")
    module("pack.b", "1 / 0")
    module("pack._shared", policy.format("shared"))
    module("pack.d", policy.format("base").replace("Mine", "_Base"))
    registered = Registry([point(entry.name, "pack")])
    assert list(registered.policies) == ["a", "c"]
    assert problems(registered) == {entry.name: ["pack.b: ZeroDivisionError: division by zero"]}

    with pytest.raises(PluginError, match=r"pack\.b: ZeroDivisionError"):  # nobody is listening
        subclasses_in("pack", sys.modules["pack"].__path__, EvictionPolicy)


class Fifo(EvictionPolicy):
    kind: Literal["fifo"] = "fifo"


class Offers:
    @hookimpl
    def kvpolicy_policies(self):
        return [Fifo]


def test_registering_in_a_notebook():
    registered = Registry()
    plugin = registered.register(Offers(), "mine")
    assert (plugin.origin, plugin.problems) == ("registered in this process", [])
    assert registered.policy("fifo") is Fifo

    again = registered.register(Offers(), "mine")  # the cell is run once more
    assert again.problems == []
    assert registered.plugins == [again]
    assert registered.policy("fifo") is Fifo


def test_a_notebook_cannot_displace_what_is_installed(module):
    registered = Registry([module("good_one", source("mine"))])
    for _ in range(2):
        assert registered.register(Offers(), "good-one").problems == [
            "another plugin is named 'good-one': good_one; this one is ignored"
        ]
    assert list(registered.policies) == ["mine"]


def test_an_object_that_cannot_even_be_looked_at():
    class Hostile:
        def __dir__(self):
            raise RuntimeError("no")

    registered = Registry()
    assert registered.register(Hostile(), "hostile").problems == ["RuntimeError: no"]
    assert registered.register(SimpleNamespace(), "hostile").problems[0].startswith("it has no hooks")


def test_importing_is_light():
    code = "import sys, kvpolicy.config, kvpolicy.plugins; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_registry_is_that_of_the_environment(monkeypatch):
    assert kvpolicy.policies() == registry().policies
    assert plugins.policies().keys() >= FIRST_PARTY
