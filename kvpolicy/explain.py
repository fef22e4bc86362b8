"""What a policy, a budget and a model come to for a prompt of some length: every number, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from kvpolicy.budget import Budget, LayerBudget, layer_budgets
from kvpolicy.compose import Composite
from kvpolicy.compose.protect import with_prefix
from kvpolicy.config import read
from kvpolicy.errors import BudgetError, ConfigError
from kvpolicy.measured import least_tokens
from kvpolicy.policy import UNBOUNDED, EvictionPolicy, HeadField, Need, SlotField, View
from kvpolicy.pool import GROWTH
from kvpolicy.ragged import PAGE, heads_differ


@dataclass(frozen=True)
class Shape:
    """What of a model decides how much a cache takes."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    group: int = 1
    """Query heads of a KV head."""

    @classmethod
    def of(cls, config: Any, dtype: str | None = None) -> Shape:
        """The shape that a transformers config describes; `dtype` is another than the stored one."""
        text = config.get_text_config(decoder=True)
        try:
            heads = int(text.num_attention_heads)
            kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
            return cls(
                layers=int(text.num_hidden_layers),
                kv_heads=kv_heads,
                head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
                dtype=dtype or str(text.dtype or config.dtype or "float32").removeprefix("torch."),
                group=heads // kv_heads,
            )
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"the config of a {config.model_type} model does not say layers, heads and their size: {error}"
            ) from error

    @property
    def token(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return self.kv_heads * 2 * self.head_dim * _size(self.dtype)

    @property
    def sizes(self) -> dict[str, int]:
        """What fields may be shaped by."""
        return {"head_dim": self.head_dim, "value_dim": self.head_dim, "group": self.group}

    def bytes_of_field(self, field: SlotField | HeadField) -> int:
        """Bytes of a field in one slot (or in ``every`` so many), or in one head."""
        dtype = "float64" if (field.dtype, self.dtype) == ("float32", "float64") else field.dtype
        return math.prod(field.sized(self.sizes)) * _size(self.dtype if dtype == "model" else dtype)


def _size(dtype: str) -> int:
    return _dtype(dtype).itemsize


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, "float32" if name == "model" else name)
    return found


@dataclass(frozen=True)
class Part:
    """A policy in the tree of a composition, and how many tokens of a head it may keep."""

    name: str
    """Its name among the parts of the policy above it; empty at the top."""
    kind: str
    options: dict[str, Any]
    """Those that are not the defaults, without the policies inside."""
    tokens: int | None
    """``None``: it evicts nothing."""
    parts: tuple[Part, ...] = ()

    def walk(self, path: str = "") -> Iterator[tuple[str, Part]]:
        """This part and all below, with their paths."""
        path = ".".join(filter(None, (path, self.name)))
        yield path, self
        for part in self.parts:
            yield from part.walk(path)


@dataclass(frozen=True)
class Bytes:
    """What is allocated for a batch of one after the prompt."""

    keys_and_values: int
    slot_fields: int
    bookkeeping: int
    """Positions, the next free slot of each head, tokens seen."""
    head_fields: int = 0

    @property
    def total(self) -> int:
        return self.keys_and_values + self.slot_fields + self.bookkeeping + self.head_fields

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True)
class LayerNumbers:
    """The numbers of one layer."""

    tokens: int | None
    """What a KV head may keep, or the mean where the prompt decides; ``None``: nothing is evicted."""
    attends: int | None
    """What a decode step may attend to, where the policy selects that; ``None``: all that is kept."""
    least: int | None
    """What every head may keep for certain, where the prompt decides how much that is."""
    certain: tuple[tuple[int, int], ...]
    """Positions of the prompt that stay whatever attention finds, each ``(first, last)``."""
    tree: Part
    slots: int
    """What a head has space for after the prompt, the slot of the newcomer included."""
    bytes: Bytes


