"""Every way to name a policy gives the same policy, and everything wrong is reported where it is."""

import json
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import pytest
from kvpolicy_plugins.full import Full
from kvpolicy_plugins.h2o import H2O
from kvpolicy_plugins.lru import LRU
from kvpolicy_plugins.pyramid import Pyramid
from kvpolicy_plugins.uniform import Uniform
from pydantic import BeforeValidator, model_validator

from kvpolicy import config, load
from kvpolicy.budget import Budget
from kvpolicy.compose import Layers, Protect
from kvpolicy.config import Config, policy_from, read
from kvpolicy.errors import BudgetError, ConfigError
from kvpolicy.plugins import Registry, registry
from kvpolicy.policy import EvictionPolicy

KINDS = ", ".join(sorted(registry().policies))
REMEDY = (
    "is no budget; give a number of tokens, 1 or more (64), "
    "or a share of the prompt, above 0.0 and up to 1.0 (0.25 or 25%)"
)
ZERO_TO_ONE = "needs a number of tokens >= 0 (4) or a share of the budget from 0.0 to 1.0 (0.5)"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text, name="p.yaml"):
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def refusal(source, error=ConfigError):
    with pytest.raises(error) as caught:
        read(source)
    assert type(caught.value) is error
    return str(caught.value)


# The same policy, however it is written


def test_all_sources_give_the_same_policy():
    meant = H2O(recent=0.25, sinks=4)
    mapping = {"kind": "h2o", "recent": 0.25, "sinks": 4}
    file = write("# mine\nkind: h2o\nrecent: 0.25\nsinks: 4\n")
    sources = [meant, mapping, MappingProxyType(mapping), file, Path(file), f"./{file}"]
    sources.append(write(json.dumps(mapping, indent="\t"), "p.json"))
    sources.append(write(b"\xef\xbb\xbfkind: h2o\r\nrecent: 0.25\r\nsinks: 4\r\n", "p.YML"))
    for source in sources:
        assert load(source) == meant


def test_a_policy_is_returned_as_it_is():
    policy = H2O()
    assert load(policy) is policy
    assert read(policy) == Config(policy)
    assert read(read(policy)) == Config(policy)


def test_a_policy_from_a_notebook_needs_no_registration():
    class Mine(EvictionPolicy):
        kind: Literal["mine"] = "mine"

    assert isinstance(load(Mine()), Mine)


def test_a_kind_alone_has_its_defaults():
    assert load("h2o") == H2O()
    assert load(write("kind: lru")) == LRU()


def test_a_path_without_a_suffix_of_ours():
    assert load(Path(write("kind: lru", "mine.conf"))) == LRU()
    assert load("./mine.conf") == LRU()


@pytest.mark.parametrize("text", ["recent: 1e-3", "recent: .001", "recent: 0.001"])
def test_numbers_are_numbers(text):
    recent = load(write(f"kind: h2o\n{text}\n")).recent
    assert recent == 0.001
    assert isinstance(recent, float)


def test_one_token_is_not_everything():
    assert type(load(write("kind: h2o\nrecent: 1\n")).recent) is int
    assert type(load(write("kind: h2o\nrecent: 1.0\n")).recent) is float
    assert type(load(write('{"kind": "h2o", "recent": 1.0}', "p.json")).recent) is float


def test_yaml_merge_keys():
    assert load({"kind": "h2o", "sinks": 2}) == load(write("<<: {kind: h2o, sinks: 1}\nsinks: 2\n"))
    several = "<<: [{sinks: 3}, {kind: h2o, sinks: 1}]\n"
    assert load(write(several)) == H2O(sinks=3)
    assert refusal(write(f"{several}recent: -1\n")) == f"p.yaml:2:9: recent: {ZERO_TO_ONE}"


def test_the_mapping_is_not_changed_and_not_held():
    mapping = {"kind": "h2o", "recent": 0.25, "budget": "25%"}
    before = deepcopy(mapping)
    first, second = read(mapping), read(mapping)
    assert mapping == before
    mapping["recent"] = 0.75
    assert first == second == Config(H2O(recent=0.25), Budget(share=0.25))


@pytest.mark.parametrize(
    ("written", "budget"),
    [
        ("budget: 64", Budget(tokens=64)),
        ("budget: 0.25", Budget(share=0.25)),
        ("budget: 25%", Budget(share=0.25)),
        ("budget: 1.0", Budget(share=1.0)),
        ("budget:", None),
        ("", None),
    ],
)
def test_budget(written, budget):
    assert read(write(f"kind: h2o\n{written}\n")) == Config(H2O(), budget)


