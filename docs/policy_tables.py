"""Put tables of what comes with kvpolicy into README.md and docs/policies.md: ``python docs/policy_tables.py``.

Nothing in them is written by hand. The first line of a module says what its policy keeps and the docstring of the class
names the paper; what a policy reads and protects shows when it runs on a tiny model. ``--check`` changes nothing, and
fails where a table is out of date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from importlib.metadata import entry_points
from math import isinf, prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pydantic import ValidationError
from torch import Tensor

from kvpolicy import EvictionCache, EvictionPolicy, View
from kvpolicy.allocator import Allocator, HeadAllocator, LayerAllocator
from kvpolicy.compose import Composite
from kvpolicy.errors import KVPolicyError
from kvpolicy.plugins import Registry
from kvpolicy.rehearsal import compress
from kvpolicy.testing import models
from kvpolicy.testing.spy import Spy, Watched

ROOT = Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "policies.md"
PROMPT, BUDGETS = 700, (300, 600)
INSIDE = "recent"
"""What wrappers are tried with: a policy that reads nothing but positions."""
GIVEN: dict[str, dict[str, Any]] = {"duo_attention": {"heads": [[1.0, 0.0]] * models.LAYERS}}
"""What others are tried with that have to be told something."""


# -- what it says of itself ------------------------------------------------------------------------------------


def keeps(of: type) -> str:
    """The first sentence of its module, after the name."""
    found = re.match(r"[^:\n]*: (.*?)\.?(?:\n|$|(?<=\.) )", _text(inspect.getmodule(of)))
    if found is None:
        raise SystemExit(f"{of.__module__} must begin with its name, a colon and what it keeps")
    return found[1].rstrip(".")


def is_primitive(of: type) -> bool:
    return "A part for compositions." in _text(inspect.getmodule(of))


def paper(of: type) -> str:
    """Authors, venue and year, with a link; as in ``(Zhang et al., NeurIPS 2023, arXiv 2306.14048)``."""
    found = re.search(r"\(([^()]+), arXiv (\d{4}\.\d{4,5})\)", " ".join(_text(of).split()))
    return f"[{found[1]}](https://arxiv.org/abs/{found[2]})" if found else ""


def _text(of: Any) -> str:
    return inspect.getdoc(of) or ""


# -- what it does ----------------------------------------------------------------------------------------------


@dataclass
class Seen(Spy):
    """What a policy reads beside attention, and what it protects where a prompt is cut."""

    reads: set[str] = field(default_factory=set)
    protected: list[tuple[int, int]] = field(default_factory=list)

    def select(self, policy: EvictionPolicy, view: View, query: Tensor) -> Tensor | None:
        self.reads.add("queries")
        return policy.select(view, query)

    def ranking(self, policy: EvictionPolicy, view: View) -> tuple[Tensor, ...]:
        if not view.decoding and view.layer == 0 and isinstance(view.budget, int):  # not again, once heads differ
            self.protected.append(ends(policy.protected(view), view))
        return policy.ranking(view)

    @contextmanager
    def noting(self) -> Iterator[None]:
        def noted(name: str, method: Any) -> Any:
            def read(*args: Any, **kwargs: Any) -> Any:
                self.reads.add(name)
                return method(*args, **kwargs)

            return read

        keys, values = (property(noted(name, vars(View)[name].fget)) for name in ("keys", "values"))
        with patch.multiple(View, keys=keys, values=values, uniform=noted("chance", View.uniform)):
            yield


def ends(protected: Tensor | None, view: View) -> tuple[int, int]:
    """How many first tokens are protected and how many last ones, in the first head."""
    if protected is None:
        return 0, 0
    by_age = protected.expand_as(view.positions)[0, 0][view.positions[0, 0].argsort()].long()
    last = int(by_age.flip(0).cumprod(0).sum())
    return int(by_age[: len(by_age) - last].cumprod(0).sum()), last


class Facts:
    """A policy with default options, and what becomes of it; a wrapper is tried with a policy inside."""

    def __init__(self, of: type[EvictionPolicy]) -> None:
        self.wraps = issubclass(of, Composite)
        inside = {name: INSIDE for name, option in of.model_fields.items() if option.is_required()}
        self.policy = of(**{**inside, **GIVEN.get(of.model_fields["kind"].default, {})})

    @cached_property
    def seen(self) -> Seen:
        seen, model = Seen(), models.llama("float32")
        with suppress(KVPolicyError), seen.noting(), torch.no_grad():  # what wants more than a prompt shows nothing
            for budget in BUDGETS:
                cache = EvictionCache(model, Watched.by(seen, self.policy), budget if self.policy.budgeted else None)
                if cache.awaiting:
                    compress(model, models.Tokenizer(), cache, models.ids(1, PROMPT))
                else:
                    models.feed(model, cache, models.ids(1, PROMPT))
                models.feed(model, cache, models.ids(1, 1))
        return seen

    def row(self) -> list[str]:
        return [self.signal(), self.protects(), self.in_prefill(), self.in_decode(), self.nbytes()]

    def signal(self) -> str:
        needs = {*self.policy.needs, *self.policy.rehearsal_needs}
        names = {need.name.partition("_")[0] for need in needs} | self.seen.reads
        return self._with_inside([name for name in SIGNALS if name in names], "none")

    def protects(self) -> str:
        if self.policy.own_budget is not None and not self.wraps:
            return f"everything, or in some heads {self.policy.own_budget} tokens"
        if self.wraps or not self.policy.bounded:
            return "as inside" if self.wraps else "everything"
        if not self.seen.protected:
            return "–"
        sinks, recent = (_amount(*counts) for counts in zip(*self.seen.protected, strict=True))
        recent = "the newest" if recent == "1" else f"{recent} recent" if recent else ""
        return ", ".join(filter(None, (f"{sinks} sinks" if sinks else "", recent))) or "nothing"

    def in_prefill(self) -> str:
        wants = self.policy.wants
        rows = "one row" if wants.window == 1 else f"{wants.window} rows"
        found = ["sums of all queries"] * wants.total
        found += ["rows of all queries"] if wants.blocks else [rows] * bool(wants.window)
        found += ["a pass after it"] * self.policy.rehearses
        return self._with_inside(found, "nothing")

    def in_decode(self) -> str:
        if isinf(self.policy.room(decoding=True)):
            return "evicts nothing"
        return self._with_inside(["one row"] * (not self.policy.wants.nothing), "nothing")

    def nbytes(self) -> str:
        one, two = (self._bytes(group) for group in (1, 2))  # query heads of a KV head
        found = str(one) if one == two else f"{2 * one - two} + {two - one} * group"
        fields = self.policy.slot_fields().values()
        of_keys = sum((Fraction(1, its.every) for its in fields if (its.dtype, its.shape) == AS_KEYS), Fraction(0))
        return self._with_inside([found] * bool(one) + [f"{of_keys} of a key"] * bool(of_keys), "0")

    def _bytes(self, group: int) -> int:
        sizes = {"group": group, "head_dim": 1, "value_dim": 1}
        fields = self.policy.slot_fields().values()
        others = (its for its in fields if (its.dtype, its.shape) != AS_KEYS)
        return sum(getattr(torch, its.dtype).itemsize * prod(its.sized(sizes)) for its in others)

    def _with_inside(self, found: Sequence[str], nothing: str) -> str:
        return ", ".join(["as inside"] * self.wraps + list(found)) or nothing


AS_KEYS = ("model", ("head_dim",))
SIGNALS = ("attention", "logits", "queries", "keys", "values", "output", "chance")


def _amount(small: int, large: int) -> str:
    """What is protected of each of the budgets, as a number or as a share."""
    if small == large:
        return str(small) if small else ""
    return f"{large / BUDGETS[1]:g} of the budget"


# -- tables ----------------------------------------------------------------------------------------------------


class Tables:
    """Tables by the name of the comments they stand between, ``<!-- table: NAME -->``."""

    def __init__(self) -> None:
        registry = Registry(entry_points(group="kvpolicy"), only=())  # whatever else is installed
        self.allocators: dict[str, type[Allocator]] = dict(sorted(registry.allocators.items()))
        ours = {kind: of for kind, of in sorted(registry.policies.items()) if not of.__module__.startswith("kvpolicy.")}
        self.combinators = {kind: of for kind, of in sorted(registry.policies.items()) if kind not in ours}
        self.primitives = {kind: of for kind, of in ours.items() if is_primitive(of)}
        self.policies = {kind: of for kind, of in ours.items() if kind not in self.primitives}

    def written(self, name: str) -> str:
        head, *rows = getattr(self, f"_{name}")()
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)).replace("|  |", "| |")

    def _kinds(self) -> list[list[str]]:
        return [
            ["kind", "keeps", "paper"],
            *([f"`{kind}`", keeps(of), paper(of)] for kind, of in self.policies.items()),
        ]

    def _policies(self) -> list[list[str]]:
        return [
            ["kind", "keeps", "paper"],
            *([_linked(kind), keeps(of), paper(of)] for kind, of in self.policies.items()),
        ]

    def _costs(self) -> list[list[str]]:
        head = ["kind", "signal", "protects by default", "in prefill", "in decode", "bytes a slot"]
        return [head, *([_linked(kind), *self._facts(of)] for kind, of in self.policies.items())]

    def _primitives(self) -> list[list[str]]:
        head = ["kind", "keeps", "signal", "options"]
        return [head, *([_code(kind), keeps(of), _needed(of), _options(of)] for kind, of in self.primitives.items())]

    def _combinators(self) -> list[list[str]]:
        return [
            ["kind", "what it does"],
            *([f"[`{kind}`](compose.md#{kind})", keeps(of)] for kind, of in self.combinators.items()),
        ]

    def _allocators(self) -> list[list[str]]:
        return [
            ["kind", "for", "what it does", "paper"],
            *(
                [_linked(kind, kind in self.policies), _for(of), keeps(of), paper(of)]
                for kind, of in self.allocators.items()
            ),
        ]

    @staticmethod
    def _facts(of: type[EvictionPolicy]) -> list[str]:
        try:
            return Facts(of).row()
        except ValidationError:  # it has to be told more than what is inside
            return ["by options"] * 5


def _code(kind: str) -> str:
    return f"`{kind}`"


def _linked(kind: str, second: bool = False) -> str:
    """With a link to its heading, or to the second of that name on the page."""
    return f"[`{kind}`](#{kind}{'_1' * second})"


def _needed(of: type[EvictionPolicy]) -> str:
    return ", ".join(sorted({need.name.replace("_", " ") for need in of.needs})) or "none"


def _options(of: type[EvictionPolicy]) -> str:
    options = {name: option for name, option in of.model_fields.items() if name != "kind"}
    told = (f"`{name}`" + ("" if its.is_required() else f" (`{its.default}`)") for name, its in options.items())
    return ", ".join(told) or "none"


def _for(of: type[Allocator]) -> str:
    return " or ".join(
        name for name, sort in (("layers", LayerAllocator), ("heads", HeadAllocator)) if issubclass(of, sort)
    )


# -- files -----------------------------------------------------------------------------------------------------

_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.S)


def stale() -> Mapping[Path, str]:
    """Files whose tables are out of date, and what should be in them."""
    tables, found = Tables(), {}
    for file in (README, PAGE):
        text = file.read_text("utf-8")
        new = _PLACE.sub(lambda place: f"{place[1]}\n{tables.written(place[2])}\n\n{place[3]}", text)
        if new != text:
            found[file] = new
    return found


def main() -> None:
    out_of_date = stale()
    for file, text in out_of_date.items():
        if "--check" in sys.argv:
            print(f"{file.relative_to(ROOT)} is out of date; run: python docs/policy_tables.py")
        else:
            file.write_text(text, "utf-8")
    sys.exit(bool(out_of_date) and "--check" in sys.argv)


if __name__ == "__main__":
    main()
