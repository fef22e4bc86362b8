"""`kvpolicy new`: what it refuses, and that what it writes passes its own tests. So does the example."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpolicy import cli
from kvpolicy.errors import KVPolicyError
from kvpolicy.scaffold import FILES, create, next_steps

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "kvpolicy-fifo"


def contents(folder: Path) -> dict[str, str]:
    """The files of a package by their path."""
    return {
        str(file.relative_to(folder)): file.read_text()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def as_if_installed(package: Path, where: Path) -> dict[str, str]:
    """An environment in which Python finds the package and its entry point."""
    [module] = (path.name for path in (package / "src").iterdir())
    name = module.replace("_", "-")
    info = where / f"{module}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[kvpolicy]\n{name} = {module}\n")
    paths = [str(where), str(package / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}


def own_tests(package: Path, where: Path) -> str:
    """What the package's own tests print; they must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=package, env=as_if_installed(package, where), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return create("my-policy", tmp_path / "made")


def test_what_is_written(made: Path) -> None:
    assert sorted(contents(made)) == [
        "README.md", "pyproject.toml", "src/kvpolicy_my_policy/__init__.py", "src/kvpolicy_my_policy/py.typed",
        "tests/test_my_policy.py",
    ]  # fmt: skip
    assert not any("$" in text for text in contents(made).values())
    assert 'kvpolicy-my-policy = "kvpolicy_my_policy"' in contents(made)["pyproject.toml"]
    assert "class MyPolicy(EvictionPolicy):" in contents(made)["src/kvpolicy_my_policy/__init__.py"]


def test_it_passes_its_own_tests(made: Path, tmp_path: Path) -> None:
    assert "skipped" not in own_tests(made, tmp_path / "installed")


def test_the_example_passes_its_own_tests(tmp_path: Path) -> None:
    assert "skipped" not in own_tests(EXAMPLE, tmp_path / "installed")


@pytest.mark.parametrize("tool", [["ruff", "check"], ["ruff", "format", "--check"]], ids=["lint", "format"])
def test_its_style_is_ours(made: Path, tool: list[str]) -> None:
    pytest.importorskip("ruff")
    done = subprocess.run(
        [sys.executable, "-m", *tool, "--config", str(ROOT / "pyproject.toml"), str(made)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def frame(code: str, *filled_in: str) -> str:
    """A module without its imports, its docstring and the bodies of some classes."""
    tree = ast.parse(code)
    kept = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in filled_in:
            node.body = [ast.Pass()]
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            kept.append(ast.unparse(node))
    return "\n".join(kept)


def test_the_example_is_the_template_with_the_policy_filled_in(tmp_path: Path) -> None:
    template, example = contents(create("fifo", tmp_path / "fifo")), contents(EXAMPLE)
    assert set(example) == set(template)
    for path, text in template.items():
        if path.endswith(".py"):
            assert frame(example[path], "Fifo", "FifoRule") == frame(text, "Fifo", "FifoRule"), path
        elif path == "README.md":
            skip = "The policy `fifo` for kvpolicy: "
            ours, theirs = (
                [line for line in given.splitlines() if not line.startswith(skip)] for given in (example[path], text)
            )
            assert ours == theirs
        else:
            assert example[path] == text, path


def test_the_folder_is_named_like_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert create("kvpolicy-a_b2-c") == Path("kvpolicy-a-b2-c")
    assert "class AB2C(EvictionPolicy)" in Path("kvpolicy-a-b2-c/src/kvpolicy_a_b2_c/__init__.py").read_text()


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    assert create("mine", tmp_path) == tmp_path
    assert len(contents(tmp_path)) == len(FILES)


@pytest.mark.parametrize("name", ["", "My", "2nd", "a--b", "-a", "a-", "a b", "a/b", "../a", "a.b", "naïve", "a\n"])
def test_what_cannot_be_a_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(KVPolicyError, match=r"cannot name a policy: lower-case letters"):
        create(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "'none' cannot name a policy: it is a word of Python's own"),
        ("lambda", "'lambda' cannot name a policy: it is a word of Python's own"),
        ("h2o", r"a policy 'h2o' is installed already, by kvpolicy-plugins \(kvpolicy "),
        ("streaming-llm", "a policy 'streaming_llm' is installed already"),
        ("union", r"a policy 'union' is installed already, by kvpolicy-compose \(kvpolicy "),
    ],
)
def test_names_that_are_taken(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(KVPolicyError, match=message):
        create(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KVPolicyError, match="is not empty; choose another folder by --out"):
        create("mine", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(KVPolicyError, match=r"cannot write to .*notes.txt: Not a directory"):
        create("mine", tmp_path / "notes.txt")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvpolicy", "new", "my-policy", "--out", "here"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    assert capsys.readouterr().out == next_steps(Path("here")) + "\n"
    assert 'cd here\n  pip install -e ".[test]"\n  pytest\n' in next_steps(Path("here"))
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "kvpolicy: here is not empty; choose another folder by --out\n"
