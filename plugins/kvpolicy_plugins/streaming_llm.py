"""StreamingLLM: the first tokens (attention sinks) and the recent ones."""

from typing import Literal

from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Tokens, View


class StreamingLLM(EvictionPolicy):
    """Attention sinks and a sliding window (Xiao et al., ICLR 2024, arXiv 2309.17453).

    Keeps the first `sinks` tokens; the rest of the budget is the recent window. The paper renumbers positions
    inside the cache, which is ``positions: rolled``; with original positions the same tokens are kept.
    """

    kind: Literal["streaming_llm"] = "streaming_llm"
    sinks: Tokens = 4
    """First tokens that always stay."""
    positions: Literal["original", "rolled"] = "original"
    """Whether tokens stay where they stood or are numbered anew; what is said to the cache comes before it."""

    @property
    def rolled(self) -> bool:
        return self.positions == "rolled"

    def protected(self, view: View) -> Tensor:
        return view.protect(sinks=self.sinks, recent=1)

    def priority(self, view: View) -> Tensor:
        return view.positions
