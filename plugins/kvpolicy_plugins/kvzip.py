"""KVzip: what the model looks at when it is asked to repeat the context."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, SlotField, Tokens, View
from kvpolicy.rehearsal import Passage

_UNSCORED = 2.0  # more than any probability


class KVzip(EvictionPolicy):
    """Reconstruction of the context (Kim et al., NeurIPS 2025, arXiv 2505.23416), by :func:`kvpolicy.compress`.

    The prompt is read in full. Then, chunk by chunk, the model is asked to repeat it and is fed the chunk, and what
    was read is scored by the most attention it gets: from any query of the pass and any head of the query group, in a
    softmax over sinks, the chunk and the pass itself. One threshold over all layers and KV heads cuts the cache. What
    the user will ask plays no part, so the cache is good for any question.

    A token that comes after the pass has no score and stays before all that have one.
    """

    kind: Literal["kvzip"] = "kvzip"
    chunk: Annotated[int, Field(ge=1, strict=True)] = 2048
    """Tokens of the context that are repeated in one call."""
    lead: Tokens = 8
    """Last tokens of the chunk before that a request quotes."""
    sinks: Tokens = 4
    """First tokens that always stay, and that take part in every softmax."""
    budgets: Literal["global", "uniform"] = "global"
    """``global``: the best of all layers and heads stay. ``uniform``: each head has what the budget says."""
    decode: Literal["grow", "bounded"] = "grow"
    """What is written after the pass is kept beside the budget, or takes the place of the least of the context."""
    ask: str = "\n\nRepeat the previous context exactly."
    """The request before the first chunk."""
    ask_again: str = "\n\nRepeat the part of the previous context exactly, starting with "
    """The request before the others, which the quotation follows."""
    reply: str = "\n"
    """What stands between a request and the chunk: for chat models what begins an answer in their template."""

    rehearsal_needs = {Need.LOGITS}
    score = SlotField(fill=-1.0)

    @property
    def together(self) -> bool:  # type: ignore[override]
        return self.budgets == "global"

    def room(self, decoding: bool) -> float:
        return math.inf if decoding and self.decode == "grow" else 0

    def rehearsal(self, context: Tensor, encode: Callable[[str], list[int]], prefix: int = 0) -> Iterator[Passage]:
        reply = context.new_tensor(encode(self.reply))
        for start in range(prefix, len(context), self.chunk):
            asked = context.new_tensor(encode(self.ask if start == prefix else self.ask_again))
            quoted = context[max(prefix, start - self.lead) : start]
            stop = min(start + self.chunk, len(context))
            yield Passage(torch.cat([asked, quoted, reply, context[start:stop]]), start, stop)

    def observe(self, view: View) -> Mapping[str, Tensor]:
        if view.rehearsal is None:
            return {}
        about = view.rehearsal.about(view.positions)
        among = about | (view.positions < self._sinks(view.prefix)) | view.rehearsal.own(view.positions)
        logits = view.attention.logits()
        least = torch.finfo(logits.dtype).min
        probs = logits.masked_fill(~among[:, :, None, None], least).softmax(-1)
        asked = probs * (view.attention.positions >= 0).unsqueeze(2)
        found = asked.amax((2, 3)).to(view["score"].dtype)
        return {"score": torch.where(about, view["score"].maximum(found), view["score"])}

    def _sinks(self, prefix: Any) -> Any:
        return prefix.clamp(min=self.sinks) if isinstance(prefix, Tensor) else max(prefix, self.sinks)

    def protected(self, view: View) -> Tensor:
        return view.is_sink(self.sinks)

    def priority(self, view: View) -> tuple[Tensor, Tensor]:
        unscored = view["score"] < 0
        # Of tokens without a score the oldest goes first; of others with the same score the lower position stays.
        return view["score"].masked_fill(unscored, _UNSCORED), torch.where(unscored, view.positions, 0)
