"""The contract: what an eviction policy declares, and the view of one layer that it is given.

The order of one call is always the same: **append** the new tokens, **attend** (they see themselves),
**observe**, **evict** down to the budget. A policy takes part in the last two and never touches storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, SerializationInfo, WithJsonSchema

from kvpolicy.budget import portion
from kvpolicy.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from typing_extensions import Self

    from kvpolicy.attention.blocks import Wants
    from kvpolicy.attention.rows import AttentionRows
    from kvpolicy.compose import Part, Union
    from kvpolicy.rehearsal import Passage, Rehearsal
    from kvpolicy.rotation import Rotation, Turn
    from kvpolicy.storage import Storage


_F = TypeVar("_F", bound="_Field")


@dataclass(frozen=True)
class Need:
    """A statistic that attention must hand out; what is not asked for costs nothing.

    ``rows`` limits it to the last rows (queries) of each call; ``None`` means all of them.
    """

    name: str
    rows: int | None = None

    ATTENTION_SUM: ClassVar[Need]
    """Column sums of the probabilities: ``view.attention.sum()``."""
    ATTENTION_ROWS: ClassVar[Need]
    """Every row of probabilities, in blocks: ``view.attention.rows()``."""
    ATTENTION_LAST: ClassVar[Need]
    """The last row of each call: ``view.attention.last()``."""
    LOGITS: ClassVar[Need]
    """Every row before the softmax, in blocks: ``view.attention.logits()``."""
    QUERIES: ClassVar[Need]
    """The query vectors: ``view.attention.queries()``; in blocks where other rows are asked for, else all at once."""
    ROTATION: ClassVar[Need]
    """How the model rotates: ``view.rotation`` and, with QUERIES, ``view.attention.queries(rotated=False)``."""
    OUTPUT: ClassVar[Need]
    """The weights of the layer's output projection, ``view.output``. Attention has nothing to do for it."""

    @classmethod
    def window(cls, rows: int) -> Need:
        """The last `rows` rows of each call, as one block (SnapKV's observation window)."""
        return cls("attention_rows", rows)


Need.ATTENTION_SUM = Need("attention_sum")
Need.ATTENTION_ROWS = Need("attention_rows")
Need.ATTENTION_LAST = Need("attention_rows", 1)
Need.LOGITS = Need("logits")
Need.QUERIES = Need("queries")
Need.ROTATION = Need("rotation", 0)
Need.OUTPUT = Need("output", 0)


Size = int | Literal["head_dim", "value_dim", "group"]
"""A number, or one that the model decides: the length of keys or values, or how many query heads share a KV head."""


@dataclass
class _Field:
    """What state is made of.

    `dtype` is a torch dtype's name, and ``float32`` becomes ``float64`` in a float64 model; or ``"model"``, that of
    keys and values.
    """

    fill: float = 0.0
    dtype: str = "float32"
    shape: tuple[Size, ...] = ()
    name: str = field(default="", compare=False)
    noun: ClassVar[str] = "field"

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers, by the `sizes` of a model."""
        return tuple(size if isinstance(size, int) else sizes[size] for size in self.shape)


@dataclass
class SlotField(_Field):
    """State a policy keeps for every slot: ``[batch, kv_heads, slots, *shape]``.

    The cache allocates it, fills it for new tokens, and moves it with its token on eviction, reordering,
    offloading and saving. A policy that evicts nothing may have one entry for `every` so many tokens, ``[batch,
    kv_heads, entries, *shape]``: the first is of a row's positions 0 to ``every - 1``.
    """

    every: int = 1
    noun: ClassVar[str] = "slot field"

    def entries(self, slots: int) -> int:
        """How many entries there are for so many slots."""
        return -(-slots // self.every)


@dataclass
class HeadField(_Field):
    """State a policy keeps for every row and KV head, whatever tokens are held: ``[batch, kv_heads, *shape]``.

    The cache allocates it, fills it at the start, and moves it with its row. Declared and read like a slot field.
    """

    noun: ClassVar[str] = "head field"


def _fields_of(policy: type, kind: type[_F]) -> dict[str, _F]:
    """The fields of that kind which a class of policies declares, base classes first."""
    found: dict[str, _F] = {}
    for base in reversed(policy.__mro__):
        found.update({name: of for name, of in vars(base).items() if isinstance(of, kind)})
    return found


@dataclass(frozen=True)
class Changed:
    """New values of some entries of a slot field, the others as they were: what ``observe`` may return of it."""

    entries: Tensor
    """Which, ``[batch, kv_heads, n]``, each once; slots, where a field has an entry for each."""
    values: Tensor
    """``[batch, kv_heads, n, *shape]``."""

    def put_into(self, state: Tensor) -> None:
        """Write them to `state` ``[batch, kv_heads, entries, *shape]``."""
        index = self.entries.view(*self.entries.shape, *(1 for _ in state.shape[3:]))
        state.scatter_(2, index.expand(*self.entries.shape, *state.shape[3:]), self.values.to(state.dtype))


def _share(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("needs a number of tokens (4) or a share of the budget (0.5)")
    if value < 0 or (isinstance(value, float) and value > 1):
        raise ValueError("needs a number of tokens >= 0 (4) or a share of the budget from 0.0 to 1.0 (0.5)")
    return value


_TokensOrPart = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)]
Share = Annotated[int | float, BeforeValidator(_share, json_schema_input_type=_TokensOrPart)]
"""A number of tokens (``int``) or a share of the budget (``float``, 0.0 to 1.0). ``1`` is one token, ``1.0`` is all.

