"""H2O: the tokens with the most accumulated attention, and the recent ones. The reference plugin."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, Share, SlotField, Tokens, View


class H2O(EvictionPolicy):
    """Heavy-Hitter Oracle (Zhang et al., NeurIPS 2023, arXiv 2306.14048).

    A token's mass is the attention it has received from every query that could see it, renormalised over what
    was kept at the time and never divided by age. The `recent` tokens stay; of the others the heaviest do, so
    the budget is ``heavy + recent``. ``recent=0`` is the paper's windowless greedy rule.
    """

    kind: Literal["h2o"] = "h2o"
    recent: Share = 0.5
    """Recent window: tokens, or a share of the budget."""
    sinks: Tokens = 0
    """First tokens that always stay; the paper protects none."""

    needs = {Need.ATTENTION_SUM}
    mass = SlotField(fill=0.0)

    def observe(self, view: View) -> Mapping[str, Tensor]:
        return {"mass": view["mass"] + view.attention.sum()}

    def protected(self, view: View) -> Tensor:
        return view.protect(sinks=self.sinks, recent=self.recent)

    def priority(self, view: View) -> Tensor:
        return view["mass"]
