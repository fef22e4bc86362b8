"""``kvpolicy new``: a package with a policy of one's own, which works and is tested from the start."""

from __future__ import annotations

import re
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path
from string import Template

from kvpolicy.errors import ConfigError, PluginError
from kvpolicy.plugins import registry

PREFIX = "kvpolicy-"

FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    "src/$module/__init__.py": "policy.py.in",
    "src/$module/py.typed": "py.typed.in",
    "tests/test_$kind.py": "test.py.in",
}
"""What is written, and the template it is made of."""


def create(name: str, out: Path | None = None) -> Path:
    """Write the package of a policy called `name` to the folder `out`; by default one named like the package.

    Raises:
        ConfigError: the name cannot be one, or there is something in the folder; PluginError: the name is taken.
    """
    words = _words(name)
    names = {
        "kind": "_".join(words),
        "policy": "".join(word.capitalize() for word in words),
        "distribution": PREFIX + "-".join(words),
        "module": "_".join(["kvpolicy", *words]),
    }
    _check_names(name, names)
    folder = Path(names["distribution"]) if out is None else out
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; choose another folder by --out")
        for path, text in rendered(names).items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from error
    return folder


def rendered(names: dict[str, str]) -> dict[str, str]:
    """The files of a package by their path in it."""
    templates = files(__name__)
    return {
        Template(path).substitute(names): Template((templates / source).read_text("utf-8")).substitute(names)
        for path, source in FILES.items()
    }


def next_steps(folder: Path) -> str:
    """What to do with a new package."""
    [module] = (folder / "src").iterdir()
    [test] = (folder / "tests").glob("test_*.py")
    return f"""\
{folder} has a policy that works, and its tests. Next:

  cd {folder}
  pip install -e ".[test]"
  pytest

Then make it yours: {(module / "__init__.py").relative_to(folder)}, its definition in plain Python in
{test.relative_to(folder)}, and what it keeps in README.md. `kvpolicy policies` lists it once it is installed."""


def _words(name: str) -> list[str]:
    """The words of a name; the prefix of packages may be given or not."""
    bare = name.removeprefix(PREFIX)
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", bare):
        raise ConfigError(
            f"{name!r} cannot name a policy: lower-case letters and digits, words joined by - or _, as in my-policy"
        )
    return re.split("[-_]", bare)


def _check_names(name: str, names: dict[str, str]) -> None:
    if iskeyword(names["policy"]) or iskeyword(names["kind"]):
        raise ConfigError(f"{name!r} cannot name a policy: it is a word of Python's own")
    owners = {kind: plugin for plugin in registry().plugins for kind in plugin.policies}
    if owner := owners.get(names["kind"]):
        raise PluginError(f"a policy {names['kind']!r} is installed already, by {owner.name} ({owner.origin})")
