"""What all compositions share: slot fields, needs and observations of the parts, taken together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import AfterValidator, model_validator
from torch import Tensor

from kvpolicy.errors import BudgetError
from kvpolicy.policy import Changed, EvictionPolicy, HeadField, Need, Policy, SlotField, View, as_if_alone
from kvpolicy.select import best_first
from kvpolicy.storage import Storage


class Composite(EvictionPolicy):
    """A policy made of policies. It decides by :meth:`ranking`, made from the rankings of its parts.

    Each part has a name, and its slot fields carry it (``0.mass``); whatever a part needs of attention, the whole
    needs. Subclasses say what the parts are (:meth:`children`), how to exchange them (:meth:`with_parts`), what of the
    budget each may keep (:meth:`split`), and how they rank together.
    """

    demands: ClassVar[tuple[str, ...]] = ()
    holds_selecting: ClassVar[bool] = False
    """Whether a part may be one that selects what a step attends to, since it decides of a layer alone."""

    @model_validator(mode="after")
    def _parts_evict(self) -> Composite:
        if not self.holds_selecting:
            for _, part in self.children():
                _evicting(part)
        return self

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        raise NotImplementedError(f"{type(self).__name__} must define children()")

    def with_parts(self, change: Callable[[EvictionPolicy], EvictionPolicy]) -> EvictionPolicy:
        """The same composition of other parts: each is what `change` makes of it."""
        raise NotImplementedError(f"{type(self).__name__} must define with_parts()")

    def replaced(self, **fields: Any) -> EvictionPolicy:
        """A copy with other values of some fields."""
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_construct(_fields_set=self.model_fields_set, **{**kept, **fields})

    def split(self, budget: int, prefix: int = 0) -> list[tuple[str, EvictionPolicy, int]]:
        """Name and policy of each part, and how many tokens it may keep of `budget`; by default all of them."""
        return [(name, part, budget) for name, part in self.children()]

    def for_layer(self, layer: int, layers: int) -> EvictionPolicy:
        return self.with_parts(lambda part: part.for_layer(layer, layers))

    @cached_property
    def bounded(self) -> bool:  # type: ignore[override]
        return any(part.bounded for _, part in self.children())

    @cached_property
    def storage(self) -> Storage | None:
        """That of the one part; several parts share their slots, and none of them can say how these are stored."""
        parts = list(self.children())
        storing = [(name, part) for name, part in parts if part.storage is not None]
        if storing and len(parts) > 1:
            name, part = storing[0]
            raise ValueError(
                f"{part.kind} says how a layer stores all that it keeps, so it cannot be one part of several ({name}); "
                f"put it around {self.kind}"
            )
        return storing[0][1].storage if storing else None

    @model_validator(mode="after")
    def _storable(self) -> Composite:
        self.storage  # noqa: B018 - says what is wrong
        return self

    @cached_property
    def selects(self) -> bool:  # type: ignore[override]
        return any(part.selects for _, part in self.children())

    @property
    def rolled(self) -> bool:
        return any(part.rolled for _, part in self.children())

    @cached_property
    def together(self) -> bool:  # type: ignore[override]
        return any(part.together for _, part in self.children())

    @cached_property
    def divided(self) -> bool:  # type: ignore[override]
        return any(part.divided for _, part in self.children())

    @cached_property
    def own_budget(self) -> int | None:  # type: ignore[override]
        return next((part.own_budget for _, part in self.children() if part.own_budget is not None), None)

    def shares(self, budget: Tensor, heads: int) -> Tensor:
        """Those of its only part, or of the only one that has some to say."""
        part = next((part for _, part in self.children() if part.divided), None)
        return super().shares(budget, heads) if part is None else part.shares(budget, heads)

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        return frozenset(need for _, part in self.children() for need in part.needs)

    def slot_fields(self) -> dict[str, SlotField]:
        parts = {f"{name}.{key}": field for name, part in self.children() for key, field in part.slot_fields().items()}
        return {**super().slot_fields(), **parts}

    def head_fields(self) -> dict[str, HeadField]:
        return {f"{name}.{key}": field for name, part in self.children() for key, field in part.head_fields().items()}

    @cached_property
    def observes(self) -> bool:
        return type(self).observe is not Composite.observe or any(part.observes for _, part in self.children())

    @cached_property
    def _observing(self) -> list[tuple[str, EvictionPolicy]]:
        return [(name, part) for name, part in self.children() if part.observes]

    def observe(self, view: View) -> Mapping[str, Tensor | Changed]:
        found: dict[str, Tensor | Changed] = {}
        for name, part in self._observing:
            if view.rehearsal is not None:
                if view.rehearsal.by in part.rehearsing():
                    found |= {f"{name}.{field}": state for field, state in part.observe(view.part(name)).items()}
                continue
            if (shown := as_if_alone(view.part(name), part.wants)) is not None:
                for field, state in part.observe(shown).items():
                    found[f"{name}.{field}"] = state
        return found

    def protected(self, view: View) -> Tensor | None:
        return None

    def certain_of(self, name: str, view: View, candidates: Tensor | None = None) -> Tensor:
        """What the part `name` is certain to keep of its part of the budget."""
        parts = {own: (part, tokens) for own, part, tokens in self.split(int(view.budget), int(view.prefix))}
        part, tokens = parts[name]
        if not part.bounded:
            return view.eligible if candidates is None else candidates
        return part.certain(view.part(name, tokens, candidates))

    def check(self, budget: int, prefix: int = 0) -> None:
        super().check(budget, prefix)
        for name, part, tokens in self.split(budget, prefix):
            try:
                part.check(tokens, prefix)
            except BudgetError as error:
                raise BudgetError(f"{self.kind}.{name}: {error}") from None


class Wrapper(Composite):
    """A policy around one other, `of`, that leaves to it whatever it does not override."""

    if TYPE_CHECKING:
        of: EvictionPolicy

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        yield "of", self.of

    def with_parts(self, change: Callable[[EvictionPolicy], EvictionPolicy]) -> EvictionPolicy:
        return self.replaced(of=change(self.of))

    def room(self, decoding: bool) -> float:
        return self.of.room(decoding)

    def protected(self, view: View) -> Tensor | None:
        return self.of.protected(view.part("of"))

    def certain(self, view: View) -> Tensor:
        return self.certain_of("of", view)

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        return self.of.ranking(view.part("of"))


def _evicting(policy: EvictionPolicy) -> None:
    if policy.selects:
        raise ValueError(
            f"{policy.kind} selects what a step attends to, so it is a layer's only policy: use it alone or in layers"
        )


def _evicting_at_once(policy: EvictionPolicy) -> EvictionPolicy:
    _evicting(policy)
    if policy.room(True) or policy.room(False):
        raise ValueError(
            f"{policy.kind} decides when to evict, and its parts only what; put it outside (every, phases, layers and "
            "protect may hold it)"
        )
    return policy


def _undivided(policy: EvictionPolicy) -> EvictionPolicy:
    if policy.divided:
        raise ValueError(
            f"{policy.kind} says how many tokens each head holds, which only a whole layer can go by; put it outside "
            "(layers, protect and every may hold it)"
        )
    return policy


Undivided = Annotated[Policy, AfterValidator(_undivided)]
"""A field that holds a policy which treats all heads of a layer alike."""
Chooser = Annotated[Undivided, AfterValidator(_evicting_at_once)]
"""A field that holds a policy which only says what goes, not when."""


def has_score(policy: EvictionPolicy) -> bool:
    """Whether it gives each slot a priority, rather than an order alone."""
    return type(policy).priority is not EvictionPolicy.priority


def by_rank(part: EvictionPolicy, view: View) -> Tensor:
    """The place of each slot in the order of `part`, from one down: what different rankings have in common."""
    order = best_first(part.ranking(view), view.eligible, view.positions)
    slots = order.shape[-1]
    place = torch.arange(slots, 0, -1, device=order.device, dtype=torch.float32) / slots
    return torch.zeros_like(order, dtype=torch.float32).scatter_(-1, order, place.expand(order.shape))


def spelled_out(value: Any) -> Any:
    """A bare policy among parts stands for ``{of: policy}``."""
    bare = isinstance(value, (str, EvictionPolicy)) or (isinstance(value, dict) and "kind" in value)
    return {"of": value} if bare else value
