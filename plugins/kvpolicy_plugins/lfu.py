"""LFU: the tokens used most often, where a use is getting at least a fair share of a query's attention."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, Share, SlotField, View
from kvpolicy_plugins._uses import uses


class LFU(EvictionPolicy):
    """Least frequently used; a use is what it is to ``lru``.

    The token with the fewest uses goes first; ties go by the oldest last use, then by less accumulated attention, then
    by age. Counts favour tokens that were there for more queries: ``normalise="visible"`` divides by these.
    """

    kind: Literal["lfu"] = "lfu"
    tau: Annotated[float, Field(gt=0, strict=True)] = 1.0
    """A use is at least this many fair shares of a query's attention."""
    recent: Share = 0.25
    """Recent window: tokens, or a share of the budget."""
    normalise: Literal["none", "visible"] = "none"
    """Whether uses are counted, or divided by the queries that have come since the token."""

    needs = {Need.ATTENTION_ROWS}
    uses = SlotField(fill=0, dtype="int32")
    last_used = SlotField(fill=-1, dtype="int32")
    mass = SlotField(fill=0.0)

    def observe(self, view: View) -> Mapping[str, Tensor]:
        rows = view.attention.rows()
        used, last_used = uses(rows, view, self.tau)
        count = view["uses"] + used.sum(-2, dtype=torch.int32)
        return {"uses": count, "last_used": last_used, "mass": view["mass"] + rows.sum(-2)}

    def protected(self, view: View) -> Tensor:
        return view.is_recent(self.recent)

    def priority(self, view: View) -> tuple[Tensor, ...]:
        count = view["uses"]
        if self.normalise == "visible":
            count = count / (view.seen - view.positions)
        return count, view["last_used"], view["mass"], view.positions
