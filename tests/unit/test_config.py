"""Every way to name a policy gives the same policy, and everything wrong is reported where it is."""

import json
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_plugins.full import Full
from kvpolicy_plugins.h2o import H2O
from kvpolicy_plugins.lru import LRU
from kvpolicy_plugins.random import Random
from kvpolicy_plugins.streaming_llm import StreamingLLM
from pydantic import BeforeValidator, model_validator
from ruamel.yaml import YAML

from kvpolicy import config, load
from kvpolicy.budget import Budget
from kvpolicy.config import Config, dump, policy_from, read
from kvpolicy.errors import BudgetError, ConfigError
from kvpolicy.plugins import Registry, registry
from kvpolicy.policy import EvictionPolicy

KINDS = "full, h2o, lru, random, streaming_llm"
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


shares = st.integers(0, 512) | st.floats(0, 1)
tokens = st.integers(0, 512)
policies = st.one_of(
    st.builds(Full),
    st.builds(H2O, recent=shares, sinks=tokens),
    st.builds(LRU, tau=st.floats(1e-9, 1e9), recent=shares),
    st.builds(Random, seed=st.integers(-(2**63), 2**63), draw=st.sampled_from(["fixed", "fresh"])),
    st.builds(StreamingLLM, sinks=tokens),
)


@given(policies)
def test_round_trip(tmp_path_factory, policy):
    mapping = dump(policy)
    assert next(iter(mapping)) == "kind"
    file = tmp_path_factory.mktemp("round") / "p.yaml"
    YAML(typ="safe", pure=True).dump(mapping, file)
    asjson = file.with_suffix(".json")
    asjson.write_text(json.dumps(mapping))
    for loaded in (load(mapping), load(file), load(asjson)):
        assert loaded == policy
        assert repr(loaded) == repr(policy)  # 1 == 1.0, but they mean different things
        assert loaded.model_fields_set - {"kind"} == policy.model_fields_set - {"kind"}


def test_dump_keeps_what_was_set_and_no_more():
    assert dump(H2O()) == {"kind": "h2o"}
    assert dump(H2O(recent=0.5)) == {"kind": "h2o", "recent": 0.5}


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
            "2:1: recnt: unknown option 'recnt'; did you mean 'recent'? h2o has: recent, sinks",
        ),
        ("kind: h2o\ntau: 1\n", "2:1: tau: unknown option 'tau'; h2o has: recent, sinks"),
        ("kind: full\nsinks: 4\n", "2:1: sinks: unknown option 'sinks'; full has: none"),
        ("kind: h2o\n5: 1\n", "2:1: 5: unknown option '5'; h2o has: recent, sinks"),
        ("kind: h2o\nrecent:   2.0\n", f"2:11: recent: {ZERO_TO_ONE}"),
        ("kind: h2o\nrecent: .nan\n", "2:9: recent: must be a finite number, not nan"),
        (
            "kind: h2o\nrecent: half\n",
            "2:9: recent: needs a number of tokens (4) or a share of the budget (0.5)",
        ),
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
            "1:1: has a value that cannot be read: invalid literal for int() with base 10: 'x'",
        ),
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
        (
            "zzz",
            f"unknown policy 'zzz'; installed: {KINDS}; a new entry point is seen once its package is reinstalled",
        ),
        ({"kind": "h2oo"}, f"kind: unknown policy 'h2oo'; did you mean 'h2o'? installed: {KINDS}"),
        ({"kind": None}, f"kind: needs the name of a policy, not None; installed: {KINDS}"),
        ({}, f"kind: is missing; installed: {KINDS}"),
        (
            {"kind": "h2o", "recnt": 1},
            "recnt: unknown option 'recnt'; did you mean 'recent'? h2o has: recent, sinks",
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
    installed = f"installed: {KINDS.replace('random', 'pair, random')}"
    assert refusal(write(text)).splitlines() == [
        "p.yaml:4:3: parts.0.recnt: unknown option 'recnt'; did you mean 'recent'? h2o has: recent, sinks",
        f"p.yaml:6:11: parts.1.parts.0.kind: is missing; {installed}",
        "p.yaml:6:38: parts.1.parts.1.tau: must be greater than 0, not -1",
        f"p.yaml:6:43: parts.1.parts.2: unknown policy 'lru2'; did you mean 'lru'? {installed}",
    ]


@pytest.mark.usefixtures("pair")
def test_repeated_keys_in_nested_policies():
    text = "kind: pair\nparts:\n- kind: h2o\n  kind: lru\n"
    assert refusal(write(text)) == "p.yaml:4:3: parts.0.kind: is given twice, first in line 3"


@pytest.mark.usefixtures("pair")
def test_an_error_about_a_whole_policy_is_one_line_at_its_start():
    assert refusal(write("\nkind: pair\nparts: [h2o]\n")) == "p.yaml:2:1: needs two parts"
    assert refusal(write("kind: pair\n")) == "p.yaml:1:1: parts: is missing"
    assert refusal("pair") == "parts: is missing"
