"""How a budget is divided: over the layers of a model, and over the KV heads of a layer.

A budget is an average. An allocator says who gets more and who less, and the total stays what it was: real-valued
parts are rounded by largest remainder (:func:`largest_remainder`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, SerializationInfo, WithJsonSchema

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicy.policy import Need, View


class Allocator(BaseModel):
    """What layer and head allocators have in common: frozen, stateless, named by a literal ``kind``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    kind: str

    def __hash__(self) -> int:
        return hash((type(self), self.model_dump_json()))


class LayerAllocator(Allocator):
    """Divides a budget over the layers that evict."""

    def quotas(self, average: int, layers: Sequence[int], of: int, prompt: int | None) -> Sequence[Fraction | int]:
        """Tokens for each layer, as exact numbers that add up to ``average * len(layers)``.

        Args:
            average: tokens that each layer would have if all had the same.
            layers: indices of the layers that evict, ascending.
            of: how many layers the model has.
            prompt: tokens of the prompt, ``None`` before it is known.
        """
        raise NotImplementedError


class MeasuredLayerAllocator(LayerAllocator):
    """Divides a budget over the layers by what their attention shows, while a prompt runs through them.

    Before anything is measured, and for prompts that fit, all layers have the same. :mod:`kvpolicy.measured` says
    when layers are measured, and cuts them.
    """

    needs: ClassVar[Collection[Need]] = frozenset()
    """What attention must hand out in a call that is measured. A property may override it."""

    def measure(self, view: View) -> Tensor:
        """Numbers of each row of `view`, ``[batch, n]``, of the heads and queries shown.

        Heads and queries come in several views: what is measured in each is added up, so these must be sums.
        """
        raise NotImplementedError(f"{type(self).__name__} must define measure()")

    def shares(
        self, measured: Sequence[Sequence[float]], average: int, layers: int, prompt: int
    ) -> Sequence[Fraction | int]:
        """Tokens for the layers measured so far, in one row of the batch, as exact numbers.

        They add up to a whole number: at most ``average * layers``, and no more than these layers' prompts; to
        ``average * layers`` once all layers are measured. A layer never gets back what it gave up, nor more than the
        prompt has: what shares exceed that by goes to the others. So, as more layers come, no share should rise.

        Args:
            measured: the `n` numbers of each layer so far, lower ones first.
            average: tokens that each layer would have if all had the same.
            layers: how many layers evict.
            prompt: tokens of the prompt, more than `average`; no layer needs more.
        """
        raise NotImplementedError(f"{type(self).__name__} must define shares()")

    def least(self, average: int) -> int:
        """Tokens that no layer has less than, whatever is measured."""
        return 1

    def quotas(self, average: int, layers: Sequence[int], of: int, prompt: int | None) -> list[int]:
        return [average] * len(layers)


class HeadAllocator(Allocator):
    """Divides the budget of a layer over its KV heads, each time a prompt or a chunk is cut."""

    def divide(self, keys: Sequence[Tensor], view: View, budget: Tensor) -> Tensor:
        """Tokens for each head, ``[batch, kv_heads, 1]``, which add up to ``kv_heads * budget`` in each row.

        Args:
            keys: the policy's ranking, most significant first, each ``[batch, kv_heads, slots]``.
            view: the layer, all slots of it.
            budget: tokens that each head would have if all had the same, ``[batch, 1, 1]``; more than that are held.
        """
        raise NotImplementedError


def largest_remainder(quotas: Sequence[Fraction | int]) -> list[int]:
    """Whole numbers next to `quotas` with the same sum; the largest remainders are rounded up, earlier ones first."""
    under = math.lcm(*(Fraction(quota).denominator for quota in quotas))
    return largest_remainder_of([int(quota * under) for quota in quotas], under)


def largest_remainder_of(numerators: Sequence[int], denominator: int) -> list[int]:
    """The same for quotas ``numerators / denominator``, in whole numbers throughout."""
    whole = [over // denominator for over in numerators]
    missing = (sum(numerators) + denominator // 2) // denominator - sum(whole)
    by_remainder = sorted((whole[i] * denominator - over, i) for i, over in enumerate(numerators))
    for _, i in by_remainder[:missing]:
        whole[i] += 1
    return whole


def largest_remainder_within(quotas: Sequence[Fraction | int], least: Sequence[int], most: Sequence[int]) -> list[int]:
    """The same, where each number has bounds; what they take from one is spread over the others.

    The sum of `quotas` must be one that the bounds allow.
    """
    whole = [max(low, min(math.floor(quota), high)) for quota, low, high in zip(quotas, least, most, strict=True)]
    missing = round(sum(quotas)) - sum(whole)
    while missing:
        step = 1 if missing > 0 else -1
        bounds = most if step > 0 else least
        able = [i for i, bound in enumerate(bounds) if whole[i] != bound]
        if not able:
            raise ValueError(f"quotas that add up to {sum(quotas)} cannot be met within {least} and {most}")
        able.sort(key=lambda i: step * (whole[i] - quotas[i]))
        for i in able[: abs(missing)]:
            whole[i] += step
            missing -= step
    return whole


def largest_remainder_rows(numerators: Tensor, denominator: int) -> Tensor:
    """The same for many at once: quotas are ``numerators / denominator`` along the last dimension."""
    whole = numerators // denominator
    missing = (numerators.sum(-1, keepdim=True) + denominator // 2) // denominator - whole.sum(-1, keepdim=True)
    by_remainder = (numerators - whole * denominator).argsort(dim=-1, descending=True, stable=True)
    return whole + (by_remainder.argsort(dim=-1) < missing)


def _allocator(value: Any) -> Allocator:
    from kvpolicy.config import allocator_from

    return allocator_from(value)


def _layer_allocator(value: Any) -> Allocator:
    return _of_type(_allocator(value), LayerAllocator, "layers")


def _head_allocator(value: Any) -> Allocator:
    return _of_type(_allocator(value), HeadAllocator, "heads")


def _of_type(allocator: Allocator, base: type[Allocator], what: str) -> Allocator:
    if not isinstance(allocator, base):
        from kvpolicy.plugins import registry

        able = sorted(kind for kind, found in registry().allocators.items() if issubclass(found, base))
        raise ValueError(f"{allocator.kind!r} does not divide a budget over {what}; these do: {', '.join(able)}")
    return allocator


def _dumped(allocator: Allocator, info: SerializationInfo) -> dict[str, Any]:
    return allocator.model_dump(mode=info.mode)


OverLayers = Annotated[
    LayerAllocator,
    BeforeValidator(_layer_allocator),
    PlainSerializer(_dumped),
    WithJsonSchema({"$ref": "#/$defs/layer_allocator"}),
]
"""A field that holds an allocator over layers."""
OverHeads = Annotated[
    HeadAllocator,
    BeforeValidator(_head_allocator),
    PlainSerializer(_dumped),
    WithJsonSchema({"$ref": "#/$defs/head_allocator"}),
]
"""A field that holds an allocator over heads."""
