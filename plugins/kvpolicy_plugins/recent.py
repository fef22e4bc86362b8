"""Recent: the last tokens, a sliding window. A part for compositions."""

from typing import Literal

from torch import Tensor

from kvpolicy.policy import EvictionPolicy, View


class Recent(EvictionPolicy):
    """The newest tokens: as many as it may take. Alone it is a sliding window, StreamingLLM without sinks."""

    kind: Literal["recent"] = "recent"

    def priority(self, view: View) -> Tensor:
        return view.positions
