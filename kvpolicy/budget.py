"""How many tokens may remain: a number of them, or a share of the prompt."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

from kvpolicy.errors import BudgetError


@dataclass(frozen=True)
class Budget:
    """A number of tokens, or a share of the prompt: exactly one of the two.

    >>> Budget.parse(64), Budget.parse("25%")
    (Budget(tokens=64, share=None), Budget(tokens=None, share=0.25))

    ``1`` is one token and ``1.0`` is the whole prompt; the two are different budgets, which is why they are
    different fields: as one number they would compare equal.
    """

    tokens: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.share is None):
            raise BudgetError("a budget is either tokens (tokens=64) or a share of the prompt (share=0.25)")
        valid = self.tokens >= 1 if self.tokens is not None else 0 < (self.share or 0) <= 1
        if not valid:
            raise _impossible(self.amount)

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """What a user means by 64, 0.25, ``"64"``, ``"0.25"`` or ``"25%"``; a budget is returned as it is."""
        if isinstance(value, Budget):
            return value
        number = _number(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, Real):
            raise _impossible(value)
        try:
            return cls(tokens=int(number)) if isinstance(number, Integral) else cls(share=float(number))
        except BudgetError:
            raise _impossible(value) from None  # as the user wrote it

    @property
    def amount(self) -> int | float:
        """The number itself: an ``int`` is tokens, a ``float`` a share."""
        return self.tokens if self.tokens is not None else float(self.share or 0)

    def resolve(self, prompt_tokens: Any) -> Any:
        """The budget in tokens, for a number of prompt tokens or for a tensor of such numbers.

        A share is rounded half up and is at least one token.
        """
        if isinstance(prompt_tokens, Integral):
            return self.tokens if self.share is None else max(1, portion(self.share, int(prompt_tokens)))
        if self.share is None:
            return prompt_tokens.new_full(prompt_tokens.shape, self.tokens)
        return portion(self.share, prompt_tokens).clamp(min=1)

    def __str__(self) -> str:
        return str(self.amount)


def portion(share: float, whole: Any) -> Any:
    """The share of a number of tokens, or of each in a tensor of them, rounded half up."""
    over, under = _ratio(share)
    whole = whole if isinstance(whole, int) else whole.long()
    return (2 * whole * over + under) // (2 * under)


_ratios: dict[float, tuple[int, int]] = {}  # a plain dictionary, because torch.compile warns of functools.cache


def _ratio(share: float) -> tuple[int, int]:
    # The decimal the user wrote (0.29, not the binary number just below it), or the plain fraction nearby (1/3).
    # Halves are then halves, whole numbers suffice, and every device rounds alike.
    if share not in _ratios:
        _ratios[share] = Fraction(str(share)).limit_denominator(10**6).as_integer_ratio()
    return _ratios[share]


def _number(text: str) -> int | float | None:
    text = text.strip()
    if text.endswith("%"):
        text = f"{text[:-1].strip()}e-2"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None


def _impossible(value: Any) -> BudgetError:
    return BudgetError(
        f"{value!r} is no budget; give a number of tokens, 1 or more (64), "
        "or a share of the prompt, above 0.0 and up to 1.0 (0.25 or 25%)"
    )
