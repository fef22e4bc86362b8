"""Every: evict seldom, and several tokens at once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvpolicy.compose._base import Wrapper
from kvpolicy.policy import Policy


class Every(Wrapper):
    """Lets up to ``tokens - 1`` tokens more than the budget gather before it is cut to the budget again.

    Less work a step, for that many slots more. Whatever divides a budget over heads divides it anew at each cut.
    """

    kind: Literal["every"] = "every"
    tokens: Annotated[int, Field(ge=1, strict=True)]
    """Evict each so many tokens; 1 is every step."""
    of: Policy
    """The policy that decides what goes."""

    def room(self, decoding: bool) -> float:
        return self.of.room(decoding) + self.tokens - 1
