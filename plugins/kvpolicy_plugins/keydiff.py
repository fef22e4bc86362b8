"""KeyDiff: the tokens whose keys are least like the others."""

from typing import Literal

import torch
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, View
from kvpolicy_plugins._vectors import unit


class KeyDiff(EvictionPolicy):
    """Key similarity (Park et al., 2025, arXiv 2504.15364).

    The key that points most nearly where the others point on average goes first; where several do, the oldest. The
    average is that of the keys that are held, each of length one. Nothing is protected, not even the newest token. The
    paper reads a prompt in blocks and cuts after each; for that, feed it in chunks.
    """

    kind: Literal["keydiff"] = "keydiff"

    def protected(self, view: View) -> None:
        return None

    def priority(self, view: View) -> tuple[Tensor, ...]:
        keys = unit(view.keys, view.valid)
        return -torch.cosine_similarity(keys, keys.sum(-2, keepdim=True), dim=-1), view.positions
