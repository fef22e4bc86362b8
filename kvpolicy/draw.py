"""Random numbers from counters: a pure function of its arguments, the same on every device."""

from __future__ import annotations

from torch import Tensor

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as a signed 64-bit integer


def _mix(x: Tensor) -> Tensor:
    # The finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Torch shifts arithmetically, hence the masks.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniform(seed: int, *lanes: Tensor | int) -> Tensor:
    """Uniform numbers in [0, 1), float32, one for each element of the broadcast integer `lanes`."""
    start, mixed = seed, None
    for lane in lanes:
        if isinstance(lane, int):
            start = (start * 0x9E3779B1 + lane + 1) & 0x7FFFFFFF
        elif mixed is None:
            mixed = _mix((lane.long() + 1) * _GOLDEN + start)
        else:
            mixed = _mix((lane.long() + 1) * _GOLDEN + mixed)
    assert mixed is not None, "at least one lane is a tensor"
    return ((mixed >> 40) & 0xFFFFFF).float() / 0x1000000