@dataclass(frozen=True)
class Explanation:
    """Everything that is settled before a model is loaded."""

    policy: EvictionPolicy
    shape: Shape
    prompt: int
    prefix: int
    budget: Budget | None
    average: int | None
    """The budget in tokens for this prompt."""
    layers: tuple[LayerNumbers, ...]
    needs: tuple[Need, ...]
    rehearsing: tuple[str, ...]
    """Kinds of the policies that choose by a pass over the prompt."""
    fields: dict[str, SlotField]
    """Slot fields of all layers by name."""
    head_fields: dict[str, HeadField]
    overshoot: float
    """Tokens beyond the budget that a head may hold while decoding; infinite where what is written stays."""

    def groups(self) -> Iterator[tuple[list[int], LayerNumbers]]:
        """Layers with the same numbers, wherever they are."""
        indices: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            indices.setdefault(repr(layer), []).append(index)
        for found in indices.values():
            yield found, self.layers[found[0]]

    @property
    def tokens(self) -> int:
        """Tokens held by one head of each layer together, once the prompt was cut."""
        return sum(min(self.prompt, self.prompt if layer.tokens is None else layer.tokens) for layer in self.layers)

    @property
    def bytes(self) -> Bytes:
        """Of all layers."""
        return sum((layer.bytes for layer in self.layers), Bytes(0, 0, 0))

    @property
    def full_bytes(self) -> int:
        """Bytes of the keys and values of the whole prompt."""
        return self.shape.layers * self.prompt * self.shape.token

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            "policy": self.policy.model_dump(mode="json"),
            "model": asdict(self.shape),
            "prompt_tokens": self.prompt,
            "prefix": self.prefix,
            "budget": None if self.budget is None else self.budget.model_dump(mode="json", exclude_none=True),
            "budget_tokens": self.average,
            "tokens": self.tokens,
            "layers": [{"layers": layers, **asdict(numbers)} for layers, numbers in self.groups()],
            "needs": [asdict(need) for need in self.needs],
            "rehearsing": list(self.rehearsing),
            "slot_fields": {
                name: {
                    "dtype": field.dtype,
                    "shape": field.shape,
                    "bytes": self.shape.bytes_of_field(field),
                    **({"every": field.every} if field.every > 1 else {}),
                }
                for name, field in self.fields.items()
            },
            "head_fields": {
                name: {"dtype": field.dtype, "shape": field.shape, "bytes": self.shape.bytes_of_field(field)}
                for name, field in self.head_fields.items()
            },
            "overshoot": None if self.overshoot == math.inf else self.overshoot,
            "bytes": {**asdict(self.bytes), "total": self.bytes.total, "full_cache": self.full_bytes},
        }


def explain(
    source: EvictionPolicy | str | PathLike[str] | Any,
    config: Any,
    prompt: int,
    *,
    budget: Any = None,
    prefix: int | None = None,
    dtype: str | None = None,
) -> Explanation:
    """What the policy `source` (an object, kind, mapping or file) does with a prompt of `prompt` tokens.

    Args:
        config: of the model, from transformers; the model itself is not needed.
        budget: as for :class:`~kvpolicy.EvictionCache`; by default that of the file.
        prefix: how many first tokens the user of the cache wants kept.
        dtype: of keys and values; by default as the config says.

    Raises:
        ConfigError, BudgetError: a cache of these would be refused; a layer is named where it is only one's fault.
    """
    found = read(source)
    policy, _ = with_prefix(found.policy, prefix)
    given = Budget.parse(budget) if budget is not None else found.budget
    if given is None and policy.budgeted:
        raise BudgetError(f"{policy.kind} needs a budget: --budget 512 (tokens) or --budget 0.25 (of the prompt)")
    shape, first = Shape.of(config, dtype), prefix or 0
    shares = layer_budgets(policy, given, shape.layers, first, None if given is None or given.grows else prompt)
    for own, its in shares:
        heads_differ(own, its, config.get_text_config(decoder=True))
    layers = [_Layer(own, its, shape, prompt, first, index).numbers() for index, (own, its) in enumerate(shares)]
    policies = [own for own, _ in shares]
    return Explanation(
        policy=policy,
        shape=shape,
        prompt=prompt,
        prefix=first,
        budget=given,
        average=None if given is None else given.resolve(prompt),
        layers=tuple(layers),
        needs=tuple(dict.fromkeys(need for needs in _needs(policies, given) for need in sorted(needs, key=str))),
        rehearsing=tuple(dict.fromkeys(own.kind for own in policy.rehearsing())),
        fields={name: field for own in policies for name, field in own.slot_fields().items()},
        head_fields={name: field for own in policies for name, field in own.head_fields().items()},
        overshoot=max((own.room(decoding=True) for own in policies if _evicts(own)), default=0),
    )


