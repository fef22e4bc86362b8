"""The worked examples: six tokens, one head, and what each policy keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import EvictionPolicy, load, policies
from kvpolicy.attention.rows import AttentionRows
from kvpolicy.errors import BudgetError
from kvpolicy.policy import Changed, View, share_of
from kvpolicy.select import lowest, survivors

ROWS = [
    [1],
    [0.70, 0.30],
    [0.50, 0.10, 0.40],
    [0.40, 0.10, 0.30, 0.20],
    [0.30, 0.05, 0.35, 0.09, 0.21],
    [0.25, 0.05, 0.10, 0.32, 0.08, 0.20],
]


class Trace:
    """Slots of one head fed by hand with rows of probabilities; the policy decides through its contract alone."""

    def __init__(
        self, policy: EvictionPolicy, budget: int, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        """`keys` and `values` are those of all tokens to come, in order, ``[tokens, head_dim]``."""
        self.policy, self.budget = policy, budget
        self.keys, self.values = keys, values
        self.positions = torch.zeros(1, 1, 0, dtype=torch.int32)
        self.fields = {
            name: torch.zeros(1, 1, 0, *field.sized({"head_dim": 1 if keys is None else keys.shape[-1]}))
            for name, field in policy.slot_fields().items()
        }
        self.seen = 0
        self.decoding = False

    def view(self, rows: AttentionRows | None = None) -> View:
        return View(
            self.fields, self.positions, torch.tensor([[[self.seen]]]), self.budget, self.held(self.keys),
            self.held(self.values), attention=rows, decoding=self.decoding,
        )  # fmt: skip

    def held(self, vectors: Tensor | None) -> Tensor:
        return torch.zeros(*self.positions.shape, 1) if vectors is None else vectors[self.positions.long()]

    def observe(self, rows: list[list[float]], blocks: int | None = None) -> None:
        """Append a token for each row and show the rows, `blocks` at a time."""
        self.decoding = len(rows) == 1 and self.seen > 0
        new = torch.arange(self.seen, self.seen + len(rows), dtype=torch.int32).view(1, 1, -1)
        self.positions = torch.cat([self.positions, new], -1)
        slots = self.positions.shape[-1]
        for name, field in self.policy.slot_fields().items():
            before = self.fields[name].to(torch.float32 if field.dtype == "model" else getattr(torch, field.dtype))
            new_ones = field.entries(slots) - before.shape[2]
            self.fields[name] = torch.cat([before, before.new_full((1, 1, new_ones, *before.shape[3:]), field.fill)], 2)
        probs = torch.tensor([row + [0.0] * (slots - len(row)) for row in rows])
        visible = torch.tensor([[len(row)] for row in rows])
        self.seen += len(rows)
        for start in range(0, len(rows), blocks or len(rows)):
            part = slice(start, start + (blocks or len(rows)))
            statistics = AttentionRows(
                new[0, 0, part].view(1, 1, -1, 1),
                probs=probs[part].view(1, 1, 1, -1, slots),
                logits=probs[part].log().clamp(min=torch.finfo(probs.dtype).min).view(1, 1, 1, -1, slots),
                visible=visible[part].view(1, 1, -1, 1),
                final=part.stop >= len(rows),
            )
            self.update(self.policy.observe(self.view(statistics)))

    def update(self, changed: Mapping[str, Tensor | Changed]) -> None:
        for name, state in changed.items():
            if isinstance(state, Changed):
                state.put_into(self.fields[name])
            else:
                self.fields[name] = state

    def evict(self) -> list[int]:
        if self.policy.bounded and self.positions.shape[-1] > self.budget:
            view = self.view()
            order, _ = survivors(self.policy.ranking(view), view, self.budget)
            self.positions = self.positions.gather(-1, order)
            self.fields = {name: state[:, :, order.flatten()] for name, state in self.fields.items()}
        return self.positions.flatten().tolist()


def kept(kind: str, budget: int = 3, blocks: int | None = None, **options: Any) -> list[int]:
    trace = Trace(load({"kind": kind, **options}), budget)
    trace.observe(ROWS, blocks)
    return trace.evict()


@pytest.mark.parametrize("blocks", [None, 1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("full", {}, [0, 1, 2, 3, 4, 5]),
        ("streaming_llm", {"sinks": 1}, [0, 4, 5]),
        ("h2o", {"recent": 1}, [0, 2, 5]),
        ("h2o", {"recent": 2}, [0, 4, 5]),
        ("lru", {"recent": 1}, [0, 3, 5]),
        ("heavy", {}, [0, 2, 3]),
        ("recent", {}, [3, 4, 5]),
        ("sinks", {}, [0, 1, 2]),
        ("span", {"start": 1, "stop": 4}, [1, 2, 3]),
    ],
)
def test_worked_examples(kind: str, options: dict[str, Any], expected: list[int], blocks: int | None) -> None:
    assert kept(kind, blocks=blocks, **options) == expected


@pytest.mark.parametrize(
    ("options", "votes", "expected"),
    [
        ({"kernel": 1}, [0.55, 0.10, 0.45, 0.41], [0, 4, 5]),
        # Token 1, the least attended, wins: its neighbours are strong, and the sink loses by the zeros before it.
        ({"kernel": 3}, [0.21667, 0.36667, 0.32, 0.28667], [1, 4, 5]),
        ({"kernel": 3, "pooling": "max"}, [0.55, 0.55, 0.45, 0.45], [0, 4, 5]),
    ],
)
def test_snapkv_pools_its_votes(options: dict[str, Any], votes: list[float], expected: list[int]) -> None:
    trace = Trace(load({"kind": "snapkv", "window": 2, **options}), 3)
    trace.observe(ROWS, 4)  # the last block is the window
    torch.testing.assert_close(trace.fields["votes"].flatten()[:4], torch.tensor(votes), atol=1e-4, rtol=0)
    assert trace.evict() == expected


def test_h2o_column_sums_and_the_step_after() -> None:
    trace = Trace(load({"kind": "h2o", "recent": 1}), 3)
    trace.observe(ROWS)
    torch.testing.assert_close(trace.fields["mass"].flatten(), torch.tensor([3.15, 0.60, 1.15, 0.61, 0.29, 0.20]))
    assert trace.evict() == [0, 2, 5]
    trace.observe([[0.2, 0.1, 0.5, 0.2]])
    torch.testing.assert_close(trace.fields["mass"].flatten(), torch.tensor([3.35, 1.25, 0.70, 0.20]))
    assert trace.evict() == [0, 2, 6], "5 leaves although it just received the largest weight"


@pytest.mark.parametrize(("group", "expected"), [("mean", 1), ("max", 0)])
def test_a_query_group_is_joined(group: str, expected: int) -> None:
    """By its mean the token that both heads look at; by its maximum one that either does, the lower of two alike."""
    heads = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.30, 0.15, 0.5]]).view(1, 1, 2, 1, 4)
    trace = Trace(load({"kind": "h2o", "recent": 0, "group": group}), 1)
    trace.observe([[0.0]] * 4)
    rows = AttentionRows(torch.full((1, 1, 1, 1), 3), probs=heads, visible=torch.full((1, 1, 1, 1), 4))
    trace.update(trace.policy.observe(trace.view(rows)))
    assert trace.evict() == [expected]


def test_h2o_promotes_what_leaves_the_recent_window() -> None:
    """FlexGen's rule for two heavy tokens: the lightest of them goes, however little the token after them has got."""
    trace = Trace(load({"kind": "h2o", "recent": 1, "promote": "always"}), 3)
    trace.observe(ROWS)
    assert trace.evict() == [0, 2, 5], "a prompt is cut by mass"
    trace.observe([[0.2, 0.1, 0.5, 0.2]])
    assert trace.evict() == [0, 5, 6], "2 weighs 1.25 and 5 only 0.70"
    trace.observe([[0.2, 0.6, 0.1, 0.1]])
    assert trace.evict() == [0, 6, 7], "5 weighs 1.30, and 0 more than that"


