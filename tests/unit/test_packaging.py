"""What is installed, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution, entry_points
from importlib.resources import files
from pathlib import Path
from zipfile import ZipFile

import pytest

import kvpolicy

ROOT = Path(__file__).parents[2]
PACKAGES = {"kvpolicy", "kvpolicy_plugins", "kvpolicy_adapters"}


def run(*arguments: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_entry_points():
    points = entry_points(group="kvpolicy")
    assert {"kvpolicy_plugins", "kvpolicy_adapters"} <= {point.value for point in points}
    commands = [point for point in entry_points(group="console_scripts") if point.name == "kvpolicy"]
    assert {point.value for point in commands} == {"kvpolicy.cli:main"}


def test_version():
    assert distribution("kvpolicy").version == kvpolicy.__version__


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_typed(package):
    assert files(package).joinpath("py.typed").is_file()


@pytest.mark.parametrize("name", kvpolicy.__all__)
def test_every_public_name_is_there(name):
    assert getattr(kvpolicy, name) is not None


@pytest.mark.parametrize(
    "start",
    [
        "import kvpolicy",
        "import kvpolicy.hooks, kvpolicy.errors",
        "from typer.testing import CliRunner; from kvpolicy.cli import app; "
        "assert CliRunner().invoke(app, ['compare', '--help']).exit_code == 0",
    ],
    ids=["package", "hooks", "help"],
)
def test_heavy_packages_wait_until_needed(start):
    heavy = "{'torch', 'transformers', 'numpy'}"
    assert run("-c", f"{start}; import sys; print({heavy} & {{*sys.modules}})").strip() == "set()"


def test_imports_point_one_way():
    pytest.importorskip("importlinter")
    assert "0 broken" in run("-c", "from importlinter import cli; cli.lint_imports_command()")


@pytest.mark.slow
def test_the_wheel_holds_three_packages(tmp_path):
    pytest.importorskip("hatchling")
    run("-m", "hatchling", "build", "-d", str(tmp_path))
    [wheel] = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == PACKAGES | {f"kvpolicy-{kvpolicy.__version__}.dist-info"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert "kvpolicy/report/page.css" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
