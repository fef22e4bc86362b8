"""From what a user writes (a file, a mapping, a name, an object) to a policy, and errors that say where.

Inside, there is one currency for everything wrong: pydantic's errors, whose ``loc`` is the path to the
culprit. :func:`policy_from` and its like raise them at any depth, and :func:`examine` alone turns paths into
places in a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvpolicy.budget import Budget
from kvpolicy.document import BUDGET, EXTENDS, Document, Loc, Place, Problem, Unreadable, read_file
from kvpolicy.errors import BudgetError, ConfigError, PluginError
from kvpolicy.plugins import registry
from kvpolicy.wording import MISSING, OURS, Explainer, Model, shown

if TYPE_CHECKING:
    from typing_extensions import LiteralString

    from kvpolicy.allocator import Allocator
    from kvpolicy.policy import EvictionPolicy

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
    config, problems = examine(source)
    if config is None:
        about_budget = all(problem.loc[:1] == (BUDGET,) for problem in problems)
        raise (BudgetError if about_budget else ConfigError)("\n".join(map(str, problems)))
    return config


def examine(source: Any) -> tuple[Config | None, list[Problem]]:
    """What `source` says or, if anything is wrong with it, everything that is."""
    from kvpolicy.policy import EvictionPolicy

    if isinstance(source, Config):
        return source, []
    if isinstance(source, EvictionPolicy):
        return Config(source), []
    try:
        config, problems = _build(read_file(os.fspath(source)) if _is_path(source) else Document(source))
    except Unreadable as error:
        return None, [error.problem]
    except RecursionError:
        return None, [Problem("is nested too deeply", (), Place(os.fspath(source)) if _is_path(source) else None)]
    if problems and isinstance(source, str) and not _is_path(source) and os.path.exists(source):
        hint = f"; to read the file of that name, write {os.path.join(os.curdir, source)}"
        problems[-1] = replace(problems[-1], message=problems[-1].message + hint)
    return config, problems


def dump(policy: EvictionPolicy) -> dict[str, Any]:
    """The mapping that loads as `policy`: its kind, and the options that were set."""
    return {"kind": policy.kind, **policy.model_dump(mode="json", by_alias=True, exclude_unset=True)}


def to_yaml(policy: EvictionPolicy, budget: Any = None) -> str:
    """The text of a YAML file that loads as `policy` and, if one is given, as `budget`."""
    from kvpolicy.yamltext import yaml_text

    mapping = dump(policy)
    if budget is not None:
        mapping[BUDGET] = _shortest(Budget.parse(budget))
    return yaml_text(mapping)


def _shortest(budget: Budget) -> Any:
    mapping = budget.model_dump(mode="json", exclude_defaults=True)
    return budget.amount if len(mapping) == 1 else mapping


# -- what a kind names -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sort:
    """A sort of things that are named by their kind."""

    noun: str
    article: str
    plural: str
    home: str
    base_name: str

    @property
    def base(self) -> Model:
        """The class of all of them; imported when it is needed, because of torch."""
        found: Model = getattr(import_module(self.home), self.base_name)
        return found

    @property
    def installed(self) -> Mapping[str, Model]:
        found: Mapping[str, Model] = getattr(registry(), self.plural)
        return found

    @property
    def hint(self) -> str:
        return f"installed: {', '.join(sorted(self.installed))}"

    def named(self, kind: str) -> Model:
        """The class of that kind; a PluginError that says what there is."""
        found: Model = getattr(registry(), self.noun)(kind)
        return found


_POLICY = _Sort("policy", "a", "policies", "kvpolicy.policy", "EvictionPolicy")
_ALLOCATOR = _Sort("allocator", "an", "allocators", "kvpolicy.allocator", "Allocator")


def policy_from(value: Any) -> EvictionPolicy:
    """A policy from an object, a kind or a mapping.

    It raises only pydantic's errors, so that a field which holds a policy can be validated by it
    (``Annotated[EvictionPolicy, BeforeValidator(policy_from)]``) and errors inside keep their full path.
    """
    return _from(_POLICY, value)


def allocator_from(value: Any) -> Allocator:
    """An allocator, as :func:`policy_from` makes policies."""
    return _from(_ALLOCATOR, value)


def budget_from(value: Any) -> Budget:
    """A budget from an object, a number, a text or a mapping; it too raises only pydantic's errors."""
    if isinstance(value, Mapping):
        return Budget.model_validate(dict(value))
    try:
        return Budget.parse(value)
    except BudgetError as error:
        raise _refusal(value, str(error)) from error


