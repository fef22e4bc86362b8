"""RaggedPool: a layer whose heads hold different numbers of tokens, and as many bytes as that takes.

Between calls, keys, values, positions and slot fields lie in pages of :data:`PAGE` slots, each of which belongs to one
row and head; a head has as many pages as its part of the budget needs. A decode step multiplies page by page, without
bringing keys and values into one shape; what is small (logits, positions, slot fields) is laid out as
``[batch, kv_heads, slots]``, so that policies see what they see anywhere. A prompt or a chunk is attended in that
shape as a whole, and packed when it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvpolicy.attention.blocks import Part
from kvpolicy.attention.rows import AttentionRows
from kvpolicy.budget import LayerBudget
from kvpolicy.errors import ConfigError
from kvpolicy.policy import UNBOUNDED, EvictionPolicy, View
from kvpolicy.pool import EMPTY, GROWTH, SlotPool, gathered, grown
from kvpolicy.select import counted, survivors

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

    def with_more(self, slots: Tensor) -> tuple[Pages, Tensor]:
        """The same with room for `slots` ``[batch, kv_heads]`` more; and where each page is among the new, ``[pages]``.

        Slots keep their numbers within their head.
        """
        held = torch.zeros_like(slots).flatten().index_add_(0, self.owner, torch.ones_like(self.owner)).view_as(slots)
        more = Pages(held * PAGE + slots)
        return more, more.table[self.owner * more.most + self.place % self.most]

    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in (self.place, self.owner, self.table, self.missing))


class RaggedPool(SlotPool):
    """A :class:`~kvpolicy.pool.SlotPool` whose heads hold what an allocator, or the policy, gives them at each cut.

    Heads without a bound, and all heads while tokens may gather, fill up the slots they have; when one may have none
    left, those heads get more pages.
    """

    def reset(self) -> None:
        super().reset()
        self.pages: Pages | None = None
        """How the pool is packed; ``None`` while all heads hold the same, and during a call of several tokens."""
        self._spread = False
        """Whether it was packed before the call."""
        self.shares: Any = None
        """Tokens that each row and head may hold, ``[batch, kv_heads, 1]``, once packed."""
        self.settled = False
        """Whether the shares stay what they are, since layers were divided together."""
        self._since = 0
        """Tokens that have come since the last cut."""
        self._space = 0
        """Tokens for which heads that fill up are certain to have slots."""
        self._fills_up = False
        """Whether some heads do."""

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
        self._spread = False
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
            self._spread = True

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
        if self.pages is not None and (key_states.shape[2] > 1 or self.held):
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
        if self.pages is not None or self.settled:
            view.budget = self.shares if part is None else self.shares[part.batch, part.heads]
        return view

    def evict(self, tokens: int) -> None:
        if self.pages is None or self.held:
            super().evict(tokens)
            if self._spread and not self.held:  # nothing was cut
                self._since += tokens
                self._close_up()
                self._pack_with_space(self._rooms[True] - self._since)
            return
        room = self._rooms[True]
        if room:  # without it nothing is counted: a number that changes would have a compiled step compiled anew
            self._since += 1
            if self._since > room:
                self._unpack_folded()
                self._cut()
                return
        if self._fills_up:
            self._space -= 1
            if self._space < 1:
                self._add_pages()
        if room:
            self.free.copy_(self._first_empty())  # type: ignore[union-attr]
        else:
            self._choose_victim()
        self._fold()

    def _choose_victim(self) -> None:
        if self.pages is None and self.policy.divided:  # from here on heads differ
            self._cut()
        else:
            super()._choose_victim()

    def _unpack_folded(self) -> None:
        self._fold()
        self._unpack()

    def _add_pages(self) -> None:
        """Give the heads that fill up more pages, and leave the others and what is in them as they are."""
        assert self.pages is not None
        self._fold()
        more = torch.full_like(self.shares[..., 0], GROWTH) * self._filling[..., 0]
        pages, place = self.pages.with_more(more)
        fills = {name: field.fill for name, field in self._declared.items()}

        def spread(state: Tensor, fill: float) -> Tensor:
            return state.new_full((len(pages.place), *state.shape[1:]), fill).index_copy_(0, place, state)

        self.keys, self.values = spread(self.keys, 0), spread(self.values, 0)
        self._positions = spread(self._positions, EMPTY)
        self._fields = {name: spread(state, fills[name]) for name, state in self._fields.items()}
        self.pages, self.used = pages, pages.slots
        self._space += GROWTH
        self._unfold()

    @property
    def _filling(self) -> Tensor:
        """Which heads fill up, ``[batch, kv_heads, 1]``."""
        return torch.ones_like(self.shares, dtype=torch.bool) if self._rooms[True] else self.shares >= UNBOUNDED

    def _cut(self) -> None:
        """Divide the budget over the heads, keep what fits of each, and pack it."""
        view = self.view()
        if not self.settled:
            view.dividing = True
            self.shares = self._divided(self.policy.ranking(view), view)
            view.dividing, view.budget = False, self.shares
        count = min(int(self.shares.max()), self.used)
        order, positions = survivors(self.policy.ranking(view), view, count)
        if self.observers:
            self._tell_cut(positions)
        self._take(order, positions)
        self._since = 0
        self._pack_with_space(self._rooms[True])

    def _divided(self, ranking: tuple[Tensor, ...], view: View) -> Tensor:
        """What each head may hold, ``[batch, kv_heads, 1]``."""
        assert self.budget is not None
        even = self.even
        if self.policy.divided:
            return self.policy.shares(even, view.positions.shape[1])
        assert self.budget.budget.heads is not None
        divided = self.budget.budget.heads.divide(ranking, view, even)
        # A row that need not give up anything has nothing to divide.
        fits = view.valid.sum(-1, keepdim=True).amax(1, keepdim=True) <= even
        return torch.where(fits, even, divided)

    @property
    def even(self) -> Tensor:
        """Tokens of each head if all had the same, ``[batch, 1, 1]``."""
        budget = self.limit if self.limits is None else self.limits
        return torch.as_tensor(budget, device=self.device).expand(self.seen.shape).long()

    def _take(self, order: Tensor, positions: Tensor) -> None:
        """Hold the slots in `order` ``[batch, kv_heads, n]`` alone."""
        self.keys, self.values = gathered(self.keys, order), gathered(self.values, order)
        self._fields = {name: gathered(state, order) for name, state in self._fields.items()}
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
        """Pack what is held, with space for `room` tokens and one more, or some of them where that is without end.

        Without room that goes for heads that evict nothing, and the others have a slot for the newcomer.
        """
        filling = self._filling[..., 0]
        self._fills_up = bool(filling.any())
        self._space = int(min(room or GROWTH - 1, GROWTH - 1)) + 1
        held = (self._positions >= 0).sum(-1)
        slots = torch.where(filling, held + self._space, self.shares[..., 0] + 1)
        self._pack(torch.maximum(slots, held + 1))
        with self._unfolded():
            self.free = self._first_empty()

    # -- what users ask ------------------------------------------------------------------------------------

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        packed = self.pages is not None
        self._unpack()
        super()._map_rows(change)
        self.shares = None if self.shares is None else change(self.shares)
        if packed:
            self._close_up()
            self._pack_with_space(self._rooms[True] - self._since)

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
    return state[:, :, :slots] if state.shape[2] >= slots else grown(state, slots, fill)


# -- who is divided, and all layers together -------------------------------------------------------------------


def heads_differ(policy: EvictionPolicy, its: LayerBudget | None, config: Any) -> bool:
    """Whether the KV heads of a layer may hold different numbers of tokens.

    Raises:
        ConfigError: both the policy and its budget say how they do, or a head is named that `config` does not have.
    """
    budget = its.budget if its is not None else None
    if not (policy.together or policy.divided):
        return budget is not None and budget.heads is not None
    if policy.storage is not None:
        raise ConfigError(
            f"{policy.kind} stores a layer in a way of its own, in which all heads hold the same number of tokens, and "
            "a policy inside has heads that differ: leave one of the two out"
        )
    others = [name for name in ("heads", "layers") if budget is not None and getattr(budget, name) is not None]
    if "heads" in others or (others and (policy.together or (budget and budget.measured is not None))):
        raise ConfigError(
            f"{policy.kind} says by itself how the budget is divided: leave {' and '.join(others)} out of the budget"
        )
    if budget is not None and budget.grows:
        raise ConfigError(f"{policy.kind} divides a budget where a prompt is cut: give it a share of the prompt")
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if policy.divided and heads:
        policy.shares(torch.ones(1, 1, 1, dtype=torch.long), heads)
    return True


def divide_together(pools: Sequence[RaggedPool]) -> None:
    """Give the best tokens of all heads of these layers, which are held, the budget of all of them.

    Rows that need not give up anything keep the same in all heads.
    """
    views = [pool.view() for pool in pools]
    for view in views:
        view.dividing = True
    device = pools[0].device
    rankings = [pool.policy.ranking(view) for pool, view in zip(pools, views, strict=True)]
    ranking = [torch.cat([key.to(device) for key in keys], 1) for keys in zip(*rankings, strict=True)]
    valid = torch.cat([view.valid.to(device) for view in views], 1)
    positions = torch.cat([view.positions.to(device) for view in views], 1)
    even = pools[0].even
    divided = counted(ranking, valid, positions, valid.shape[1] * even[:, 0]).unsqueeze(-1)
    divided = torch.where(valid.sum(-1, keepdim=True).amax(1, keepdim=True) <= even, even, divided)
    for pool, view in zip(pools, views, strict=True):
        heads, divided = divided.split([view.positions.shape[1], divided.shape[1] - view.positions.shape[1]], 1)
        pool.shares, pool.settled = heads.to(pool.device), True
