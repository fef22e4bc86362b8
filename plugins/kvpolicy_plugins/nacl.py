"""NACL: the tokens that the last queries looked at, some of the others by lot, and both ends."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field, StrictInt
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, Share, SlotField, Tokens, View
from kvpolicy.select import top
from kvpolicy_plugins._gumbel import gumbel
from kvpolicy_plugins._votes import voted


class NACL(EvictionPolicy):
    """Proxy tokens and random eviction (Chen et al., ACL 2024, arXiv 2408.03675).

    The last `proxies` queries of a prompt or chunk score the tokens by their mean attention. Sinks and recents stay, of
    the others the best, and a share of the budget is drawn from the rest, without replacement, by the softmax of the
    scores. What is drawn repairs what the few proxies could not know.

    The paper takes a hundredth of the prompt as proxies and cuts once; here their number is fixed, and while decoding
    scores are a running mean of the same length. Each token draws once, for good.
    """

    kind: Literal["nacl"] = "nacl"
    proxies: Annotated[int, Field(ge=1, strict=True)] = 32
    """How many last queries score."""
    drawn: Share = 0.35
    """Tokens to draw by lot, or a share of the budget."""
    sinks: Tokens = 4
    """First tokens that always stay."""
    recent: Share = 0.05
    """Recent window: tokens, or a share of the budget."""
    seed: StrictInt = 0
    rows: Literal["independent", "shared"] = "independent"
    """Whether the rows of a batch draw independently, or as each would alone."""

    votes = SlotField(fill=0.0)

    @property
    def needs(self) -> Collection[Need]:  # type: ignore[override]
        return {Need.window(self.proxies)}

    def observe(self, view: View) -> Mapping[str, Tensor]:
        return {"votes": voted(view["votes"], view.attention.rows(), view, self.proxies)}

    def protected(self, view: View) -> Tensor:
        return view.protect(sinks=self.sinks, recent=self.recent)

    def priority(self, view: View) -> tuple[Tensor, ...]:
        score, protected = view["votes"] / self.proxies, self.protected(view)
        count = view.budget - (protected & view.eligible).sum(-1, keepdim=True) - view.tokens(self.drawn)
        best = top((score,), view.without(protected), view.positions, count)
        return best.char(), score + gumbel(self._tickets(view), score.dtype)

    def _tickets(self, view: View) -> Tensor:
        return view.uniform(self.seed, rows=self.rows == "independent")