# A file on top of others


def wrote(**files):
    for name, text in files.items():
        write(text, f"{name}.yaml")
    return f"{name}.yaml"


def test_a_file_extends_another():
    file = wrote(base="kind: h2o\nrecent: 0.25\nsinks: 4\nbudget: 64\n", own="extends: base.yaml\nrecent: 8\n")
    assert read(file) == Config(H2O(recent=8, sinks=4), Budget(tokens=64))
    assert repr(load(file)) == repr(H2O(recent=8, sinks=4))


def test_mappings_merge_deeply_and_lists_are_replaced():
    base = """
        kind: layers
        at:
          "0-1": {kind: protect, spans: [[0, 4], [8, 9]], sinks: 2, of: {kind: h2o, recent: 0.25}}
          "2": full
        default: lru
    """
    own = """
        extends: base.yaml
        at:
          "0-1": {spans: [[1, 2]], of: {sinks: 1}}
          "2": {kind: lru, tau: 2}
        default: h2o
    """
    assert load(wrote(base=base, own=own)) == Layers(
        at={
            "0-1": Protect(spans=[(1, 2)], sinks=2, of=H2O(recent=0.25, sinks=1)),
            "2": LRU(tau=2),
        },
        default=H2O(),
    )


def test_options_of_another_kind_do_not_carry_over_but_the_budget_does():
    base = "kind: protect\nsinks: 4\nof: {kind: h2o, recent: 0.25}\nbudget: {share: 0.25, min: 8}\n"
    assert read(wrote(base=base, own="extends: base.yaml\nkind: lru\n")) == Config(LRU(), Budget(share=0.25, min=8))
    assert load(wrote(base=base, own="extends: base.yaml\nof: {kind: lru}\n")) == Protect(sinks=4, of=LRU())
    same = "extends: base.yaml\nof: {kind: h2o, sinks: 2}\n"
    assert load(wrote(base=base, own=same)) == Protect(sinks=4, of=H2O(recent=0.25, sinks=2))


@pytest.mark.parametrize(
    ("own", "budget"),
    [
        ("", Budget(share=0.25, min=8, layers=Pyramid(beta=9, window=2))),
        ("budget: 64", Budget(tokens=64)),
        ("budget: {max: 99}", Budget(share=0.25, min=8, max=99, layers=Pyramid(beta=9, window=2))),
        ("budget: {layers: {beta: 30}}", Budget(share=0.25, min=8, layers=Pyramid(beta=30, window=2))),
        ("budget: {layers: {kind: uniform}}", Budget(share=0.25, min=8, layers=Uniform())),
        ("budget: {layers: pyramid}", Budget(share=0.25, min=8, layers=Pyramid())),
        ("budget: {tokens: 64, min: null}", Budget(tokens=64, layers=Pyramid(beta=9, window=2))),
        ("budget:", None),
    ],
)
def test_budgets_merge(own, budget):
    base = "kind: h2o\nbudget: {share: 0.25, min: 8, layers: {kind: pyramid, beta: 9, window: 2}}\n"
    assert read(wrote(base=base, own=f"extends: base.yaml\n{own}\n")).budget == budget


def test_of_several_bases_the_later_wins():
    bases = {"one": "kind: h2o\nsinks: 1\nrecent: 1\n", "two": "sinks: 2\nbudget: 64\n"}
    file = wrote(**bases, own="extends:\n- one.yaml\n- two.yaml\n")
    assert read(file) == Config(H2O(sinks=2, recent=1), Budget(tokens=64))
    assert load(wrote(**bases, own="extends: []\nkind: lru\n")) == LRU()


def test_the_layers_of_the_extending_file_count_first():
    base = "kind: layers\nat: {':50%': h2o, '4': full}\ndefault: lru\n"
    policy = load(wrote(base=base, own="extends: base.yaml\nat: {'0': full, '4': lru}\n"))
    assert list(policy.at) == ["0", "4", ":50%"]


def test_bases_are_found_beside_the_file_that_names_them(tmp_path, monkeypatch):
    Path("sub/deep").mkdir(parents=True)
    write("kind: h2o\n", "sub/root.yaml")
    write("extends: ../root.yaml\nsinks: 1\n", "sub/deep/middle.yaml")
    write("extends: deep/middle.yaml\nrecent: 3\n", "sub/own.yaml")
    assert load("sub/own.yaml") == H2O(sinks=1, recent=3)
    monkeypatch.chdir("sub/deep")
    assert load("../own.yaml") == H2O(sinks=1, recent=3)
    write(f"extends: {tmp_path}/sub/own.yaml\n", "far.yaml")
    assert load(Path("far.yaml")) == H2O(sinks=1, recent=3)


