"""TOVA: the tokens that the last query looked at."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.policy import EvictionPolicy, Need, SlotField, View


class TOVA(EvictionPolicy):
    """Token Omission Via Attention (Oren et al., EMNLP 2024, arXiv 2401.06104).

    What a token is worth is the attention it got from the last query, averaged over all query heads of the layer, so
    that all heads keep the same tokens; ``heads="each"`` lets every KV head decide by its own group. Nothing is
    protected: neither sinks nor the newest token, which its own query may evict.
    """

    kind: Literal["tova"] = "tova"
    heads: Literal["layer", "each"] = "layer"
    """Whether a layer keeps one set of tokens, or each KV head its own."""

    needs = {Need.ATTENTION_LAST}
    last = SlotField(fill=0.0)

    def observe(self, view: View) -> Mapping[str, Tensor]:
        last = view.attention.last()
        return {"last": torch.where(last.sum(-1, keepdim=True) > 0, last, view["last"])}  # rows of padding are zero

    def protected(self, view: View) -> None:
        return None

    def priority(self, view: View) -> Tensor:
        return view["last"] if self.heads == "each" else over_heads(view["last"], view.positions)


def over_heads(score: Tensor, positions: Tensor) -> Tensor:
    """The mean over the heads of what they give to the same position, zero where one does not hold it.

    Heads may hold different tokens, after another policy's turn say, and have them in different slots.
    """
    order = positions.flatten(1).argsort(dim=-1, stable=True)
    ordered = positions.flatten(1).gather(-1, order)
    token = F.pad(ordered.diff(dim=-1) != 0, (1, 0)).cumsum(-1)
    token = torch.empty_like(order).scatter_(-1, order, token)
    total = torch.zeros_like(score.flatten(1)).scatter_add_(-1, token, score.flatten(1))
    return (total.gather(-1, token) / score.shape[1]).view_as(score)
