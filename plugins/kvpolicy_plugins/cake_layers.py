"""CAKE's budgets: layers whose attention is spread over many tokens and changes from query to query keep more."""

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvpolicy.allocator import MeasuredLayerAllocator
from kvpolicy.policy import Need, View
from kvpolicy_plugins._spread import mean_and_variance

_FINE = 1 << 40  # preferences as whole numbers up to this, so that parts of a budget are exact


class CAKELayers(MeasuredLayerAllocator):
    """Layer preferences (Qin et al., ICLR 2025, arXiv 2503.12491).

    A layer's preference is ``H^(1 / tau1) * V^(1 / tau2)``. ``H`` is the entropy of the attention that the last
    `window` queries of the prompt give to the tokens before them, summed over queries and heads, not renormalised.
    ``V`` is the variance of that attention over the queries, summed over tokens and heads. Every layer keeps the
    window; the rest is divided in proportion to the preferences. No layer gets more than the prompt has, and the others
    then get what is over.
    """

    kind: Literal["cake"] = "cake"
    tau1: Annotated[float, Field(gt=0, strict=True)] = 1.0
    """The larger, the less the entropy counts."""
    tau2: Annotated[float, Field(gt=0, strict=True)] = 1.0
    """The larger, the less the variance counts."""
    window: Annotated[int, Field(ge=1, strict=True)] = 32
    """How many last queries are looked at, and how many tokens each layer keeps in any case."""

    @property
    def needs(self) -> Collection[Need]:  # type: ignore[override]
        return {Need.window(self.window)}

    def measure(self, view: View) -> Tensor:
        """Entropy and variance, ``[batch, 2]``."""
        past = view.valid & (view.positions < view.seen - self.window)
        rows = view.attention.heads()
        entropy = torch.special.entr(rows).sum((2, 3))
        _, variance = mean_and_variance(rows)
        both = torch.stack([entropy, variance.sum(2)], -1)  # [batch, kv_heads, slots, 2]
        return torch.where(past.unsqueeze(-1), both, 0.0).sum((1, 2))

    def shares(
        self, measured: Sequence[Sequence[float]], average: int, layers: int, prompt: int
    ) -> list[Fraction | int]:
        window = min(self.window, average)
        wanted = [self.preference(entropy, variance) for entropy, variance in measured]
        return [window + part for part in _filled(wanted, (average - window) * layers, prompt - window)]

    def preference(self, entropy: float, variance: float) -> float:
        """How much a layer wants."""
        found = entropy ** (1 / self.tau1) * variance ** (1 / self.tau2)
        return found if math.isfinite(found) else 0.0

    def least(self, average: int) -> int:
        return min(self.window, average)


def _filled(wanted: Sequence[float], amount: int, most: int) -> list[Fraction | int]:
    """`amount` in proportion to `wanted`, none above `most`; in equal parts where nothing is wanted."""
    largest = max(wanted)
    weights = [round(want / largest * _FINE) if largest else 1 for want in wanted]
    parts: list[Fraction | int] = [most] * len(weights)
    left = list(range(len(weights)))
    while left:
        total = sum(weights[i] for i in left)
        if total == 0:
            weights, total = [1] * len(weights), len(left)
        fitting = [i for i in left if weights[i] * amount < most * total]
        if fitting == left:
            for i in left:
                parts[i] = Fraction(weights[i] * amount, total)
            break
        amount -= most * (len(left) - len(fitting))
        left = fitting
    return parts
