"""Several caches as one: rows of a batch under different policies, so that the weights are read once for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvpolicy.attention.blocks import Scoring
from kvpolicy.cache import EvictionCache
from kvpolicy.pool import SlotPool


class Together(EvictionCache):
    """The rows of a batch in groups of the same size, each with an :class:`~kvpolicy.EvictionCache` of its own.

    For calls without padding. Each group keeps what it would keep alone.
    """

    def __init__(self, caches: Sequence[EvictionCache], rows: int) -> None:
        """`caches` of one model and with nothing in them yet, for `rows` rows each."""
        self.caches = caches
        self._configs = caches[0]._configs
        pools = zip(*(cache.layers for cache in caches), strict=True)
        Cache.__init__(self, layers=[_Pools(own, rows) for own in pools])

    def expect(self, index: int, config: Any, angles: Any = None) -> Any:
        groups = _split(angles, self.layers[index].rows, len(self.caches))
        for cache, own in zip(self.caches, groups, strict=True):
            cache.expect(index, config, own)
        return self.layers[index]


def _split(angles: Any, rows: int, groups: int) -> Sequence[Any]:
    """Cos and sin of each group; a model may hand over those of one row for all."""
    if not isinstance(angles, tuple) or angles[0].shape[0] == 1:
        return [angles] * groups
    return list(zip(*(part.split(rows) for part in angles), strict=True))


class _Pools(CacheLayerMixin):
    """One layer of all groups: calls are split by rows, and answers put together."""

    is_compileable = is_croppable = is_sliding = supports_early_init = False

    def __init__(self, pools: Sequence[SlotPool], rows: int) -> None:
        super().__init__()
        self.pools = pools
        self.rows = rows
        self.handed: torch.Size | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Each pool does this for itself."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for pool, keys, values in zip(
            self.pools, key_states.split(self.rows), value_states.split(self.rows), strict=True
        ):
            pool.update(keys, values)
        self.handed = key_states.shape
        return key_states, value_states

    def answer(self, query: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
        """See :meth:`SlotPool.answer`."""
        assert mask is None
        return torch.cat(
            [pool.answer(own, None, scoring) for pool, own in zip(self.pools, query.split(self.rows), strict=True)]
        )

    def get_seq_length(self) -> Any:
        return self.pools[0].get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.pools[0].get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
