"""Full: everything. The reference for quality, speed and memory."""

from typing import ClassVar, Literal

from torch import Tensor

from kvpolicy.policy import EvictionPolicy, View


class Full(EvictionPolicy):
    """The full cache, through the same code path as every policy. A budget is a limit it refuses to exceed."""

    kind: Literal["full"] = "full"
    bounded: ClassVar[bool] = False

    def priority(self, view: View) -> Tensor:
        return view.positions
