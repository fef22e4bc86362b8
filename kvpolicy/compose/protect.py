"""Protect: tokens that always stay, whatever decides about the others."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, StrictBool, StrictInt, model_validator
from torch import Tensor

from kvpolicy.compose._base import Wrapper
from kvpolicy.errors import BudgetError, ConfigError
from kvpolicy.policy import EvictionPolicy, Policy, Share, Tokens, View, share_of
from kvpolicy.select import raised


def _in_order(spans: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    end = 0
    for start, stop in spans:
        if not end <= start < stop:
            raise ValueError(f"[{start}, {stop}] must start at or after {end} and stop after its start")
        end = stop
    return spans


class Protect(Wrapper):
    """Sinks, recents, spans of positions and the user's prefix stay; `of` decides about the rest with what is left.

    What is protected is part of the budget, and `of` sees neither those tokens nor that part of it. One ``protect``
    right inside another (``layers`` between them do not count) is joined with it, so that a sink that is also part of
    the prefix is counted once; where `recent` is a share, of which budget matters, and they stay two.
    """

    kind: Literal["protect"] = "protect"
    sinks: Tokens = 0
    """First tokens that always stay."""
    recent: Share = 0
    """Recent window: tokens, or a share of the budget."""
    spans: Annotated[tuple[tuple[StrictInt, StrictInt], ...], AfterValidator(_in_order)] = ()
    """Positions that always stay, each ``[start, stop]`` with the stop excluded, in order."""
    prefix: StrictBool = False
    """Keep as many first tokens as the user of the cache says, ``EvictionCache(prefix=...)``: a system prompt."""
    of: Policy
    """The policy for the other tokens."""

    demands: ClassVar[tuple[str, ...]] = ("sinks", "recent")
    holds_selecting: ClassVar[bool] = True

    @model_validator(mode="after")
    def _something_goes(self) -> Protect:
        if self.of.selects and not self.of.bounded:
            raise ValueError(f"{self.of.kind} keeps everything, so there is nothing to protect: leave protect out")
        return self

    def for_layer(self, layer: int, layers: int) -> EvictionPolicy:
        of = self.of.for_layer(layer, layers)
        if of.selects:  # nothing goes in this layer
            return of
        if not (isinstance(of, Protect) and isinstance(of.recent, int) and isinstance(self.recent, int)):
            return self.replaced(of=of)
        return Protect.model_construct(
            _fields_set=self.model_fields_set | of.model_fields_set,
            kind=self.kind,
            sinks=max(self.sinks, of.sinks),
            recent=max(self.recent, of.recent),
            spans=_joined(self.spans + of.spans),
            prefix=self.prefix or of.prefix,
            of=of.of,
        )

    def check(self, budget: int, prefix: int = 0) -> None:
        recent = self.recent if isinstance(self.recent, int) else 1
        first, spans = self._fixed(prefix)
        if (needed := first + spans + max(recent, 1)) > budget:
            named = {"sinks": self.sinks, "prefix": prefix * self.prefix, "spans": spans, "recent": recent}
            listed = " + ".join(f"{name}={tokens}" for name, tokens in named.items() if tokens)
            raise BudgetError(
                f"protect: a budget of {budget} tokens cannot hold the {needed} it must protect ({listed}, and "
                "at least the newest token); raise the budget or protect less"
            )
        super().check(budget, prefix)

    def split(self, budget: int, prefix: int = 0) -> list[tuple[str, EvictionPolicy, int]]:
        return [("of", self.of, budget - sum(self._amounts(budget, prefix)))]

    def _fixed(self, prefix: Any) -> tuple[Any, Any]:
        """First tokens, and tokens of spans after them."""
        first = self.sinks
        if self.prefix:
            first = max(first, prefix) if isinstance(prefix, int) else prefix.clamp(min=first)
        if isinstance(first, int):
            return first, sum(max(0, stop - max(start, first)) for start, stop in self.spans)
        return first, sum((stop - first.clamp(min=start)).clamp(min=0) for start, stop in self.spans)

    def _amounts(self, budget: Any, prefix: Any) -> tuple[Any, Any, Any]:
        """First tokens, tokens of spans, recent tokens: together never more than the budget."""
        first, spans = self._fixed(prefix)
        return first, spans, _smaller(share_of(self.recent, budget), budget - first - spans)

    def protected(self, view: View) -> Tensor:
        first, _, recent = self._amounts(view.budget, view.prefix)
        found = (view.positions < first) | (view.positions >= view.seen - recent)
        for start, stop in self.spans:
            found = found | ((view.positions >= start) & (view.positions < stop))
        return found

    def certain(self, view: View) -> Tensor:
        protected = self.protected(view)
        return protected | self.certain_of("of", view, view.without(protected))

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        protected = self.protected(view)
        budget = view.budget - sum(self._amounts(view.budget, view.prefix))
        return raised(self.of.ranking(view.part("of", budget, view.without(protected))), protected)


def _joined(spans: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """The same positions in order, each once."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def with_prefix(policy: EvictionPolicy, prefix: Any) -> tuple[EvictionPolicy, Tensor]:
    """A policy that keeps the first `prefix` tokens, and their number, one or one for each row.

    Raises:
        ConfigError: the policy waits for a prefix that is not given, or it is no number of tokens.
    """
    waits = _waits_for_prefix(policy)
    if prefix is None and waits:
        raise ConfigError("protect: prefix is true, so say how many first tokens stay: prefix=50 (--prefix 50), or 0")
    first = torch.as_tensor(0 if prefix is None else prefix).flatten()
    if first.is_floating_point() or first.dtype == torch.bool or first.numel() == 0 or int(first.min()) < 0:
        raise ConfigError(f"prefix must be a number of tokens, 0 or more, or one for each row; not {prefix!r}")
    evicts = policy.bounded or policy.own_budget is not None
    if not waits and evicts and int(first.max()) > 0:
        policy = Protect(prefix=True, of=policy)
    return policy, first.int()


def _waits_for_prefix(policy: EvictionPolicy) -> bool:
    return bool(getattr(policy, "prefix", False)) or any(_waits_for_prefix(part) for _, part in policy.children())


def _smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers, either of which may be a tensor of them."""
    if isinstance(a, int):
        return min(a, b) if isinstance(b, int) else b.clamp(max=a)
    return a.clamp(max=b) if isinstance(b, int) else a.minimum(b)
