"""Telling a policy about a model by texts: what ``kvpolicy profile`` does."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from torch import Tensor

from kvpolicy.config import SUFFIXES, dump, to_yaml
from kvpolicy.errors import EvaluationError
from kvpolicy.evaluate.models import check_model, load_model
from kvpolicy.evaluate.results import command_line, versions
from kvpolicy.evaluate.texts import load_text, windows_of
from kvpolicy.plugins import policies, registry
from kvpolicy.policy import EvictionPolicy
from kvpolicy.report.progress import Progress
from kvpolicy.wording import Explainer
from kvpolicy.yamltext import comment, yaml_text

ABOUT = "about"
"""The option that is given the record of how a policy was made, where it has one."""


@dataclass(frozen=True)
class Request:
    """What to profile, and on what."""

    model: str
    texts: Sequence[str]
    """Text files, or ``builtin:`` ones; samples are taken from each."""
    policy: str | None = None
    """The kind to make; ``None`` is the one that is installed and can be profiled."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of its ``profiled``; text is read as the types say."""
    tokens: int = 512
    """Length of a sample."""
    samples: int = 4
    """How many of each text."""
    seed: int = 0
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.texts:
            raise EvaluationError("no text given: name files, or builtin:python-docs")
        for name, least in {"tokens": 16, "samples": 1, "threads": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise EvaluationError(f"{name} must be at least {least}, not {value}")


def make_profile(
    request: Request, out: Path, *, overwrite: bool = False, progress: Progress | None = None
) -> EvictionPolicy:
    """Write the file `out`, which loads as the policy that is made; return it.

    How it was made is said in the file: by the option ``about`` where the policy has one, else by a comment.

    Raises:
        EvaluationError: a policy, model, text or file that it cannot work with; as far as possible before anything is
            loaded.
    """
    progress = progress or Progress()
    policy = _profiled_class(request.policy)
    options = _options(policy, request.options)
    _check_out(out, overwrite, policy)
    texts = [load_text(text) for text in request.texts]
    check_model(request.model, request.dtype, request.device)
    if request.threads:
        torch.set_num_threads(request.threads)
    progress.stage(f"loading {request.model}")
    model, tokenizer, record = load_model(request.model, request.dtype, request.device)
    contexts = [
        torch.tensor(window, device=model.device)
        for text, _ in texts
        for window in windows_of(text, tokenizer, request.tokens, request.samples, request.seed)[0]
    ]
    with torch.inference_mode():
        made = policy.profiled(model, tokenizer, _told(contexts, progress), **dict(options))
    about = {
        "command": command_line(),
        "model": record,
        "texts": [found for _, found in texts],
        "tokens": request.tokens,
        "samples": request.samples,
        "options": options.model_dump(mode="json"),
        "seed": request.seed,
        "versions": versions(),
    }
    return _written(out, made, about)


def _told(contexts: list[Tensor], progress: Progress) -> Iterator[Tensor]:
    for number, context in enumerate(contexts, 1):
        progress.stage(f"sample {number} of {len(contexts)}")
        yield context


# -- which policy, and how ---------------------------------------------------------------------------------------


def profiled_kinds() -> list[str]:
    """The installed policies that can be profiled: those that define ``profiled``."""
    return sorted(kind for kind, policy in policies().items() if _is_profiled(policy))


def _is_profiled(policy: type[EvictionPolicy]) -> bool:
    of_all = inspect.getattr_static(EvictionPolicy, "profiled")
    return inspect.getattr_static(policy, "profiled") is not of_all


def _profiled_class(kind: str | None) -> type[EvictionPolicy]:
    kinds = profiled_kinds()
    if kind is None:
        if len(kinds) != 1:
            found = f"several policies can be profiled: {', '.join(kinds)}" if kinds else "no policy can be profiled"
            raise EvaluationError(f"{found}; {'name one by --policy' if kinds else 'install one that can'}")
        [kind] = kinds
    policy = registry().policy(kind)
    if not _is_profiled(policy):
        raise EvaluationError(f"{kind} cannot be profiled; policies that can: {', '.join(kinds) or 'none'}")
    return policy


def _options(policy: type[EvictionPolicy], given: Mapping[str, Any]) -> BaseModel:
    """The options of ``profiled``, its arguments after the texts: those that were given, and defaults."""
    _, _, _, *own = inspect.signature(policy.profiled).parameters.values()
    fields: dict[str, Any] = {
        option.name: (
            Any if option.annotation is option.empty else option.annotation,
            ... if option.default is option.empty else option.default,
        )
        for option in own
        if option.kind is not option.VAR_KEYWORD
    }
    name = f"the profile of {policy.model_fields['kind'].default}"
    model = create_model(name, __config__=ConfigDict(extra="forbid"), __module__=policy.__module__, **fields)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        loc, message, unknown = next(Explainer(given, model, lambda *_: None).problems(error))
        if unknown:
            raise EvaluationError(f"{message}; kvpolicy profile --help lists those of any policy") from error
        raise EvaluationError(f"{name}: {loc[0]} {message}") from error


# -- the file ----------------------------------------------------------------------------------------------------


def _check_out(out: Path, overwrite: bool, policy: type[EvictionPolicy]) -> None:
    if out.suffix not in SUFFIXES:
        raise EvaluationError(f"--out {out} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, to be read again")
    if out.suffix == ".json" and ABOUT not in policy.model_fields:
        kind = policy.model_fields["kind"].default
        raise EvaluationError(
            f"--out {out} cannot say how it was made: {kind} has no option {ABOUT!r}, and JSON no comments; write .yaml"
        )
    if not out.parent.is_dir():
        raise EvaluationError(f"cannot write to {out}: there is no folder {out.parent}")
    if out.exists() and not overwrite:
        raise EvaluationError(f"{out} is there already: add --overwrite, or give another --out")


def _written(out: Path, policy: EvictionPolicy, about: Mapping[str, Any]) -> EvictionPolicy:
    """Write `policy` to `out`, and return it as it was written."""
    heading = ""
    if ABOUT in type(policy).model_fields:
        policy = policy.model_copy(update={ABOUT: dict(about)})
    else:
        heading = comment(yaml_text({ABOUT: about}))
    text = json.dumps(dump(policy), indent=1, ensure_ascii=False) + "\n"
    try:
        out.write_text(text if out.suffix == ".json" else heading + to_yaml(policy), "utf-8")
    except OSError as error:
        raise EvaluationError(f"cannot write to {out}: {error.strerror or error}") from error
    return policy
