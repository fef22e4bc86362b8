"""A package of somebody else's, as its users have it: installed by pip, beside our wheel, into its own environment.

The environment is a new one but for what would take minutes to install: a ``.pth`` file lets it see the torch,
transformers and test tools of the environment that runs this. Its kvpolicy is the wheel, never this checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import folder

pytest.importorskip("hatchling")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "kvpolicy-fifo"
Run = Callable[..., str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything happens: far from the checkout."""
    return tmp_path_factory.mktemp("third-party")


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    """Run a command of the new environment, which must succeed: what it prints."""

    def call(*words: str, where: Path = place, **variables: str) -> str:
        command = [str(place / "venv" / "bin" / words[0]), *words[1:]]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVPOLICY"))}
        done = subprocess.run(command, cwd=where, env={**clean, **variables}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


@pytest.fixture(scope="module", autouse=True)
def _installed(place: Path, run: Run) -> None:
    """Our wheel, and the example."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
    [wheel] = place.glob("kvpolicy-*.whl")
    run("pip", "install", "--no-index", "--no-deps", str(wheel))
    [packages] = (place / "venv").glob("lib/python*/site-packages")
    (packages / "heavy.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    shutil.copytree(EXAMPLE, place / "fifo", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    install(run, place / "fifo")
    folder.save_model(place / "model")
    folder.save_text(place / "text.txt")


def install(run: Run, package: Path) -> None:
    run("pip", "install", "--no-index", "--no-deps", "--no-build-isolation", str(package))


def test_it_is_the_wheel(run: Run, place: Path) -> None:
    for package in ("kvpolicy", "kvpolicy_plugins", "kvpolicy_fifo"):
        assert run("python", "-c", f"import {package}; print({package}.__file__)").startswith(str(place / "venv"))


def test_it_is_listed(run: Run) -> None:
    listed = run("kvpolicy", "policies")
    assert "fifo" in listed
    assert "First in, first out" in listed
    assert "problem" not in listed
    shown = run("kvpolicy", "plugins")
    assert "kvpolicy-fifo 0.1.0" in shown
    assert "problem in plugin" not in shown


def test_it_can_be_left_out(run: Run) -> None:
    assert "fifo" not in run("kvpolicy", "policies", KVPOLICY_PLUGINS="")
    assert "fifo" in run("kvpolicy", "policies", KVPOLICY_PLUGINS="kvpolicy-fifo")
    traced = run("kvpolicy", "policies", KVPOLICY_TRACE_PLUGINS="1")
    assert "kvpolicy: kvpolicy_policies: kvpolicy-fifo: [<class 'kvpolicy_fifo.Fifo'>]" in traced


def test_it_is_in_the_schema(run: Run) -> None:
    schema = json.loads(run("kvpolicy", "schema"))
    assert '"fifo"' in json.dumps(schema)
    assert '"fifo"' not in run("kvpolicy", "schema", KVPOLICY_PLUGINS="")


def test_it_is_a_part_of_compositions(run: Run, place: Path) -> None:
    (place / "mixed.yaml").write_text("kind: union\nparts:\n- {take: 2, of: sinks}\n- fifo\nbudget: 0.5\n")
    assert run("kvpolicy", "check", "mixed.yaml") == "mixed.yaml: ok, union\n"


def test_it_is_compared(run: Run, place: Path) -> None:
    (place / "mixed.yaml").write_text("kind: union\nparts:\n- {take: 2, of: sinks}\n- fifo\n")
    command = "compare --model ./model --text text.txt --policies full,fifo,mixed.yaml --budgets 8 --tokens 40"
    run("kvpolicy", *command.split(), "--samples", "2", "--out", "out")
    results = (place / "out" / "results.json").read_text()
    assert '"fifo"' in results
    assert (place / "out" / "report.html").exists()


def test_it_passes_its_tests(run: Run, place: Path) -> None:
    told = run("python", "-m", "pytest", where=place / "fifo")
    assert "test_fifo.py" in told
    assert "skipped" not in told


def test_its_speed_is_compared(run: Run, place: Path) -> None:
    told = run("python", "-m", "pytest", "--kvpolicy-compare", "fifo", "--benchmark-only", where=place / "fifo")
    assert "test_decode_step[fifo]" in told
    assert "test_prefill[fifo]" in told


def test_a_new_package(run: Run, place: Path) -> None:
    assert 'cd kvpolicy-my-policy\n  pip install -e ".[test]"' in run("kvpolicy", "new", "my-policy")
    package = place / "kvpolicy-my-policy"
    install(run, package)
    assert "my_policy" in run("kvpolicy", "policies")
    assert "skipped" not in run("python", "-m", "pytest", where=package)