@pytest.mark.parametrize("options", [{"recent": 1.0}, {"recent": 2, "sinks": 1}])
def test_h2o_promotes_nothing_where_there_are_no_heavy_tokens(options: dict[str, Any]) -> None:
    traces = [Trace(load({"kind": "h2o", "promote": how, **options}), 3) for how in ("always", "heavier")]
    for trace in traces:
        trace.observe(ROWS)
    for _ in range(4):
        one, two = (trace.evict() for trace in traces)
        assert one == two
        for trace in traces:
            trace.observe([[0.25] * 4])


def test_lru_last_use() -> None:
    trace = Trace(load("lru"), 3)
    trace.observe(ROWS)
    assert trace.fields["last_used"].flatten().tolist() == [5, -1, 4, 5, 4, 5]


def test_random_keeps_sink_recent_and_the_best_ticket() -> None:
    trace = Trace(load({"kind": "random", "sinks": 1, "recent": 1}), 3)
    trace.observe(ROWS)
    ticket = trace.fields["ticket"].flatten()
    assert trace.evict() == [0, 1 + int(ticket[1:5].argmax()), 5]


def test_fixed_tickets_sample_the_past_uniformly_and_fresh_ones_favour_the_recent() -> None:
    def mean_age(draw: str) -> float:
        ages = []
        for seed in range(40):
            trace = Trace(load({"kind": "random", "sinks": 0, "recent": 0, "draw": draw, "seed": seed}), 8)
            for _ in range(80):
                trace.observe([[1.0] * (trace.positions.shape[-1] + 1)])
                trace.evict()
            ages += [80 - p for p in trace.evict()]
        return sum(ages) / len(ages)

    assert 35 < mean_age("fixed") < 46
    assert mean_age("fresh") < 14


