"""A2SF: the tokens with the most accumulated attention, where old attention fades, and the recent ones."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, Share, SlotField, View
from kvpolicy_plugins._fading import faded


class A2SF(EvictionPolicy):
    """Accumulative attention score with forgetting factor (Jo and Shin, 2024, arXiv 2407.20485).

    Each query multiplies the mass of all tokens by `decay` before it adds its own attention, so that early tokens gain
    nothing from having been there for more queries. With ``decay=1`` it is H2O, with ``decay=0`` only the last query
    counts. The official code searches a factor for each layer; here it is one number, and ``layers`` gives others.
    """

    kind: Literal["a2sf"] = "a2sf"
    decay: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.9
    """What is left of a token's mass after each query."""
    recent: Share = 0.5
    """Recent window: tokens, or a share of the budget."""
    group: Literal["mean", "max"] = "mean"
    """How the attention of the query heads of a group is joined."""

    needs = {Need.ATTENTION_ROWS}
    mass = SlotField(fill=0.0)

    def observe(self, view: View) -> Mapping[str, Tensor]:
        rows = view.attention
        return {"mass": faded(view["mass"], rows.rows(self.group), rows.positions, self.decay)}

    def protected(self, view: View) -> Tensor:
        return view.is_recent(self.recent)

    def priority(self, view: View) -> Tensor:
        return view["mass"]
