"""R-KV: the tokens that the last queries look at and whose keys say what no other does."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, SlotField, View
from kvpolicy_plugins._pooling import odd, pooled
from kvpolicy_plugins._ring import queries, written
from kvpolicy_plugins._vectors import unit

_ROWS = 256  # keys compared with all others at once


class RKV(EvictionPolicy):
    """Redundancy-aware eviction for long answers (Cai et al., 2025, arXiv 2505.24133).

    Importance is the attention of the last `window` queries to the tokens before them: the largest logit of the query
    group, softmax over these tokens, mean over the queries, maximum over `kernel` neighbours. Redundancy is the mean
    cosine of a token's key with the others, softmax over all tokens. Of several keys more alike than `alike`, the
    newest is spared. The window stays, and of the rest the greatest ``weight * importance - (1 - weight) *
    redundancy``.

    All keys are compared with all others at each decision. The paper decides each 128 tokens, which is ``every``.
    """

    kind: Literal["rkv"] = "rkv"
    window: Annotated[int, Field(ge=1, strict=True)] = 8
    """How many last queries count, and how many last tokens stay."""
    weight: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.1
    """Weight of importance; redundancy has the rest."""
    kernel: Annotated[int, Field(ge=1, strict=True), AfterValidator(odd)] = 7
    """Width of the pooling of importance, an odd number; 1 is none."""
    alike: Annotated[float, Field(ge=-1, le=1, strict=True)] = 0.5
    """Cosine above which two keys count as alike."""

    demands = ("window",)

    @property
    def needs(self) -> Collection[Need]:  # type: ignore[override]
        return {Need.window(self.window), Need("logits", self.window)}

    def slot_fields(self) -> dict[str, SlotField]:
        return {"logits": SlotField(shape=(self.window,), name="logits")}

    def observe(self, view: View) -> Mapping[str, Tensor]:
        rows = view.attention
        return {"logits": written(view["logits"], rows.logits().amax(2), rows.rows(), view)}

    def protected(self, view: View) -> Tensor:
        return view.is_recent(self.window)

    def priority(self, view: View) -> Tensor:
        important = pooled(self._attention(view), view.positions, self.kernel, "max")
        redundant = redundancy(view.keys, view.positions, self.alike)
        return self.weight * important - (1 - self.weight) * redundant.to(important.dtype)

    def _attention(self, view: View) -> Tensor:
        """What the window's queries give to the tokens before it."""
        logits, written = view["logits"], queries(view, self.window) >= 0
        past = (view.valid & ~view.is_recent(self.window)).unsqueeze(-1)
        given = logits.masked_fill(~past, torch.finfo(logits.dtype).min).softmax(-2) * (past & written)
        return given.sum(-1) / written.sum(-1).clamp(min=1)


def redundancy(keys: Tensor, positions: Tensor, alike: float) -> Tensor:
    """How much each key is like the others, ``[batch, kv_heads, slots]``; sums to one over the tokens of a head."""
    held = positions >= 0
    keys = unit(keys, held)
    total = torch.zeros_like(keys[..., 0])
    for start in range(0, keys.shape[2], _ROWS):
        rows = slice(start, start + _ROWS)
        cosine = keys[:, :, rows] @ keys.transpose(-1, -2)
        cosine = cosine.masked_fill(positions[:, :, rows, None] == positions.unsqueeze(-2), 0.0)
        near = cosine > alike
        newest = torch.where(near, positions.unsqueeze(-2), -1).argmax(-1, keepdim=True)
        spared = torch.zeros_like(near).scatter_(-1, newest, True) & near
        total = total + cosine.masked_fill(spared, 0.0).sum(-2)
    mean = total / held.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~held, torch.finfo(mean.dtype).min).softmax(-1)
