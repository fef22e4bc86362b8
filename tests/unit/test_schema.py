"""The JSON Schema of files accepts whatever loads, and knows what editors have to know."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from kvpolicy import EvictionPolicy, Share, cli, hookimpl
from kvpolicy.allocator import LayerAllocator
from kvpolicy.config import dump, examine, to_yaml
from kvpolicy.plugins import Registry
from kvpolicy.policy import Policy
from kvpolicy.schema import schema, schema_text
from tests import configs

DOCS = Path(__file__).parents[2] / "docs"
COMMITTED = DOCS / "kvpolicy.schema.json"
RECIPES = sorted((DOCS / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def first_party():
    """Only what comes with kvpolicy, whatever else is installed."""
    return Registry(point for point in entry_points(group="kvpolicy") if point.dist.name == "kvpolicy")


@pytest.fixture(scope="module")
def validator(first_party):
    made = schema(first_party)
    Draft202012Validator.check_schema(made)
    return Draft202012Validator(made)


def accepts(validator, text):
    return validator.is_valid(json.loads(json.dumps(YAML(typ="safe", pure=True).load(text))))


def test_the_file_in_the_documentation_is_up_to_date(first_party):
    assert json.loads(COMMITTED.read_text("utf-8")) == schema(first_party), (
        f"{COMMITTED.name} is out of date; run: KVPOLICY_PLUGINS= kvpolicy schema --out docs/{COMMITTED.name}"
    )


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(configs.nested(2), configs.budgets)
def test_what_is_written_is_accepted(validator, policy, budget):
    assert accepts(validator, to_yaml(policy, budget))
    validator.validate(dump(policy))


GOOD = {
    "a kind": "kind: h2o",
    "options": "kind: h2o\nrecent: 0.25\nsinks: 4",
    "all of it": "kind: h2o\nrecent: 1.0",
    "tokens": "kind: h2o\nrecent: 100",
    "a nested kind": "kind: protect\nof: h2o",
    "parts": "kind: union\nparts:\n- {take: 4, of: sinks}\n- {take: 0.5, of: {kind: h2o}}\n- of: heavy",
    "bare parts": "kind: union\nparts: [sinks, {kind: h2o, recent: 4}, {take: 0.5, of: heavy}]",
    "bare parts of a blend": "kind: blend\nparts: [h2o, {kind: lru}, {of: heavy, weight: 2}]",
    "ranges": "kind: layers\nat: {':50%': full, '0-1': {kind: lru}}\ndefault: h2o",
    "ranges that are numbers": "kind: layers\nat: {0: full}\ndefault: h2o",
    "tokens for a budget": "kind: h2o\nbudget: 64",
    "a share for a budget": "kind: h2o\nbudget: 0.25",
    "percents for a budget": "kind: h2o\nbudget: 25%",
    "no budget": "kind: h2o\nbudget:",
    "a budget": "kind: h2o\nbudget: {share: 25%, of: seen, min: 64, layers: {kind: pyramid, beta: 30}}",
    "allocators": "kind: h2o\nbudget: {tokens: 64, layers: {kind: given, weights: {':50%': 2}}, heads: adaptive}",
}

EXTENDING = {
    "nothing else": "extends: base.yaml",
    "several": "extends: [a.yaml, b.yaml]\nbudget: 64",
    "options alone": "extends: base.yaml\nrecent: 0.5",
    "a kind": "extends: base.yaml\nkind: union",
    "half a budget": "extends: base.yaml\nbudget: {layers: {beta: 30}}",
    "half a nested policy": "extends: base.yaml\nof: {of: {recent: 0.5}}",
    "half a range": "extends: base.yaml\nat: {'0-1': {sinks: 3}}",
    "an emptied range": "extends: base.yaml\nat: {}",
}

BAD = {
    "a list": "[h2o]",
    "a string": "h2o",
    "no kind": "recent: 0.5",
    "unknown kind": "kind: h2oo",
    "unknown option": "kind: h2o\nrecnt: 0.5",
    "an option of another": "kind: h2o\ntau: 1",
    "a share above one": "kind: h2o\nrecent: 1.5",
    "a negative number": "kind: h2o\nrecent: -1",
    "a part of a token": "kind: h2o\nsinks: 0.5",
    "a boolean": "kind: h2o\nsinks: true",
    "a text": "kind: h2o\nsinks: four",
    "a choice that is none": "kind: random\ndraw: frsh",
    "no parts": "kind: union\nparts: []",
    "a part without a policy": "kind: union\nparts: [{take: 4}]",
    "unknown option of a part": "kind: union\nparts: [{tke: 4, of: h2o}]",
    "a nested typo": "kind: union\nparts: [{of: {kind: protect, of: {kind: h2o, recnt: 1}}}]",
    "a kind that needs options": "kind: every\ntokens: 2\nof: union",
    "a multiple below one": "kind: cascade\nnarrow: h2o\nto: 0.5\npick: lru",
    "a budget of a nested policy": "kind: protect\nof: {kind: h2o, budget: 64}",
    "a budget above all": "kind: h2o\nbudget: 1.5",
    "no tokens": "kind: h2o\nbudget: 0",
    "two budgets": "kind: h2o\nbudget: {tokens: 64, share: 0.5}",
    "neither": "kind: h2o\nbudget: {of: seen}",
    "unknown allocator": "kind: h2o\nbudget: {tokens: 64, layers: pyramd}",
    "an allocator of layers for heads": "kind: h2o\nbudget: {tokens: 64, heads: pyramid}",
    "an allocator of heads for layers": "kind: h2o\nbudget: {tokens: 64, layers: {kind: adaptive}}",
    "no base": "extends: 3\nkind: h2o",
    "a typo beside a base": "extends: base.yaml\nrecnt: 0.5",
    "options of no one policy": "extends: base.yaml\ntau: 1\nsinks: 4",
    "options that the kind does not have": "extends: base.yaml\nkind: h2o\ntau: 1",
    "a typo in half a nested policy": "extends: base.yaml\nof: {recnt: 0.5}",
    "a list of halves": "extends: base.yaml\nparts: [{take: 4}]",
}


@pytest.mark.parametrize("text", [*GOOD.values(), *EXTENDING.values()], ids=[*GOOD, *EXTENDING])
def test_good_files_are_accepted(validator, text):
    assert accepts(validator, text)


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_good_files_are_good(tmp_path, text):
    file = tmp_path / "p.yaml"
    file.write_text(text)
    assert examine(file)[1] == []


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_bad_files_are_rejected(validator, text):
    assert not accepts(validator, text)


def check_jsonschema(*files):
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(COMMITTED), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True).returncode


def test_check_jsonschema_agrees(tmp_path):
    for name, texts in (("good", [*GOOD.values(), *EXTENDING.values()]), ("bad", BAD.values())):
        (tmp_path / name).mkdir()
        for index, text in enumerate(texts):
            (tmp_path / name / f"{index}.yaml").write_text(text)
    assert check_jsonschema(*(tmp_path / "good").iterdir()) == 0
    assert check_jsonschema(tmp_path / "bad/3.yaml") == 1


@pytest.mark.skipif(not RECIPES, reason="there are no recipes")
def test_recipes_are_good_and_name_the_schema(validator):
    assert check_jsonschema(*RECIPES) == 0
    for recipe in RECIPES:
        first, _, text = recipe.read_text("utf-8").partition("\n")
        assert first == "# yaml-language-server: $schema=../kvpolicy.schema.json", recipe.name
        assert examine(recipe)[1] == []
        assert accepts(validator, text)


def test_what_editors_are_told(first_party):
    defs = schema(first_party)["$defs"]
    for kind in first_party.policies:
        assert defs[f"policy.{kind}"]["properties"]["kind"]["const"] == kind
        assert defs[f"policy.{kind}"]["description"]
        assert {"$ref": f"#/$defs/policy.{kind}"} in defs["policy"]["anyOf"]
    h2o = defs["policy.h2o"]
    assert h2o["properties"]["recent"] == {
        "anyOf": [{"minimum": 0, "type": "integer"}, {"maximum": 1, "minimum": 0, "type": "number"}],
        "default": 0.5,
        "description": "Recent window: tokens, or a share of the budget.",
    }
    assert (h2o["additionalProperties"], h2o["required"]) == (False, ["kind"])
    kinds = {choice["const"]: choice["description"] for choice in defs["policy"]["anyOf"] if "const" in choice}
    assert kinds["h2o"].startswith("Heavy-Hitter Oracle")
    assert kinds.keys().isdisjoint({"union", "blend", "cascade", "phases", "layers", "protect", "every", "span"})
    over_layers = [choice.get("const") for choice in defs["layer_allocator"]["anyOf"]]
    assert "pyramid" in over_layers
    assert not {"given", "adaptive"} & set(over_layers)  # one needs options, the other is for heads


class Option(EvictionPolicy):
    """Wants a share,
    told in two lines.

    And in more.
    """

    kind: Literal["acme/~own %"] = "acme/~own %"
    title: Share = 1
    of: Policy | None = None


class Halving(LayerAllocator):
    kind: Literal["policy"] = "policy"


def test_plugins_are_in_it():
    offers = SimpleNamespace(
        kvpolicy_policies=hookimpl(lambda: [Option]), kvpolicy_allocators=hookimpl(lambda: [Halving])
    )
    installed = Registry()
    assert installed.register(offers, "mine").problems == []
    validator = Draft202012Validator(schema(installed))
    own = {"kind": "acme/~own %", "title": 0.5, "budget": {"share": 0.5, "layers": "policy"}}
    validator.validate(own)
    validator.validate({**own, "of": {"kind": "acme/~own %", "of": "acme/~own %"}})
    validator.validate({"extends": "base.yaml", "of": {"of": {"title": 1}}})
    for wrong in ({**own, "title": 1.5}, {**own, "of": "h2o"}, {"extends": "base.yaml", "of": {"titel": 1}}):
        assert not validator.is_valid(wrong)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["kvpolicy", "schema", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code or 0, *capsys.readouterr()

    return call


def test_the_command(run):
    status, out, _ = run()
    assert status == 0
    assert out == schema_text()
    assert run("--out", "own.json") == (0, "", "")
    assert Path("own.json").read_text("utf-8") == out
    assert run("--out", "no/own.json") == (
        2,
        "",
        "kvpolicy: cannot write to no/own.json: No such file or directory\n",
    )
