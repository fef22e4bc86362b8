"""LagKV: the tokens whose keys and values stand out against those that follow."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Tokens, View
from kvpolicy_plugins._vectors import wide


class LagKV(EvictionPolicy):
    """Lag-relative scores (Liang et al., 2025, arXiv 2504.04704).

    Tokens after the `sinks` are taken in lags, `lag` of them each, in order. Each channel of keys and values is scaled
    by its least and greatest value in the *next* lag; a token's score is the softmax, over its lag, of the deviation of
    its scaled channels, keys and values averaged. The last full lag and what follows have nothing to be compared with,
    and stay before all others, the newest first.

    The paper compresses each lag once, by a ratio, so that the cache goes on growing. Here the budget decides: lags
    are formed anew of the tokens that are held. ``every`` around this policy does it once for several tokens.
    """

    kind: Literal["lagkv"] = "lagkv"
    lag: Annotated[int, Field(ge=2, strict=True)] = 128
    """How many tokens are compared with the next so many."""
    sinks: Tokens = 16
    """First tokens that always stay."""
    compare: Literal["lag", "all"] = "lag"
    """Whether every lag gives up the same share, or scores are compared across lags."""

    def protected(self, view: View) -> Tensor:
        return view.protect(sinks=self.sinks, recent=1)

    def priority(self, view: View) -> tuple[Tensor, ...]:
        slots = view.positions.shape[-1]
        lags = max(slots - self.sinks, 0) // self.lag
        worth = torch.full_like(view.positions, 2, dtype=wide(view.keys[..., :0]).dtype)
        if lags < 2:
            return worth, view.positions
        last = torch.iinfo(view.positions.dtype).max
        order = view.positions.masked_fill(~view.valid, last).argsort(dim=-1, stable=True)
        order = order[..., self.sinks : self.sinks + lags * self.lag]
        scores = (_deviations(view.keys, order, self.lag) + _deviations(view.values, order, self.lag)) / 2
        if self.compare == "lag":
            scores = scores.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag
        ends = self.sinks + self.lag * torch.arange(2, lags + 1, device=order.device).unsqueeze(-1)
        full = ends <= view.valid.sum(-1)[..., None, None]  # this lag and the next are of tokens only
        scored = torch.where(full, scores.to(worth.dtype), 2).flatten(2)
        return worth.scatter(-1, order[..., : -self.lag], scored), view.positions


def _deviations(vectors: Tensor, order: Tensor, lag: int) -> Tensor:
    """Scores of all lags but the last, ``[batch, kv_heads, lags - 1, lag]``; `order` is slots in order of age."""
    ordered = wide(vectors).gather(2, order.unsqueeze(-1).expand(-1, -1, -1, vectors.shape[-1]))
    lags = ordered.unflatten(2, (-1, lag))
    these, following = lags[:, :, :-1], lags[:, :, 1:]
    least, most = following.aminmax(dim=-2, keepdim=True)
    scale = torch.where(most > least, most - least, 1.0)  # a channel that does not change is not scaled
    return ((these - least) / scale).std(-1).softmax(-1)
