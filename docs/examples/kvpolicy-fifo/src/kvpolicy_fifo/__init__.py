"""The policy fifo. A policy sees slots; kvpolicy's documentation, "Writing a policy", says what it may do."""

from typing import Literal

from torch import Tensor

from kvpolicy import EvictionPolicy, View, hookimpl


class Fifo(EvictionPolicy):
    """First in, first out: the oldest token goes, and nothing is protected but the newest.

    The simplest policy there is, a sliding window. It needs nothing of attention and remembers nothing.
    """

    kind: Literal["fifo"] = "fifo"

    def priority(self, view: View) -> Tensor:  # the lowest goes first
        return view.positions


@hookimpl
def kvpolicy_policies() -> list[type[EvictionPolicy]]:
    return [Fifo]