A share of the budget is rounded half up, and a positive share is at least one token.
"""

Tokens = Annotated[int, Field(ge=0, strict=True)]
"""A number of tokens."""


def share_of(amount: int | float, budget: Any) -> Any:
    """Resolve a :data:`Share` against `budget` (an ``int``, or a tensor of budgets), never above it."""
    if isinstance(amount, int):
        return min(amount, budget) if isinstance(budget, int) else budget.clamp(max=amount)
    least = 1 if amount > 0 else 0
    resolved = portion(amount, budget)
    return min(max(resolved, least), budget) if isinstance(budget, int) else resolved.clamp(min=least).minimum(budget)


class View:
    """What a policy sees of one layer. Shapes are ``[batch, kv_heads, slots]`` unless stated.

    Slots are in no particular order: read age from `positions`, never from the slot index. During a long
    prompt `observe` is given slices of batch, heads and slots; it must be elementwise over the first two.
    """

    __slots__ = (
        "_fields", "_heads", "_keys", "_offsets", "_output", "_scope", "_turn", "_values", "attention", "budget",
        "candidates", "decoding", "dividing", "holes", "layer", "most", "positions", "prefix", "rehearsal",
        "seen",
    )  # fmt: skip

    def __init__(
        self,
        fields: Mapping[str, Tensor],
        positions: Tensor,
        seen: Tensor,
        budget: int | Tensor,
        keys: Tensor | Callable[[], Tensor],
        values: Tensor | Callable[[], Tensor],
        layer: int = 0,
        attention: AttentionRows | None = None,
        offsets: tuple[int, int] = (0, 0),
        holes: bool = True,
        decoding: bool = False,
        prefix: int | Tensor = 0,
        turn: Turn | None = None,
        heads: Mapping[str, Tensor] | None = None,
        output: Callable[[], Tensor] | None = None,
        dividing: bool = False,
        most: int | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._fields = fields
        self._heads = {} if heads is None else heads
        self._turn = turn
        self._scope = ""
        self._offsets = offsets
        self._keys = keys
        self._values = values
        self._output = output
        self.holes = holes
        """Whether slots may be empty. Where not, the framework saves looking."""
        self.positions = positions
        """Logical position of each slot's token: 0 is the row's first real one, padding not counted; -1 is empty."""
        self.seen = seen
        """Real tokens seen so far, those of this call included, ``[batch, 1, 1]``."""
        self.budget = budget
        """How many tokens may remain: an ``int``, or a tensor ``[batch, 1 or kv_heads, 1]`` where rows or heads differ.

        A part of a composition is shown its own part of the budget.
        """
        self.most = budget if most is None and isinstance(budget, int) else most
        """The largest budget of the batch, a number even where rows differ."""
        self.candidates: Tensor | None = None
        """Slots that a part of a composition has to choose from; ``None`` is all of them."""
        self.layer = layer
        """Index of the layer."""
        self.attention: Any = attention
        """The rows of attention being observed (:class:`~kvpolicy.attention.rows.AttentionRows`), if asked for."""
        self.decoding = decoding
        """Whether the call brings one token to a cache that holds some: a decode step, rather than prefill."""
        self.prefix = prefix
        """How many first tokens the user of the cache wants kept: an ``int``, or a tensor ``[batch, 1, 1]``."""
        self.dividing = dividing
        """Whether a ranking is asked for to divide a budget over the heads, whose tokens it compares: then a score
        says more than who would stay if all heads had the same."""
        self.rehearsal = rehearsal
        """What the call is about, where it is part of a pass the policy asked for; ``None`` in ordinary calls."""

    @property
    def keys(self) -> Tensor:
        """``[batch, kv_heads, slots, head_dim]``, as held: rotated where the model rotates, unless they are rolled."""
        return self._keys() if callable(self._keys) else self._keys

    @property
    def values(self) -> Tensor:
        """``[batch, kv_heads, slots, value_dim]``."""
        return self._values() if callable(self._values) else self._values

    @property
    def rotation(self) -> Rotation | None:
        """How the model rotates queries and keys in this layer; ``None``: it does not. Needs ``Need.ROTATION``."""
        if self._turn is None:
            return None
        if not self._turn.known:
            raise RuntimeError("view.rotation was not asked for: add Need.ROTATION to the policy's `needs`")
        return self._turn.rotation

    def rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Some :attr:`keys`, of tokens at `positions`, as the model rotated them. Needs ``Need.ROTATION``.

        They are what they are, unless positions are rolled; then they are rotated anew.
        """
        rotation = self.rotation
        if rotation is None or self._turn is None or not self._turn.rolls:
            return keys
        return rotation.turned(keys, rotation.at(positions.clamp(min=0), keys.dtype))

    @property
    def output(self) -> Tensor:
        """What the layer's output projection makes of each head's values, ``[kv_heads, group, hidden, value_dim]``.

        Needs ``Need.OUTPUT``.
        """
        if self._output is None:
            raise RuntimeError("view.output is not there: add Need.OUTPUT to the policy's `needs`")
        return self._output()

    def part(self, name: str, budget: Any = None, candidates: Tensor | None = None) -> View:
        """The view for the part `name` of a composition: its own slot fields, its budget, what it may choose from."""
        part = View(
            self._fields, self.positions, self.seen, self.budget if budget is None else budget, self._keys,
            self._values, self.layer, self.attention, self._offsets, self.holes, self.decoding, self.prefix,
            self._turn, self._heads,
            self._output, self.dividing, self.most, self.rehearsal,
        )  # fmt: skip
        part._scope = f"{self._scope}{name}."
        part.candidates = self.candidates if candidates is None else candidates
        return part

    @property
    def eligible(self) -> Tensor:
        """Slots to choose from: the candidates, or all that hold a token."""
        return self.valid if self.candidates is None else self.candidates

    @property
    def valid(self) -> Tensor:
        """Which slots hold a token."""
        return self.positions >= 0

    def without(self, slots: Tensor) -> Tensor:
        """The slots to choose from that are not among `slots`."""
        return ~slots if self.candidates is None and not self.holes else self.eligible & ~slots

    def __getitem__(self, name: str) -> Tensor:
        """The slot field or head field `name`, as `observe` last left it."""
        name = self._scope + name
        return self._heads[name] if name in self._heads else self._fields[name]

    def tokens(self, amount: int | float) -> Any:
        """A :data:`Share` in tokens, resolved against the budget and never above it."""
        return share_of(amount, self.budget)

    def is_recent(self, amount: int | float) -> Tensor:
        """The last `amount` tokens seen; the newest counts as one of them."""
        return self.positions >= self.seen - self.tokens(amount)

    def is_sink(self, amount: int | float) -> Tensor:
        """The first `amount` real tokens of the row."""
        return self.positions < self.tokens(amount)

    def protect(self, sinks: int | float = 0, recent: int | float = 0) -> Tensor:
        """Sinks and recents together, made to fit the budget: the newest token first, then sinks, then recents."""
        if not sinks:
            return self.is_recent(recent)
        n, r = self.tokens(sinks), self.tokens(recent)
        if isinstance(self.budget, int):
            n = min(n, self.budget - min(r, 1))
            r = min(r, self.budget - n)
        else:
            n = n.minimum(self.budget - r.clamp(max=1))
            r = r.minimum(self.budget - n)
        return (self.positions < n) | (self.positions >= self.seen - r)

    def uniform(self, seed: int, *, fresh: bool = False, rows: bool = True) -> Tensor:
        """Numbers in [0, 1) that depend only on seed, layer, head, position and (where `rows`) the batch row.

        With `fresh` they also depend on the tokens seen, so every step draws anew. No generator is involved:
        the global random state is neither read nor written, and every device draws the same.
        """
        from kvpolicy.draw import uniform

        batch, heads = self.positions.shape[:2]
        row, head = self._offsets
        device = self.positions.device
        lanes: list[Tensor | int] = [self.layer, torch.arange(head, head + heads, device=device).view(1, -1, 1)]
        if rows:
            lanes.append(torch.arange(row, row + batch, device=device).view(-1, 1, 1))
        lanes.append(self.positions)
        if fresh:
            lanes.append(self.seen)
        return uniform(seed, *lanes)


