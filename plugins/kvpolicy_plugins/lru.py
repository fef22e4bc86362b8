"""LRU: the tokens used lately, where a use is getting at least a fair share of a query's attention."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, Share, SlotField, View
from kvpolicy_plugins._uses import uses


class LRU(EvictionPolicy):
    """Least recently used, after the eviction strategy in SparQ's code (Ribar et al., 2023, arXiv 2312.04985).

    A softmax touches every key, so a *use* is receiving at least ``tau / m`` of the attention of a query that
    sees ``m`` keys. A new token has never been used unless its own query marks it. The token whose last use is
    oldest goes first; ties go by less accumulated attention, then by age.
    """

    kind: Literal["lru"] = "lru"
    tau: Annotated[float, Field(gt=0, strict=True)] = 1.0
    """A use is at least this many fair shares of a query's attention."""
    recent: Share = 0.25
    """Recent window: tokens, or a share of the budget."""

    needs = {Need.ATTENTION_ROWS}
    last_used = SlotField(fill=-1, dtype="int32")
    mass = SlotField(fill=0.0)

    def observe(self, view: View) -> Mapping[str, Tensor]:
        return uses(view, self.tau)[1]

    def protected(self, view: View) -> Tensor:
        return view.is_recent(self.recent)

    def priority(self, view: View) -> tuple[Tensor, ...]:
        return view["last_used"], view["mass"], view.positions
