"""Files as they were written: YAML nodes that know their place, with those that a file extends merged in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

Loc = tuple[int | str, ...]
"""The keys and indices that lead to a value, from the top."""

EXTENDS = "extends"
BUDGET = "budget"
AMOUNTS = ("tokens", "share")
"""What a budget is given by, one of the two: where a file has one, that of its base is gone."""


@dataclass(frozen=True, order=True)
class Place:
    """A line and column of a file, counted from 1; without them, the file."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it is written, what it is about, and what to do."""

    message: str
    loc: Loc = ()
    place: Place | None = None

    def __str__(self) -> str:
        return ": ".join(filter(None, (str(self.place or ""), ".".join(map(str, self.loc)), self.message)))


class Unreadable(Exception):
    """Something is wrong with a file that leaves nothing to go on with."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass
class Document:
    """What was written and, if it was in a file, the nodes that know where."""

    value: Any
    root: Any = None
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with the writing itself."""
    whole: bool = True
    """False where something it extends could not be read: what seems to be missing may be there."""

    def problem(self, loc: Loc, message: str, on_key: bool = False) -> Problem:
        """`message`, about the value (or the key) at `loc`, and where that is written."""
        return Problem(message, loc, None if self.root is None else _place(self.root, loc, on_key))

    def in_order(self, problems: list[Problem]) -> list[Problem]:
        """As a reader would meet them: the file's own before those of what it extends, each from top to bottom."""
        file = None if self.root is None else self.root.start_mark.name
        return sorted(problems, key=lambda p: (p.place.file != file, p.place) if p.place else (False, Place("")))


def read_file(file: str) -> Document:
    """What `file` says, and what is said by the files that it extends.

    Raises:
        Unreadable: there is nothing to go on with.
    """
    document = Document(None)
    document.root = _Reader(document).read(file, ())
    document.value = _constructed(document.root)
    return document


class _Reader:
    """Reads a file and what it extends. Problems that leave something to go on with are the document's."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def read(self, file: str, chain: tuple[str, ...]) -> Any:
        """The mapping in `file`, on top of those it extends; each file of `chain` extends the next, the last this."""
        own = _plain(_parsed(file), self.document.problems)
        if own.id != "mapping":
            found = "a list" if own.id == "sequence" else repr(_constructed(own))
            message = f"needs a mapping with a kind, such as kind: h2o; not {found}"
            raise Unreadable(Problem(message, (), _at(own.start_mark)))
        pairs = _pairs(own)
        _, bases = pairs.pop(EXTENDS, (None, None))
        root = _mapping(own, pairs)
        base = None
        for loc, node in _items(bases):
            if (read := self._base(loc, node, (*chain, file))) is not None:
                base = read if base is None else merged(base, read)
        return root if base is None else merged(base, root)

    def _base(self, loc: Loc, node: Any, chain: tuple[str, ...]) -> Any:
        try:
            return self.read(_base_file(loc, node, chain), chain)
        except Unreadable as error:
            problem = error.problem
            if problem.place and not problem.place.line:  # a file that is not there is a problem of who wants it
                problem = Problem(str(problem), loc, _at(node.start_mark))
            self.document.problems.append(problem)
            self.document.whole = False
            return None


def _items(bases: Any) -> Iterator[tuple[Loc, Any]]:
    if bases is not None and bases.id == "sequence":
        yield from (((EXTENDS, index), node) for index, node in enumerate(bases.value))
    elif bases is not None:
        yield (EXTENDS,), bases


def _base_file(loc: Loc, node: Any, chain: tuple[str, ...]) -> str:
    """The path of a base, relative to the last file of `chain`, which names it."""
    named = _constructed(node) if node.id == "scalar" else None
    if not isinstance(named, str) or not named:
        raise Unreadable(Problem("needs a file, or a list of files", loc, _at(node.start_mark)))
    file = os.path.normpath(os.path.join(os.path.dirname(chain[-1]), named))
    for index, earlier in enumerate(chain):
        if os.path.realpath(earlier) == os.path.realpath(file):
            message = f"a file cannot extend itself: {' -> '.join((*chain[index:], earlier))}"
            raise Unreadable(Problem(message, loc, _at(node.start_mark)))
    return file


def merged(base: Any, own: Any, loc: Loc = ()) -> Any:
    """The node `own` on top of the node `base`: mappings key by key, anything else takes the place of the base's.

    The keys of a base of another kind mean nothing here and are left out, but for the budget at the top. Those of
    `own` come first, since where ranges of layers overlap, the first counts.
    """
    if base.id != "mapping" or own.id != "mapping":
        return own
    theirs, ours = _pairs(base), _pairs(own)
    for name in _superseded(theirs, ours, loc):
        del theirs[name]
    for name, (key, value) in ours.items():
        if name in theirs:
            ours[name] = key, merged(theirs[name][1], value, (*loc, name))
    return _mapping(own, {**ours, **{name: pair for name, pair in theirs.items() if name not in ours}})


def _superseded(theirs: dict[str, Any], ours: dict[str, Any], loc: Loc) -> list[str]:
    kinds = [pairs["kind"][1].value for pairs in (theirs, ours) if "kind" in pairs]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        return [name for name in theirs if (*loc, name) != (BUDGET,)]
    if loc == (BUDGET,) and any(amount in ours for amount in AMOUNTS):
        return [amount for amount in AMOUNTS if amount in theirs]
    return []


def _pairs(mapping: Any) -> dict[str, tuple[Any, Any]]:
    return {name: (key, value) for name, key, value in _children(mapping)}


def _mapping(node: Any, pairs: dict[str, tuple[Any, Any]]) -> Any:
    return _with(node, list(pairs.values()))


def _with(node: Any, value: Any) -> Any:
    changed = copy(node)
    changed.value = value
    return changed


def _children(node: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, node of the key and node of the value of everything in a mapping or sequence."""
    if node.id == "mapping":
        yield from ((str(key.value), key, value) for key, value in node.value)
    elif node.id == "sequence":
        yield from ((str(index), value, value) for index, value in enumerate(node.value))