def _needs(policies: Iterable[EvictionPolicy], budget: Budget | None) -> Iterator[Collection[Need]]:
    yield from (policy.needs for policy in policies)
    if budget is not None and budget.measured is not None:
        yield budget.measured.needs


def _evicts(policy: EvictionPolicy) -> bool:
    return policy.bounded or policy.own_budget is not None


@dataclass(frozen=True)
class _Layer:
    """One layer, about to read the prompt."""

    policy: EvictionPolicy
    budget: LayerBudget | None
    shape: Shape
    prompt: int
    prefix: int
    index: int

    def numbers(self) -> LayerNumbers:
        tokens = self._tokens()
        slots = self._slots(tokens)
        floor = self._floor(tokens)
        stay = self._certain(tokens if floor is None else floor)
        return LayerNumbers(
            tokens=self._mean(tokens),
            attends=self.budget.resolve(self.prompt) if self.budget and self.policy.selects else None,
            least=self._least(tokens, stay) if floor is None else floor,
            certain=tuple(runs(stay[0, 0].nonzero().flatten().tolist())),
            tree=_tree("", self.policy, tokens, self.prefix),
            slots=slots,
            bytes=self._bytes(tokens, slots),
        )

    @property
    def _size(self) -> tuple[int, int]:
        """Numbers in a key, and bytes of a number."""
        return self.shape.head_dim, _size(self.shape.dtype)

    def _mean(self, tokens: int | None) -> int | None:
        """What heads may keep on average, where some evict nothing."""
        if tokens is None or not self.policy.divided:
            return tokens
        return round(float(self._shares(tokens, self.prompt).double().mean()))

    def _shares(self, tokens: int, most: int) -> Tensor:
        """What each head may hold, at most so many tokens, ``[kv_heads]``."""
        return self.policy.shares(torch.tensor([[[tokens]]]), self.shape.kv_heads).clamp(max=most).flatten()

    def _tokens(self) -> int | None:
        if self.budget is None:
            return None
        tokens = self.budget.resolve(self.prompt)
        if not _evicts(self.policy):
            if self.prompt > tokens and not self.policy.selects:
                raise BudgetError(
                    f"{self.policy.kind} evicts nothing and a prompt of {self.prompt} tokens does not fit its budget "
                    f"of {tokens}; leave the budget out, or choose a policy that evicts"
                )
            return None
        try:
            self.policy.check(tokens, self.prefix)
        except BudgetError as error:
            where = f"layer {self.index}: " if self.budget.budget.layers is not None else ""
            raise BudgetError(f"{where}{error}") from error
        if (storage := self.policy.storage) is None:
            return tokens
        fields = sum(self.shape.bytes_of_field(field) for field in self.policy.slot_fields().values())
        return storage.tokens(tokens, *self._size, _POSITION + fields)

    def _floor(self, tokens: int | None) -> int | None:
        """What a layer has at least, where layers are measured."""
        allocator = self.budget.budget.measured if self.budget is not None else None
        if allocator is None or tokens is None:
            return None
        return least_tokens(allocator, self.policy, tokens, self.prefix) if self.prompt > tokens else tokens

    def _cut(self, tokens: int | None) -> bool:
        """Whether the prompt is cut."""
        return tokens is not None and self.prompt > tokens + self.policy.room(decoding=False)

    def _certain(self, tokens: int | None) -> Tensor:
        """Tokens of the prompt that stay for certain, ``[1, 1, prompt]``."""
        if tokens is None or not self._cut(tokens):
            return torch.ones(1, 1, self.prompt, dtype=torch.bool)
        heads = self.shape.kv_heads if self.policy.divided else 1
        return self.policy.certain(self._view(tokens, heads)).all(1, keepdim=True).expand(1, 1, self.prompt)

    def _least(self, tokens: int | None, stay: Tensor) -> int | None:
        """What a head gets if, beside what stays for certain, all tokens of the others are worth more than its own."""
        if tokens is not None and self.policy.together:
            return max(1, int(stay.sum())) if self._cut(tokens) else tokens
        if tokens is not None and self.policy.divided:
            return int(self._shares(tokens, self.prompt).min())
        allocator = self.budget.budget.heads if self.budget is not None else None
        if allocator is None or tokens is None or not self._cut(tokens):
            return None if allocator is None else tokens
        heads = self.shape.kv_heads
        worth = torch.ones(1, heads, self.prompt)
        worth[:, -1] = 0
        worth = worth.masked_fill(stay, 2)
        return int(allocator.divide((worth,), self._view(tokens, heads), torch.tensor([[[tokens]]])).min())

    def _view(self, tokens: int, heads: int = 1) -> View:
        """The layer after the prompt, of which nothing is known but positions."""
        slots = (1, heads, self.prompt)
        nothing = torch.zeros(()).expand(*slots, self.shape.head_dim)
        fields = {
            name: torch.full((*slots, *field.sized(self.shape.sizes)), field.fill, dtype=_dtype(field.dtype))
            for name, field in self.policy.slot_fields().items()
        }
        positions = torch.arange(self.prompt, dtype=torch.int32).expand(slots)
        seen = torch.tensor([[[self.prompt]]], dtype=torch.int32)
        return View(fields, positions, seen, tokens, nothing, nothing, self.index, holes=False, prefix=self.prefix)

    def _held(self, tokens: int | None) -> int:
        """Tokens that a head holds after the prompt."""
        return tokens if tokens is not None and self._cut(tokens) else self.prompt

    def _most(self, tokens: int | None) -> float:
        """Tokens that a head may come to hold."""
        if tokens is None or (self.budget is not None and self.budget.budget.grows):
            return math.inf
        return max(tokens + self.policy.room(decoding=True), self._held(tokens))

    def _slots(self, tokens: int | None) -> int:
        if (storage := self.policy.storage) is not None:
            return storage.slots(self._held(tokens), self._most(tokens))
        steps = -(-self.prompt // GROWTH) * GROWTH
        if tokens is None or self.budget is None:
            return steps
        room = self.policy.room(decoding=True)
        most = UNBOUNDED if room == math.inf else tokens + int(room) + 1
        if self._cut(tokens) and self.policy.divided:
            shares = self._shares(tokens, self.prompt + GROWTH - 1)  # pages of heads that differ, on average
            return round(float((-(-(shares + 1) // PAGE) * PAGE).double().mean()))
        if self._cut(tokens):
            return tokens + GROWTH if room == math.inf else most
        return max(self.prompt, steps if self.budget.budget.grows else min(steps, most))

    def _bytes(self, tokens: int | None, slots: int) -> Bytes:
        heads, storage = self.shape.kv_heads, self.policy.storage
        if storage is None:
            keys_and_values = slots * self.shape.token
            has_free_slot = self._cut(tokens) and not self.policy.room(decoding=True)
        else:
            keys_and_values = heads * storage.nbytes(self._held(tokens), self._most(tokens), *self._size)
            has_free_slot = True
        return Bytes(
            keys_and_values=keys_and_values,
            slot_fields=heads
            * sum(f.entries(slots) * self.shape.bytes_of_field(f) for f in self.policy.slot_fields().values()),
            bookkeeping=slots * heads * _POSITION + has_free_slot * heads * _FREE_SLOT + _SEEN,
            head_fields=heads * sum(self.shape.bytes_of_field(f) for f in self.policy.head_fields().values()),
        )


_POSITION, _FREE_SLOT, _SEEN = 4, 8, 4


def _tree(name: str, policy: EvictionPolicy, tokens: int | None, prefix: int) -> Part:
    tokens = tokens if _evicts(policy) else None
    return Part(
        name=name,
        kind=policy.kind,
        options=_options(policy),
        tokens=tokens,
        parts=tuple(_tree(part, of, its, prefix) for part, of, its in _split(policy, tokens, prefix)),
    )


def _split(policy: EvictionPolicy, tokens: int | None, prefix: int) -> Iterable[tuple[str, EvictionPolicy, int | None]]:
    if tokens is None or not isinstance(policy, Composite):
        return [(name, part, tokens) for name, part in policy.children()]
    return policy.split(tokens, prefix)


def _options(policy: EvictionPolicy) -> dict[str, Any]:
    """Options that are not the defaults; what holds policies is shown as parts."""
    options = policy.model_dump(mode="json", exclude_defaults=True)
    if list(policy.children()):
        options = {name: value for name, value in options.items() if not _holds_policies(value)}
    return {name: value for name, value in options.items() if name != "kind"}


def _holds_policies(value: Any) -> bool:
    if isinstance(value, dict):
        return "kind" in value or any(map(_holds_policies, value.values()))
    return isinstance(value, list) and any(map(_holds_policies, value))


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers among `numbers`, which ascend."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]
