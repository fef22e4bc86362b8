"""EvictionCache: a transformers cache that keeps a bounded number of tokens, in one :class:`SlotPool` a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpolicy.budget import Budget, LayerBudget, layer_budgets
from kvpolicy.errors import BudgetError, ConfigError, UnsupportedModelError
from kvpolicy.observer import Observer, installed
from kvpolicy.policy import EvictionPolicy, Need
from kvpolicy.pool import SlotPool
from kvpolicy.rehearsal import Rehearsal
from kvpolicy.rotation import Turn, turns_of

if TYPE_CHECKING:
    from kvpolicy.adapter import Attachment


class EvictionCache(Cache):
    """A cache bounded by `policy` to `budget` tokens per layer, row and KV head.

    Give it to ``generate`` or to a forward call like any cache. It attaches kvpolicy to the model by itself;
    :func:`kvpolicy.detach` undoes that.

    Args:
        model: a transformers model of a supported family.
        policy: a policy object, a kind (``"h2o"``), a mapping (``{"kind": "h2o", "recent": 0.25}``) or a file.
        budget: tokens (``512``) or a share of the prompt (``0.25``). May be left out where a file gives it, and
            with policies that evict nothing.
        positions: ``"original"``: keys stay rotated where they were, queries use the tokens seen. ``"rolled"``:
            what is held is numbered anew, 0, 1, ... in each head, as in StreamingLLM's paper; for models that rotate.
            By default what the policy says (:attr:`~kvpolicy.EvictionPolicy.rolled`), which is original for most.
        prompt_length: the length a share refers to, where a prompt comes in chunks. By default it is the number
            of tokens of the first call, padding not counted, each row for itself.
        prefix: how many first tokens always stay, a system prompt say: a number, or one for each row. A policy with
            ``protect`` and ``prefix: true`` in it says where; any other is protected as a whole.
        observers: objects told about evictions and statistics (:class:`~kvpolicy.observer.Observer`).

    Raises:
        ConfigError, BudgetError: options that cannot be meant; UnsupportedModelError: the model is refused.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        policy: EvictionPolicy | str | PathLike[str] | Mapping[str, Any],
        budget: int | float | str | Budget | None = None,
        *,
        positions: str | None = None,
        prompt_length: int | None = None,
        prefix: int | Sequence[int] | Tensor | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        from kvpolicy.adapter import attach
        from kvpolicy.compose.protect import with_prefix
        from kvpolicy.config import read
        from kvpolicy.measured import Cascade

        config = read(policy)
        self.policy, first = with_prefix(config.policy, prefix)
        self.budget = Budget.parse(budget) if budget is not None else config.budget
        if self.budget is None and self.policy.budgeted:
            raise BudgetError(
                f"{self.policy.kind} needs a budget: tokens (budget=512) or a share of the prompt (budget=0.25)"
            )
        prompt = None if prompt_length is None else _positive(prompt_length, "prompt_length")
        attachment = attach(model)
        self._configs = attachment.configs  # of the model it is for; the model itself is not held
        observers = (*installed(), *observers)
        shares = layer_budgets(self.policy, self.budget, len(self._configs), int(first.max()), prompt)
        turns = turns_of(model, attachment.adapter, [policy for policy, _ in shares], positions)
        _check_kept(self.policy, self.budget, [own for own, _ in shares], turns)
        pools = [
            _kind_of_pool(policy, budget, config)(
                policy,
                budget,
                index,
                first,
                observers,
                turn,
                getattr(config, "num_attention_heads", None),
                _output_for(policy, attachment, index),
            )
            for index, ((policy, budget), turn, config) in enumerate(zip(shares, turns, self._configs, strict=True))
        ]
        if self.budget is not None and self.budget.measured is not None:
            Cascade.over(pools, self.budget.measured)
        self._prefix = first
        self.awaiting = tuple(dict.fromkeys(self.policy.rehearsing()))
        """Policies whose pass over the context is still to come: :func:`kvpolicy.compress` is for that."""
        self._holds = False
        super().__init__(layers=pools)
        if self.awaiting:
            self._check_held()

    def expect(self, index: int, config: Any, angles: Any = None) -> SlotPool:
        """Announce a call of the attention of layer `index` of the model with `config`; the pool it will use.

        `angles` are the cos and sin that the model hands to the layer, ``[batch or 1, tokens, columns]`` each.
        """
        if index >= len(self.layers) or config is not self._configs[index]:
            raise ConfigError(
                "this EvictionCache was made for another model; make one for this: EvictionCache(model, ...)"
            )
        if self.awaiting and not self._holds:
            raise ConfigError(
                f"{self.awaiting[0].kind} chooses by a pass over the context, which is still to come: "
                "kvpolicy.compress(model, tokenizer, cache, input_ids) first, then generate"
            )
        pool: SlotPool = self.layers[index]
        self.layers[index - 1].check_finished()
        pool.check_finished()
        pool.announce(angles)
        return pool

    def reset(self) -> None:
        super().reset()
        self.awaiting = tuple(dict.fromkeys(self.policy.rehearsing()))

    # -- several calls as one prompt -----------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """Evict nothing inside, and cut to the budget once at the end: what was read counts as one prompt.

        A policy with a pass over the context is not cut yet; that is what :func:`kvpolicy.compress` does.

        Raises:
            ConfigError: layers are cut, or stored, in a way that does not go with that.
        """
        self._check_held()
        before, self._holds = self._holds, True
        for pool in self.layers:
            pool.held = True
        try:
            yield
        finally:
            self._holds = before
            for pool in self.layers:
                pool.held = before or bool(self.awaiting)
        if not self.awaiting and not before:
            self._cut()

    def _check_held(self) -> None:
        if self.budget is not None and self.budget.measured is not None:
            raise ConfigError(
                f"budget.layers: {self.budget.measured.kind} divides while a prompt is read, and a cache that is held "
                f"({self.policy.kind}) is cut after that: take another allocator"
            )
        if any(pool.policy.storage is not None for pool in self.layers):
            raise ConfigError(
                f"{self.policy.kind} has layers stored in a way of their own, which cannot be held; store them in full"
            )

    @contextmanager
    def rehearsing(self, rehearsal: Rehearsal) -> Iterator[None]:
        """Calls inside are shown to the policy that asked for them; then their tokens are dropped again."""
        before = self.get_seq_length()
        pools = [pool for pool in self.layers if pool.is_initialized]
        for pool in pools:
            pool.begin(rehearsal)
        yield
        for pool in pools:
            pool.end(before)

    def rehearsed(self) -> None:
        """The pass is over."""
        self.awaiting = ()

    def _cut(self) -> None:
        """Cut what was held to the budget: layers whose budget is one thing are divided together."""
        from kvpolicy.ragged import divide_together

        pools = [pool for pool in self.layers if pool.is_initialized]
        for pool in pools:
            pool.settle()
        for policy in dict.fromkeys(pool.policy for pool in pools if pool.policy.together):
            divide_together([pool for pool in pools if pool.policy == policy])
        for pool in pools:
            pool.release()

    def prefixes(self, rows: int) -> list[int]:
        """How many first tokens of each row stay."""
        return self._prefix.expand(rows).tolist() if self._prefix.numel() == 1 else self._prefix.tolist()

    # -- what users ask ------------------------------------------------------------------------------------

    def kept(self, layer: int) -> Tensor:
        """How many tokens each row and head of `layer` holds, ``[batch, kv_heads]``."""
        return self._pool(layer).kept()

    def positions(self, layer: int) -> Tensor:
        """Logical positions kept in `layer`, ``[batch, kv_heads, kept]``, ascending; -1 where a head holds fewer.

        Position 0 is a row's first real token: padding is not counted.
        """
        return self._pool(layer).kept_positions()

    def scores(self, layer: int) -> dict[str, Tensor]:
        """The policy's slot fields in the order of :meth:`positions`, each ``[batch, kv_heads, kept, *shape]``.

        A field that has one entry for several tokens has them in order, the first for a row's first tokens.
        """
        return self._pool(layer).kept_fields()

    def head_state(self, layer: int) -> dict[str, Tensor]:
        """The policy's head fields, each ``[batch, kv_heads, *shape]``."""
        pool = self._pool(layer)
        return {name: state.clone() for name, state in pool.heads.items()}

    def attended(self, layer: int) -> Tensor:
        """Logical positions that the last decode step attended to, ascending, ``[batch, kv_heads, 1 or group, n]``.

        -1 where a head attended to fewer. They are all that is held, unless the policy selects.
        """
        return self._pool(layer).attended_positions()

    def nbytes(self) -> int:
        """Bytes allocated for keys, values, positions and the policy's fields, over all layers."""
        return sum(pool.nbytes() for pool in self.layers)

    def _pool(self, layer: int) -> SlotPool:
        if not -len(self.layers) <= layer < len(self.layers):
            raise ConfigError(f"layer {layer} does not exist: the model has layers 0 to {len(self.layers) - 1}")
        return self.layers[layer]

    def __repr__(self) -> str:
        return f"EvictionCache({self.policy!r}, budget={self.budget}, seen={self.get_seq_length()})"


