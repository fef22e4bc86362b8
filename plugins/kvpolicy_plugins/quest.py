"""Quest: everything, and each step attends to the pages of keys that may matter to its query: time, not bytes."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.errors import ConfigError
from kvpolicy.policy import Changed, EvictionPolicy, SlotField, View
from kvpolicy_plugins._vectors import wide
from kvpolicy_plugins.full import Full

Count = Annotated[int, Field(ge=1, strict=True)]


class Quest(EvictionPolicy):
    """Query-aware selection (Tang et al., ICML 2024, arXiv 2406.10774). It saves time, and no bytes.

    Nothing is evicted. Of each `page` consecutive tokens the least and the greatest number in each channel of their
    keys is remembered; no logit of theirs can be above ``sum_c max(q_c low_c, q_c high_c)``. A decode step attends to
    the pages with the highest bounds, as many as the budget holds, the newest token's page always among them. Prompts
    are attended in full. A budget that holds all tokens attends to all.
    """

    kind: Literal["quest"] = "quest"
    page: Count = 16
    """Consecutive tokens that are chosen together."""
    least: Count = 3
    """Pages attended to at the least, however small the budget."""
    full_layers: Annotated[int, Field(ge=0, strict=True)] = 2
    """How many first layers attend to everything, and have no budget."""
    group: Literal["each", "mean", "max"] = "each"
    """Whether each query head chooses its pages, or a group together, by the mean or the maximum of its bounds."""

    bounded: ClassVar[bool] = False
    selects: ClassVar[bool] = True

    def slot_fields(self) -> dict[str, SlotField]:
        return {
            name: SlotField(shape=("head_dim",), dtype="model", every=self.page, name=name) for name in ("low", "high")
        }

    def for_layer(self, layer: int, layers: int) -> EvictionPolicy:
        if self.full_layers >= layers and "full_layers" in self.model_fields_set:
            raise ConfigError(
                f"quest: full_layers={self.full_layers} leaves no layer of {layers} to select in; give it fewer"
            )
        return Full() if layer < min(self.full_layers, layers - 1) else self

    def observe(self, view: View) -> Mapping[str, Tensor | Changed]:
        if view.decoding:
            return self._with_newest(view)
        keys, there = _in_order(view)
        most = torch.finfo(keys.dtype).max
        there = F.pad(there, (0, -there.shape[-1] % self.page)).unflatten(-1, (-1, self.page)).unsqueeze(-1)
        keys = F.pad(keys, (0, 0, 0, -keys.shape[2] % self.page)).unflatten(2, (-1, self.page))
        low, high = keys.masked_fill(~there, most).amin(3), keys.masked_fill(~there, -most).amax(3)
        held = there.any(3)
        return {"low": low.masked_fill(~held, 0), "high": high.masked_fill(~held, 0)}

    def _with_newest(self, view: View) -> Mapping[str, Changed]:
        """The page of the newest token alone is another; where a row pauses, it is done again."""
        newest = (view.seen - 1).clamp(min=0)
        page = (newest // self.page).long().expand(-1, view.positions.shape[1], -1)
        starts = (newest % self.page == 0).unsqueeze(-1)
        key = view.keys[:, :, -1:]
        if view.holes:
            slot = view.positions.argmax(-1)[..., None, None]
            key = view.keys.gather(2, slot.expand(-1, -1, -1, view.keys.shape[-1]))
        index = page.unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
        found = {}
        for name, joined in (("low", torch.minimum), ("high", torch.maximum)):
            before = view[name].gather(2, index)
            found[name] = Changed(page, torch.where(starts, key, joined(before, key)))
        return found

    def select(self, view: View, query: Tensor) -> Tensor | None:
        slots, pages = view.positions.shape[-1], view["low"].shape[2]
        assert view.most is not None
        if view.most >= slots and isinstance(view.budget, int):
            return None
        # Where rows differ, some may attend to all they have, the last page unfinished.
        count = -(-view.most // self.page) if view.holes else view.most // self.page
        if (count := min(max(count, self.least), pages)) == pages and not view.holes:
            return None
        best = self._bounds(view, query).topk(count, dim=-1).indices
        chosen = (best.unsqueeze(-1) * self.page + torch.arange(self.page, device=best.device)).flatten(3)
        there = chosen < view.seen.unsqueeze(-1)
        if view.holes:
            within = torch.arange(count * self.page, device=best.device) < self._tokens(view).unsqueeze(-1)
            chosen, there = _slots_of(chosen, view), there & within
        return torch.where(there, chosen, -1)

    def _bounds(self, view: View, query: Tensor) -> Tensor:
        """What no product with keys of a page can be above, ``[batch, kv_heads, 1 or group, pages]``.

        That of the newest token's page is infinite.
        """
        bounds = wide(query.clamp(min=0) @ view["high"].mT) + wide(query.clamp(max=0) @ view["low"].mT)
        if self.group != "each":
            bounds = bounds.mean(2, keepdim=True) if self.group == "mean" else bounds.amax(2, keepdim=True)
        pages = torch.arange(bounds.shape[-1], device=bounds.device)
        newest = ((view.seen - 1) // self.page).unsqueeze(-1)
        return bounds.masked_fill(pages > newest, -torch.inf).masked_fill(pages == newest, torch.inf)

    def _tokens(self, view: View) -> Tensor:
        """How many tokens of the best pages each row attends to, ``[batch, 1, 1]``."""
        budget = view.budget if isinstance(view.budget, Tensor) else torch.full_like(view.seen, view.budget)
        return torch.where(
            budget >= view.seen, view.positions.shape[-1], (budget // self.page).clamp(min=self.least) * self.page
        )


def _in_order(view: View) -> tuple[Tensor, Tensor]:
    """Keys in the order of their positions, ``[batch, kv_heads, slots, head_dim]``, and which are there."""
    if not view.holes:
        return view.keys, view.valid
    order = torch.where(view.valid, view.positions, torch.iinfo(view.positions.dtype).max).argsort(dim=-1)
    return view.keys.gather(2, order.unsqueeze(-1).expand_as(view.keys)), view.valid.gather(2, order)


def _slots_of(positions: Tensor, view: View) -> Tensor:
    """The slots that hold `positions` ``[batch, kv_heads, choices, n]``: nothing was evicted, but rows have padding."""
    ranks = view.valid[:, 0].cumsum(-1)
    return torch.searchsorted(ranks, positions.flatten(1) + 1).view_as(positions)
