"""Uses of tokens: what a query gives at least a fair share of its attention, it uses."""

import torch
from torch import Tensor

from kvpolicy.policy import View


def uses(view: View, tau: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Which slots each query uses, ``[batch, kv_heads, rows, slots]``; and the fields `last_used` and `mass` anew."""
    rows = view.attention.rows()
    used = rows >= tau / view.attention.visible()
    when = torch.where(used, view.attention.positions, -1).amax(-2)
    return used, {"last_used": view["last_used"].maximum(when), "mass": view["mass"] + rows.sum(-2)}
