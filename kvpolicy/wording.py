"""What pydantic finds wrong, in the words of a user: the path as it was written, and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from kvpolicy.document import Loc
from kvpolicy.plugins import did_you_mean, unknown

Model = type[BaseModel]
OURS = "kvpolicy"
MISSING = "kvpolicy_missing"
"""The types of errors that already are in such words."""

_ABOUT_A_KEY = ("extra_forbidden", "invalid_key")
_MISSING = ("missing", MISSING)
_NAMED = (*_ABOUT_A_KEY, *_MISSING)
_KEY = "[key]"
_NOTHING = object()


class Explainer:
    """Explains errors in a value that was to become a `model`.

    `by_kind` finds the class for a base class and a kind, or None: which options there are is decided by what was
    written.
    """

    def __init__(self, value: Any, model: Model, by_kind: Callable[[Model, Any], Model | None]) -> None:
        self.value = value
        self.model = model
        self.by_kind = by_kind

    def problems(self, error: ValidationError, whole: bool = True) -> Iterator[tuple[Loc, str, bool]]:
        """Path, message, and whether it is about the key rather than the value; one for each path.

        Where the value is not the `whole` of it, nothing is said that more of it could put right.
        """
        seen = set()
        for details in error.errors(include_url=False):
            if _is_consequence(details) or (not whole and _may_be_for_want(details)):
                continue
            on_key = details["type"] in _ABOUT_A_KEY or details["loc"][-1:] == (_KEY,)
            loc, owner = self._followed(details["loc"], named=details["type"] in _NAMED)
            if loc not in seen:
                seen.add(loc)
                yield loc, _message(details, owner), on_key

    def _followed(self, loc: Loc, named: bool) -> tuple[Loc, Model | None]:
        """The part of `loc` that the user wrote, and the class that has (or has not) its last step as an option.

        Other steps are pydantic's (``int``, where either an int or a float would do) or were left out, as the ``of``
        of a part that is a bare policy. A last step that the value does not have is for the user only if it is
        `named`: an option that is missing.
        """
        path: list[int | str] = []
        value, models = self.value, [self.model]
        owner = None
        for index, part in enumerate(loc):
            owner = self._owner(value, models)
            implied = owner is not None and _is_named_by_kind(value) and "kind" not in owner.model_fields
            if owner and part in (options := options_of(owner)):
                models = list(_models_in(options[str(part)]))
            child = _NOTHING if implied else _child(value, part)
            if child is not _NOTHING:
                path.append(part)
                value = child
            elif named and index == len(loc) - 1:
                path.append(part)
        return tuple(path), owner

    def _owner(self, value: Any, models: Sequence[Model]) -> Model | None:
        """Which of `models` the value is to become; None if it is a collection of them."""
        kind = value.get("kind") if isinstance(value, Mapping) else value
        for model in models:
            found = self.by_kind(model, kind) if is_open(model) else model
            if found is not None and not isinstance(value, (list, tuple)):
                return found
        return None


def _is_consequence(details: Any) -> bool:
    """Whether a collection is said to be too short, which is not, because of items that are told of anyway."""
    return details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]


def _may_be_for_want(details: Any) -> bool:
    return details["type"] in _MISSING or (details["type"] == "value_error" and isinstance(details["input"], Mapping))


def is_open(model: Model) -> bool:
    """Whether a ``kind`` has to say which class it is."""
    return "kind" in model.model_fields and model.model_fields["kind"].is_required()


def options_of(model: Model) -> dict[str, Any]:
    """Names and annotations of what a user can set."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _is_named_by_kind(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "kind" in value)


def _models_in(annotation: Any) -> Iterator[Model]:
    """The models that an annotation mentions: Part in ``tuple[Annotated[Part, ...], ...] | None``."""
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _child(value: Any, part: int | str) -> Any:
    try:
        return _NOTHING if isinstance(value, str) else value[part]
    except (LookupError, TypeError):
        return _NOTHING


def _message(details: Any, owner: Model | None) -> str:
    kind, text, value = details["type"], details["msg"], details["input"]
    if kind == "missing":
        return "is missing"
    if kind in _ABOUT_A_KEY:
        return _unknown_option(str(details["loc"][-1]), owner)
    if kind in ("value_error", "assertion_error"):
        text = str(details["ctx"]["error"])
    elif kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        text = f"must be a mapping, not {shown(value)}"
    elif kind in ("tuple_type", "list_type"):
        text = f"must be a list, not {shown(value)}"
    elif kind in ("too_short", "too_long"):
        least, most = details["ctx"].get("min_length"), details["ctx"].get("max_length")
        text = f"must have at {f'least {least}' if kind == 'too_short' else f'most {most}'}, not {len(value)}"
    elif text.startswith("Input should "):
        text = text.removeprefix("Input should ").replace("be ", "must be ", 1)
        text = text if kind == "literal_error" else text.split(", ")[0]  # what can be chosen, or why it cannot be read
        text += f", not {shown(value)}"
        if kind == "literal_error" and isinstance(value, str):
            text += did_you_mean(value, details["ctx"]["expected"].split("'")[1::2])
    return " ".join(text.split())


def _unknown_option(name: str, owner: Model | None) -> str:
    if owner is None:
        return f"unknown option {name!r}"
    kind = owner.model_fields.get("kind")
    label = kind.default if kind else owner.__name__.lower()
    return unknown("option", name, f"{label} has", [option for option in options_of(owner) if option != "kind"])


def shown(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
