"""H2O: the tokens with the most accumulated attention, and the recent ones. The reference plugin."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, Share, SlotField, Tokens, View
from kvpolicy_plugins._fading import faded


class H2O(EvictionPolicy):
    """Heavy-Hitter Oracle (Zhang et al., NeurIPS 2023, arXiv 2306.14048).

    A token's mass is the attention it has received from every query that could see it, renormalised over what
    was kept at the time and never divided by age. The `recent` tokens stay; of the others the heaviest do, so
    the budget is ``heavy + recent``. ``recent=0`` is the paper's windowless greedy rule. The other options are
    variants: mass that fades, that is divided by age, or that joins a query group by its maximum, and promotion as in
    the authors' FlexGen program, where the token that leaves the recent window becomes heavy whatever its mass.
    """

    kind: Literal["h2o"] = "h2o"
    recent: Share = 0.5
    """Recent window: tokens, or a share of the budget."""
    sinks: Tokens = 0
    """First tokens that always stay; the paper protects none."""

    decay: Annotated[float, Field(ge=0, le=1, strict=True)] = 1.0
    """What is left of a token's mass after each query: 1 is all, with 0 only the last query counts."""
    normalise: Literal["none", "visible"] = "none"
    """Whether mass is a sum, or the mean over the queries that have come since the token, weighted by `decay`."""
    group: Literal["mean", "max"] = "mean"
    """How the attention of the query heads of a group is joined."""
    promote: Literal["heavier", "always"] = "heavier"
    """Whether a token that leaves the recent window must be heavier than the lightest heavy one to stay, or always
    takes its place. It is about decode steps; prompts and chunks are cut by mass.
    """

    mass = SlotField(fill=0.0)

    @property
    def needs(self) -> Collection[Need]:  # type: ignore[override]
        return {Need.ATTENTION_SUM if self._sums else Need.ATTENTION_ROWS}

    @property
    def _sums(self) -> bool:
        """Whether column sums are enough; they cost less than rows."""
        return self.decay == 1 and self.group == "mean"

    def observe(self, view: View) -> Mapping[str, Tensor]:
        attention = view.attention
        if self._sums:
            return {"mass": view["mass"] + attention.sum()}
        return {"mass": faded(view["mass"], attention.rows(self.group), attention.positions, self.decay)}

    def protected(self, view: View) -> Tensor:
        protected = view.protect(sinks=self.sinks, recent=self.recent)
        if self.promote == "heavier" or not view.decoding:
            return protected
        leaving = view.positions == view.seen - view.tokens(self.recent) - 1
        return protected | leaving & (protected.sum(-1, keepdim=True) < view.budget)

    def priority(self, view: View) -> Tensor:
        mass = view["mass"]
        if self.normalise == "none":
            return mass
        queries = (view.seen - view.positions).to(mass.dtype)
        return mass / (queries if self.decay == 1 else (1 - self.decay**queries) / (1 - self.decay))
