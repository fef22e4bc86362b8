"""CriticalKV: the tokens with the best score of any policy, half of them weighed by what values do to the output."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from kvpolicy.policy import Changed, Need, Policy, Share, SlotField, View
from kvpolicy.select import raised, top
from kvpolicy_plugins._vectors import wide
from kvpolicy_plugins._weighing import Weighed

_NUMBERS = 1 << 22  # of projected values at once


class CriticalKV(Weighed):
    """The second stage of CriticalKV (Feng et al., 2025, arXiv 2502.03805), for any policy that gives scores.

    A part `first` of the budget goes to the best by the policy `of`, what it protects among them. The rest goes to the
    best of the others by its score times ``||W_o v||_1``: how far a value moves the output of the layer, W_o being the
    output projection of its head, averaged over the query group. Where heads divide a budget, they compare their
    tokens by the score of `of` alone.
    """

    kind: Literal["criticalkv"] = "criticalkv"
    of: Policy
    """The policy whose scores are weighed. Where its priority is a tuple, the first of it is."""
    first: Share = 0.5
    """How much of the budget is chosen by the score alone: tokens, or a share."""

    reach = SlotField(fill=0.0)

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        return super().needs | {Need.OUTPUT}

    def observe(self, view: View) -> Mapping[str, Tensor | Changed]:
        found = dict(super().observe(view))
        if view.attention is None or view.attention.final:  # once a call; attention itself is no matter
            found["reach"] = self._newest(view) if view.decoding else reach(view.values, view.output)
        return found

    @staticmethod
    def _newest(view: View) -> Changed:
        """Only the newest token is new; where a row pauses, it is done again."""
        slot = view.positions.argmax(-1, keepdim=True)
        value = view.values.gather(2, slot.unsqueeze(-1).expand(-1, -1, -1, view.values.shape[-1]))
        return Changed(slot, reach(value, view.output))

    def weights(self, view: View) -> Tensor:
        return view["reach"]

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        by_score = self.of.ranking(view.part("of"))
        if view.dividing:
            return by_score
        chosen = top(by_score, view.eligible, view.positions, view.tokens(self.first))
        return raised(super().ranking(view), chosen)


def reach(values: Tensor, output: Tensor) -> Tensor:
    """``||W_o v||_1``, the mean over the query group, ``[batch, kv_heads, tokens]``.

    Values are ``[batch, kv_heads, tokens, value_dim]``, `output` is ``[kv_heads, group, hidden, value_dim]``.
    """
    batch, heads, tokens, _ = values.shape
    group, hidden = output.shape[1:3]
    rows = values.transpose(0, 1).flatten(1, 2)
    total = torch.zeros((), dtype=torch.float32, device=values.device)
    sums = []
    for some in rows.split(max(_NUMBERS // (heads * hidden), 1), dim=1):
        projected = (torch.matmul(some, output[:, index].mT) for index in range(group))
        sums.append(sum((wide(part).abs().sum(-1) for part in projected), total))
    return (torch.cat(sums, 1) / group).view(heads, batch, tokens).transpose(0, 1)