def test_two_files_may_extend_the_same():
    file = wrote(
        root="kind: h2o\nsinks: 1\n",
        left="extends: root.yaml\nrecent: 1\n",
        right="extends: root.yaml\nsinks: 2\n",
        own="extends: [left.yaml, right.yaml]\n",
    )
    assert load(file) == H2O(sinks=2, recent=1)


def test_what_is_wrong_in_a_base_is_told_of_the_base():
    file = wrote(
        root="# root\nkind: protect\nof:\n  kind: h2o\n  recent: 2.0\nbudget: 0\n",
        base="extends: root.yaml\nof: {recnt: 1}\n",
        own="extends: base.yaml\nsinks: -1\nof: {sinks: x}\n",
    )
    assert refusal(file).splitlines() == [
        "own.yaml:2:8: sinks: must be greater than or equal to 0, not -1",
        "own.yaml:3:13: of.sinks: must be a valid integer, not 'x'",
        "base.yaml:2:6: of.recnt: unknown option 'recnt'; did you mean 'recent'? "
        "h2o has: recent, sinks, decay, normalise, group, promote",
        f"root.yaml:5:11: of.recent: {ZERO_TO_ONE}",
        f"root.yaml:6:9: budget: 0 {REMEDY}",
    ]


def test_what_is_missing_is_told_of_the_extending_file():
    assert refusal(wrote(base="kind: protect\n", own="\nextends: base.yaml\n")) == "own.yaml:2:1: of: is missing"


def test_without_a_base_only_what_is_certain_is_told():
    text = "extends: none.yaml\nbudget: {of: seen}\nof: {recent: 1}\n"
    missing = "own.yaml:1:10: extends: none.yaml: cannot be read: No such file or directory"
    assert refusal(write(text, "own.yaml")) == missing
    assert refusal(write(text + "kind: protect\nsinks: -1\n", "own.yaml")).splitlines() == [
        missing,
        "own.yaml:5:8: sinks: must be greater than or equal to 0, not -1",
    ]


def test_a_base_that_is_no_yaml_leaves_the_rest_to_be_told():
    file = wrote(base="kind: [\n", own="extends: base.yaml\nkind: h2o\nrecnt: 1\n")
    assert refusal(file).splitlines() == [
        "own.yaml:3:1: recnt: unknown option 'recnt'; did you mean 'recent'? "
        "h2o has: recent, sinks, decay, normalise, group, promote",
        "base.yaml:2:1: is not valid YAML: expected the node content, but found '<stream end>'",
    ]


@pytest.mark.parametrize("value", ["3", "", "{file: base.yaml}", "[[base.yaml]]", "''"])
def test_what_is_no_base(value):
    message = refusal(write(f"extends: {value}\nkind: h2o\n"))
    assert message.startswith("p.yaml:1:")
    assert message.endswith(": needs a file, or a list of files")


def test_a_mapping_extends_nothing():
    assert refusal({"kind": "h2o", "extends": "b.yaml"}) == (
        "extends: is for files, which are found relative to each other"
    )


