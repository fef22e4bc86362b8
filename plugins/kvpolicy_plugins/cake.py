"""CAKE: the tokens that the last queries of the prompt looked at, most of all those on which they differed."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, SlotField, View
from kvpolicy_plugins._pooling import odd, pooled
from kvpolicy_plugins._spread import mean_and_variance


class CAKE(EvictionPolicy):
    """Cascading and adaptive KV-cache eviction (Qin et al., ICLR 2025, arXiv 2503.12491): its eviction score.

    A token scores the mean of what the last `window` queries of a prompt or chunk give to it, plus `gamma` times the
    variance, pooled along positions; the window itself stays. At the default `gamma` the variance decides. While
    decoding, the score is what the current query gives, as in the paper.

    The budgets of layers are the allocator of the same name, which goes with any policy.
    """

    kind: Literal["cake"] = "cake"
    window: Annotated[int, Field(ge=1, strict=True)] = 32
    """Observation window: how many last queries are looked at, and how many last tokens stay."""
    gamma: Annotated[float, Field(ge=0, strict=True)] = 200.0
    """How much the variance counts; 0 is the mean alone."""
    kernel: Annotated[int, Field(ge=1, strict=True), AfterValidator(odd)] = 5
    """Width of the pooling, an odd number; 1 is none."""

    demands = ("window",)
    score = SlotField(fill=0.0)

    @property
    def needs(self) -> Collection[Need]:  # type: ignore[override]
        return {Need.window(self.window)}

    def observe(self, view: View) -> Mapping[str, Tensor]:
        rows = view.attention.heads()
        seen = rows.sum((2, 3, 4)).unsqueeze(-1) > 0
        mean, variance = mean_and_variance(rows)
        score = (mean + self.gamma * variance).mean(2)
        if not view.decoding:
            score = self._pooled(score, view)
        return {"score": torch.where(seen, score, view["score"])}

    def _pooled(self, score: Tensor, view: View) -> Tensor:
        """`score` pooled over neighbours; the window, which stays, gives nothing to those before it."""
        stays = view.positions >= view.seen - self.window
        before = pooled(score.masked_fill(stays, 0.0), view.positions, self.kernel, "average")
        return torch.where(stays, score, before)

    def protected(self, view: View) -> Tensor:
        return view.is_recent(self.window)

    def priority(self, view: View) -> Tensor:
        return view["score"]
