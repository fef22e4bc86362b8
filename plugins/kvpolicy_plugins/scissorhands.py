"""Scissorhands: the tokens that the last queries did not find unimportant too often."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, Share, SlotField, View
from kvpolicy_plugins._ring import queries, written


class Scissorhands(EvictionPolicy):
    """Persistence of importance (Liu et al., NeurIPS 2023, arXiv 2305.17118).

    With `t` tokens held, a query finds a token unimportant if it gives it less than the average, ``1/t``. The token
    that most of the last `window` queries find so goes first; ties, of which counts have many, go by less attention in
    the window, then by age. The recents stay: the paper counts nothing against them. It drops half the buffer at once,
    which is ``every`` around this policy.
    """

    kind: Literal["scissorhands"] = "scissorhands"
    window: Annotated[int, Field(ge=1, strict=True)] = 400
    """How many last queries count. Each slot remembers what they gave it: four bytes a query."""
    recent: Share = 10
    """Recent window: tokens, or a share of the budget."""

    @property
    def needs(self) -> Collection[Need]:  # type: ignore[override]
        return {Need.window(self.window)}

    def slot_fields(self) -> dict[str, SlotField]:
        return {"given": SlotField(shape=(self.window,), name="given")}

    def observe(self, view: View) -> Mapping[str, Tensor]:
        rows = view.attention.rows()
        return {"given": written(view["given"], rows, rows, view)}

    def protected(self, view: View) -> Tensor:
        return view.is_recent(self.recent)

    def priority(self, view: View) -> tuple[Tensor, ...]:
        given, query = view["given"], queries(view, self.window)
        could = (query >= 0) & (query >= view.positions.unsqueeze(-1))
        held = view.valid.sum(-1)[..., None, None]
        unimportant = (could & (given * held < 1)).sum(-1)
        mean = (given * could).sum(-1) / could.sum(-1).clamp(min=1)
        return -unimportant, mean, view.positions
