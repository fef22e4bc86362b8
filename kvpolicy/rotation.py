"""Rotary positions: how a layer rotates queries and keys, undone and done again for other places.

A rotation turns pairs of coordinates of a head by angles that grow with the position. Everything here is made from the
model's own parts: cos and sin are what its rotary module gives, and how coordinates pair up is found out by trying
the function in its file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.policy import EvictionPolicy, Need

if TYPE_CHECKING:
    from kvpolicy.adapter import ModelAdapter

Angles = tuple[Tensor, Tensor]
"""Cos and sin ``[..., pairs]``, or as a model has them, ``[batch, tokens, columns]``."""

FIXED = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary positions whose frequencies never change."""

_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "first half": lambda table: table[..., : table.shape[-1] // 2],
    "every second": lambda table: table[..., ::2],
    "all": lambda table: table,
}
_TRIED = 5
_APART = 97
"""Positions at which a function is tried: so many, so far apart."""


@dataclass(frozen=True)
class Layout:
    """Which coordinates of a head are turned together, and which column of cos and sin is theirs."""

    halves: bool
    """Whether coordinate `i` is paired with ``i + pairs``, rather than ``2 * i`` with the next."""
    columns: str
    """Which columns hold one angle for each pair."""

    def one_a_pair(self, angles: Any) -> Angles:
        """A model's `angles`, one for each pair, in float32 at least."""
        cos, sin = (_wide(_COLUMNS[self.columns](part)) for part in angles)
        return cos, sin

    def turned(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`vectors` ``[..., head_dim]`` with pairs turned by `cos`, `sin` ``[..., pairs]``; the rest as it is."""
        pairs = cos.shape[-1]
        shape = torch.broadcast_shapes(vectors.shape[:-1], cos.shape[:-1])
        before = _wide(vectors).expand(*shape, vectors.shape[-1])
        after = before.clone()  # worked on in place, which is many times faster than putting parts together
        one, two = self._split(before, pairs)
        for part, other, sign in zip(self._split(after, pairs), (two, one), (-1, 1), strict=True):
            part.mul_(cos).addcmul_(other, sin, value=sign)
        return after.to(vectors.dtype)

    def _split(self, vectors: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """The first of each pair, and the second."""
        if self.halves:
            return vectors[..., :pairs], vectors[..., pairs : 2 * pairs]
        return vectors[..., : 2 * pairs : 2], vectors[..., 1 : 2 * pairs : 2]

    @classmethod
    def of(cls, function: Callable[..., Any], angles: Any, head_dim: int) -> Layout | None:
        """The layout by which `function` turns queries and keys, for `angles` of some tokens; ``None`` if by none."""
        cos, sin = (part.detach().cpu().double() for part in angles)
        generator = torch.Generator().manual_seed(0)
        given = torch.rand(2, 1, 1, cos.shape[1], head_dim, generator=generator, dtype=torch.float64)
        layouts = [cls(halves, columns) for columns, halves in product(_COLUMNS, (True, False))]
        fitting = [layout for layout in layouts if _COLUMNS[layout.columns](cos).shape[-1] * 2 <= head_dim]
        for layout in fitting:
            wanted = [layout.turned(part, *layout.one_a_pair((cos[:, None], sin[:, None]))) for part in given]
            # Where not the whole head is rotated, some functions are given only the part that is.
            for dims in {head_dim, 2 * layout.one_a_pair((cos, sin))[0].shape[-1]}:
                if _agree(function, given[..., :dims], cos, sin, [part[..., :dims] for part in wanted]):
                    return layout
        return None


def _agree(function: Callable[..., Any], given: Tensor, cos: Tensor, sin: Tensor, wanted: list[Tensor]) -> bool:
    try:
        found = function(*given, cos, sin)
        return all(torch.allclose(a.double(), b, rtol=1e-4, atol=1e-4) for a, b in zip(found, wanted, strict=True))
    except (RuntimeError, TypeError, ValueError):
        return False


class Rotation:
    """How some layers rotate; what they share is one object."""

    def __init__(self, embedding: nn.Module, layout: Layout, layer_type: str | None = None) -> None:
        self.embedding = embedding
        """The model's rotary module."""
        self.layout = layout
        self.layer_type = layer_type
        """Which of its angles, where it has several kinds."""
        self._table: Tensor | None = None
        self._of: torch.dtype | None = None

    def at(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Angles:
        """Cos and sin at any `positions`, ``[*positions.shape, pairs]``, as a model of type `dtype` has them."""
        angles = _angles(self.embedding, positions.reshape(1, -1), dtype, self.layer_type)
        cos, sin = (part.view(*positions.shape, -1) for part in self.layout.one_a_pair(angles))
        return cos, sin

    def turned(self, vectors: Tensor, angles: Angles) -> Tensor:
        """`vectors` ``[..., head_dim]`` rotated by `angles`, which :meth:`at` gives."""
        return self.layout.turned(vectors, *angles)

    def unturned(self, vectors: Tensor, angles: Angles) -> Tensor:
        """`vectors` as they were before they were rotated by `angles`."""
        cos, sin = angles
        # Not 1 where a model scales cos and sin (YaRN), or has them in low precision.
        square = cos.square() + sin.square()
        return self.layout.turned(vectors, cos / square, -sin / square)

    def first(self, most: int, places: Tensor, like: Tensor) -> Angles:
        """Cos and sin at `places`, all below `most`, ``[*places.shape, pairs]``, for vectors `like` these."""
        table = self._table
        if table is None or table.shape[0] < most or table.device != like.device or self._of != like.dtype:
            size = 1 << (most - 1).bit_length()
            table = torch.cat(self.at(torch.arange(size, device=like.device), like.dtype), -1)
            self._table, self._of = table, like.dtype
        found = table.index_select(0, places.flatten()).view(*places.shape, -1)
        cos, sin = found.chunk(2, -1)
        return cos, sin


@dataclass(frozen=True)
class Turn:
    """What one layer does about rotation."""

    rotation: Rotation | None = None
    """How the model rotates; ``None``: it does not, or nobody has asked."""
    known: bool = False
    """Whether somebody has asked."""
    rolled: bool = False
    """Whether positions are rolled."""

    @property
    def rolls(self) -> bool:
        """Whether keys are held as they were before the model rotated them, and attended at their places."""
        return self.rolled and self.rotation is not None

    def given(self, angles: Any) -> Angles | None:
        """The cos and sin that the model hands to the layer, one for each pair, ``[batch or 1, tokens, pairs]``."""
        if self.rotation is None:
            return None
        if angles is None:
            raise UnsupportedModelError("a layer was called without the position_embeddings that it rotates by")
        return self.rotation.layout.one_a_pair(angles)

    def held(self, keys: Tensor, angles: Angles | None) -> Tensor:
        """New `keys` ``[batch, kv_heads, tokens, head_dim]`` as they are held."""
        if not (self.rolled and self.rotation and angles):
            return keys
        return self.rotation.unturned(keys, _unsqueezed(angles, 1))

    def attended(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Held `keys` ``[batch, kv_heads, slots, head_dim]`` of tokens at `positions` as queries meet them."""
        if not (self.rolled and self.rotation):
            return keys
        return self.rotation.turned(keys, self.rotation.first(positions.shape[-1], places(positions), keys))

    def asking(self, query: Tensor, angles: Angles | None, positions: Tensor) -> Tensor:
        """A `query` for each new token, ``[batch, kv_heads, group, tokens, head_dim]``, as it meets those keys."""
        if not (self.rolled and self.rotation and angles):
            return query
        tokens = query.shape[3]
        if tokens == 1:  # the newest token comes after all others that are held
            at = (positions >= 0).sum(-1, keepdim=True).clamp(min=1) - 1
        else:
            at = places(positions)[..., -tokens:]
        there = self.rotation.first(positions.shape[-1], at, query)
        return self.rotation.turned(self.bare(query, angles), _unsqueezed(there, 2))

    def bare(
        self, query: Tensor, angles: Angles | None, batch: slice = slice(None), rows: slice = slice(None)
    ) -> Tensor:
        """`query` as it was before the model rotated it by the `angles` of some `rows` of a `batch`."""
        if self.rotation is None or angles is None:
            return query
        part = [(a if a.shape[0] == 1 else a[batch])[:, rows] for a in angles]
        return self.rotation.unturned(query, _unsqueezed((part[0], part[1]), 1, 1))


UNKNOWN = Turn()
"""Positions are original, and nobody needs to know how the layer rotates."""


def turns_of(
    model: nn.Module, adapter: ModelAdapter, policies: Sequence[EvictionPolicy], positions: str | None
) -> list[Turn]:
    """What each layer of `model` does about rotation, under its policy and the mode of `positions` asked for.

    Raises:
        ConfigError: the mode is not one of the model's family.
        UnsupportedModelError: how the model rotates matters, and cannot be told or not be undone.
    """
    rolled = [policy.rolled if positions is None else positions == "rolled" for policy in policies]
    for mode in {positions or "original", *(["rolled"] if any(rolled) else [])}:
        adapter.check_positions(mode)
    asks = [policy for policy in policies if Need.ROTATION in policy.needs]
    if not (any(rolled) or asks):
        return [UNKNOWN] * len(policies)
    what = "positions='rolled'" if any(rolled) else asks[0].kind
    try:
        rotations = adapter.rotations(model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{what} is not available for {type(model).__name__}: {error}") from None
    if any(rolled) and not any(rotations):
        raise UnsupportedModelError(
            f"{what} is not available for {type(model).__name__}: it does not rotate its keys, so they cannot be "
            "given other positions; use 'original'"
        )
    return [Turn(rotation, True, rolls) for rotation, rolls in zip(rotations, rolled, strict=True)]


def _unsqueezed(angles: Angles, *dims: int) -> Angles:
    for dim in dims:
        angles = angles[0].unsqueeze(dim), angles[1].unsqueeze(dim)
    return angles


def rotation_of(
    model: nn.Module, config: Any, function: Callable[..., Any], index: int, head_dim: int
) -> Rotation | str:
    """How layer `index` of `model` rotates by `function` of its file; or why that cannot be told."""
    embeddings = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if len(embeddings) != 1:
        return f"it has {len(embeddings) or 'no'} rotary module{'s' if embeddings else ''} rather than one"
    embedding = embeddings[0]
    by_type = "layer_type" in inspect.signature(embedding.forward).parameters
    layer_type = config.layer_types[index] if by_type else None
    if reason := _changes(embedding, config, layer_type):
        return reason
    device = next((part.device for part in (*embedding.buffers(), *model.parameters())), torch.device("cpu"))
    with torch.no_grad():
        angles = _angles(embedding, _APART * torch.arange(_TRIED, device=device)[None], torch.float32, layer_type)
    if not (isinstance(angles, tuple) and len(angles) == 2):
        return f"{type(embedding).__name__} does not give cos and sin"
    layout = Layout.of(function, angles, head_dim)
    if layout is None:
        return f"{getattr(function, '__name__', function)} rotates in a way that kvpolicy does not know"
    return Rotation(embedding, layout, layer_type)


def _angles(embedding: nn.Module, positions: Tensor, dtype: torch.dtype, layer_type: str | None) -> Any:
    """What a rotary module gives for `positions` ``[1, n]`` in a model of that type."""
    more = {} if layer_type is None else {"layer_type": layer_type}
    return embedding(torch.empty(0, dtype=dtype, device=positions.device), position_ids=positions, **more)


def _changes(embedding: nn.Module, config: Any, layer_type: str | None) -> str | None:
    """Why the frequencies of `embedding` are not the same for ever, or not one for each position."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = getattr(embedding, "rope_type", None)
    if isinstance(kind, dict):
        kind, parameters = kind.get(layer_type), parameters.get(layer_type) or {}
    if kind not in FIXED:
        return f"its rotary positions are of the type {kind!r}; known are {', '.join(sorted(FIXED))}"
    if "mrope_section" in parameters:
        return "its positions have several dimensions"
    return None


def places(positions: Tensor) -> Tensor:
    """The place of each slot among the held ones of its head, by position; empty slots come last."""
    order = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions).argsort(dim=-1)
    ascending = torch.arange(positions.shape[-1], device=positions.device).expand(positions.shape)
    return torch.empty_like(order).scatter_(-1, order, ascending)


def _wide(vectors: Tensor) -> Tensor:
    return vectors.float() if vectors.dtype.itemsize < 4 else vectors
