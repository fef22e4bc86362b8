"""Gumbel noise, whose largest sum with some logits is a draw by their softmax."""

from torch import Tensor

_LEAST = 2.0**-25  # half the distance between two uniform numbers


def gumbel(uniform: Tensor, dtype: object) -> Tensor:
    """Standard Gumbel numbers of type `dtype` from `uniform` ones in [0, 1)."""
    return -(-uniform.to(dtype).clamp(min=_LEAST).log()).log()  # type: ignore[call-overload]