def _from(sort: _Sort, value: Any) -> Any:
    if isinstance(value, sort.base):
        return value
    if isinstance(value, str):
        return _class_of(sort, value).model_validate({"kind": value})
    if not isinstance(value, Mapping):
        needed = f"needs {sort.article} {sort.noun}: an object, a kind, or a mapping with one"
        raise _refusal(value, f"{needed}; not {shown(value)}")
    if "kind" not in value:
        near = get_close_matches("kind", filter(_is_text, value), n=1)
        hint = f"is {near[0]!r} meant to be it?" if near else sort.hint
        raise _refusal(value, f"is missing; {hint}", "kind", type_=MISSING)
    return _class_of(sort, value["kind"], "kind").model_validate(dict(value))


def _class_of(sort: _Sort, kind: Any, *loc: str) -> Model:
    if not isinstance(kind, str):
        raise _refusal(kind, f"needs the name of {sort.article} {sort.noun}, not {shown(kind)}; {sort.hint}", *loc)
    try:
        return sort.named(kind)
    except PluginError as error:
        raise _refusal(kind, str(error), *loc) from error


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str)


def _refusal(value: Any, message: str, *loc: str, type_: LiteralString = OURS) -> ValidationError:
    error = PydanticCustomError(type_, "{message}", {"message": message})
    return ValidationError.from_exception_data(OURS, [InitErrorDetails(type=error, loc=loc, input=value)])


def _by_kind(base: Model, kind: Any) -> Model | None:
    sort = next((sort for sort in (_POLICY, _ALLOCATOR) if issubclass(base, sort.base)), None)
    return sort.installed.get(kind) if sort and isinstance(kind, str) else None


# -- from a document to a configuration --------------------------------------------------------------------


def _is_path(source: Any) -> bool:
    if not isinstance(source, str):
        return isinstance(source, os.PathLike)
    separators = filter(None, (os.sep, os.altsep))
    return source.lower().endswith(SUFFIXES) or any(separator in source for separator in separators)


def _build(document: Document) -> tuple[Config | None, list[Problem]]:
    problems = list(document.problems)
    options, amount = document.value, None
    if isinstance(options, Mapping):
        amount = options.get(BUDGET)
        if EXTENDS in options:
            problems.append(document.problem((EXTENDS,), "is for files, which are found relative to each other", True))
        options = {key: option for key, option in options.items() if key not in (BUDGET, EXTENDS)}
    policy = budget = None
    try:
        with _in_folder_of(document):
            policy = policy_from(options)
    except ValidationError as error:
        problems += _explained(document, error, options, _POLICY.base)
    try:
        budget = budget_from(amount) if amount is not None else None
    except ValidationError as error:
        problems += _explained(document, error, amount, Budget, BUDGET)
    try:
        if policy and budget and budget.tokens:
            policy.check(budget.tokens)
    except BudgetError as error:
        loc: Loc = (BUDGET, "tokens") if isinstance(amount, Mapping) else (BUDGET,)
        problems.append(document.problem(loc, str(error)))
    if problems or policy is None:
        return None, document.in_order(problems)
    return Config(policy, budget), []


_folder: ContextVar[str] = ContextVar("folder", default="")


@contextmanager
def _in_folder_of(document: Document) -> Iterator[None]:
    token = _folder.set("" if document.root is None else os.path.dirname(document.root.start_mark.name))
    try:
        yield
    finally:
        _folder.reset(token)


def beside(file: str) -> str:
    """The path of a file that an option names: relative to the file being read, if the option stands in one."""
    return os.path.join(_folder.get(), file)


def _explained(document: Document, error: ValidationError, value: Any, model: Model, *at: str) -> Iterator[Problem]:
    explainer = Explainer(value, model, _by_kind)
    for loc, message, on_key in explainer.problems(error, document.whole):
        yield document.problem((*at, *loc), message, on_key)
