"""Looking over a policy's shoulder: a policy that passes everything on, and looks at what goes in and out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from functools import cached_property
from typing import Any, ClassVar

import torch
from pydantic import PrivateAttr
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvpolicy.attention.blocks import Wants
from kvpolicy.attention.rows import AttentionRows
from kvpolicy.policy import Changed, EvictionPolicy, HeadField, Need, SlotField, View
from kvpolicy.rehearsal import Passage
from kvpolicy.storage import Storage


class Spy:
    """Called in place of the policy's methods; by default it passes the call on."""

    def observe(self, policy: EvictionPolicy, view: View) -> Mapping[str, Tensor]:
        return observed(policy, view)

    def select(self, policy: EvictionPolicy, view: View, query: Tensor) -> Tensor | None:
        return policy.select(view, query)

    def ranking(self, policy: EvictionPolicy, view: View) -> tuple[Tensor, ...]:
        return policy.ranking(view)


def observed(policy: EvictionPolicy, view: View) -> dict[str, Tensor]:
    """What `policy` returns from ``observe``, whole fields where it returns those entries that changed."""
    found: dict[str, Tensor] = {}
    for name, state in policy.observe(view).items():
        if isinstance(state, Changed):
            whole = view[name].clone()
            state.put_into(whole)
            state = whole
        found[name] = state
    return found


class Watched(EvictionPolicy):
    """The policy `of`, with a spy between it and the cache."""

    kind: str = "watched"
    of: Any
    demands: ClassVar[tuple[str, ...]] = ()
    _spy: Spy = PrivateAttr(default_factory=Spy)

    @classmethod
    def by(cls, spy: Spy, policy: EvictionPolicy) -> Watched:
        watched = cls(of=policy)
        watched._spy = spy
        return watched

    @property
    def needs(self) -> Collection[Need]:  # type: ignore[override]
        return self.of.needs

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.of.bounded

    @property
    def selects(self) -> bool:  # type: ignore[override]
        return self.of.selects

    @property
    def budgeted(self) -> bool:
        return self.of.budgeted

    @property
    def selective(self) -> bool:  # type: ignore[override]
        return self.of.selective

    @property
    def rolled(self) -> bool:
        return self.of.rolled

    @property
    def together(self) -> bool:  # type: ignore[override]
        return self.of.together

    @property
    def divided(self) -> bool:  # type: ignore[override]
        return self.of.divided

    @property
    def own_budget(self) -> int | None:  # type: ignore[override]
        return self.of.own_budget

    @property
    def rehearsal_needs(self) -> Collection[Need]:  # type: ignore[override]
        return self.of.rehearsal_needs

    @property
    def rehearses(self) -> bool:
        return self.of.rehearses

    @property
    def observes(self) -> bool:
        return self.of.observes

    @property
    def storage(self) -> Storage | None:
        return self.of.storage

    @cached_property
    def wants(self) -> Wants:
        return self.of.wants

    def slot_fields(self) -> dict[str, SlotField]:
        return self.of.slot_fields()

    def head_fields(self) -> dict[str, HeadField]:
        return self.of.head_fields()

    def required(self) -> int:
        return self.of.required()

    def check(self, budget: int, prefix: int = 0) -> None:
        self.of.check(budget, prefix)

    def for_layer(self, layer: int, layers: int) -> EvictionPolicy:
        return Watched.by(self._spy, self.of.for_layer(layer, layers))

    def room(self, decoding: bool) -> float:
        return self.of.room(decoding)

    def shares(self, budget: Tensor, heads: int) -> Tensor:
        return self.of.shares(budget, heads)

    def rehearsal(self, context: Tensor, encode: Callable[[str], list[int]], prefix: int = 0) -> Iterable[Passage]:
        return self.of.rehearsal(context, encode, prefix)

    def rehearsing(self) -> Iterator[EvictionPolicy]:
        return self.of.rehearsing()

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        return self.of.children()

    def certain(self, view: View) -> Tensor:
        return self.of.certain(view)

    def observe(self, view: View) -> Mapping[str, Tensor]:
        return self._spy.observe(self.of, view)

    def select(self, view: View, query: Tensor) -> Tensor | None:
        return self._spy.select(self.of, view, query)

    def protected(self, view: View) -> Tensor | None:
        return self.of.protected(view)

    def priority(self, view: View) -> Tensor | tuple[Tensor, ...]:
        return self.of.priority(view)

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        return self._spy.ranking(self.of, view)


