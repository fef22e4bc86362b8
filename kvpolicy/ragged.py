"""RaggedPool: a layer whose heads hold different numbers of tokens, and as many bytes as that takes.

Between calls, keys, values, positions and slot fields lie in pages of :data:`PAGE` slots, each of which belongs to one
row and head; a head has as many pages as its part of the budget needs. A decode step multiplies page by page, without
bringing keys and values into one shape; what is small (logits, positions, slot fields) is laid out as
``[batch, kv_heads, slots]``, so that policies see what they see anywhere. A prompt or a chunk is attended in that
shape as a whole, and packed when it is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvpolicy.attention.blocks import Part
from kvpolicy.attention.rows import AttentionRows
from kvpolicy.cache import EMPTY, GROWTH, SlotPool, _gathered, _grown
from kvpolicy.policy import View
from kvpolicy.select import survivors

PAGE = 16
"""Slots of a page: what a head holds is rounded up to it."""


class Pages:
    """Which page belongs to which row and head."""

    def __init__(self, slots: Tensor) -> None:
        """Room for `slots` ``[batch, kv_heads]`` of each row and head."""
        self.batch, self.heads = slots.shape
        pages = (slots.flatten() + PAGE - 1) // PAGE
        self.most = int(pages.max())
        """Pages of the head that has most."""
        wanted = torch.arange(self.most, device=slots.device) < pages[:, None]
        self.place = wanted.flatten().nonzero().flatten()
        """Where each page is in the common shape, ``[pages]``."""
        self.owner = self.place // self.most
        """Row and head of each page, as one number, ``[pages]``."""
        self.table = (wanted.flatten().cumsum(0) - 1).clamp(min=0)
        """The page at each place of the common shape; any page where there is none, ``[batch * kv_heads * most]``."""
        self.missing = ~wanted.view(self.batch, self.heads, self.most, 1)

    @property
    def slots(self) -> int:
        """Slots of the common shape."""
        return self.most * PAGE

    def pack(self, state: Tensor) -> Tensor:
        """``[batch, kv_heads, slots, ...]`` as pages ``[pages, PAGE, ...]``."""
        return state.reshape(-1, PAGE, *state.shape[3:])[self.place]

    def unpack(self, pages: Tensor) -> Tensor:
        """Pages as ``[batch, kv_heads, slots, ...]``; what no page holds is arbitrary."""
        return pages[self.table].reshape(self.batch, self.heads, self.slots, *pages.shape[2:])

    def dot(self, query: Tensor, keys: Tensor) -> Tensor:
        """Products of `query` ``[batch, kv_heads, group, 1, head_dim]`` with pages of keys."""
        product = torch.bmm(query.flatten(0, 1)[:, :, 0][self.owner], keys.transpose(1, 2))  # [pages, group, PAGE]
        spread = product[self.table].view(self.batch, self.heads, self.most, -1, PAGE)
        return spread.transpose(2, 3).flatten(3).unsqueeze(3)

    def mix(self, probs: Tensor, values: Tensor) -> Tensor:
        """The mean of pages of values by `probs` ``[batch, kv_heads, group, 1, slots]``."""
        paged = probs[:, :, :, 0].unflatten(-1, (self.most, PAGE)).transpose(2, 3).flatten(0, 2)[self.place]
        parts = torch.bmm(paged.to(values.dtype), values).to(probs.dtype)  # summed in float32
        total = parts.new_zeros(self.batch * self.heads, *parts.shape[1:]).index_add_(0, self.owner, parts)
        return total.to(values.dtype).view(self.batch, self.heads, -1, 1, values.shape[-1])

    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in (self.place, self.owner, self.table, self.missing))


class RaggedPool(SlotPool):
    """A :class:`~kvpolicy.cache.SlotPool` whose budget an allocator divides over the heads at each cut."""

    def reset(self) -> None:
        super().reset()
        self.pages: Pages | None = None
        """How the pool is packed; ``None`` while all heads hold the same."""
        self.shares: Any = None
        """Tokens that each row and head may hold, ``[batch, kv_heads, 1]``, once packed."""
        self._since = 0
        """Tokens that have come since the last cut."""
        self._space = 0
        """Tokens that still fit without packing anew."""

    # -- packed and unpacked -------------------------------------------------------------------------------

    def _pack(self, slots: Tensor) -> None:
        """Pack everything; each row and head gets room for `slots` ``[batch, kv_heads]``."""
        self.pages = pages = Pages(slots)
        self.keys, self.values = (pages.pack(_resized(s, pages.slots, 0)) for s in (self.keys, self.values))
        self._positions = _resized(self._positions, pages.slots, EMPTY)
        self._fields = {
            name: _resized(self._fields[name], pages.slots, field.fill) for name, field in self._declared.items()
        }
        self.used = pages.slots
        self.holes = True
        self._fold()

    def _fold(self) -> None:
        """Put positions and slot fields into pages."""
        assert self.pages is not None
        self._positions = self.pages.pack(self._positions)
        self._fields = {name: self.pages.pack(state) for name, state in self._fields.items()}

    def _unfold(self) -> None:
        """Bring positions and slot fields into the common shape."""
        assert self.pages is not None
        positions = self.pages.unpack(self._positions)
        self._positions = positions.masked_fill(self.pages.missing.expand(-1, -1, -1, PAGE).flatten(2), EMPTY)
        self._fields = {name: self.pages.unpack(state) for name, state in self._fields.items()}

    def _unpack(self) -> None:
        """Bring everything into the common shape."""
        if self.pages is not None:
            self._unfold()
            self.keys, self.values = self.pages.unpack(self.keys), self.pages.unpack(self.values)
            self.pages = self.free = None

    @contextmanager
    def _unfolded(self) -> Any:
        if self.pages is None or self._positions.dim() == 3:  # in the common shape already
            yield
            return
        kept = self._positions, self._fields
        self._unfold()
        try:
            yield
        finally:
            self._positions, self._fields = kept

    # -- the steps of a call -------------------------------------------------------------------------------

    @property
    def active_keys(self) -> Tensor:
        return super().active_keys if self.pages is None else self.pages.unpack(self.keys)

    @property
    def active_values(self) -> Tensor:
        return super().active_values if self.pages is None else self.pages.unpack(self.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.pages is not None and key_states.shape[2] > 1:
            self._unpack()
        return super().update(key_states, value_states, *args, **kwargs)

    def _handed_out(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        # Attention takes the rest from the pages.
        return super()._handed_out(key_states, value_states) if self.pages is None else (key_states, value_states)

    def _overwrite(self, keys: Tensor, values: Tensor) -> None:
        if self.pages is None:
            super()._overwrite(keys, values)
            return
        assert self.free is not None
        self._unfold()
        first = torch.arange(self.free[..., 0].numel(), device=self.free.device).view_as(self.free) * self.pages.most
        page, offset = self.pages.table[first + self.free // PAGE].flatten(), (self.free % PAGE).flatten()
        self.keys[page, offset] = keys.flatten(0, 2)
        self.values[page, offset] = values.flatten(0, 2)
        self._clear_fields()

    def dot(self, query: Tensor) -> Tensor:
        if self.pages is None or self.turn.rolls:  # keys are rotated in the common shape
            return super().dot(query)
        return self.pages.dot(query, self.keys)

    def mix(self, probs: Tensor) -> Tensor:
        return super().mix(probs) if self.pages is None else self.pages.mix(probs, self.values)

    def view(self, rows: AttentionRows | None = None, part: Part | None = None) -> View:
        view = super().view(rows, part)
        if self.pages is not None:
            view.budget = self.shares
        return view

    def evict(self, tokens: int) -> None:
        if self.pages is None:
            super().evict(tokens)
            return
        room = self._rooms[True]
        if room == 0:  # nothing is counted: a number that changes would have a compiled step compiled anew
            self._choose_victim()
            self._fold()
            return
        self._since += 1
        self._space -= 1
        if self._since > room:
            self._unpack_folded()
            self._cut()
        elif self._space > 0:
            self.free.copy_(self._first_empty())  # type: ignore[union-attr]
            self._fold()
        else:
            self._unpack_folded()
            self._close_up()
            self._pack_with_space(room - self._since)

    def _unpack_folded(self) -> None:
        self._fold()
        self._unpack()

    def _cut(self) -> None:
        """Divide the budget over the heads, keep what fits of each, and pack it."""
        assert self.limit is not None and self.budget is not None and self.budget.budget.heads is not None
        view = self.view()
        view.dividing = True
        ranking = self.policy.ranking(view)
        view.dividing = False
        even = torch.as_tensor(view.budget, device=self.device).expand(self.seen.shape)
        divided = self.budget.budget.heads.divide(ranking, view, even.long())
        # A row that need not give up anything has nothing to divide.
        fits = view.valid.sum(-1, keepdim=True).amax(1, keepdim=True) <= even
        self.shares = torch.where(fits, even, divided)
        count = min(int(self.shares.max()), self.used)
        view.budget = self.shares
        order, positions = survivors(self.policy.ranking(view), view, count)
        if self.observers:
            self._tell_cut(positions)
        self._take(order, positions)
        self._since = 0
        self._pack_with_space(self._rooms[True])

    def _take(self, order: Tensor, positions: Tensor) -> None:
        """Hold the slots in `order` ``[batch, kv_heads, n]`` alone."""
        self.keys, self.values = _gathered(self.keys, order), _gathered(self.values, order)
        self._fields = {name: _gathered(state, order) for name, state in self._fields.items()}
        self._positions = positions
        self.used = order.shape[-1]

    def _close_up(self) -> None:
        """Move empty slots to the end."""
        order = torch.where(self._positions < 0, torch.iinfo(torch.int32).max, self._positions).argsort(dim=-1)
        self._take(order, self._positions.gather(-1, order))

    def _first_empty(self) -> Tensor:
        """An empty slot of each head, ``[batch, kv_heads, 1]``."""
        return (self._positions < 0).int().argmax(-1, keepdim=True)

    def _pack_with_space(self, room: float) -> None:
        """Pack what is held, with space for `room` tokens and one more, or some of them where that is without end."""
        self._space = int(min(room, GROWTH - 1)) + 1
        held = (self._positions >= 0).sum(-1)
        slots = held + self._space if room else self.shares[..., 0] + 1
        self._pack(torch.maximum(slots, held + 1))
        with self._unfolded():
            self.free = self._first_empty()

    # -- what users ask ------------------------------------------------------------------------------------

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        packed = self.pages is not None
        self._unpack()
        super()._map_rows(change)
        if packed:
            self.shares = change(self.shares)
            self._close_up()
            self._pack_with_space(self._rooms[True] and self._space - 1)

    def kept(self) -> Tensor:
        with self._unfolded():
            return super().kept()

    def kept_positions(self) -> Tensor:
        with self._unfolded():
            return super().kept_positions()

    def kept_fields(self) -> dict[str, Tensor]:
        with self._unfolded():
            return super().kept_fields()

    def nbytes(self) -> int:
        if self.pages is None:
            return super().nbytes()
        return super().nbytes() + self.pages.nbytes() + self.shares.nbytes


def _resized(state: Tensor, slots: int, fill: float) -> Tensor:
    """`state` ``[batch, kv_heads, n, ...]`` with `slots` slots: cut, or filled."""
    return state[:, :, :slots] if state.shape[2] >= slots else _grown(state, slots, fill)
