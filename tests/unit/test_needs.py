"""Every need hands out what it names, in agreement with the plain rows of attention."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvpolicy import EvictionCache, EvictionPolicy, Need, View
from kvpolicy.attention import blocks
from kvpolicy.attention.blocks import Wants
from tests import tiny


class Recorder(EvictionPolicy):
    """Keeps everything and notes what it is shown. Impure, which a real policy must not be."""

    kind: str = "recorder"
    what: str
    asked: tuple[Any, ...]
    shown: ClassVar[list[tuple[slice, slice, Tensor]]] = []

    @property
    def needs(self) -> Collection[Need]:  # type: ignore[override]
        return set(self.asked)

    def observe(self, view: View) -> dict[str, Tensor]:
        if self.what == "final" and not view.attention.final:
            return {}
        found = getattr(view.attention, "rows" if self.what == "final" else self.what)()
        self.shown.append(found)
        return {}

    def priority(self, view: View) -> Tensor:
        return view.positions


def shown(model: Any, what: str, *needs: Need, tokens: int = 13, mask: Tensor | None = None) -> list[Tensor]:
    Recorder.shown.clear()
    cache = EvictionCache(model, Recorder(what=what, asked=needs), budget=64)
    with torch.no_grad():
        model(tiny.ids(1, tokens), attention_mask=mask, use_cache=True, **tiny.cache_argument(cache))
    return list(Recorder.shown)[: len(Recorder.shown) // 2]  # the first of the two layers


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.family("llama")


@pytest.fixture(scope="module")
def rows(model: Any) -> Tensor:
    """All rows of the first layer, from transformers' own eager attention."""
    eager = tiny.family("llama")
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        probs = eager(tiny.ids(1, 13), output_attentions=True).attentions[0]
    return probs.unflatten(1, (2, 2)).mean(2)


def test_rows_and_their_sum(model: Any, rows: Tensor) -> None:
    torch.testing.assert_close(torch.cat(shown(model, "rows", Need.ATTENTION_ROWS), -2), rows)
    torch.testing.assert_close(shown(model, "sum", Need.ATTENTION_SUM)[-1], rows.sum(-2))


def test_rows_come_in_blocks_that_end_where_they_can_see(
    model: Any, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_CPU_BLOCK_BYTES", 1)  # blocks of sixteen rows, a head at a time
    found = shown(model, "rows", Need.ATTENTION_ROWS, tokens=40)
    assert [tuple(block.shape[1:]) for block in found] == [(1, 16, 16), (1, 16, 32), (1, 8, 40)] * 2
    torch.testing.assert_close(found[0][0, 0, :13, :13], rows[0, 0])


def test_the_last_row(model: Any, rows: Tensor) -> None:
    torch.testing.assert_close(shown(model, "last", Need.ATTENTION_LAST)[-1], rows[:, :, -1])


@pytest.mark.parametrize("window", [1, 4, 13, 40])
@pytest.mark.parametrize("more", [(), (Need.ATTENTION_SUM,), (Need.ATTENTION_ROWS,)])
def test_a_window_is_one_final_block(model: Any, rows: Tensor, window: int, more: tuple[Need, ...]) -> None:
    found = shown(model, "final", Need.window(window), *more)[-1]
    assert found.shape[-2] == min(window, 13)
    torch.testing.assert_close(found, rows[:, :, -window:])


def test_logits_and_queries(model: Any, rows: Tensor) -> None:
    logits = torch.cat(shown(model, "logits", Need.LOGITS), -2)
    torch.testing.assert_close(logits.softmax(-1).mean(2), rows)
    queries = torch.cat(shown(model, "queries", Need.QUERIES), -2)
    assert queries.shape == (1, 2, 2, 13, 8)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ({Need.QUERIES}, {Need.QUERIES, Need.ROTATION}, Wants(queries=True)),
        ({Need.QUERIES}, set(), Wants(queries=True)),
        ({Need.QUERIES}, {Need.window(3)}, Wants(blocks=True, window=3)),
        ({Need.QUERIES}, {Need.ATTENTION_SUM}, Wants(total=True, blocks=True)),
        ({Need.ROTATION}, {Need.window(3)}, Wants(window=3)),
    ],
)
def test_queries_come_whole_where_nothing_else_is_wanted(one: set[Need], two: set[Need], expected: Wants) -> None:
    assert Wants.of(one | two) == Wants.of(one) | Wants.of(two) == expected
