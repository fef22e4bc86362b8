"""Keyformer: the tokens with the most accumulated attention, noisy and ever flatter, and the recent ones."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, StrictInt
from torch import Tensor

from kvpolicy.draw import uniform
from kvpolicy.policy import EvictionPolicy, Need, Share, SlotField, View
from kvpolicy_plugins._gumbel import gumbel

_Positive = Annotated[float, Field(gt=0, strict=True)]


class Keyformer(EvictionPolicy):
    """Key tokens (Adnan et al., MLSys 2024, arXiv 2403.09054).

    Each query adds ``softmax((logits + noise) / temperature)`` to the scores, with Gumbel noise of its own for every
    token. The temperature is `start` in prompts and rises to `end` over `steps` decode steps, as more and more tokens
    are gone. Noise is in the score only, not in what the model computes, and comes from `seed` alone.

    The official code combines its masks over time in a way that lets no token of the answer become a key token; here
    all compete, as the paper says.
    """

    kind: Literal["keyformer"] = "keyformer"
    recent: Share = 0.3
    """Recent window: tokens, or a share of the budget."""
    start: _Positive = 1.0
    """Temperature in prompts and in the first decode step."""
    end: _Positive = 2.0
    """Temperature after `steps` decode steps, and from then on."""
    steps: Annotated[int, Field(ge=1, strict=True)] = 100
    """How many decode steps it takes: about as many tokens as will be written."""
    noise: Literal["gumbel", "none"] = "gumbel"
    seed: StrictInt = 0
    rows: Literal["independent", "shared"] = "independent"
    """Whether the rows of a batch draw independently, or as each would alone."""

    needs = {Need.LOGITS, Need.ATTENTION_ROWS}
    score = SlotField(fill=0.0)
    read = SlotField(fill=0, dtype="int32")
    """How many tokens had been seen at the end of the last prompt or chunk; the same in all slots."""

    def observe(self, view: View) -> Mapping[str, Tensor]:
        read = view["read"].amax(-1, keepdim=True) if view.decoding else view.seen
        logits = view.attention.logits()
        hidden = logits <= torch.finfo(logits.dtype).min / 2
        noisy = logits + self._drawn(view, logits) if self.noise == "gumbel" else logits
        warm = noisy / self._temperature(view, read, logits.dtype)
        rows = warm.masked_fill(hidden, torch.finfo(logits.dtype).min).softmax(-1).mean(2)
        real = view.attention.positions >= 0
        return {
            "score": view["score"] + (rows * real).sum(-2),
            "read": read.expand(view.positions.shape),
        }

    def _temperature(self, view: View, read: Tensor, dtype: torch.dtype) -> Tensor | float:
        if not view.decoding:
            return self.start
        step = (view.seen - read - 1).to(dtype).clamp(min=0, max=self.steps)[..., None, None]
        return self.start + (self.end - self.start) * step / self.steps

    def _drawn(self, view: View, logits: Tensor) -> Tensor:
        """Noise of every query head, query and token. A token's ticket brings in layer, head and row."""
        ticket = (view.uniform(self.seed, rows=self.rows == "independent") * 2**24).int()[:, :, None, None]
        heads = torch.arange(logits.shape[2], device=logits.device).view(-1, 1, 1)
        queries, tokens = view.attention.positions.unsqueeze(2), view.positions[:, :, None, None]
        return gumbel(uniform(self.seed, ticket, heads, queries, tokens), logits.dtype)

    def protected(self, view: View) -> Tensor:
        return view.is_recent(self.recent)

    def priority(self, view: View) -> Tensor:
        return view["score"]