def as_if_alone(view: View, wants: Wants) -> View | None:
    """`view` as one who wants `wants` would be shown it without others, or ``None`` where it would not be.

    Others may make attention hand out more, and more often. The view is changed.
    """
    rows = view.attention
    if rows is None or wants.total or wants.blocks or wants.queries:
        return view
    if not rows.final:
        return None
    view.attention = rows.latest(wants.window) if wants.window else None
    return view


class EvictionPolicy(BaseModel):
    """A policy *is* its configuration: frozen, stateless, shared freely by layers, caches, models and threads.

    Subclasses declare a literal ``kind``, options as pydantic fields, slot fields and needs, and override what
    they must of :meth:`observe`, :meth:`protected` and :meth:`priority`. All three are pure.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        ignored_types=(SlotField, HeadField, set, frozenset),
    )

    needs: ClassVar[Collection[Need]] = frozenset()
    """Statistics attention must hand out. A property may override it where they depend on the options."""
    demands: ClassVar[tuple[str, ...]] = ("sinks", "recent")
    """Options that protect tokens. Where a user sets one to a number of tokens, the budget must hold it."""
    bounded: ClassVar[bool] = True
    """Whether the policy evicts at all; without a bound no budget is needed."""
    selects: ClassVar[bool] = False
    """Whether :meth:`select` chooses what a decode step attends to. Then the budget is of that, and if the policy is
    not `bounded` everything is kept."""
    selective: ClassVar[bool] = False
    """Whether it may want less than it is allowed: slots ranked as low as can be are not wanted."""
    together: ClassVar[bool] = False
    """Whether the budget belongs to all layers and KV heads together: after a :meth:`rehearsal` the best of all of them
    stay, and heads hold different numbers."""
    divided: ClassVar[bool] = False
    """Whether :meth:`shares` says how many tokens each KV head may hold."""
    own_budget: ClassVar[int | None] = None
    """Tokens to which it keeps a head, whatever the budget of the cache; ``None``: that budget says."""
    rehearsal_needs: ClassVar[Collection[Need]] = frozenset()
    """Statistics attention must hand out in a :meth:`rehearsal`; :attr:`needs` are for ordinary calls."""

    kind: str

    def slot_fields(self) -> dict[str, SlotField]:
        """The declared slot fields by name, base classes first."""
        return _fields_of(type(self), SlotField)

    def head_fields(self) -> dict[str, HeadField]:
        """The declared head fields by name, base classes first."""
        return _fields_of(type(self), HeadField)

    @property
    def rolled(self) -> bool:
        """Whether it is meant for rolled positions: ``EvictionCache(positions="rolled")`` if not said otherwise."""
        return False

    @property
    def budgeted(self) -> bool:
        """Whether it has a use for a budget."""
        return self.bounded or self.selects

    @property
    def observes(self) -> bool:
        """Whether :meth:`observe` does anything."""
        return type(self).observe is not EvictionPolicy.observe

    def __eq__(self, other: object) -> bool:
        # One token (1) and the whole budget (1.0) are equal numbers and different policies.
        if not isinstance(other, EvictionPolicy) or type(self) is not type(other):
            return NotImplemented
        return self.model_dump_json() == other.model_dump_json()

    def __hash__(self) -> int:
        return hash((type(self), self.model_dump_json()))

    def required(self) -> int:
        """Tokens that options set by the user promise to protect. Defaults and shares yield to a small budget."""
        promised = (getattr(self, name, None) for name in self.demands if name in self.model_fields_set)
        return sum(amount for amount in promised if isinstance(amount, int))

    def check(self, budget: int, prefix: int = 0) -> None:
        """Raise :class:`~kvpolicy.errors.BudgetError` where `budget` tokens cannot hold what was promised.

        `prefix` is the number of first tokens that the user of the cache wants kept.
        """
        if (required := self.required()) > budget:
            named = " + ".join(
                f"{name}={getattr(self, name)}"
                for name in self.demands
                if name in self.model_fields_set and isinstance(getattr(self, name, None), int)
            )
            raise BudgetError(
                f"{self.kind}: a budget of {budget} tokens cannot hold the {required} it must protect"
                f"{f' ({named})' if named else ''}; raise the budget, or lower them or give them as shares (0.5)"
            )

    # -- what compositions change --------------------------------------------------------------------------

    def for_layer(self, layer: int, layers: int) -> EvictionPolicy:
        """The policy for one of `layers` layers: this one, unless a part of it differs by layer."""
        return self

    @cached_property
    def wants(self) -> Wants:
        """The needs, taken together."""
        from kvpolicy.attention.blocks import Wants

        return Wants.of(self.needs)

    @property
    def storage(self) -> Storage | None:
        """How a layer stores what it keeps; ``None`` is as it comes, in full."""
        return None

    def room(self, decoding: bool) -> float:
        """Tokens beyond the budget that may be held before anything is evicted, in prefill or while decoding."""
        return 0 if self.bounded else math.inf

    def children(self) -> Iterator[tuple[str, EvictionPolicy]]:
        """Names and policies of the parts of a composition."""
        yield from ()

    def shares(self, budget: Tensor, heads: int) -> Tensor:
        """Tokens that each of `heads` KV heads may hold, ``[batch, heads, 1]``, where these are :attr:`divided`.

        ``UNBOUNDED`` (of :mod:`kvpolicy.policy`) is for a head that evicts nothing.

        Args:
            budget: tokens that each head would have if all had the same, ``[batch, 1, 1]``.
        """
        return budget.expand(-1, heads, -1)

    # -- a pass over the context ---------------------------------------------------------------------------

    def rehearsal(self, context: Tensor, encode: Callable[[str], list[int]], prefix: int = 0) -> Iterable[Passage]:
        """What to feed once a prompt is read in full and before it is cut: a policy that overrides this has a pass.

        The tokens of each :class:`~kvpolicy.rehearsal.Passage` attend to the whole context, are shown to
        :meth:`observe` with ``view.rehearsal``, and are dropped again.

        Args:
            context: ids of a row's prompt, padding left out, ``[tokens]``.
            encode: from text to ids, nothing put before or after.
            prefix: how many first tokens of the row the user of the cache wants kept.
        """
        return ()

    @property
    def rehearses(self) -> bool:
        """Whether it has a pass of its own; that of a part is not meant."""
        return type(self).rehearsal is not EvictionPolicy.rehearsal

    def rehearsing(self) -> Iterator[EvictionPolicy]:
        """This policy and its parts, as far as they have a pass."""
        if self.rehearses:
            yield self
        for _, part in self.children():
            yield from part.rehearsing()

    # -- what a policy is told about a model -----------------------------------------------------------------

    @classmethod
    def profiled(cls, model: Any, tokenizer: Any, contexts: Iterable[Tensor]) -> Self:
        """A policy of this kind with options measured on `model` while it reads texts: a kind that overrides this has
        a profile, and ``kvpolicy profile`` writes it to a file.

        Called without gradients. What else it takes are keyword arguments with types and defaults: options of the
        command.

        Args:
            contexts: token ids, ``[tokens]`` each, on the model's device; to be gone through once.
        """
        raise NotImplementedError(f"{cls.__name__} must define profiled()")

    # -- parts of others -----------------------------------------------------------------------------------

    def certain(self, view: View) -> Tensor:
        """Slots that stay at a cut whatever attention finds. Nothing of the view is known yet but positions."""
        from kvpolicy.certain import certain

        return certain(self, view)

    def take(self, amount: int | float) -> Part:
        """This policy as a part of a union: so many tokens, or a share of what the token parts leave."""
        from kvpolicy.compose import Part

        return Part(take=amount, of=self)

    def __or__(self, other: EvictionPolicy | Part | Union) -> Union:
        """The union of both: each keeps its part of the budget."""
        from kvpolicy.compose import Union

        return Union.joined(self, other)

    # -- what a policy decides -----------------------------------------------------------------------------

    def observe(self, view: View) -> Mapping[str, Tensor | Changed]:
        """New values of fields after the queries in ``view.attention``: all of a field, or those :class:`Changed`.

        A long call is observed in several consecutive blocks of queries, a decode step is one row. Written as a
        running update, the outcome is the same either way.
        """
        return {}

    def select(self, view: View, query: Tensor) -> Tensor | None:
        """Slots that the query of a decode step attends to, int64 ``[batch, kv_heads, 1 or group, n]``.

        Each slot at most once, -1 where a head has fewer than `n`; ``None`` is all. `query` is ``[batch, kv_heads,
        group, head_dim]``, as the model rotated it, unscaled. Slot fields are as the step before left them: the newest
        token has not been observed yet, and its slot should be among those selected. Called where `selects` is true.
        """
        raise NotImplementedError(f"{type(self).__name__} must define select()")

    def protected(self, view: View) -> Tensor | None:
        """Mask of slots that must stay; by default the newest token. At most ``view.budget`` of them per head.

        ``None`` where nothing is protected.
        """
        return view.is_recent(1)

    def priority(self, view: View) -> Tensor | tuple[Tensor, ...]:
        """What each slot is worth; the lowest goes first. A tuple is compared in order, later entries break ties.

        Ties that remain are broken by keeping the lower position.
        """
        raise NotImplementedError(f"{type(self).__name__} must define priority()")

    def ranking(self, view: View) -> tuple[Tensor, ...]:
        """What decides who stays, most significant first: the priority, with the protected raised above all.

        The best ``view.budget`` slots stay; in which order they and the others come is of no consequence.
        Compositions override this in place of the two; a policy of one idea has no need to.
        """
        priority = self.priority(view)
        first, *rest = priority if isinstance(priority, tuple) else (priority,)
        protected = self.protected(view)
        return first if protected is None else torch.where(protected, extremes(first.dtype)[1], first), *rest


UNBOUNDED = 2**31 - 1
"""More tokens than any cache holds: the share of a head that evicts nothing."""


def extremes(dtype: torch.dtype) -> tuple[float, float]:
    """The least and the greatest value of a ranking of that type."""
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    info = torch.iinfo(dtype)
    return info.min + 1, info.max  # one to spare below, so that a position can be taken off


def _policy_from(value: Any) -> EvictionPolicy:
    from kvpolicy.config import policy_from

    return policy_from(value)


def _dumped(policy: EvictionPolicy, info: SerializationInfo) -> dict[str, Any]:
    unset, defaults = info.exclude_unset, info.exclude_defaults
    options = policy.model_dump(mode=info.mode, exclude_unset=unset, exclude_defaults=defaults)
    return {"kind": policy.kind, **options}


Policy = Annotated[
    EvictionPolicy,
    BeforeValidator(_policy_from),
    PlainSerializer(_dumped),
    WithJsonSchema({"$ref": "#/$defs/policy"}),
]
"""A field that holds a policy: given as an object, a kind or a mapping."""
