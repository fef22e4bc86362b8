"""QuantisedPool: a layer whose tokens take a few bits a number, but for the newest.

Keys are quantised per channel (a group is some slots of one channel), values per token (a group is some channels of one
slot), asymmetrically: KIVI, Liu et al., ICML 2024, arXiv 2402.02750. The first slots of a layer are quantised, the
others are in full precision. A newcomer is written in full precision; when `group` of them have come, what is older
than the newest `residual` moves into quantised slots that are empty, all heads at once and without asking the device.

Slots share the scale of their group, so whoever moves into a group with others in it may only widen its range. Where it
does not, the codes of the others stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.attention.blocks import Scoring
from kvpolicy.errors import BudgetError
from kvpolicy.policy import EvictionPolicy
from kvpolicy.pool import EMPTY, SlotPool, gathered, grown
from kvpolicy.select import lowest, survivors
from kvpolicy.storage import Storage


@dataclass(frozen=True)
class Quantised(Storage):
    """Keys and values in `bits` bits a number. Scales and zeros are of the model's type, and counted."""

    bits: int = 2
    group: int = 32
    """Slots of a channel that share a scale (keys), and channels of a slot that do (values)."""
    residual: int = 32
    """How many newest tokens of a head stay in full precision, at least."""
    by_bytes: bool = False
    """Whether a budget is the bytes of the keys and values of so many tokens in full precision, into which all fits."""

    @property
    def pool(self) -> type[SlotPool]:
        return QuantisedPool

    def groups(self, held: Any) -> Any:
        """Groups of slots for what is quantised of `held` tokens: an ``int``, or a tensor of such."""
        older = held - self.residual
        return -(-(max(older, 0) if isinstance(older, int) else older.clamp(min=0)) // self.group)

    def full(self, most: float) -> int:
        """Slots in full precision of a head that holds at most `most` tokens: the newest, and space for a group."""
        return int(min(self.residual + self.group, most + 1))

    def tokens(self, budget: int, width: int, itemsize: int, beside: int) -> int:
        if not self.by_bytes:
            return budget

        def takes(held: int) -> int:
            return self.nbytes(held, held, width, itemsize) + self.slots(held, held) * beside

        least, plain = self.residual + self.group, 2 * (budget + 1) * width * itemsize  # a slot is free
        if plain < takes(least):
            raise self.too_little(budget)
        return least + (plain - takes(least)) // (takes(least + self.group) - takes(least)) * self.group

    def too_little(self, budget: int) -> BudgetError:
        """What to say of bytes in which nothing would be quantised."""
        return BudgetError(
            f"the bytes of {budget} tokens are too few for {self.residual + self.group} in full precision "
            f"(residual {self.residual}, and a group of {self.group} to come) and some in {self.bits} bits; raise the "
            "budget, or lower residual or group"
        )

    def slots(self, held: int, most: float) -> int:
        return self.groups(held) * self.group + self.full(most)

    def nbytes(self, held: int, most: float, width: int, itemsize: int) -> int:
        groups, channels = self.groups(held), PerToken(self, width)
        codes = groups * self.group * -(-width * self.bits // 8)
        key_ranges, value_ranges = groups * width, groups * self.group * channels.groups
        return 2 * codes + 2 * (key_ranges + value_ranges + self.full(most) * width) * itemsize

    def remark(self, most: int) -> str | None:
        return (
            None if most > self.residual else f"nothing was quantised, as all is within the residual of {self.residual}"
        )


# -- numbers ---------------------------------------------------------------------------------------------------


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[..., n]`` below ``2 ** bits``, as many to a byte as fit: ``[..., ceil(n * bits / 8)]``, uint8."""
    each = 8 // bits
    if each == 1:
        return codes.clone()  # not a view of something larger
    filled = F.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    return (filled << _shifts(bits, codes)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """The `width` codes that :func:`pack` packed."""
    if bits == 8:
        return packed
    return ((packed.unsqueeze(-1) >> _shifts(bits, packed)) & (2**bits - 1)).flatten(-2)[..., :width]


def _shifts(bits: int, like: Tensor) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)


def _wide(state: Tensor) -> Tensor:
    """In float32 at least."""
    return state.float() if state.dtype.itemsize < 4 else state


class Layout:
    """Which numbers of ``[batch, kv_heads, slots, width]`` share a scale: those along `axis` once they are `split`."""

    axis: ClassVar[int]

    def __init__(self, storage: Quantised, width: int) -> None:
        self.group, self.width = storage.group, width

    def split(self, state: Tensor) -> Tensor:
        """With one dimension more."""
        raise NotImplementedError

    def join(self, state: Tensor) -> Tensor:
        """The opposite of `split`."""
        raise NotImplementedError

    def of_slots(self, mask: Tensor) -> Tensor:
        """A mask of slots ``[batch, kv_heads, slots]``, so that it goes with what is `split`."""
        raise NotImplementedError

    def ranges(self, slots: int) -> tuple[int, int, int]:
        """Dimensions of the scales of so many slots, after batch and heads."""
        raise NotImplementedError


class PerChannel(Layout):
    """Groups of slots of one channel: ``[batch, kv_heads, groups, group, width]``."""

    axis = 3

    def split(self, state: Tensor) -> Tensor:
        return state.unflatten(2, (-1, self.group))

    def join(self, state: Tensor) -> Tensor:
        return state.flatten(2, 3)

    def of_slots(self, mask: Tensor) -> Tensor:
        return self.split(mask).unsqueeze(-1)

    def ranges(self, slots: int) -> tuple[int, int, int]:
        return slots // self.group, 1, self.width


class PerToken(Layout):
    """Groups of channels of one slot, the last of which may be smaller: ``[batch, kv_heads, slots, groups, group]``."""

    axis = 4

    def __init__(self, storage: Quantised, width: int) -> None:
        super().__init__(storage, width)
        self.group = min(self.group, width)
        self.groups = -(-width // self.group)

    def split(self, state: Tensor) -> Tensor:
        if missing := self.groups * self.group - self.width:  # the last channel again widens no range
            state = torch.cat([state, state[..., -1:].expand(*state.shape[:-1], missing)], -1)
        return state.unflatten(3, (-1, self.group))

    def join(self, state: Tensor) -> Tensor:
        return state.flatten(3)[..., : self.width]

    def of_slots(self, mask: Tensor) -> Tensor:
        return mask[..., None, None]

    def ranges(self, slots: int) -> tuple[int, int, int]:
        return slots, self.groups, 1


@dataclass(frozen=True)
class Coded:
    """Vectors ``[batch, kv_heads, slots, width]`` in a few bits a number: ``zero + code * scale``."""

    bits: int
    layout: Layout
    codes: Tensor
    """Packed, ``[batch, kv_heads, slots, bytes]``."""
    scale: Tensor
    """The step from one code to the next, one for each group: :meth:`Layout.ranges`."""
    zero: Tensor
    """What code 0 stands for, the least number of the group."""

    @classmethod
    def none(cls, bits: int, layout: Layout, like: Tensor) -> Coded:
        """No slots yet, for vectors of the type and on the device of `like` ``[batch, kv_heads, any, width]``."""
        rows = like.shape[:2]
        codes = like.new_empty((*rows, 0, -(-layout.width * bits // 8)), dtype=torch.uint8)
        ranges = like.new_empty((*rows, *layout.ranges(0)))
        return cls(bits, layout, codes, ranges, ranges)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that is stored."""
        return self.codes, self.scale, self.zero

    def changed(self, change: Callable[[Tensor], Tensor]) -> Coded:
        """The same of other rows."""
        codes, scale, zero = map(change, self.parts)
        return replace(self, codes=codes, scale=scale, zero=zero)

    def grown(self, slots: int) -> Coded:
        """With `slots` slots, the new ones empty."""
        ranges = self.layout.ranges(slots)[0]
        codes, scale, zero = grown(self.codes, slots, 0), grown(self.scale, ranges, 0), grown(self.zero, ranges, 0)
        return replace(self, codes=codes, scale=scale, zero=zero)

    def decoded(self) -> Tensor:
        """The vectors, as attention and policies see them."""
        return self.layout.join(self._decoded()).to(self.scale.dtype)

    def _decoded(self) -> Tensor:
        codes = self.layout.split(unpack(self.codes, self.bits, self.layout.width))
        return _wide(self.zero) + codes * _wide(self.scale)

    def joined(self, vectors: Tensor, fresh: Tensor, there: Tensor) -> Coded:
        """With `vectors` in the slots that are `fresh`, beside those that are `there` (masks of slots).

        A group with nobody in it gets the range of who comes. Otherwise its range is widened where it has to be, and
        only then are the codes of those there chosen anew, from what they stood for.
        """
        new, fresh, there = self.layout.split(_wide(vectors)), self.layout.of_slots(fresh), self.layout.of_slots(there)
        axis, zero, scale = self.layout.axis, _wide(self.zero), _wide(self.scale)
        high = zero + scale * self._top
        least = new.masked_fill(~fresh, math.inf).amin(axis, keepdim=True)
        most = new.masked_fill(~fresh, -math.inf).amax(axis, keepdim=True)
        shared = there.any(axis, keepdim=True)
        wider = fresh.any(axis, keepdim=True) & (~shared | (least < zero) | (most > high))
        least, most = torch.where(shared, least.minimum(zero), least), torch.where(shared, most.maximum(high), most)
        zero = torch.where(wider, least, zero).to(self.zero.dtype)
        scale = torch.where(wider, self._step(least, most), scale).to(self.scale.dtype)
        before = self.layout.split(unpack(self.codes, self.bits, self.layout.width))
        codes = self._nearest(torch.where(fresh, new, self._decoded()), _wide(zero), _wide(scale))
        codes = self.layout.join(torch.where(fresh | wider, codes, before))
        return replace(self, codes=pack(codes, self.bits), scale=scale, zero=zero)

    @property
    def _top(self) -> int:
        """The greatest code."""
        return int(2**self.bits) - 1

    def _step(self, least: Tensor, most: Tensor) -> Tensor:
        step = (most - least) / self._top
        # Rounded up where rounding is coarse, or the greatest number would be beyond the greatest code.
        return step * (1 + torch.finfo(self.scale.dtype).eps) if self.scale.dtype.itemsize < 4 else step

    def _nearest(self, numbers: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
        apart = torch.where(scale > 0, scale, 1)  # all the same, and all at zero
        return ((numbers - zero) / apart).round().clamp(0, self._top).to(torch.uint8)


# -- a layer ---------------------------------------------------------------------------------------------------


class QuantisedPool(SlotPool):
    """A :class:`~kvpolicy.pool.SlotPool` with its first slots quantised and the others in full precision.

    A call of several tokens brings everything into full precision for as long as it lasts. What was quantised before
    keeps its codes all the same.
    """

    def __init__(self, policy: EvictionPolicy, *more: Any) -> None:
        assert isinstance(policy.storage, Quantised)
        self.storage = policy.storage
        super().__init__(policy, *more)

    def reset(self) -> None:
        super().reset()
        self.store: tuple[Coded, Coded] | None = None
        """Keys and values of the quantised slots; ``None`` where there are none. ``keys`` and ``values`` are of the
        others, or of all while a call of several tokens is under way."""
        self.coded = 0
        """How many slots are quantised: the first ones."""
        self.whole = False
        """Whether ``keys`` and ``values`` are of all slots."""
        self.most = 0
        """Tokens that a head may hold now, counted without asking the device."""
        self._since = 0
        """Tokens that have come since some moved."""
        self._decoded: dict[int, Tensor] | None = None
        """Keys (0) and values (1) of all slots, once asked for, as long as a call is under way."""

    # -- what attention and policies see -------------------------------------------------------------------

    @property
    def active_keys(self) -> Tensor:
        return self._seen(0, self.keys)

    @property
    def active_values(self) -> Tensor:
        return self._seen(1, self.values)

    def _seen(self, which: int, others: Tensor) -> Tensor:
        if self.whole or self.store is None:
            return others
        decoded = {} if self._decoded is None else self._decoded
        if which not in decoded:
            decoded[which] = torch.cat([self.store[which].decoded(), others], 2)
        return decoded[which]

    def answer(self, query: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
        self._decoded = {}
        output = super().answer(query, mask, scoring)
        self._decoded = None
        return output

    def _handed_out(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        # A step takes the rest from storage.
        return super()._handed_out(key_states, value_states) if self.whole else (key_states, value_states)

    # -- the steps of a call -------------------------------------------------------------------------------

    def _overwrite(self, keys: Tensor, values: Tensor) -> None:
        assert self.free is not None
        self._write(self.free - self.coded, keys, values)
        self._clear_fields()

    def _extend(self, keys: Tensor, values: Tensor) -> None:
        super()._extend(keys, values)
        self.whole = True

    def evict(self, tokens: int) -> None:
        self.most += tokens
        room = self._rooms[self.decoding]
        if not self.bounded:
            self._refuse_to_exceed(self.most)
        elif self.limit is not None and self._is_over(room):
            if self.decoding and self.most <= self.limit + 1:
                self._choose_victim()
            else:
                self._cut()
            self.most = min(self.most, self.limit)
        self._since += 1
        if self.whole or self._since == self.storage.group:
            self._move()
        self.free = self._first_empty()

    def _is_over(self, room: float) -> bool:
        assert self.limit is not None
        if self.limits is not None and (room == 0 if self.decoding else room < math.inf):
            return True
        return self.most > self.limit + room

    def _choose_victim(self) -> None:
        victim = lowest(self.policy, self.view())
        self._tell(victim)
        self._positions.scatter_(2, victim, EMPTY)

    def _cut(self) -> None:
        """Leave empty slots where tokens go; bring the others into full precision if many slots are in excess."""
        assert self.limit is not None
        view = self.view()
        order, positions = survivors(self.policy.ranking(view), view, min(self.limit, self.used))
        if self.observers:
            self._tell_cut(positions)
        stays = torch.zeros_like(view.valid).scatter_(-1, order, positions >= 0)
        self._positions = self._positions.masked_fill(~stays, EMPTY)
        room = self._rooms[True]
        if self.coded > self._slots_of(self.limit + (int(room) if room < math.inf else 0)):
            self.keys, self.values = self.active_keys, self.active_values
            self.store, self.coded, self.whole = None, 0, True

    def _slots_of(self, held: Any) -> Any:
        """Quantised slots for `held` tokens."""
        return self.storage.groups(held) * self.storage.group

    def _first_empty(self) -> Tensor:
        """A slot in full precision that is empty, ``[batch, kv_heads, 1]``."""
        return (self._positions[:, :, self.coded :] < 0).int().argmax(-1, keepdim=True) + self.coded

    # -- from full precision to a few bits -----------------------------------------------------------------

    def _move(self) -> None:
        """Quantise what is in full precision but for the newest of each head."""
        self._decoded = None
        before, loose = self.coded, self._positions[:, :, self.coded :]
        keys, values = (state[:, :, before:] if self.whole else state for state in (self.keys, self.values))
        leaving = max(min(loose.shape[2], self.most) - self.storage.residual, 0)
        self.coded, full = self._slots_with(leaving)
        order = self._order(loose, leaving, before, full)
        if self.coded:
            self.store = self._joined(keys, values, order[..., : self.coded], before)
        staying = (order[..., self.coded :] - before).clamp(max=loose.shape[2] - 1)
        self.keys, self.values = gathered(keys, staying), gathered(values, staying)
        self._positions = gathered(grown(self._positions, self.used + 1, EMPTY), order)
        self._fields = {
            name: gathered(grown(self._fields[name], self.used + 1, field.fill), order)
            for name, field in self._declared.items()
        }
        self.used, self.holes, self.whole, self._since = order.shape[2], True, False, 0

    def _order(self, loose: Tensor, leaving: int, before: int, full: int) -> Tensor:
        """Which slot each slot takes its token from, ``[batch, kv_heads, slots]``; one beyond all where it is empty.

        `loose` are the positions in slots of full precision, which come after the `before` quantised ones. Of them at
        most `leaving` get quantised, and `full` slots of full precision are there afterwards.
        """
        nobody, residual = self.used, self.storage.residual
        by_age = loose.argsort(dim=-1, descending=True)
        order = torch.arange(self.coded + 1, device=loose.device)
        order = torch.where(order < before, order, nobody).repeat(*loose.shape[:2], 1)
        if leaving:
            older = by_age[..., residual : residual + leaving].flip(-1)  # by position, empty ones first
            older = older.gather(-1, (loose.gather(-1, older) < 0).int().argsort(dim=-1, stable=True))
            empty = loose.gather(-1, older) < 0
            order.scatter_(-1, torch.where(empty, self.coded, self._holes(before, leaving)), older + before)
        newest = by_age[..., : min(residual, full)] + before
        return torch.cat([order[..., :-1], F.pad(newest, (0, full - newest.shape[-1]), value=nobody)], -1)

    def _slots_with(self, leaving: int) -> tuple[int, int]:
        """Slots that are quantised and slots that are not, for at most so many tokens that become quantised."""
        most = max(self.most, self._ceiling())
        grows = self.budget is not None and self.budget.budget.grows
        coded = self.coded + self._slots_of(leaving + self.storage.residual)
        if most < math.inf:
            coded = max(self.coded, min(coded, self._slots_of(int(most))))
        return coded, self.storage.full(math.inf if grows else most)

    def _ceiling(self) -> float:
        """Tokens that a head may hold while decoding."""
        return self.limit + self._rooms[True] if self.bounded and self.limit is not None else math.inf

    def _holes(self, before: int, count: int) -> Tensor:
        """`count` empty quantised slots of each head, those of the emptiest groups first."""
        group = self.storage.group
        empty = F.pad(self._positions[:, :, :before] < 0, (0, self.coded - before), value=True)
        taken = (~empty).unflatten(-1, (-1, group)).sum(-1).repeat_interleave(group, -1)
        slots = torch.arange(self.coded, device=empty.device)
        if self.limits is not None and self.most <= self._ceiling() < math.inf:
            empty = empty & (slots < self._slots_of(self.limits + int(self._rooms[True])))  # what a row has alone
        rank = torch.where(empty, taken * self.coded + slots, (group + 1) * self.coded)
        return rank.topk(count, dim=-1, largest=False).indices

    def _joined(self, keys: Tensor, values: Tensor, order: Tensor, before: int) -> tuple[Coded, Coded]:
        """What is stored in the quantised slots, now that some come from slots in full precision."""
        fresh = (order >= before) & (order < self.used)
        there = F.pad(self._positions[:, :, :before] >= 0, (0, self.coded - before))
        source = (order - before).clamp(0, keys.shape[2] - 1)
        found = []
        for coded, new in zip(self.store or self._nothing(keys, values), (keys, values), strict=True):
            found.append(coded.grown(self.coded).joined(gathered(new, source), fresh, there))
        return found[0], found[1]

    def _nothing(self, keys: Tensor, values: Tensor) -> tuple[Coded, Coded]:
        storage = self.storage
        return (
            Coded.none(storage.bits, PerChannel(storage, keys.shape[-1]), keys),
            Coded.none(storage.bits, PerToken(storage, values.shape[-1]), values),
        )

    # -- what users ask ------------------------------------------------------------------------------------

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map_rows(change)
        if self.store is not None:
            self.store = self.store[0].changed(change), self.store[1].changed(change)

    def nbytes(self) -> int:
        stored = [part for coded in self.store or () for part in coded.parts]
        return super().nbytes() + sum(int(part.untyped_storage().nbytes()) for part in stored)
