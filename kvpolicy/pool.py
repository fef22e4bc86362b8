"""SlotPool: one layer of an EvictionCache, a bounded number of slots.

A layer holds preallocated keys and values, the logical position of the token in each slot and the policy's
slot fields. Attention does not care about the order of keys, so in decode the newcomer is written into the slot
of the last victim: no concatenation, no gather, no growth. A prompt or a chunk is attended in full, then cut to
the budget with one selection and one gather, layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import CacheLayerMixin

from kvpolicy.attention.blocks import Part, Scoring, Wants, attend, dot, mix
from kvpolicy.attention.interface import UNORDERED
from kvpolicy.attention.rows import AttentionRows
from kvpolicy.budget import LayerBudget
from kvpolicy.errors import BudgetError, ConfigError, NotAttachedError
from kvpolicy.observer import Observer
from kvpolicy.policy import UNBOUNDED, Changed, EvictionPolicy, HeadField, SlotField, View, as_if_alone
from kvpolicy.rehearsal import Rehearsal
from kvpolicy.rotation import UNKNOWN, Angles, Turn
from kvpolicy.select import lowest, survivors

if TYPE_CHECKING:
    from kvpolicy.measured import Cascade

EMPTY = -1
GROWTH = 64
"""Slots are allocated in multiples of this until the budget is reached."""


class SlotPool(CacheLayerMixin):
    """One layer of an :class:`EvictionCache`.

    The steps of one call: the adapter's hook announces it, the model appends (:meth:`update`),
    the attention function gives the new tokens their positions (:meth:`place`), attends, lets the policy
    :meth:`observe`, and lets it :meth:`evict`.

    While fewer than the budget are held, slots ``[:used]`` fill up in order. From then on there are ``budget + 1``
    slots of which each head has one free: the newcomer goes there, and the next victim leaves another. A policy with
    :meth:`~kvpolicy.EvictionPolicy.room` beyond the budget goes on filling up and is cut when there is none left.
    """

    is_compileable = False  # users may compile a step themselves; generate must not do it unasked
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    keys: Any
    """``[batch, kv_heads, slots, head_dim]``; ``None`` before the first call. Not rotated if positions are rolled."""
    values: Any
    """``[batch, kv_heads, slots, value_dim]``."""

    def __init__(
        self,
        policy: EvictionPolicy,
        budget: LayerBudget | None,
        index: int,
        prefix: Tensor,
        observers: Sequence[Observer] = (),
        turn: Turn = UNKNOWN,
        query_heads: int | None = None,
        output: Callable[[], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.budget = budget
        self.index = index
        self.cascade: Cascade | None = None
        """What measures this layer and others to divide a budget over them."""
        self.observers = observers
        self.turn = turn
        """How the layer rotates, where that matters to the policy or to positions."""
        self._query_heads = query_heads
        self._output = output
        self._prefix = prefix
        self._declared = policy.slot_fields()
        self._of_heads = policy.head_fields()
        self._observes = policy.observes
        self.bounded = policy.bounded or policy.own_budget is not None
        """Whether anything is evicted at all."""
        self._selects = policy.selects
        self._rooms = policy.room(decoding=False), policy.room(decoding=True)
        """Tokens beyond the budget that may be held in prefill, and while decoding."""
        self.reset()

    def reset(self) -> None:
        """Forget everything: the pool is as new."""
        self.keys = self.values = None
        self.is_initialized = False
        self.expected = False
        self.arrived = 0
        """Tokens of the call under way that :meth:`place` has not placed yet."""
        self.used = 0
        self.free: Tensor | None = None
        """The slot each head writes next, ``[batch, kv_heads, 1]``, once the pool is full."""
        self.limit: int | None = None
        """Tokens a head may hold, the largest of the batch."""
        self.limits: Tensor | None = None
        """The same for each row ``[batch, 1, 1]``, where rows differ."""
        self.holes = False
        """Whether slots other than the free one may be empty (padding, rows of different budgets)."""
        self.uneven = False
        """Whether rows may have seen different numbers of tokens (padding)."""
        self.average: Any = None
        """The tokens that all layers have on average, as `limit`, or as `limits` where rows differ."""
        self.wants: Wants = self.policy.wants
        """What attention must hand out in the call under way."""
        self.measured = False
        """Whether the layer is measured in the call under way."""
        self.decoding = False
        """Whether the call under way, or the last one, is a decode step: one token more for a cache that holds some."""
        self.handed: torch.Size | None = None
        """Shape of the keys that the model was given in this call."""
        self._angles: Angles | None = None
        """Cos and sin of the call under way, where they matter."""
        self._asked: Any = None
        """Queries of the call under way, as the model rotated them."""
        self.heads: dict[str, Tensor] = {}
        """The policy's head fields, ``[batch, kv_heads, *shape]``."""
        self._attended: Tensor | None = None
        """Positions that the last decode step attended to, ``[batch, kv_heads, 1 or group, n]``; ``None``: all held."""
        self.held = False
        """Whether nothing is to be evicted for the time being."""
        self.rehearsal: Rehearsal | None = None
        """The part of a pass over the context that is under way."""
        self._takes_part = False
        """Whether the policy, or a part of it, asked for that."""
        self._rehearsed = False
        """Whether the pass is over. What comes then has no part in it, so that it is not cut like a prompt."""
        self._columns: int | None = 0

    # -- transformers' interface ---------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.score_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        batch, heads = key_states.shape[:2]
        self.kv_heads = heads
        self._positions = key_states.new_empty((batch, heads, 0), dtype=torch.int32)
        sizes = self._sizes(key_states, value_states)
        self._fields = {
            name: key_states.new_empty((batch, heads, 0, *field.sized(sizes)), dtype=self._dtype_of(field))
            for name, field in self._declared.items()
        }
        self.heads = {
            name: key_states.new_full((batch, heads, *of.sized(sizes)), of.fill, dtype=self._dtype_of(of))
            for name, of in self._of_heads.items()
        }
        self.seen = key_states.new_zeros((batch, 1, 1), dtype=torch.int32)
        self._columns_tensor = key_states.new_zeros((), dtype=torch.int64)
        self.prefix = self._rows_of_prefix(batch)
        self.is_initialized = True

    def _rows_of_prefix(self, batch: int) -> int | Tensor:
        given = self._prefix
        if given.numel() == 1:
            return int(given)
        if given.numel() != batch:
            raise ConfigError(f"prefix has {given.numel()} numbers and the batch {batch} rows: give one for each row")
        return given.to(self.device).view(-1, 1, 1)

    def _sizes(self, keys: Tensor, values: Tensor) -> dict[str, int]:
        """What fields may be shaped by."""
        found = {"head_dim": keys.shape[-1], "value_dim": values.shape[-1]}
        if self._query_heads is not None:
            found["group"] = self._query_heads // keys.shape[1]
        elif "group" in {size for of in (*self._declared.values(), *self._of_heads.values()) for size in of.shape}:
            raise ConfigError(
                f"{self.policy.kind} keeps state for each query head, and the model's config has no num_attention_heads"
            )
        return found

    def _dtype_of(self, field: SlotField | HeadField) -> torch.dtype:
        dtype: torch.dtype = self.dtype if field.dtype == "model" else getattr(torch, field.dtype)
        return self.score_dtype if dtype == torch.float32 else dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, ``[batch, kv_heads, tokens, head_dim]``; return those held."""
        if not self.expected:
            raise NotAttachedError(
                "EvictionCache was given to a model kvpolicy is not attached to; make the cache for this model "
                "(EvictionCache(model, ...)), or call kvpolicy.attach(model) again after detach"
            )
        self.expected = False
        key_states, value_states = key_states.detach(), value_states.detach()  # an inference cache keeps no graph
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        key_states = self.turn.held(key_states, self._angles)
        rows, tokens = key_states.shape[0], key_states.shape[2]
        if rows != self.seen.shape[0]:
            raise ConfigError(
                f"the cache holds {self.seen.shape[0]} rows and the call brings {rows}: "
                "expand it first (cache.batch_repeat_interleave(n)), or start with cache.reset()"
            )
        self.arrived = tokens
        self.decoding = tokens == 1 and self.used > 0
        if tokens == 1 and self.free is not None and not self.held:
            self._overwrite(key_states, value_states)
        elif tokens == 1 and self.used > 0 and self.free is None:
            self._fill(key_states, value_states)
        else:
            self.holes = self.holes or self.free is not None
            self._extend(key_states, value_states)
        keys, values = self._handed_out(key_states, value_states)
        self.handed = keys.shape
        return keys, values

    def _handed_out(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """What the model's attention module is given: all that is held."""
        return self.active_keys, self.active_values

    def _overwrite(self, keys: Tensor, values: Tensor) -> None:
        assert self.free is not None
        self._write(self.free, keys, values)
        self._clear_fields()

    def _write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put one token of each head into its slot of `slots` ``[batch, kv_heads, 1]``."""
        slot = slots.unsqueeze(-1)
        self.keys.scatter_(2, slot.expand(*slot.shape[:3], keys.shape[-1]), keys)
        self.values.scatter_(2, slot.expand(*slot.shape[:3], values.shape[-1]), values)

    def _clear_fields(self) -> None:
        """Slot fields of the newcomers are as new."""
        assert self.free is not None
        for name, field in self._declared.items():
            state = self._fields[name]
            index = self.free.view(*self.free.shape, *(1 for _ in field.shape))
            state.scatter_(2, index.expand(*self.free.shape, *state.shape[3:]), field.fill)

    def _fill(self, keys: Tensor, values: Tensor) -> None:
        if self.used == self.keys.shape[2]:
            self._allocate(self.used + 1)
        self.keys[:, :, self.used] = keys[:, :, 0]
        self.values[:, :, self.used] = values[:, :, 0]
        self.used += 1

    def _extend(self, keys: Tensor, values: Tensor) -> None:
        # Attended as they come; `evict` moves what stays to storage of its own.
        if self.used:
            keys, values = torch.cat([self.active_keys, keys], 2), torch.cat([self.active_values, values], 2)
        self._grow_state(keys.shape[2])
        self.keys, self.values = keys, values
        self.used = keys.shape[2]
        self.free = None

    def get_seq_length(self) -> Any:
        """Tokens seen (columns of the input, padding included). An ``int``; a tensor while compiling."""
        if not self.is_initialized:
            return 0
        if torch.compiler.is_compiling():
            return self._columns_tensor
        if self._columns is None:
            self._columns = int(self._columns_tensor)
        return self._columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens kept and new ones together; and ``UNORDERED``, since slots have no common offset."""
        return self.used - (self.free is not None) + query_length, UNORDERED

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give row `i` the state of row ``beam_idx[i]``, positions and scores included."""
        self._map_rows(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda state: state.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(lambda state: state[indices])

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        self.keys, self.values = change(self.keys), change(self.values)
        self._positions, self.seen = change(self._positions), change(self.seen)
        self._fields = {name: change(state) for name, state in self._fields.items()}
        self.heads = {name: change(state) for name, state in self.heads.items()}
        self.free = None if self.free is None else change(self.free)
        self.limits = None if self.limits is None else change(self.limits)
        self.average = change(self.average) if isinstance(self.average, Tensor) else self.average
        self.prefix = change(self.prefix) if isinstance(self.prefix, Tensor) else self.prefix
        self._attended = None if self._attended is None else change(self._attended)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "EvictionCache cannot be cropped: evicted tokens do not come back, so assisted decoding and prompt "
            "lookup are refused; generate without them, or start over with cache.reset()"
        )

    # -- the steps of a call -------------------------------------------------------------------------------

    @property
    def active_keys(self) -> Tensor:
        """Keys of the slots in use, ``[batch, kv_heads, used, head_dim]``."""
        return self._active(self.keys)

    @property
    def active_values(self) -> Tensor:
        return self._active(self.values)

    @property
    def active_positions(self) -> Tensor:
        return self._active(self._positions)

    @property
    def attended_keys(self) -> Tensor:
        """What queries are multiplied with: the keys in use, rotated for their places where positions are rolled."""
        return self.turn.attended(self.active_keys, self.active_positions)

    def turned(self, query: Tensor) -> Tensor:
        """`query` ``[batch, kv_heads, group, tokens, head_dim]`` as it meets :attr:`attended_keys`."""
        self._asked = query
        return self.turn.asking(query, self._angles, self.active_positions)

    def unrotated(
        self, batch: slice = slice(None), heads: slice = slice(None), rows: slice = slice(None)
    ) -> Callable[[], Tensor] | None:
        """What gives some queries of this call as they were before they were rotated, where that is known."""
        if not self.turn.known:
            return None
        return partial(self.turn.bare, self._asked[batch, heads, :, rows], self._angles, batch, rows)

    def _active(self, state: Tensor) -> Tensor:
        return state if state.shape[2] == self.used else state[:, :, : self.used]

    def _field(self, name: str, part: Part | None = None) -> Tensor:
        """A slot field as far as slots are in use, or what of it belongs to `part`."""
        state, slots = self._fields[name], self.used if part is None else part.slots.stop
        if part is not None:
            state = state[part.batch, part.heads]
        entries = self._declared[name].entries(slots)
        return state if state.shape[2] == entries else state[:, :, :entries]

    def dot(self, query: Tensor) -> Tensor:
        """Products of `query` ``[batch, kv_heads, group, 1, head_dim]`` with all keys."""
        return dot(query, self.attended_keys)

    def mix(self, probs: Tensor) -> Tensor:
        """The mean of all values by `probs` ``[batch, kv_heads, group, 1, slots]``."""
        return mix(probs, self.active_values)

    def announce(self, angles: Any) -> None:
        """A call is coming, whose queries and keys the model rotates by `angles`: cos and sin."""
        self.expected = True
        self._angles = self.turn.given(angles)

    def _finish(self) -> None:
        """The call is over, and what was known for its time is forgotten."""
        self._angles = None
        self._asked = None

    def selected(self, query: Tensor) -> Tensor | None:
        """Slots that a decode step attends to, ``[batch, kv_heads, 1 or group, n]``, -1 for none; ``None`` is all.

        `query` is ``[batch, kv_heads, group, head_dim]``.
        """
        self._attended = None
        return self.policy.select(self.view(), query) if self._selects and self.decoding else None

    def taken(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions of `slots` ``[batch, kv_heads, choices, n]``.

        They are ``[batch, kv_heads * choices, n, head_dim]`` and ``[batch, kv_heads * choices, n]``; a position is -1
        where a slot is -1 or empty.
        """
        batch, heads, choices, _ = slots.shape
        first = torch.arange(batch * heads, device=slots.device).view(batch, heads, 1, 1) * self.keys.shape[2]
        rows = (slots.clamp(min=0) + first).flatten()

        def of(state: Tensor) -> Tensor:
            found = state.flatten(0, 2).index_select(0, rows)
            return found.view(batch, heads * choices, slots.shape[-1], *state.shape[3:])

        positions = of(self._positions).masked_fill(slots.flatten(1, 2) < 0, EMPTY)
        self._attended = positions.unflatten(1, (heads, choices))
        return of(self.keys), of(self.values), positions

    def check_finished(self) -> None:
        """Raise if the last call did not come to its end in our attention function."""
        if self.arrived or self.expected:
            raise NotAttachedError(
                f"the last call of this cache did not finish in layer {self.index}: it raised an error, or the model's "
                "attention implementation was changed after attaching. Start over with cache.reset(), or with "
                "kvpolicy.detach(model) and a new cache"
            )

    def answer(self, query: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
        """Place the new tokens, attend, and evict: all that follows when a call has appended.

        `query` is ``[batch, query_heads, tokens, head_dim]``, the result ``[..., value_dim]``.
        """
        self.place(mask)
        output = attend(self, query, scoring)
        self.evict(query.shape[2])
        self._finish()
        return output

    def place(self, mask: Tensor | None) -> None:
        """Number the new tokens. `mask` ``[batch, tokens]`` marks the real ones; ``None`` means all are."""
        tokens, self.arrived = self.arrived, 0
        self.padded = mask is not None
        self.holes, self.uneven = self.holes or self.padded, self.uneven or self.padded
        self.is_causal = self.used == tokens and not self.padded
        if mask is not None:
            real = mask[:, None].to(self.device, torch.int32)
            numbers = torch.where(real > 0, self.seen + real.cumsum(-1, dtype=torch.int32) - 1, EMPTY)
            added: Tensor | int = real.sum(-1, keepdim=True, dtype=torch.int32)
        else:
            numbers = (
                self.seen if tokens == 1 else self.seen + torch.arange(tokens, dtype=torch.int32, device=self.device)
            )
            added = tokens
        spread = numbers.expand(-1, self._positions.shape[1], -1)
        if self.free is not None:
            self._positions.scatter_(2, self.free, spread)
        else:
            self._positions[:, :, self.used - tokens : self.used] = spread
        self.seen += added
        self._numbers = None if numbers is self.seen else numbers
        self._columns_tensor += tokens
        if torch.compiler.is_compiling():
            self._columns = None  # counted on the device; a Python integer in the graph would recompile every step
        elif self._columns is not None:
            self._columns += tokens
        if not self.held and self._unsettled:
            self._resolve()
        if self.cascade is not None and not self.decoding:
            self.cascade.begin(self)

    @property
    def query_positions(self) -> Tensor:
        """Logical positions of the call's queries, ``[batch, 1, tokens, 1]``; -1 is padding."""
        return (self.seen - 1 if self._numbers is None else self._numbers).unsqueeze(-1)

    @property
    def most_prefix(self) -> int:
        """The most first tokens that some row of the batch is to keep."""
        return int(self._prefix.max())

    @property
    def _unsettled(self) -> bool:
        return self.budget is not None and (self.limit is None or self.budget.budget.grows)

    def _resolve(self) -> None:
        """Fix the budget now that the prompt is known. Each row has its own prompt, hence its own share."""
        assert self.budget is not None
        if self.budget.constant or not self.uneven:
            rows = [self.budget.resolve(self.get_seq_length())]
        else:
            rows = [self.budget.resolve(tokens) for tokens in self.seen.flatten().tolist()]
        if self.limit is None:  # a budget that grows holds later what it holds now
            self.policy.check(min(rows), self.most_prefix)
        if (storage := self.policy.storage) is not None:
            assert self.keys is not None
            size = self.keys.shape[-1], self.keys.element_size(), self._beside()
            rows = [storage.tokens(tokens, *size) for tokens in rows]
        self.limit_to(rows)
        self.average = self.limit if self.limits is None else self.limits

    def _beside(self) -> int:
        """Bytes of a slot beside its key and value."""
        states = (self._positions, *self._fields.values())
        return sum(state.element_size() * math.prod(state.shape[3:]) for state in states)

    def limit_to(self, rows: Sequence[int]) -> None:
        """Have each row hold as many tokens as `rows` says: one number for each, or one for all."""
        self.limit = max(rows)
        self.limits = None if min(rows) == self.limit else self.seen.new_tensor(rows).view(-1, 1, 1)
        self.holes = self.holes or self.limits is not None

    def observe(self, rows: AttentionRows | None, part: Part | None = None) -> None:
        """Let the policy update its fields from a block of rows, of all slots or of some `part`."""
        if self.rehearsal is not None and not self._takes_part:
            return
        if not (self._observes or self.observers or self.measured):
            return
        view = self.view(rows, part)
        if self.measured and self.cascade is not None:
            self.cascade.observe(self, self.view(rows, part), part)
            shown = as_if_alone(self.view(rows, part), self.policy.wants)
        else:
            shown = view
        for name, state in self.policy.observe(shown).items() if shown is not None else ():
            if isinstance(state, Changed):
                state.put_into(view[name])
            elif state is not view[name]:
                view[name].copy_(state)
        for observer in self.observers:
            observer.observed(self.index, view)

    def view(self, rows: AttentionRows | None = None, part: Part | None = None) -> View:
        """What the policy is shown of the slots in use."""
        take = self._active if part is None else part.of
        return View(
            fields={name: self._field(name, part) for name in self._fields},
            positions=take(self._positions),
            seen=self.seen if part is None else self.seen[part.batch],
            budget=self._budget(part),
            keys=lambda: self.active_keys if part is None else part.of(self.keys),
            values=lambda: self.active_values if part is None else part.of(self.values),
            layer=self.index,
            attention=rows,
            offsets=(0, 0) if part is None else (part.batch.start, part.heads.start),
            holes=self.holes,
            decoding=self.decoding,
            prefix=self._of(part, self.prefix),
            turn=self.turn,
            heads=self.heads if part is None else {name: state[part[:2]] for name, state in self.heads.items()},
            output=None if self._output is None else lambda: self._output_of_heads(part),
            most=UNBOUNDED if self.limit is None else self.limit,
            rehearsal=self.rehearsal if part is None or self.rehearsal is None else self.rehearsal.of(part.batch),
        )

    def _output_of_heads(self, part: Part | None) -> Tensor:
        assert self._output is not None
        weight = self._output()
        by_head = weight.view(weight.shape[0], self.kv_heads, -1, self.values.shape[-1]).permute(1, 2, 0, 3)
        return by_head if part is None else by_head[part.heads]

    def _budget(self, part: Part | None) -> int | Tensor:
        if self.limits is not None:
            return self._of(part, self.limits)
        return UNBOUNDED if self.limit is None else self.limit

    @staticmethod
    def _of(part: Part | None, rows: Any) -> Any:
        """What of a number for each row, ``[batch, 1, 1]``, belongs to `part`."""
        return rows[part.batch] if part is not None and isinstance(rows, Tensor) else rows

    def evict(self, tokens: int) -> None:
        """End a call of `tokens` tokens: cut to the budget, or choose the next victim."""
        if self.held:
            if not self.decoding and self.rehearsal is None:
                self._allocate(self.used)
            return
        if self.measured and self.cascade is not None:
            self.cascade.settle(self)
        room = self._rooms[self.decoding or self._rehearsed]
        if self.free is not None:
            self._choose_victim()
        elif not self.bounded:
            if not self._selects:
                self._refuse_to_exceed(self.used)
        elif self.limit is not None and (self.used > self.limit + room or self._rows_differ(room)):
            if self.decoding and self.used == self.limit + 1:
                self._choose_victim()
            else:
                self._cut()
            return
        if not self.decoding:
            self._allocate(self.used)

    def cut_again(self, before: int) -> None:
        """Cut to a budget that has fallen since this call ended with `before` slots in use and was cut to another."""
        if self.free is not None:
            self.used, self.free = self.used - 1, None
        room = self._rooms[self.decoding]
        if self.limit is not None and (before > self.limit + room or self._rows_differ(room)):
            self._cut()

    # -- being held ----------------------------------------------------------------------------------------

    def begin(self, rehearsal: Rehearsal) -> None:
        """The next calls are part of a pass over the context."""
        asked = [policy for policy in self.policy.rehearsing() if policy == rehearsal.by]
        self.rehearsal, self._takes_part = rehearsal.on(self.device), bool(asked)
        self.wants = Wants.of(asked[0].rehearsal_needs if asked else ())

    def end(self, columns: int) -> None:
        """That was it: hold what was held when `columns` had been seen."""
        self.rehearsal, self.wants, self._rehearsed = None, self.policy.wants, True
        self._forget(int(self._columns_tensor) - columns)

    def _forget(self, tokens: int) -> None:
        """Drop the newest columns; nothing has been evicted since they came."""
        newest = self._positions[:, :1, self.used - tokens : self.used]
        self.seen -= (newest >= 0).sum(-1, keepdim=True, dtype=torch.int32)
        self._columns_tensor -= tokens
        self._columns = None if self._columns is None else self._columns - tokens
        self.used -= tokens
        self.keys, self.values = self.active_keys, self.active_values
        self._grow_state(self.used)  # without what the policy noted about them

    def settle(self) -> None:
        """Fix the budget for what was read while held."""
        self.held, self.decoding = False, False
        if self._unsettled:
            self._resolve()

    def release(self) -> None:
        """Cut what was held, as a prompt is cut."""
        rehearsed, self._rehearsed = self._rehearsed, False
        self.evict(self.used)
        self._rehearsed = rehearsed

    def _rows_differ(self, room: float) -> bool:
        return self.limits is not None and not self.decoding and room < math.inf

    def _refuse_to_exceed(self, held: int) -> None:
        """`held` is what a head may hold, counted without asking the device."""
        if self.limit is not None and held > self.limit and (most := int(self.kept().max())) > self.limit:
            raise BudgetError(
                f"{self.policy.kind} evicts nothing and {most} tokens do not fit its budget of {self.limit}; "
                "leave the budget out, or choose a policy that evicts"
            )

    def _choose_victim(self) -> None:
        if self.free is not None and self.limit is not None and self.limit >= self.used:
            self._grow(self.limit + 1)
            if self.limits is None:
                self.free.fill_(self.used - 1)
                return
        victim = lowest(self.policy, self.view())
        self._tell(victim)
        self._positions.scatter_(2, victim, EMPTY)
        if self.free is None:
            self.free = victim
        else:
            self.free.copy_(victim)  # in place: its address is part of a captured graph

    def _grow(self, slots: int) -> None:
        """Have `slots` slots in use, the new ones empty: the budget has risen."""
        if slots > self.keys.shape[2]:
            self._allocate(slots)
        self.holes = self.holes or slots > self.used + 1
        self.used = slots

    def _cut(self) -> None:
        """Keep what fits, in order of position, in new storage with space for the tokens to come."""
        assert self.limit is not None
        count = min(self.limit, self.used)
        view = self.view()
        order, positions = survivors(self.policy.ranking(view), view, count)
        if self.observers:
            self._tell_cut(positions)
        room = self._rooms[True]
        slots = self.limit + (int(room) + 1 if room < math.inf else GROWTH)
        padded = F.pad(order, (0, slots - count))
        self.keys, self.values = gathered(self.keys, padded), gathered(self.values, padded)
        self._fields = {
            name: grown(gathered(self._fields[name], order), slots, field.fill)
            for name, field in self._declared.items()
        }
        self._positions = grown(positions, slots, EMPTY)
        if room:
            self.used = count
        else:
            self.used = self.limit + 1
            self.free = torch.full_like(order[..., :1], self.limit)

    def _tell(self, victim: Tensor) -> None:
        if self.observers:
            gone = self.active_positions.gather(-1, victim)
            for observer in self.observers:
                observer.evicted(self.index, gone)

    def _tell_cut(self, kept: Tensor) -> None:
        before = self.active_positions
        gone = torch.where((before.unsqueeze(-1) == kept.unsqueeze(-2)).any(-1), EMPTY, before)
        most = int((gone >= 0).sum(-1).max())
        for observer in self.observers:
            observer.evicted(self.index, gone.sort(dim=-1, descending=True).values[..., :most])

    def _allocate(self, least: int) -> None:
        """Move what is held to storage of its own with room for `least` slots and some more."""
        capacity = -(-least // GROWTH) * GROWTH
        room = self._rooms[True]
        if self.limit is not None and room < math.inf and not (self.budget and self.budget.budget.grows):
            capacity = max(least, min(capacity, self.limit + 1 + int(room)))
        self.keys = grown(self.active_keys, capacity, 0)
        self.values = grown(self.active_values, capacity, 0)
        self._grow_state(capacity)

    def _grow_state(self, slots: int) -> None:
        """Give positions and slot fields `slots` slots, those beyond the used ones empty."""
        self._positions = grown(self.active_positions, slots, EMPTY)
        self._fields = {
            name: grown(self._field(name), field.entries(slots), field.fill) for name, field in self._declared.items()
        }

    # -- what users ask ------------------------------------------------------------------------------------

    def kept(self) -> Tensor:
        if not self.is_initialized:
            return torch.zeros((0, 0), dtype=torch.int64)
        return (self.active_positions >= 0).sum(-1)

    def _in_order(self) -> Tensor:
        most = int(self.kept().max())
        return self.active_positions.argsort(dim=-1, stable=True)[..., self.used - most :]

    def kept_positions(self) -> Tensor:
        if not self.is_initialized:
            return torch.zeros((0, 0, 0), dtype=torch.int64)
        return self.active_positions.gather(-1, self._in_order()).long()

    def kept_fields(self) -> dict[str, Tensor]:
        if not self.is_initialized:
            return {}
        order = self._in_order()
        return {
            name: gathered(self._field(name), order) if field.every == 1 else self._field(name)
            for name, field in self._declared.items()
        }

    def attended_positions(self) -> Tensor:
        if self._attended is None:
            return self.kept_positions().unsqueeze(2)
        return self._attended.sort(-1).values.long()

    def nbytes(self) -> int:
        if not self.is_initialized:
            return 0
        held = [self.keys, self.values, self._positions, self.seen, *self._fields.values(), self.free, self.limits]
        if isinstance(self.average, Tensor) and self.average is not self.limits:
            held.append(self.average)
        held += self.heads.values()
        return sum(int(state.untyped_storage().nbytes()) for state in held if state is not None)


def grown(state: Tensor, slots: int, fill: float) -> Tensor:
    """A copy of `state` ``[batch, kv_heads, n, ...]`` with `slots` slots, the new ones filled."""
    grown = state.new_full((*state.shape[:2], slots, *state.shape[3:]), fill)
    grown[:, :, : state.shape[2]] = state
    return grown


def gathered(state: Tensor, order: Tensor) -> Tensor:
    """The slots of `state` ``[batch, kv_heads, slots, ...]`` in `order` ``[batch, kv_heads, n]``, as a copy."""
    index = order.view(*order.shape, *(1 for _ in state.shape[3:])).expand(*order.shape, *state.shape[3:])
    return state.gather(2, index)
