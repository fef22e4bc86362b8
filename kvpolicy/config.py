"""From what a user writes (a file, a mapping, a name, an object) to a policy, and errors that say where.

Inside, there is one currency for everything wrong: pydantic's errors, whose ``loc`` is the path to the
culprit. :func:`policy_from` raises them for policies at any depth, and :func:`read` alone
turns paths into places in a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvpolicy.budget import Budget
from kvpolicy.errors import BudgetError, ConfigError, PluginError
from kvpolicy.plugins import did_you_mean, registry, unknown

if TYPE_CHECKING:
    from kvpolicy.policy import EvictionPolicy

Loc = tuple[int | str, ...]
"""The keys and indices that lead to a value, from the top."""

SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Config:
    """What a configuration says. Without a budget it is a policy that has yet to be given one."""

    policy: EvictionPolicy
    budget: Budget | None = None


def load(source: Any) -> EvictionPolicy:
    """The policy that `source` means.

    `source` is a policy (returned as it is), the ``kind`` of an installed one, a mapping with a ``kind``, or
    the path of a YAML or JSON file that holds such a mapping. A string is a path if it ends in ``.yaml``,
    ``.yml`` or ``.json`` or has a path separator in it.

    Raises:
        ConfigError: one line ``file:line:column: path: message`` for each thing that is wrong.
    """
    return read(source).policy


def read(source: Any) -> Config:
    """Like :func:`load`, and the ``budget`` that a mapping or a file may also hold at its top."""
    from kvpolicy.policy import EvictionPolicy

    if isinstance(source, Config):
        return source
    if isinstance(source, EvictionPolicy):
        return Config(source)
    if not _is_path(source):
        return _build(_Document(source))
    file = os.fspath(source)
    return _build(_parse(_text_of(file), file))


def dump(policy: EvictionPolicy) -> dict[str, Any]:
    """The mapping that loads as `policy`: its kind, and the options that were set."""
    return {"kind": policy.kind, **policy.model_dump(mode="json", exclude_unset=True)}


def policy_from(value: Any) -> EvictionPolicy:
    """A policy from an object, a kind or a mapping.

    It raises only pydantic's errors, so that a field which holds a policy can be validated by it
    (``Annotated[EvictionPolicy, BeforeValidator(policy_from)]``) and errors inside keep their full path.
    """
    from kvpolicy.policy import EvictionPolicy

    if isinstance(value, EvictionPolicy):
        return value
    if isinstance(value, str):
        return _class_of(value).model_validate({"kind": value})
    if not isinstance(value, Mapping):
        raise _refusal(value, f"needs a policy: an object, a kind, or a mapping with one; not {_shown(value)}")
    if "kind" not in value:
        near = get_close_matches("kind", filter(_is_text, value), n=1)
        hint = f"is {near[0]!r} meant to be it?" if near else _installed()
        raise _refusal(value, f"is missing; {hint}", "kind")
    return _class_of(value["kind"], "kind").model_validate(dict(value))


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str)


def _class_of(kind: Any, *loc: str) -> type[EvictionPolicy]:
    if not isinstance(kind, str):
        raise _refusal(kind, f"needs the name of a policy, not {_shown(kind)}; {_installed()}", *loc)
    try:
        return registry().policy(kind)
    except PluginError as error:
        raise _refusal(kind, str(error), *loc) from error


def _installed() -> str:
    return f"installed: {', '.join(sorted(registry().policies))}"


def _refusal(value: Any, message: str, *loc: str) -> ValidationError:
    error = PydanticCustomError(_OURS, "{message}", {"message": message})
    return ValidationError.from_exception_data("policy", [InitErrorDetails(type=error, loc=loc, input=value)])


@dataclass(frozen=True)
class _Document:
    """What was written, and where: in `file`, if it was one, `root` knows the place of everything."""

    value: Any
    file: str | None = None
    root: Any = None

    def say(self, loc: Loc, message: str, on_key: bool = False) -> str:
        """`message`, after the place and the path of what it is about."""
        return ": ".join(filter(None, (self._place(loc, on_key), _dotted(loc), message)))

    def _place(self, loc: Loc, on_key: bool) -> str | None:
        if self.file is None:
            return None
        node, mark = self.root, self.root.start_mark
        for part in loc:
            found = next(((key, child) for name, key, child in _children(node) if name == str(part)), None)
            if found is None:
                break
            key, node = found
            mark = (key if on_key else node).start_mark
        return _at(self.file, mark)


def _dotted(loc: Loc) -> str:
    return ".".join(map(str, loc))


def _at(file: str, mark: Any) -> str:
    return f"{file}:{mark.line + 1}:{mark.column + 1}"


def _children(node: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, node of the key and node of the value of everything in a mapping or sequence."""
    if node.id == "mapping":
        yield from ((str(key.value), key, value) for key, value in node.value)
    elif node.id == "sequence":
        yield from ((str(index), value, value) for index, value in enumerate(node.value))


def _is_path(source: Any) -> bool:
    if not isinstance(source, str):
        return isinstance(source, os.PathLike)
    separators = filter(None, (os.sep, os.altsep))
    return source.lower().endswith(SUFFIXES) or any(separator in source for separator in separators)


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{file}:{line}:1: is not text in UTF-8") from error


