"""Blend: a weighted mean of priorities, made comparable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from torch import Tensor

from kvpolicy.compose._base import Chooser, Composite, by_rank, has_score, spelled_out
from kvpolicy.policy import EvictionPolicy, Policy, View


class Weighted(BaseModel):
    """A policy and its weight in a blend."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    of: Chooser
    """The policy."""
    weight: Annotated[float, Field(gt=0, strict=True)] = 1.0
    """How much its priority counts beside the others'."""


def _by_sum(part: EvictionPolicy, view: View) -> Tensor:
    score = _score(part, view)
    return score / score.abs().sum(-1, keepdim=True).clamp(min=torch.finfo(score.dtype).tiny)


def _by_zscore(part: EvictionPolicy, view: View) -> Tensor:
    score, among = _score(part, view), view.eligible
    count = among.sum(-1, keepdim=True).clamp(min=1)
    centred = (score - score.sum(-1, keepdim=True) / count) * among
    spread = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    return centred / spread.clamp(min=torch.finfo(score.dtype).tiny)


def _score(part: EvictionPolicy, view: View) -> Tensor:
    """The priority as real numbers, zero where there is nothing to choose."""
    priority = part.priority(view)
    score = priority[0] if isinstance(priority, tuple) else priority
    score = score if score.dtype == torch.float64 else score.float()
    return score.masked_fill(~view.eligible, 0.0)


_NORMALISED = {"rank": by_rank, "zscore": _by_zscore, "sum": _by_sum}


class Blend(Composite):
    """The highest weighted sum of the parts' priorities stay. What any part protects stays before all.

    Priorities of different policies have different scales, so each is made comparable first, over the slots of a
    head: by its rank (``rank``), by mean and deviation (``zscore``), or as a part of its sum (``sum``).
    """

    kind: Literal["blend"] = "blend"
    parts: Annotated[
        tuple[Annotated[Weighted, BeforeValidator(spelled_out, json_schema_input_type=Weighted | Policy)], ...],
        Field(min_length=1),
    ]
    """The parts: ``{of: h2o, weight: 2}``, or a bare policy of weight 1."""
    normalise: Literal["rank", "zscore", "sum"] = "rank"
    """How priorities are made comparable."""

    @model_validator(mode="after")
    def _has_scores(self) -> Blend:
        if self.normalise != "rank" and (mixed := [p.of.kind for p in self.parts if not has_score(p.of)]):
            raise ValueError(f"{self.normalise} needs a priority, and {mixed[0]} only has an order: normalise by rank")
        return self

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        return ((str(index), part.of) for index, part in enumerate(self.parts))

    def with_parts(self, change: Callable[[EvictionPolicy], EvictionPolicy]) -> EvictionPolicy:
        parts = (Weighted.model_construct(of=change(part.of), weight=part.weight) for part in self.parts)
        return self.replaced(parts=tuple(parts))

    def protected(self, view: View) -> Tensor:
        found = torch.zeros_like(view.valid)
        for name, part in self.children():
            if (protected := part.protected(view.part(name))) is not None:
                found = found | protected
        return found

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        normalised = _NORMALISED[self.normalise]
        total: Any = 0.0
        for (name, policy), part in zip(self.children(), self.parts, strict=True):
            total = total + part.weight * normalised(policy, view.part(name))
        protected = self.protected(view)
        # Where parts together protect more than fits, the newest token stays all the same.
        newest = protected & (view.positions == view.seen - 1)
        return protected.char() + newest, total
