"""Rolled: what is held is numbered anew."""

from __future__ import annotations

from typing import Literal

from kvpolicy.compose._base import Wrapper
from kvpolicy.policy import Policy


class Rolled(Wrapper):
    """Numbers what `of` keeps anew, as :class:`~kvpolicy.EvictionCache` does where ``positions="rolled"``.

    Who goes is what `of` decides. What is said to the cache comes before it, and it is of a layer as a whole.
    """

    kind: Literal["rolled"] = "rolled"
    of: Policy
    """The policy that decides what goes."""

    @property
    def rolled(self) -> bool:
        return True