def _kind_of_pool(policy: EvictionPolicy, budget: LayerBudget | None, config: Any) -> type[SlotPool]:
    from kvpolicy.ragged import RaggedPool, heads_differ

    differ = heads_differ(policy, budget, config)
    if policy.storage is not None:
        return policy.storage.pool
    return RaggedPool if differ else SlotPool


def _check_kept(
    policy: EvictionPolicy, budget: Budget | None, layers: Sequence[EvictionPolicy], turns: Sequence[Turn]
) -> None:
    """Refuse what makes sense only where everything is kept in order, or only where it is not."""
    if policy.selects and not policy.bounded and budget is not None and (budget.heads or budget.measured):
        name, allocator = ("heads", budget.heads) if budget.heads else ("layers", budget.measured)
        raise BudgetError(
            f"{policy.kind} keeps everything, and {getattr(allocator, 'kind', '')} divides what is kept of a prompt: "
            f"leave budget.{name} out"
        )
    for own, turn in zip(layers, turns, strict=True):
        if own.selects and turn.rolls:
            raise ConfigError(
                f"positions='rolled' renumbers what is left, and {own.kind} chooses by keys as the model rotated them: "
                "leave positions out"
            )
        if own.selects and own.storage is not None:
            raise ConfigError(f"{own.kind} says how a layer is stored, and selects from it: leave one of the two out")
        for name, field in own.slot_fields().items():
            if field.every > 1 and (own.bounded or own.storage is not None):
                raise ConfigError(
                    f"{own.kind}: the slot field {name!r} has one entry for {field.every} slots, which only a policy "
                    "that evicts nothing (bounded = False) can have, in a layer stored as it comes: give it an entry "
                    "for each"
                )


def _output_for(policy: EvictionPolicy, attachment: Attachment, layer: int) -> Callable[[], Tensor] | None:
    """Where a policy asks for it, what gives the weights of the output projection of `layer`."""
    if Need.OUTPUT not in policy.needs:
        return None
    try:
        return attachment.output(layer)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{policy.kind} needs the output projection of layer {layer}: {error}; or choose another policy"
        ) from None


def _positive(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a number of tokens of at least 1, not {value!r}")
    return value