# -- what a view holds -----------------------------------------------------------------------------------------

_OF_ATTENTION = {"_probs": -1, "_logits": -1, "_sum": -1, "_queries": None, "_positions": None, "_visible": None}
"""What rows of attention hold, and the dimension of the slots in it."""


def tensors_of(view: View) -> dict[str, Tensor]:
    """Every tensor a policy can reach through `view`, by a name for messages."""
    found = {f"view[{name!r}]": state for name, state in (*view._fields.items(), *view._heads.items())}
    for name in ("positions", "seen", "budget", "keys", "values", "prefix"):
        found[f"view.{name}"] = getattr(view, name)
    if view.attention is not None:
        found |= {f"view.attention.{name.strip('_')}()": getattr(view.attention, name) for name in _OF_ATTENTION}
    return {name: state for name, state in found.items() if isinstance(state, Tensor)}


def reordered(view: View, order: Tensor) -> View:
    """The same view with its slots in another `order`."""
    other = copy(view)
    other._fields = {name: state[:, :, order] for name, state in view._fields.items()}
    other.positions = view.positions[:, :, order]
    other._keys, other._values = view.keys[:, :, order], view.values[:, :, order]
    if view.attention is not None:
        other.attention = _reordered_rows(view.attention, order)
    return other


def _reordered_rows(rows: AttentionRows, order: Tensor) -> AttentionRows:
    other = copy(rows)
    for name, dimension in _OF_ATTENTION.items():
        state = getattr(rows, name)
        if dimension is not None and state is not None:
            setattr(other, name, state.index_select(dimension, order))
    return other


# -- tensors on no device in particular ------------------------------------------------------------------------

_FACTORIES = {
    getattr(torch, name)
    for name in (
        "arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros",
    )
}  # fmt: skip
_TAG = "_kvpolicy_made_by"


class Homeless(TorchFunctionMode):
    """Notices tensors made without ``device=`` that meet tensors of the cache, which fails on a GPU.

    Scalars are exempt, as in torch, and so is what is moved to a device before it is used.
    """

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__()
        self._say = say

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _FACTORIES:
            if kwargs.get("device") is None and result.dim() > 0:
                setattr(result, _TAG, f"torch.{func.__name__}")
        elif _moves(func, args, kwargs):
            vars(result).pop(_TAG, None)
        else:
            # An index may come from elsewhere.
            operands = args[:1] if func is Tensor.__getitem__ else (*args, *kwargs.values())
            self._look(func, list(_tensors(operands)), result)
        return result

    def _look(self, func: Any, operands: list[Tensor], result: Any) -> None:
        tagged = [getattr(operand, _TAG) for operand in operands if hasattr(operand, _TAG)]
        if not tagged:
            return
        if any(not hasattr(operand, _TAG) and operand.dim() > 0 for operand in operands):
            self._say(tagged[0], getattr(func, "__name__", str(func)))
        elif isinstance(result, Tensor):
            setattr(result, _TAG, tagged[0])


def _moves(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call puts its tensor onto some device."""
    named = any(isinstance(value, (torch.device, str, Tensor)) for value in (*args[1:], *kwargs.values()))
    return func in (Tensor.type_as, Tensor.cuda) or (func is Tensor.to and named)


def made_by(state: Tensor) -> str | None:
    """What made a tensor that is on no device in particular; ``None`` if it is where the cache is."""
    return getattr(state, _TAG, None)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
