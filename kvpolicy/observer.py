"""Being told what caches do, without a part in it: for logs, counters and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.plugins import registry

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicy.policy import View


class Observer:
    """Subclass, override what you want to hear of, and offer an instance by ``kvpolicy_observers``.

    Or give instances to one cache: ``EvictionCache(..., observers=[...])``. What an observer is shown belongs to
    the cache and is overwritten by later calls: copy what you keep, change nothing.
    """

    name: str = ""
    """Unique name, shown by ``kvpolicy plugins``."""

    def active(self) -> bool:
        """Whether an installed observer is told of a new cache; asked once, when the cache is made."""
        return True

    def observed(self, layer: int, view: View) -> None:
        """`layer` has attended and the policy has observed; nothing is evicted yet."""

    def evicted(self, layer: int, positions: Tensor) -> None:
        """`layer` has given up `positions`, ``[batch, kv_heads, n]``, -1 where a head gave up fewer than `n`."""


def installed() -> tuple[Observer, ...]:
    """The installed observers that are active now."""
    return tuple(observer for observer in registry().observers.values() if observer.active())