# Wrong files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# c\nkind: h2oo\n", f"2:7: kind: unknown policy 'h2oo'; did you mean 'h2o'? installed: {KINDS}"),
        ("recent: 0.5", f"1:1: kind: is missing; installed: {KINDS}"),
        ("knd: h2o", "1:1: kind: is missing; is 'knd' meant to be it?"),
        ("kind: 3", f"1:7: kind: needs the name of a policy, not 3; installed: {KINDS}"),
        (
            "kind: h2o\nrecnt: 0.25\n",
            "2:1: recnt: unknown option 'recnt'; did you mean 'recent'? "
            "h2o has: recent, sinks, decay, normalise, group, promote",
        ),
        (
            "kind: h2o\ntau: 1\n",
            "2:1: tau: unknown option 'tau'; h2o has: recent, sinks, decay, normalise, group, promote",
        ),
        ("kind: full\nsinks: 4\n", "2:1: sinks: unknown option 'sinks'; full has: none"),
        ("kind: h2o\n5: 1\n", "2:1: 5: unknown option '5'; h2o has: recent, sinks, decay, normalise, group, promote"),
        ("kind: h2o\nrecent:   2.0\n", f"2:11: recent: {ZERO_TO_ONE}"),
        ("kind: h2o\nrecent: .nan\n", "2:9: recent: must be a finite number, not nan"),
        (
            "kind: h2o\nrecent: half\n",
            "2:9: recent: needs a number of tokens (4) or a share of the budget (0.5)",
        ),
        ("kind: h2o\nsinks: \n\nrecent: 1", "2:1: sinks: must be a valid integer, not None"),
        ("kind: h2o\nsinks: 0.5\n", "2:8: sinks: must be a valid integer, not 0.5"),
        ("kind: h2o\nsinks: -1\n", "2:8: sinks: must be greater than or equal to 0, not -1"),
        (
            "kind: random\ndraw: frsh\n",
            "2:7: draw: must be 'fixed' or 'fresh', not 'frsh'; did you mean 'fresh'?",
        ),
        ("kind: h2o\nrecent: 4\nrecent: 5\n", "3:1: recent: is given twice, first in line 2"),
        ("", "1:1: is empty; it needs a policy, such as kind: h2o"),
        ("# nothing\n", "1:1: is empty; it needs a policy, such as kind: h2o"),
        ("- kind: h2o\n", "1:1: needs a mapping with a kind, such as kind: h2o; not a list"),
        ("h2o", "1:1: needs a mapping with a kind, such as kind: h2o; not 'h2o'"),
        (
            "kind: h2o\nsinks: [1,\n",
            "3:1: is not valid YAML: expected the node content, but found '<stream end>'",
        ),
        (
            "kind: h2o\n\tsinks: 3\n",
            "2:1: is not valid YAML: found character '\\t' that cannot start any token",
        ),
        ("kind: h2o\nseed: *s", "2:7: is not valid YAML: found undefined alias 's'"),
        ("kind: !py x", "1:7: is not valid YAML: could not determine a constructor for the tag '!py'"),
        (
            "kind: h2o\n---\nkind: lru",
            "2:1: is not valid YAML: expected a single document in the stream, but found another document",
        ),
        (
            "kind: h2o\nsinks: !!int x",
            "2:8: sinks: cannot be read: invalid literal for int() with base 10: 'x'",
        ),
        ("kind: h2o\nsinks: 2001-02-30", "2:8: sinks: cannot be read: day is out of range for month"),
        ("kind: h2o\nsinks: &s [*s]", "2:8: sinks.0: contains itself"),
        ("kind: h2o\n<<: 3", "2:5: <<: needs a mapping to merge, or a list of them"),
        ("kind: h2o\nsinks: \x07", "2:8: has a character that YAML does not allow"),
        (b"kind: h2o\nsinks: \xff", "2:1: is not text in UTF-8"),
    ],
)
def test_wrong_file(text, message):
    assert refusal(write(text)) == f"p.yaml:{message}"


def test_wrong_json_is_located_too():
    file = write('{\n\t"kind": "h2o",\n\t"recent": "a"\n}', "p.json")
    expected = "p.json:3:12: recent: needs a number of tokens (4) or a share of the budget (0.5)"
    assert refusal(file) == expected


def test_files_that_cannot_be_read():
    Path("folder.yaml").mkdir()
    assert refusal("none.yaml") == "none.yaml: cannot be read: No such file or directory"
    assert refusal("conf/none") == "conf/none: cannot be read: No such file or directory"
    assert refusal("folder.yaml") == "folder.yaml: cannot be read: Is a directory"
    deep = 999 * "{kind: every, tokens: 2, of: "
    assert refusal(write(f"{deep}h2o{999 * '}'}")) == "p.yaml: is nested too deeply"


def test_everything_wrong_is_told_at_once():
    text = "kind: random\nseed: x\nsinks: -1\nrecent: 2.0\nnope: 1\nbudget: 0\n"
    assert refusal(write(text)).splitlines() == [
        "p.yaml:2:7: seed: must be a valid integer, not 'x'",
        "p.yaml:3:8: sinks: must be greater than or equal to 0, not -1",
        f"p.yaml:4:9: recent: {ZERO_TO_ONE}",
        "p.yaml:5:1: nope: unknown option 'nope'; random has: seed, sinks, recent, draw, rows",
        f"p.yaml:6:9: budget: 0 {REMEDY}",
    ]


@pytest.mark.parametrize("budget", ["0", "-1", "1.5", "true", "many", "[1]"])
def test_what_is_no_budget(budget):
    message = refusal(write(f"kind: h2o\nbudget: {budget}\n"), BudgetError)
    assert message.startswith("p.yaml:2:9: budget: ")
    assert message.endswith(REMEDY)


