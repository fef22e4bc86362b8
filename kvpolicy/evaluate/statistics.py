"""The one interval that comparisons report."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt
from statistics import mean, stdev

RULE = (
    "95 % t-interval of the mean difference in negative log-likelihood to the full cache, "
    "paired by sample, taken to the exponent"
)

_EXACT = (12.706, 4.303, 3.182, 2.776)  # where the expansion below is not good enough
_Z = 1.959964


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to three digits (Cornish-Fisher expansion around the normal)."""
    if freedom <= len(_EXACT):
        return _EXACT[freedom - 1]
    z, n = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def increase_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """The interval of ``exp(mean difference) - 1``; ``None`` for one sample, which has no spread."""
    if len(differences) < 2:
        return None
    middle = mean(differences)
    reach = t_quantile(len(differences) - 1) * stdev(differences) / sqrt(len(differences))
    return exp(middle - reach) - 1, exp(middle + reach) - 1
