"""LRU: the tokens used lately, where a use is getting at least a fair share of a query's attention."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, Share, SlotField, View
from kvpolicy_plugins._uses import uses


class LRU(EvictionPolicy):
    """Least recently used, after an eviction strategy (SparQ's code, Ribar et al., 2023, arXiv 2312.04985).

    A softmax touches every key, so a *use* is receiving at least ``tau / m`` of the attention of a query that
    sees ``m`` keys. A new token has never been used unless its own query marks it. The token whose last use is
    oldest goes first; ties go by less accumulated attention, then by age. Where all that a query touches counts as
    used (`tau` near zero) and ``ties="age"``, it is first in, first out.
    """

    kind: Literal["lru"] = "lru"
    tau: Annotated[float, Field(gt=0, strict=True)] = 1.0
    """A use is at least this many fair shares of a query's attention."""
    recent: Share = 0.25
    """Recent window: tokens, or a share of the budget."""
    ties: Literal["mass", "age"] = "mass"
    """Of tokens last used by the same query, what goes first: that with less attention so far, or the older one."""

    needs = {Need.ATTENTION_ROWS}
    last_used = SlotField(fill=-1, dtype="int32")
    mass = SlotField(fill=0.0)

    def slot_fields(self) -> dict[str, SlotField]:
        return {name: field for name, field in super().slot_fields().items() if name != "mass" or self.ties == "mass"}

    def observe(self, view: View) -> Mapping[str, Tensor]:
        rows = view.attention.rows()
        _, last_used = uses(rows, view, self.tau)
        return {"last_used": last_used} | ({"mass": view["mass"] + rows.sum(-2)} if self.ties == "mass" else {})

    def protected(self, view: View) -> Tensor:
        return view.is_recent(self.recent)

    def priority(self, view: View) -> tuple[Tensor, ...]:
        weight = (view["mass"],) if self.ties == "mass" else ()
        return view["last_used"], *weight, view.positions