def test_a_budget_that_cannot_hold_what_is_protected():
    wrong = "kind: h2o\nsinks: 4\nrecent: 2\nbudget: 5\n"
    assert refusal(write(wrong), BudgetError) == (
        "p.yaml:4:9: budget: h2o: a budget of 5 tokens cannot hold the 6 it must protect (sinks=4 + recent=2)"
        "; raise the budget, or lower them or give them as shares (0.5)"
    )
    assert read(write(wrong.replace("5", "6"))).budget == Budget(tokens=6)
    assert read(write("kind: random\nbudget: 1\n")).budget == Budget(tokens=1)  # defaults yield


# Wrong mappings, names and objects: no file, so the path alone


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("h2oo", f"unknown policy 'h2oo'; did you mean 'h2o'? installed: {KINDS}"),
        ("zzz", f"unknown policy 'zzz'; installed: {KINDS}; a new entry point is seen once its package is reinstalled"),
        ({"kind": "h2oo"}, f"kind: unknown policy 'h2oo'; did you mean 'h2o'? installed: {KINDS}"),
        ({"kind": None}, f"kind: needs the name of a policy, not None; installed: {KINDS}"),
        ({}, f"kind: is missing; installed: {KINDS}"),
        (
            {"kind": "h2o", "recnt": 1},
            "recnt: unknown option 'recnt'; did you mean 'recent'? "
            "h2o has: recent, sinks, decay, normalise, group, promote",
        ),
        (3, "needs a policy: an object, a kind, or a mapping with one; not 3"),
        (None, "needs a policy: an object, a kind, or a mapping with one; not None"),
    ],
)
def test_wrong_source(source, message):
    assert refusal(source) == message


def test_a_file_that_looks_like_a_kind():
    write("kind: h2o", "mine")
    assert refusal("mine").endswith("; to read the file of that name, write ./mine")
    assert load("./mine") == H2O()


# Policies inside policies


class Pair(EvictionPolicy):
    kind: Literal["pair"] = "pair"
    parts: tuple[Annotated[EvictionPolicy, BeforeValidator(policy_from)], ...]

    @model_validator(mode="after")
    def of_two(self):
        if len(self.parts) != 2:
            raise ValueError("needs\ntwo parts")
        return self


@pytest.fixture
def pair(monkeypatch):
    mine = Registry()
    mine.policies.update(registry().policies, pair=Pair)
    monkeypatch.setattr(config, "registry", lambda: mine)


@pytest.mark.usefixtures("pair")
def test_nested_policies_are_built():
    text = "kind: pair\nparts:\n- h2o\n- {kind: pair, parts: [{kind: lru, tau: 2}, full]}\n"
    assert load(write(text)) == Pair(parts=(H2O(), Pair(parts=(LRU(tau=2.0), Full()))))


@pytest.mark.usefixtures("pair")
def test_errors_in_nested_policies_are_located():
    text = "kind: pair\nparts:\n- kind: h2o\n  recnt: 1\n"
    text += "- kind: pair\n  parts: [{tau: 2}, {kind: lru, tau: -1}, lru2]\n"
    installed = f"installed: {KINDS.replace('phases', 'pair, phases')}"
    assert refusal(write(text)).splitlines() == [
        "p.yaml:4:3: parts.0.recnt: unknown option 'recnt'; did you mean 'recent'? "
        "h2o has: recent, sinks, decay, normalise, group, promote",
        f"p.yaml:6:11: parts.1.parts.0.kind: is missing; {installed}",
        "p.yaml:6:38: parts.1.parts.1.tau: must be greater than 0, not -1",
        f"p.yaml:6:43: parts.1.parts.2: unknown policy 'lru2'; did you mean 'lru'? {installed}",
    ]


@pytest.mark.usefixtures("pair")
def test_repeated_keys_in_nested_policies():
    text = "kind: pair\nparts:\n- kind: h2o\n  kind: lru\n- full\n"
    assert refusal(write(text)) == "p.yaml:4:3: parts.0.kind: is given twice, first in line 3"


@pytest.mark.usefixtures("pair")
def test_an_error_about_a_whole_policy_is_one_line_at_its_start():
    assert refusal(write("\nkind: pair\nparts: [h2o]\n")) == "p.yaml:2:1: needs two parts"
    assert refusal(write("kind: pair\n")) == "p.yaml:1:1: parts: is missing"
    assert refusal("pair") == "parts: is missing"
