"""Sinks: the first tokens. A part for compositions."""

from typing import Literal

from torch import Tensor

from kvpolicy.policy import EvictionPolicy, View


class Sinks(EvictionPolicy):
    """The oldest tokens: as many as it may take. Alone it would freeze on the start of the prompt."""

    kind: Literal["sinks"] = "sinks"

    def protected(self, view: View) -> None:
        return None

    def priority(self, view: View) -> Tensor:
        return -view.positions
