"""What a policy observes of attention: a block of consecutive queries (rows) against the slots (columns)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class AttentionRows:
    """A block of rows of one layer's attention, in the order of the queries.

    Probabilities are float32 (float64 in a float64 model) and reduced over the query group of each KV head by
    their mean unless asked otherwise. Rows of padding queries are zero. Slots outside the model's own mask
    (later tokens, a sliding window) have probability zero.
    """

    __slots__ = ("_logits", "_positions", "_probs", "_queries", "_scaling", "_sum", "_unrotated", "_visible", "final")

    def __init__(
        self,
        positions: Tensor | None,
        *,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        queries: Tensor | None = None,
        unrotated: Callable[[], Tensor] | None = None,
        scaling: float | None = None,
        visible: Tensor | None = None,
        total: Tensor | None = None,
        final: bool = True,
    ) -> None:
        self._probs = probs
        self._logits = logits
        self._queries = queries
        self._unrotated = unrotated
        self._scaling = scaling
        self._visible = visible
        self._sum = total
        self._positions = positions
        self.final = final
        """Whether this is the last block of its call."""

    def sum(self) -> Tensor:
        """Probabilities summed over the rows, ``[batch, kv_heads, slots]``. Needs ``Need.ATTENTION_SUM``."""
        if self._sum is not None:
            return self._sum
        return self.rows().sum(-2)

    def rows(self, group: str = "mean") -> Tensor:
        """Probabilities ``[batch, kv_heads, rows, slots]``, the query group reduced by ``mean`` or ``max``.

        Needs ``Need.ATTENTION_ROWS``.
        """
        if self._probs is None:
            raise self._missing("rows()", "Need.ATTENTION_ROWS")
        if self._probs.shape[2] == 1:
            return self._probs[:, :, 0]
        return self._probs.mean(2) if group == "mean" else self._probs.amax(2)

    def last(self, group: str = "mean") -> Tensor:
        """The last row, ``[batch, kv_heads, slots]``. Needs ``Need.ATTENTION_LAST``."""
        return self.rows(group)[:, :, -1]

    def latest(self, count: int) -> AttentionRows:
        """The last `count` rows alone."""
        rows = next((part.shape[-2] for part in (self._probs, self._logits, self._queries) if part is not None), 0)
        if rows <= count:
            return self
        cut = [None if part is None else part[..., -count:, :] for part in self._parts()]
        probs, logits, queries, visible, positions = cut
        unrotated = self._unrotated
        return AttentionRows(
            positions,
            probs=probs,
            logits=logits,
            queries=queries,
            unrotated=None if unrotated is None else lambda: unrotated()[..., -count:, :],
            scaling=self._scaling,
            visible=visible,
            final=self.final,
        )

    def _parts(self) -> tuple[Tensor | None, ...]:
        return self._probs, self._logits, self._queries, self._visible, self._positions

    def heads(self) -> Tensor:
        """Probabilities of every query head, ``[batch, kv_heads, group, rows, slots]``."""
        if self._probs is None:
            raise self._missing("heads()", "Need.ATTENTION_ROWS")
        return self._probs

    def logits(self) -> Tensor:
        """Scaled logits of every query head, ``[batch, kv_heads, group, rows, slots]``; masked ones very negative.

        Needs ``Need.LOGITS``.
        """
        if self._logits is None:
            raise self._missing("logits()", "Need.LOGITS")
        return self._logits

    def queries(self, rotated: bool = True) -> Tensor:
        """Query vectors as they meet the keys, ``[batch, kv_heads, group, rows, head_dim]``, unscaled.

        Without `rotated` they are as they were before the model rotated them; where it rotates nothing, that is the
        same. Needs ``Need.QUERIES``, and ``Need.ROTATION`` beside it if not `rotated`.
        """
        if self._queries is None:
            raise self._missing("queries()", "Need.QUERIES")
        if rotated:
            return self._queries
        if self._unrotated is None:
            raise self._missing("queries(rotated=False)", "Need.ROTATION")
        return self._unrotated()

    @property
    def scaling(self) -> float:
        """What products of queries and keys are multiplied with before the softmax. Needs ``Need.QUERIES``."""
        return self.queries().shape[-1] ** -0.5 if self._scaling is None else self._scaling

    @property
    def positions(self) -> Tensor:
        """Logical positions of the queries, ``[batch, 1, rows, 1]``; -1 is padding. Needs ``Need.ATTENTION_ROWS``."""
        if self._positions is None:
            raise self._missing("positions", "Need.ATTENTION_ROWS")
        return self._positions

    def visible(self) -> Tensor:
        """How many slots each query could see, itself included, ``[batch, 1 or kv_heads, rows, 1]``."""
        if self._visible is None:
            raise self._missing("visible()", "Need.ATTENTION_ROWS")
        return self._visible

    @staticmethod
    def _missing(what: str, need: str) -> RuntimeError:
        return RuntimeError(f"attention.{what} was not computed: add {need} to the policy's `needs`")
