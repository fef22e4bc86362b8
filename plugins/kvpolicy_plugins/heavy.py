"""Heavy: the tokens with the most accumulated attention. A part for compositions."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from kvpolicy.policy import EvictionPolicy, Need, SlotField, View


class Heavy(EvictionPolicy):
    """Heavy hitters (Zhang et al., NeurIPS 2023, arXiv 2306.14048): the score of H2O without its recent window.

    Nothing is protected, so a newcomer needs a part beside it that keeps recents.
    """

    kind: Literal["heavy"] = "heavy"

    needs = {Need.ATTENTION_SUM}
    mass = SlotField(fill=0.0)

    def observe(self, view: View) -> Mapping[str, Tensor]:
        return {"mass": view["mass"] + view.attention.sum()}

    def protected(self, view: View) -> None:
        return None

    def priority(self, view: View) -> Tensor:
        return view["mass"]