def _place(node: Any, loc: Loc, on_key: bool) -> Place:
    mark = node.start_mark
    for part in loc:
        found = next(((key, child) for name, key, child in _children(node) if name == str(part)), None)
        if found is None:
            break
        key, node = found
        mark = (key if on_key else node).start_mark
    return _at(mark)


def _at(mark: Any) -> Place:
    return Place(mark.name, mark.line + 1, mark.column + 1)


def _plain(root: Any, problems: list[Problem]) -> Any:
    """`root` with merge keys (``<<``) resolved and every key once; a key that was given twice is a problem."""
    done: dict[int, Any] = {}

    def plain(node: Any, loc: Loc, above: tuple[int, ...]) -> Any:
        if id(node) in above:
            raise Unreadable(Problem("contains itself", loc, _at(node.start_mark)))
        if id(node) not in done:
            above = (*above, id(node))
            if node.id == "mapping":
                once = _once(node, loc, problems)
                pairs = {name: (k, plain(_placed(k, value), (*loc, name), above)) for name, (k, value) in once.items()}
                done[id(node)] = _mapping(node, _resolved(pairs))
            elif node.id == "sequence":
                items = [plain(item, (*loc, index), above) for index, item in enumerate(node.value)]
                done[id(node)] = _with(node, items)
            else:
                done[id(node)] = _legible(node, loc)
        return done[id(node)]

    return plain(root, (), ())


def _once(mapping: Any, loc: Loc, problems: list[Problem]) -> dict[str, tuple[Any, Any]]:
    pairs: dict[str, tuple[Any, Any]] = {}
    for name, key, value in _children(mapping):
        if name in pairs:
            message = f"is given twice, first in line {pairs[name][0].start_mark.line + 1}"
            problems.append(Problem(message, (*loc, name), _at(key.start_mark)))
        else:
            pairs[name] = key, value
    return pairs


def _placed(key: Any, value: Any) -> Any:
    """`value`, at the place of its key if there is none: the parser puts it where it looked for one."""
    if value.id != "scalar" or value.value or value.start_mark != value.end_mark:
        return value
    value = copy(value)
    value.start_mark = key.start_mark
    return value


def _resolved(pairs: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """`pairs` with those that a merge key brings, unless they are there; the earlier of several wins."""
    key, value = pairs.get("<<", (None, None))
    if key is None or key.tag != "tag:yaml.org,2002:merge":
        return pairs
    brought: dict[str, tuple[Any, Any]] = {}
    for node in reversed(value.value if value.id == "sequence" else [value]):
        if node.id != "mapping":
            raise Unreadable(Problem("needs a mapping to merge, or a list of them", ("<<",), _at(node.start_mark)))
        brought |= _pairs(node)
    return {**brought, **{name: pair for name, pair in pairs.items() if name != "<<"}}


def _legible(scalar: Any, loc: Loc) -> Any:
    try:
        _constructed(scalar)
    except ValueError as error:  # a tag that its value cannot have, such as !!int x
        raise Unreadable(Problem(f"cannot be read: {error}", loc, _at(scalar.start_mark))) from error
    return scalar


def _parsed(file: str) -> Any:
    """The nodes of a file in YAML 1.2, of which JSON is a part."""
    text = _text_of(file)
    stream = StringIO(text)
    stream.name = file  # what marks will call it
    with _located(text, file):
        root = _yaml().compose(stream)
    if root is None:
        raise Unreadable(Problem("is empty; it needs a policy, such as kind: h2o", (), Place(file, 1, 1)))
    return root


def _constructed(node: Any) -> Any:
    with _located():
        return _yaml().constructor.construct_document(node)


def _yaml() -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True)


@contextmanager
def _located(text: str = "", file: str = "") -> Iterator[None]:
    """Turn errors of YAML into problems. Not all know their line: `text` is needed for those that do not."""
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        yield
    except MarkedYAMLError as error:
        said = error.problem or error.context
        if error.context and said.startswith("but "):  # the second half of a sentence
            said = f"{error.context}, {said}"
        place = _at(error.problem_mark or error.context_mark)
        raise Unreadable(Problem(f"is not valid YAML: {said}", (), place)) from error
    except YAMLError as error:
        position = getattr(error, "position", 0)
        place = Place(file, text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position))
        raise Unreadable(Problem("has a character that YAML does not allow", (), place)) from error


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text("utf-8-sig")
    except OSError as error:
        message, place = f"cannot be read: {error.strerror or error}", Place(file)
    except UnicodeDecodeError as error:
        message, place = "is not text in UTF-8", Place(file, error.object[: error.start].count(b"\n") + 1, 1)
    raise Unreadable(Problem(message, (), place))
