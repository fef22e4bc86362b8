"""VATP: the tokens with the best score of any policy, weighed by the length of their values."""

from typing import Literal

from torch import Tensor

from kvpolicy.policy import Policy, View
from kvpolicy_plugins._vectors import wide
from kvpolicy_plugins._weighing import Weighed


class VATP(Weighed):
    """Value-aware token pruning (Guo et al., EMNLP 2024, arXiv 2406.12335), for any policy that gives scores.

    The priority of `of` is multiplied by the norm of each token's value: a token that is looked at and brings little is
    worth little. What `of` protects stays. The first tokens have values of nearly no length, so `of` should protect
    sinks, as the paper does; the paper puts it on H2O and Scissorhands. A score below zero is divided by the norm, so
    that a longer value is worth more either way.
    """

    kind: Literal["vatp"] = "vatp"
    of: Policy
    """The policy whose scores are weighed. Where its priority is a tuple, the first of it is."""
    norm: Literal["l1", "l2"] = "l1"
    """Which norm of a value."""

    def weights(self, view: View) -> Tensor:
        values = wide(view.values)
        return values.abs().sum(-1) if self.norm == "l1" else values.norm(dim=-1)  # norm(p=1) takes ten times as long