def _parse(text: str, file: str) -> _Document:
    """Read YAML 1.2, of which JSON is a part; its nodes know their line and column."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
        if root is None:
            raise ConfigError(f"{file}:1:1: is empty; it needs a policy, such as kind: h2o")
        _refuse_repeated_keys(root, file)
        value = _constructed(yaml, root, file)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = error.problem or error.context
        if error.context and said.startswith("but "):  # the second half of a sentence
            said = f"{error.context}, {said}"
        raise ConfigError(f"{_at(file, mark)}: is not valid YAML: {said}") from error
    except YAMLError as error:
        position = getattr(error, "position", 0)
        line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
        raise ConfigError(f"{file}:{line}:{column}: has a character that YAML does not allow") from error
    document = _Document(value, file, root)
    if not isinstance(value, dict):
        found = "a list" if isinstance(value, list) else _shown(value)
        raise ConfigError(document.say((), f"needs a mapping with a kind, such as kind: h2o; not {found}"))
    return document


def _constructed(yaml: Any, root: Any, file: str) -> Any:
    try:
        return yaml.constructor.construct_document(root)
    except ValueError as error:  # a tag that its value cannot have, such as !!int x
        raise ConfigError(f"{_at(file, root.start_mark)}: has a value that cannot be read: {error}") from error


def _refuse_repeated_keys(root: Any, file: str) -> None:
    todo: list[tuple[Loc, Any]] = [((), root)]
    done = set()
    while todo:
        loc, node = todo.pop()
        if id(node) in done:  # an alias
            continue
        done.add(id(node))
        lines: dict[str, int] = {}
        for name, key, value in _children(node):
            if name in lines:
                message = f"is given twice, first in line {lines[name]}"
                raise ConfigError(f"{_at(file, key.start_mark)}: {_dotted((*loc, name))}: {message}")
            lines[name] = key.start_mark.line + 1
            todo.append(((*loc, name), value))


def _build(document: _Document) -> Config:
    given = document.value
    options = {k: v for k, v in given.items() if k != "budget"} if isinstance(given, Mapping) else given
    lines: list[str] = []
    policy = budget = None
    try:
        policy = policy_from(options)
    except ValidationError as error:
        lines += [document.say(*problem) for problem in _problems(error, options)]
    try:
        if options is not given and given.get("budget") is not None:
            budget = Budget.parse(given["budget"])
        if policy and budget and budget.tokens:
            policy.check(budget.tokens)
    except BudgetError as error:
        lines.append(document.say(("budget",), str(error)))
    if policy is None:
        raise ConfigError("\n".join(lines) + _file_of_that_name(given))
    if lines:
        raise BudgetError("\n".join(lines))
    return Config(policy, budget)


def _file_of_that_name(kind: Any) -> str:
    if isinstance(kind, str) and os.path.exists(kind):
        return f"; to read the file of that name, write {os.path.join(os.curdir, kind)}"
    return ""


_OURS = "kvpolicy"
_ABOUT_A_KEY = ("extra_forbidden", "invalid_key")
_NAMED = (*_ABOUT_A_KEY, "missing", _OURS)


def _problems(error: ValidationError, value: Any) -> Iterator[tuple[Loc, str, bool]]:
    """Path, message, and whether it is about the key rather than the value; one for each path."""
    seen = set()
    for details in error.errors(include_url=False):
        on_key = details["type"] in _ABOUT_A_KEY
        loc, owner = _followed(details["loc"], value, named=details["type"] in _NAMED)
        if loc not in seen:
            seen.add(loc)
            yield loc, _message(details, owner), on_key


def _followed(loc: Loc, value: Any, named: bool) -> tuple[Loc, Any]:
    """The part of `loc` that the user wrote, and what contains it.

    pydantic also puts in steps of its own (``int``, where either an int or a float would do). A last step
    that the value does not have is for the user only if it is `named`: an option that is missing.
    """
    path: list[int | str] = []
    owner = value
    for part in loc:
        try:
            child = value[part]
        except (LookupError, TypeError):
            if named and part == loc[-1]:
                path.append(part)
                owner = value
            break
        path.append(part)
        owner, value = value, child
    return tuple(path), owner


def _message(details: Any, owner: Any) -> str:
    """What pydantic found, in the words of a user of policies."""
    kind = details["type"]
    if kind == "missing":
        return "is missing"
    if kind in _ABOUT_A_KEY:
        return _unknown_option(str(details["loc"][-1]), owner)
    text = details["msg"]
    if kind in ("value_error", "assertion_error"):
        text = str(details["ctx"]["error"])
    elif text.startswith("Input should "):
        text = text.removeprefix("Input should ").replace("be ", "must be ", 1).split(", ")[0]
        text += f", not {_shown(details['input'])}"
        if kind == "literal_error" and isinstance(details["input"], str):
            text += did_you_mean(details["input"], details["ctx"]["expected"].split("'")[1::2])
    return " ".join(text.split())


def _unknown_option(name: str, owner: Any) -> str:
    kind = owner if isinstance(owner, str) else owner.get("kind") if isinstance(owner, Mapping) else None
    policy = registry().policies.get(kind) if isinstance(kind, str) else None
    if policy is None:
        return f"unknown option {name!r}"
    options = [option for option in policy.model_fields if option != "kind"]
    return unknown("option", name, f"{kind} has", options)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
