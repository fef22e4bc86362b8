"""Knorm: the tokens with the shortest keys."""

from typing import Literal

from torch import Tensor

from kvpolicy.policy import EvictionPolicy, View
from kvpolicy_plugins._vectors import wide


class Knorm(EvictionPolicy):
    """Keys of low L2 norm (Devoto et al., EMNLP 2024, arXiv 2406.11430).

    Tokens with short keys tend to be given much attention, so the longest key goes first. Nothing is protected, not
    even the newest token, as in the official code. That code also leaves the first two layers alone, where norms say
    little; here ``layers`` with ``full`` does.
    """

    kind: Literal["knorm"] = "knorm"

    def protected(self, view: View) -> None:
        return None

    def priority(self, view: View) -> Tensor:
        return -wide(view.keys).norm(dim=-1)
