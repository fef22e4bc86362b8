"""How a layer stores the keys and values of what it keeps: what a policy may say about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvpolicy.pool import SlotPool


class Storage:
    """Storage other than plain: which pool holds a layer, and what it takes. A value: frozen, comparable, shared.

    A policy hands one out as :attr:`EvictionPolicy.storage <kvpolicy.EvictionPolicy.storage>`; the cache makes the
    layer's pool by it, and the pool finds it as ``policy.storage``. Which tokens stay is not its business.
    """

    lossless: ClassVar[bool] = False
    """Whether keys and values come back as they were stored."""

    @property
    def pool(self) -> type[SlotPool]:
        """The class of the pool."""
        raise NotImplementedError(f"{type(self).__name__} must define pool")

    def tokens(self, budget: int, width: int, itemsize: int, beside: int) -> int:
        """Tokens of a head that a budget of so many buys: as many, unless bytes are what counts.

        `width` is that of a key, `itemsize` that of a number as the model has it, `beside` the bytes that a slot takes
        beside its key and value: its position, and what the policy notes.

        Raises:
            BudgetError: it buys too few for the storage to make sense.
        """
        return budget

    def slots(self, held: int, most: float) -> int:
        """Slots of a head that holds `held` tokens after its prompt and at most `most` while decoding."""
        raise NotImplementedError(f"{type(self).__name__} must define slots()")

    def nbytes(self, held: int, most: float, width: int, itemsize: int) -> int:
        """Bytes that keys and values of such a head take; `width` is that of a key, `itemsize` that of a number."""
        raise NotImplementedError(f"{type(self).__name__} must define nbytes()")

    def remark(self, most: int) -> str | None:
        """What a comparison should point out where no head held more than `most` tokens."""
        return None