def test_seeds_repeat_and_differ() -> None:
    tickets = {}
    for seed in (0, 0, 1):
        trace = Trace(load({"kind": "random", "seed": seed}), 3)
        trace.observe(ROWS)
        tickets.setdefault(seed, []).append(trace.fields["ticket"].flatten().tolist())
    assert tickets[0][0] == tickets[0][1] != tickets[1][0]


class Fixed(EvictionPolicy):
    """Priorities given by hand."""

    kind: str = "fixed"
    keys: tuple[tuple[float, ...], ...]
    safe: tuple[int, ...] = ()

    def protected(self, view: View) -> Tensor:
        return torch.isin(view.positions, torch.tensor(self.safe, dtype=torch.int32))

    def priority(self, view: View) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(key).view(1, 1, -1) for key in self.keys)


def choose(
    positions: list[int], budget: int, *keys: tuple[float, ...], safe: tuple[int, ...] = ()
) -> tuple[list[int], int]:
    slots = torch.tensor(positions, dtype=torch.int32).view(1, 1, -1)
    empty = torch.zeros(1, 1, len(positions), 1)
    view = View({}, slots, torch.tensor([[[max(positions) + 1]]]), budget, empty, empty)
    policy = Fixed(keys=keys, safe=safe)
    victim = int(lowest(policy, view))
    return survivors(policy.ranking(view), view, budget)[1].flatten().tolist(), positions[victim]


def test_ties_keep_the_lower_position_wherever_the_slots_are() -> None:
    assert choose([3, 0, 2, 1], 3, (1.0, 1.0, 1.0, 1.0)) == ([0, 1, 2], 3)


def test_later_keys_break_ties_of_earlier_ones() -> None:
    assert choose([0, 1, 2, 3], 3, (1.0, 1.0, 1.0, 2.0), (5.0, 4.0, 4.0, 0.0)) == ([0, 1, 3], 2)


def test_protected_outrank_everything() -> None:
    assert choose([0, 1, 2, 3], 2, (9.0, 8.0, 1.0, 0.0), safe=(2, 3)) == ([2, 3], 1)


def test_empty_slots_go_first_and_come_last() -> None:
    assert choose([4, -1, 2, 7], 3, (1.0, 9.0, 5.0, 3.0)) == ([2, 4, 7], -1)
    assert choose([4, -1, -1, 7], 3, (1.0, 9.0, 9.0, 3.0))[0] == [4, 7, -1]


@pytest.mark.parametrize(
    ("amount", "budget", "expected"),
    [
        (4, 10, 4), (4, 3, 3), (0, 3, 0), (0.0, 3, 0), (0.5, 5, 3), (0.5, 4, 2), (0.5, 1, 1), (0.01, 8, 1), (1.0, 7, 7),
        (0.25, 10, 3),
    ],
)  # fmt: skip
def test_shares(amount: int | float, budget: int, expected: int) -> None:
    assert share_of(amount, budget) == expected
    assert share_of(amount, torch.tensor([budget])).tolist() == [expected]


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 9])
def test_protection_fits_the_budget_newest_first_then_sinks(budget: int) -> None:
    positions = torch.arange(30, dtype=torch.int32).view(1, 1, -1)
    empty = torch.zeros(1, 1, 30, 1)
    for limit in (budget, torch.tensor([[[budget]]])):
        view = View({}, positions, torch.tensor([[[30]]]), limit, empty, empty)
        held = positions[view.protect(sinks=4, recent=0.5)].tolist()
        assert len(held) <= budget
        assert 29 in held
        assert held[: min(4, budget - 1)] == [0, 1, 2, 3][: budget - 1]


def test_promised_tokens_must_fit_and_defaults_yield() -> None:
    load("streaming_llm").check(2)
    load({"kind": "random", "recent": 0.9}).check(1)
    with pytest.raises(BudgetError, match=r"streaming_llm: a budget of 3 tokens cannot hold the 4 .*\(sinks=4\)"):
        load({"kind": "streaming_llm", "sinks": 4}).check(3)
    with pytest.raises(BudgetError, match=r"sinks=3 \+ recent=6"):
        load({"kind": "random", "sinks": 3, "recent": 6}).check(8)


@pytest.mark.parametrize("kind", ["full", "h2o", "lru", "random", "streaming_llm"])
def test_policies_are_frozen_values(kind: str) -> None:
    policy = policies()[kind]()
    assert policy == load(kind)
    assert hash(policy) == hash(load(kind))
    assert policies()[kind].__doc__
    with pytest.raises(ValueError, match="frozen"):
        policy.kind = "other"  # type: ignore[misc]


def test_a_token_and_the_whole_are_different() -> None:
    assert load({"kind": "h2o", "recent": 1}) != load({"kind": "h2o", "recent": 1.0})


def test_missing_statistics_name_the_need() -> None:
    with pytest.raises(RuntimeError, match=r"Need\.ATTENTION_ROWS"):
        AttentionRows(None, total=torch.zeros(1)).rows()
