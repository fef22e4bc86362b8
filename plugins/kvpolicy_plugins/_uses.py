"""Uses of tokens: what a query gives at least a fair share of its attention, it uses."""

import torch
from torch import Tensor

from kvpolicy.policy import View


def uses(rows: Tensor, view: View, tau: float) -> tuple[Tensor, Tensor]:
    """Which slots each query of `rows` uses, of the same shape; and the field `last_used` anew."""
    used = rows >= tau / view.attention.visible()
    when = torch.where(used, view.attention.positions, -1).amax(-2)
    return used, view["last_used"].maximum(when)
