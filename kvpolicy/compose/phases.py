"""Phases: one policy for prompts and chunks, another for decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from torch import Tensor

from kvpolicy.compose._base import Composite, Undivided
from kvpolicy.policy import EvictionPolicy, View


class Phases(Composite):
    """`prefill` decides when a prompt or a chunk is cut, `decode` after each token that is written.

    Both observe all the time, so that the second knows the prompt. ``decode: full`` cuts the prompt and keeps
    whatever is written after it, as SnapKV's paper does; the cache then grows with the answer.
    """

    kind: Literal["phases"] = "phases"
    prefill: Undivided
    """The policy for calls of several tokens, and for the first call."""
    decode: Undivided
    """The policy for calls of one token."""

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        yield "prefill", self.prefill
        yield "decode", self.decode

    def with_parts(self, change: Callable[[EvictionPolicy], EvictionPolicy]) -> EvictionPolicy:
        return self.replaced(prefill=change(self.prefill), decode=change(self.decode))

    def room(self, decoding: bool) -> float:
        return (self.decode if decoding else self.prefill).room(decoding)

    def _now(self, view: View) -> tuple[EvictionPolicy, View]:
        name = "decode" if view.decoding else "prefill"
        return getattr(self, name), view.part(name)

    def protected(self, view: View) -> Tensor | None:
        policy, view = self._now(view)
        return policy.protected(view)

    def certain(self, view: View) -> Tensor:
        return self.certain_of("prefill", view)

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        policy, view = self._now(view)
        return policy.ranking(view)
