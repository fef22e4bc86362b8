"""Scores weighed by what a token has beside them."""

import torch
from pydantic import model_validator
from torch import Tensor

from kvpolicy.compose import Wrapper, has_score
from kvpolicy.policy import EvictionPolicy, View


class Weighed(Wrapper):
    """The score of a policy, `of`, times weights; what `of` protects stays. Subclasses define :meth:`weights`.

    Where the priority of `of` is a tuple, the first of it is the score.
    """

    @model_validator(mode="after")
    def _has_scores(self) -> "Weighed":
        if not has_score(self.of):
            raise ValueError(f"needs a policy with a score, and {self.of.kind} only has an order: put it inside")
        return self

    def weights(self, view: View) -> Tensor:
        """What the score of each slot is multiplied by, of at least zero, ``[batch, kv_heads, slots]``."""
        raise NotImplementedError(f"{type(self).__name__} must define weights()")

    def priority(self, view: View) -> tuple[Tensor, ...]:
        priority = self.of.priority(view.part("of"))
        first, *rest = priority if isinstance(priority, tuple) else (priority,)
        return weighed(first, self.weights(view), view.valid), *rest

    # It ranks by its own priority, not as `of` does.
    certain = EvictionPolicy.certain
    ranking = EvictionPolicy.ranking


def weighed(score: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
    """`score` times `weights`, all ``[batch, kv_heads, slots]``; more weight is worth more, whatever the sign.

    A score below zero is divided by the weight, and a weight of nothing counts as next to nothing.
    """
    weights = torch.where(valid, weights, 1.0).clamp(min=torch.finfo(weights.dtype).tiny)
    score = score.to(torch.promote_types(score.dtype, weights.dtype))
    return torch.where(score < 0, score / weights, score * weights)
