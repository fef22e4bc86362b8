"""Random: a random sample, the first tokens and the recent ones. The floor that every idea has to beat."""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import StrictInt
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Share, SlotField, Tokens, View


class Random(EvictionPolicy):
    """Uniformly random eviction, outside the protected sinks and recent window.

    Three choices change its quality enormously, so they are options: whether sinks are protected, whether
    recents are, and whether every token draws once (``draw="fixed"``: a uniform sample of the whole past) or at
    every step (``draw="fresh"``: survival falls geometrically with age, a soft window). The bare form is
    ``sinks=0, recent=0``. Draws come from `seed` alone; the global random state is untouched.
    """

    kind: Literal["random"] = "random"
    seed: StrictInt = 0
    sinks: Tokens = 4
    """First tokens that always stay."""
    recent: Share = 0.5
    """Recent window: tokens, or a share of the budget."""
    draw: Literal["fixed", "fresh"] = "fixed"
    rows: Literal["independent", "shared"] = "independent"
    """Whether the rows of a batch draw independently, or as each would alone."""

    ticket = SlotField(fill=-1.0)

    def observe(self, view: View) -> Mapping[str, Tensor]:
        fresh = self.draw == "fresh"
        drawn = view.uniform(self.seed, fresh=fresh, rows=self.rows == "independent")
        return {"ticket": drawn if fresh else torch.where(view["ticket"] < 0, drawn, view["ticket"])}

    def protected(self, view: View) -> Tensor:
        return view.protect(sinks=self.sinks, recent=self.recent)

    def priority(self, view: View) -> Tensor:
        return view["ticket"]
