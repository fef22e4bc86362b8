"""A pass over the context after it is read and before it is cut, for policies that choose by one.

The prompt is read in full while the cache is held, so that nothing is evicted. What the policy asks for is then fed
piece by piece; it attends to the whole prompt, the policy observes, and its tokens are dropped again, since they are
the last slots. One cut ends it, and the cache goes on like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from kvpolicy.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicy.cache import EvictionCache
    from kvpolicy.policy import EvictionPolicy


@dataclass(frozen=True)
class Passage:
    """Tokens to feed after the context of a row, and the part of the context that they are about."""

    tokens: Tensor
    """Ids, ``[tokens]``."""
    start: int
    """Position of the first token that they are about."""
    stop: int
    """Position after the last."""


@dataclass(frozen=True)
class Rehearsal:
    """One call of a pass, as ``view.rehearsal`` shows it. Numbers are positions, ``[batch, 1, 1]``."""

    by: EvictionPolicy
    """The policy that asked for it, and that alone observes it."""
    start: Tensor
    stop: Tensor
    context: Tensor
    """How many tokens the context has: from this position on they are the pass's own."""

    def about(self, positions: Tensor) -> Tensor:
        """Which slots hold the part of the context that the call is about."""
        return (positions >= self.start) & (positions < self.stop)

    def own(self, positions: Tensor) -> Tensor:
        """Which slots hold tokens of the call itself."""
        return positions >= self.context

    def of(self, rows: slice) -> Rehearsal:
        """The same for some rows of the batch."""
        return Rehearsal(self.by, self.start[rows], self.stop[rows], self.context[rows])

    def on(self, device: torch.device) -> Rehearsal:
        """The same on another device."""
        return Rehearsal(self.by, self.start.to(device), self.stop.to(device), self.context.to(device))


@torch.no_grad()
def compress(
    model: torch.nn.Module,
    tokenizer: Any,
    cache: EvictionCache,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
) -> None:
    """Read a context into `cache`, let its policy rehearse it, and cut it to the budget.

    The cache is then good for any number of calls and for ``generate`` with whatever follows the context.

    Args:
        model: the model that the cache was made for.
        tokenizer: of the model; it encodes what the policy asks the model to do.
        cache: a new one. Or one that has read this context, and nothing else, within ``cache.held()``.
        input_ids: the context, ``[batch, tokens]``.
        attention_mask: which of its tokens are no padding, ``[batch, tokens]``; by default all.

    Raises:
        ConfigError: the policy has no pass, or the cache holds something else.
    """
    asking = cache.awaiting
    if not asking:
        raise ConfigError(
            f"{cache.policy.kind} has no pass over the context, or it is done: give the cache straight to generate "
            "(for another context, cache.reset() first)"
        )
    columns = int(cache.get_seq_length())
    if columns not in (0, input_ids.shape[1]):
        raise ConfigError(
            f"the cache has read {columns} tokens and the context has {input_ids.shape[1]}: give compress() a new "
            "cache, or the very context that was read within cache.held()"
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    contexts = [row[real.bool()] for row, real in zip(input_ids, mask, strict=True)]
    passes = [(policy, rows) for policy in asking for rows in _passes(policy, contexts, tokenizer, cache)]
    _check_length(model, max(map(len, contexts)), [passage for _, rows in passes for passage in rows if passage])
    padded = None if attention_mask is None else mask
    with cache.held():
        if not columns:
            _feed(model, cache, input_ids, padded)
        for policy, rows in passes:
            _rehearse(model, cache, policy, rows, contexts, padded)
        cache.rehearsed()


def _passes(
    policy: EvictionPolicy, contexts: list[Tensor], tokenizer: Any, cache: EvictionCache
) -> Iterator[tuple[Passage | None, ...]]:
    """What `policy` asks for, call by call: a passage for each row, ``None`` where it has no more."""
    encode, prefixes = _encoder(tokenizer), cache.prefixes(len(contexts))
    return zip_longest(*(policy.rehearsal(row, encode, prefix) for row, prefix in zip(contexts, prefixes, strict=True)))


def _check_length(model: Any, context: int, passages: list[Passage]) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max((len(passage.tokens) for passage in passages), default=0)
    if most is not None and context + longest > most:
        raise ConfigError(
            f"a context of {context} tokens and a pass of {longest} after it are longer than the model's {most} "
            "positions: take a shorter context or, where the policy has one, a smaller chunk"
        )


def _rehearse(
    model: Any,
    cache: EvictionCache,
    policy: EvictionPolicy,
    passages: Sequence[Passage | None],
    contexts: list[Tensor],
    mask: Tensor | None,
) -> None:
    """One call of the pass: the rows side by side."""
    tokens, real = _side_by_side(passages, contexts[0])
    bounds = [(0, 0) if passage is None else (passage.start, passage.stop) for passage in passages]
    start, stop = torch.tensor(bounds, dtype=torch.int32).view(-1, 1, 2).split(1, -1)
    lengths = torch.tensor([len(row) for row in contexts], dtype=torch.int32).view(-1, 1, 1)
    whole = real.new_ones(len(contexts), int(lengths.max())) if mask is None else mask
    padded = None if mask is None and bool(real.all()) else torch.cat([whole.to(real), real], 1)
    with cache.rehearsing(Rehearsal(policy, start, stop, lengths)):
        _feed(model, cache, tokens, padded)


def _side_by_side(passages: Sequence[Passage | None], like: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of tokens padded on the left, and which are no padding: both ``[batch, longest]``."""
    rows = [like[:0] if passage is None else passage.tokens for passage in passages]
    longest = max(map(len, rows))
    tokens = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in rows])
    places = torch.arange(longest, device=like.device)
    return tokens, torch.stack([places >= longest - len(row) for row in rows]).long()


def _feed(model: Any, cache: EvictionCache, tokens: Tensor, mask: Tensor | None) -> None:
    """One call of `model`; `mask` marks what is no padding, from the first call on."""
    from kvpolicy.evaluate.models import cache_argument, last_logits_only

    given: dict[str, Any] = {cache_argument(model): cache, "use_cache": True, **last_logits_only(model)}
    if mask is not None:
        places = (mask.long().cumsum(-1) - 1).clamp(min=0)
        given |= {"attention_mask": mask, "position_ids": places[:, -tokens.shape[1] :]}
    model(tokens, **given)


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    if not callable(getattr(tokenizer, "encode", None)):
        raise ConfigError(f"compress() needs the model's tokenizer, with encode(text), and not {tokenizer!r}")
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
