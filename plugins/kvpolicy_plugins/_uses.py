"""What a use of a token is."""

from torch import Tensor

from kvpolicy.policy import View


def used(view: View, tau: float) -> Tensor:
    """Which slots each query gives `tau` fair shares of its attention, ``[batch, kv_heads, rows, slots]``."""
    found: Tensor = view.attention.rows() >= tau / view.attention.visible()
    return found
