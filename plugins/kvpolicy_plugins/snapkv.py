"""SnapKV: the tokens that the last queries of the prompt looked at, pooled over their neighbours."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, SlotField, View
from kvpolicy_plugins._pooling import odd, pooled
from kvpolicy_plugins._votes import voted


class SnapKV(EvictionPolicy):
    """Observation window (Li et al., NeurIPS 2024, arXiv 2404.14469).

    Each token gets votes: the attention from the last `window` queries of a prompt or chunk, pooled along positions.
    The window itself stays. The paper cuts the prompt once and then keeps every token that is written; that is
    ``phases`` with ``decode: full``. Here eviction goes on: while decoding, votes are a running sum of the same
    length, ``votes * (1 - 1/window) + attention``, so that what is written can replace what was read.

    As in the official code, average pooling counts the zeros beyond both ends, which costs the first token a part of
    its votes.
    """

    kind: Literal["snapkv"] = "snapkv"
    window: Annotated[int, Field(ge=1, strict=True)] = 32
    """Observation window: how many last queries vote, and how many last tokens stay."""
    kernel: Annotated[int, Field(ge=1, strict=True), AfterValidator(odd)] = 5
    """Width of the pooling, an odd number; 1 is none."""
    pooling: Literal["average", "max"] = "average"
    group: Literal["mean", "max"] = "mean"
    """How the votes of the query heads of a group are joined."""

    demands = ("window",)
    votes = SlotField(fill=0.0)

    @property
    def needs(self) -> Collection[Need]:  # type: ignore[override]
        return {Need.window(self.window)}

    def observe(self, view: View) -> Mapping[str, Tensor]:
        rows = view.attention.rows(self.group)
        votes = voted(view["votes"], rows, view, self.window)
        if view.decoding or self.kernel == 1:
            return {"votes": votes}
        stays = (view.positions >= view.seen - self.window) | (rows.sum((-2, -1)).unsqueeze(-1) == 0)
        before = pooled(votes.masked_fill(stays, 0.0), view.positions, self.kernel, self.pooling)
        return {"votes": torch.where(stays, votes, before)}

    def protected(self, view: View) -> Tensor:
        return view.is_recent(self.window)

    def priority(self, view: View) -> Tensor:
        return view["votes"]
