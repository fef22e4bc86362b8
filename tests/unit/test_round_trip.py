"""What `to_yaml` and `dump` write loads as it was, promises and kinds of numbers included."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvpolicy_plugins.h2o import H2O
from kvpolicy_plugins.pyramid import Pyramid
from kvpolicy_plugins.streaming_llm import StreamingLLM
from ruamel.yaml import YAML

from kvpolicy.budget import Budget
from kvpolicy.compose import Part, Protect, Union
from kvpolicy.config import dump, load, read, to_yaml
from kvpolicy.errors import BudgetError
from kvpolicy.yamltext import comment, yaml_text
from tests import configs

unhurried = settings(suppress_health_check=list(HealthCheck), deadline=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("round")


def assert_same(loaded, policy):
    assert loaded == policy
    assert repr(loaded) == repr(policy)  # 1 == 1.0, but they mean different things
    assert dump(loaded) == dump(policy)  # what was set is, and no more
    assert loaded.required() == policy.required()


def holds(policy, budget):
    try:
        policy.check(budget.tokens or 512)
    except BudgetError:
        return False
    return True


@unhurried
@given(configs.nested(3), configs.budgets)
def test_a_file_loads_as_what_was_written(folder, policy, budget):
    budget = budget if holds(policy, budget) else None
    file = folder / "p.yaml"
    file.write_text(to_yaml(policy, budget))
    config = read(file)
    assert_same(config.policy, policy)
    assert config.budget == budget
    assert repr(config.budget) == repr(budget)


@unhurried
@given(configs.nested(2))
def test_mappings_and_json_load_as_what_was_dumped(folder, policy):
    mapping = dump(policy)
    assert next(iter(mapping)) == "kind"
    file = folder / "p.json"
    file.write_text(json.dumps(mapping))
    assert_same(load(mapping), policy)
    assert_same(load(file), policy)


# Neither control characters nor line separators, of which ruamel.yaml writes some as they are and reads them otherwise.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=12)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
trees = st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))


@unhurried
@given(st.dictionaries(texts, trees, max_size=4))
def test_whatever_is_written_as_yaml_reads_the_same(mapping):
    text = yaml_text(mapping)
    assert YAML(typ="safe", pure=True).load(text) == mapping
    assert YAML(typ="safe", pure=True).load(comment(text) + "a: 1\n") == {"a": 1}


def test_only_what_was_set_is_written():
    assert dump(H2O()) == {"kind": "h2o"}
    assert dump(H2O(recent=0.5)) == {"kind": "h2o", "recent": 0.5}
    assert dump(Protect(recent=1, of=StreamingLLM())) == {
        "kind": "protect",
        "recent": 1,
        "of": {"kind": "streaming_llm"},
    }


def test_what_is_written_can_be_read():
    policy = Union(parts=[Part(take=4, of=StreamingLLM()), H2O(recent=1.0)])
    assert to_yaml(policy, Budget(share=0.25, min=64, layers=Pyramid(beta=30))) == (
        "kind: union\n"
        "parts:\n"
        "- take: 4\n"
        "  of:\n"
        "    kind: streaming_llm\n"
        "- of:\n"
        "    kind: h2o\n"
        "    recent: 1.0\n"
        "budget:\n"
        "  share: 0.25\n"
        "  min: 64\n"
        "  layers:\n"
        "    kind: pyramid\n"
        "    beta: 30.0\n"
        "    window: 0\n"
    )


@pytest.mark.parametrize(
    ("budget", "line"), [(64, "64"), (1, "1"), (1.0, "1.0"), ("25%", "0.25"), (Budget(share=0.5), "0.5")]
)
def test_the_shortest_form_of_a_budget_is_written(budget, line):
    assert to_yaml(H2O(), budget) == f"kind: h2o\nbudget: {line}\n"
