"""AhaKV, reconstructed: the tokens that recent queries look at, sharpened and weighed by the length of values."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, Share, SlotField, Tokens, View
from kvpolicy_plugins._vectors import wide
from kvpolicy_plugins._votes import voted


class AhaKV(EvictionPolicy):
    """Adaptive holistic attention (Gu et al., 2025, arXiv 2506.03762). A reconstruction.

    The paper names three parts: attention accumulated over recent queries alone, a softmax whose scale grows with the
    number of tokens so that the entropy of scores does not, and a prior from the lengths of values. Its constants and
    its code were not at hand, so the formulas here are ours and results speak for them, not for the paper.

    Were logits Gaussian with variance `v`, a softmax over `m` of them, scaled by `g`, would have entropy ``log m -
    g**2 v / 2``. So beyond `length` tokens each query's logits are scaled by ``sqrt(1 + 2 log(m / length) / v)``, for
    the score only. Sinks have short values, and so may go; the paper is not known to protect them.
    """

    kind: Literal["ahakv"] = "ahakv"
    window: Annotated[int, Field(ge=1, strict=True)] = 64
    """How many last queries of a prompt or chunk count; while decoding, a running sum of that length."""
    length: Annotated[int, Field(ge=1, strict=True)] | None = 256
    """Tokens beyond which scores are sharpened; ``null`` leaves them as they are."""
    recent: Share = 0.5
    """Recent window: tokens, or a share of the budget."""
    sinks: Tokens = 0
    """First tokens that always stay."""

    votes = SlotField(fill=0.0)

    @property
    def needs(self) -> Collection[Need]:  # type: ignore[override]
        return {Need.window(self.window), Need("logits", self.window)}

    def observe(self, view: View) -> Mapping[str, Tensor]:
        rows = view.attention.rows()
        if self.length is not None:
            real = rows.sum(-1, keepdim=True) > 0  # rows of padding are zero
            rows = sharpened(view.attention.logits(), self.length).mean(2) * real
        return {"votes": voted(view["votes"], rows, view, self.window)}

    def protected(self, view: View) -> Tensor:
        return view.protect(sinks=self.sinks, recent=self.recent)

    def priority(self, view: View) -> Tensor:
        lengths = wide(view.values).norm(dim=-1).masked_fill(~view.valid, 0.0).to(view["votes"].dtype)
        return view["votes"] * lengths / lengths.amax(-1, keepdim=True).clamp(min=torch.finfo(lengths.dtype).tiny)


def sharpened(logits: Tensor, length: int) -> Tensor:
    """Softmax of `logits`, of the entropy it would have over `length` tokens at most."""
    least = torch.finfo(logits.dtype).min
    seen = logits > least / 2
    count = seen.sum(-1, keepdim=True).clamp(min=1).to(logits.dtype)
    mean = logits.masked_fill(~seen, 0.0).sum(-1, keepdim=True) / count
    variance = (logits - mean).masked_fill(~seen, 0.0).square().sum(-1, keepdim=True) / count
    gain = (1 + 2 * (count / length).log().clamp(min=0) / variance.clamp(min=1e-6)).sqrt()
    return (gain * (logits - mean)).masked_fill(~seen, least).softmax(-1)
