"""Expected attention: the tokens that queries to come will look at, by what queries were like so far."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, StrictBool
from torch import Tensor

from kvpolicy.policy import EvictionPolicy, HeadField, Need, SlotField, Tokens, View
from kvpolicy_plugins._vectors import wide

_FIRST = 4
"""So many first queries are unlike the others, and are left out."""


class ExpectedAttention(EvictionPolicy):
    """Expected attention (Devoto et al., 2025, arXiv 2510.00636).

    Queries before their rotation are taken for normally distributed; each query head has its own mean and covariance.
    The rotations of the next `future` positions are averaged. Then ``exp(mean @ key + key @ covariance @ key / 2)`` is
    what a query to come is expected to give to a key before the softmax, with scaled queries. It is normalised over
    the tokens of a head that are no sinks, averaged over the query group, and weighed by the length of the value.

    In a prompt or a chunk all tokens are scored, once. The paper then evicts no more. Here queries go on being counted
    while decoding, and a step scores the newcomer and one in `every` of the others, those whose scores are oldest: the
    work for a covariance is as large as for a hundred keys.
    """

    kind: Literal["expected_attention"] = "expected_attention"
    sinks: Tokens = 4
    """First tokens that always stay."""
    future: Annotated[int, Field(ge=1, strict=True)] = 512
    """How many positions to come are averaged over; of consequence where the model rotates."""
    epsilon: Annotated[float, Field(ge=0, strict=True)] = 0.0
    """Added to the expected attention before it is weighed: with more of it, lengths of values count for more."""
    covariance: StrictBool = True
    """Whether the covariance counts; without it the mean alone does, which costs far less."""
    values: StrictBool = True
    """Whether the lengths of values count."""
    every: Annotated[int, Field(ge=1, strict=True)] = 32
    """While decoding, scores are at most about so many steps old; 1 scores all tokens at each step."""

    needs = {Need.QUERIES, Need.ROTATION}
    expected = SlotField(shape=("group",))
    """Logarithm of the attention a token may expect of each query head, not normalised."""
    scored = SlotField(fill=-1, dtype="int32")
    """Tokens that had been seen when it was found."""
    count = HeadField()
    """Queries counted."""
    mean = HeadField(shape=("group", "head_dim"))

    def head_fields(self) -> dict[str, HeadField]:
        fields = super().head_fields()
        if self.covariance:
            fields["spread"] = HeadField(shape=("group", "head_dim", "head_dim"), name="spread")
        return fields

    def observe(self, view: View) -> Mapping[str, Tensor]:
        moments = self._moments(view)
        if not view.attention.final:
            return moments
        if not view.decoding:
            return {**moments, **self._all_scored(view, moments)}
        return {**moments, **self._some_scored(view, moments)}

    def _moments(self, view: View) -> dict[str, Tensor]:
        """Count, mean and sum of squares around it of scaled queries, those of this block included."""
        count, mean = view["count"], view["mean"]
        asking = view.attention
        queries = wide(asking.queries(rotated=False)).to(mean.dtype) * asking.scaling
        counts = (asking.positions >= _FIRST).to(mean.dtype)  # [batch, 1, rows, 1]; padding is below zero
        new = counts.sum((-2, -1)).expand_as(count)
        total = count + new
        share = (new / total.clamp(min=1))[..., None, None]
        counts = counts.unsqueeze(2)
        theirs = (queries * counts).sum(-2) / new.clamp(min=1)[..., None, None]
        apart = theirs - mean
        found = {"count": total, "mean": mean + share * apart}
        if self.covariance:
            centred = (queries - theirs.unsqueeze(-2)) * counts
            between = apart.unsqueeze(-1) * apart.unsqueeze(-2) * (share * count[..., None, None]).unsqueeze(-1)
            found["spread"] = view["spread"] + centred.mT @ centred + between
        return found

    def _all_scored(self, view: View, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        grows = _grows(view)
        found = self._scores(view, moments, view.rotated(view.keys, view.positions))
        return {
            "expected": torch.where(grows.unsqueeze(-1), found, view["expected"]),
            "scored": torch.where(grows, view.seen, view["scored"]),
        }

    def _some_scored(self, view: View, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tokens scored longest ago are scored anew, the newcomer first of all."""
        expected, scored, positions = view["expected"], view["scored"], view.positions
        most = -(-positions.shape[-1] // self.every)
        when = (scored.long() << 32 | positions.long()).masked_fill(positions < 0, torch.iinfo(torch.int64).max)
        oldest = when.topk(most, dim=-1, largest=False).indices
        held = view.valid.sum(-1, keepdim=True)
        due = torch.arange(most, device=oldest.device) < (held + self.every - 1) // self.every
        due = due & _grows(view)
        keys = view.keys.gather(2, _along(oldest, view.keys.shape[-1]))
        found = self._scores(view, moments, view.rotated(keys, positions.gather(-1, oldest)))
        at = _along(oldest, expected.shape[-1])
        found = torch.where(due.unsqueeze(-1), found, expected.gather(2, at))
        return {
            "expected": expected.scatter(2, at, found),
            "scored": scored.scatter(2, oldest, torch.where(due, view.seen, scored.gather(2, oldest))),
        }

    def _scores(self, view: View, moments: Mapping[str, Tensor], keys: Tensor) -> Tensor:
        """What each of some `keys` ``[batch, kv_heads, n, head_dim]`` may expect, ``[batch, kv_heads, n, group]``."""
        mean = moments["mean"]
        keys = self._as_if_unrotated(view, wide(keys).to(mean.dtype))
        found = keys @ mean.mT
        if not self.covariance:
            return found
        count = moments["count"].clamp(min=1)[..., None, None]
        spreads = (moments["spread"] / count.unsqueeze(-1)).unbind(2)
        return found + torch.stack([((keys @ spread) * keys).sum(-1) for spread in spreads], -1) / 2

    def _as_if_unrotated(self, view: View, keys: Tensor) -> Tensor:
        """`keys` such that queries before their rotation meet them as those to come will meet the keys, on average."""
        rotation = view.rotation
        if rotation is None:
            return keys
        ahead = view.seen + torch.arange(self.future, device=keys.device)
        cos, sin = (part.mean(-2, keepdim=True).to(keys.dtype) for part in rotation.at(ahead))
        return rotation.turned(keys, (cos, -sin))

    def protected(self, view: View) -> Tensor:
        return view.is_sink(self.sinks)

    def priority(self, view: View) -> tuple[Tensor, Tensor]:
        among = view.eligible & (view.positions >= self.sinks)
        expected = view["expected"]
        given = expected.masked_fill(~among.unsqueeze(-1), torch.finfo(expected.dtype).min).log_softmax(2)
        attention, order = given.exp().mean(-1), given.logsumexp(-1)
        if self.values:
            lengths = wide(view.values).norm(dim=-1).to(attention.dtype)
            attention = (attention + self.epsilon) * lengths
            order = order + lengths.clamp(min=torch.finfo(lengths.dtype).tiny).log()
        return attention, order  # the logarithm tells apart what is too small for a number


def _grows(view: View) -> Tensor:
    """Which heads hold a token that is not scored yet, ``[batch, kv_heads, 1]``; a row that pauses has none."""
    return (view.valid & (view["scored"] < 0)).any(-1, keepdim=True)


def _along(slots: Tensor, size: int) -> Tensor:
    """`slots` ``[batch, kv_heads, n]`` as an index into vectors of that `size`."""
    return slots.unsqueeze(-1).expand(*slots.shape, size)
