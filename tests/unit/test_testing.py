"""The kit: every policy of ours passes it, and what is broken fails the check that is meant for it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from kvpolicy import EvictionPolicy, Need, SlotField, View, load
from kvpolicy.errors import BudgetError
from kvpolicy.plugins import registry
from kvpolicy.testing import (
    CHECKS,
    Case,
    NotApplicable,
    NotConforming,
    PolicyTests,
    Rule,
    Violation,
    check_policy,
    models,
)
from kvpolicy.testing.spy import Spy, Watched


def without_options() -> dict[str, EvictionPolicy]:
    """The policies that need to be told nothing."""
    found = {}
    for kind, policy in registry().policies.items():
        try:
            found[kind] = policy()  # type: ignore[call-arg]
        except ValidationError:
            continue
    return found


SIMPLE = without_options()
DRAWING = ("keyformer", "nacl", "random")
COMPOSED: dict[str, dict[str, Any]] = {
    "union": {"parts": [{"take": 3, "of": "sinks"}, {"take": 0.5, "of": "recent"}, "heavy"]},
    "blend": {"parts": ["h2o", {"of": "lru", "weight": 2.0}]},
    "cascade": {"narrow": "h2o", "pick": "lru"},
    "phases": {"prefill": "snapkv", "decode": "streaming_llm"},
    "layers": {"at": {"0": "full"}, "default": "h2o"},
    "heads": {"at": {"0": "full"}, "default": "h2o"},
    "protect": {"sinks": 2, "spans": [[5, 7]], "of": "lru"},
    "every": {"tokens": 4, "of": "h2o"},
    "rolled": {"of": "h2o"},
}


class MassRule(Rule):
    """Accumulated attention; the newest stays."""

    recent: int | float = 1

    def begin(self) -> None:
        self.mass: dict[int, float] = defaultdict(float)

    def observe(self, query: int, probs: dict[int, float]) -> None:
        for position, prob in probs.items():
            self.mass[position] += prob

    def worth(self, position: int) -> Any:
        return self.mass[position]

    def keep(self, held: list[int], seen: int) -> list[int]:
        options = self.policy.model_dump(include={"sinks", "recent"})
        stay = self.protect(held, seen, **{"recent": self.recent, **options})
        rest = [position for position in held if position not in stay]
        return stay + self.best(rest, self.budget - len(stay), self.worth)


class HeavyRule(MassRule):
    recent = 0


class RecencyRule(MassRule):
    def worth(self, position: int) -> Any:
        return position


RULES: dict[str, type[Rule]] = {"h2o": MassRule, "heavy": HeavyRule, "streaming_llm": RecencyRule}


@pytest.mark.parametrize("kind", SIMPLE)
def test_policies(kind: str) -> None:
    check_policy(SIMPLE[kind], reference=RULES.get(kind), draws_by={"row", "head"} if kind in DRAWING else ())


@pytest.mark.parametrize("kind", COMPOSED)
def test_compositions(kind: str) -> None:
    check_policy(load({"kind": kind, **COMPOSED[kind]}))


def test_there_is_a_composition_of_every_kind() -> None:
    [ours] = [plugin for plugin in registry().plugins if plugin.name == "kvpolicy-compose"]
    assert set(COMPOSED) == set(ours.policies)


def test_options_that_protect_raise_the_budget_of_the_checks() -> None:
    case = Case(load({"kind": "streaming_llm", "sinks": 20}))
    assert case.least == 20
    assert case.budgets == [20, 21, 22, 23, 24, 25]
    check_policy(case.policy)


def test_a_policy_without_a_possible_budget() -> None:
    class Greedy(Base):
        def check(self, budget: int, prefix: int = 0) -> None:
            raise BudgetError("never enough")

    with pytest.raises(Violation, match="one it accepts"):
        CHECKS["bounds"](Case(Greedy()))


def test_the_spy_passes_everything_on() -> None:
    contract = {name for name in vars(EvictionPolicy) if not name.startswith("_")}
    of_its_own = {"model_config", "model_fields", "model_computed_fields", "demands", "take", "profiled"}
    assert contract - of_its_own <= set(vars(Watched)) | {"model_post_init"}


# -- what is broken --------------------------------------------------------------------------------------------


class Base(EvictionPolicy):
    """A sound start: accumulated attention."""

    kind: Literal["base"] = "base"
    needs = {Need.ATTENTION_SUM}
    mass = SlotField()

    def observe(self, view: View) -> dict[str, Tensor]:
        return {"mass": view["mass"] + view.attention.sum()}

    def priority(self, view: View) -> Any:
        return view["mass"]


class InPlace(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        return {"mass": view["mass"].add_(view.attention.sum())}


class Overwrites(Base):
    def priority(self, view: View) -> Tensor:
        view.positions.add_(1)
        return view["mass"]


class Counts(Base):
    calls: ClassVar[list[int]] = []

    def observe(self, view: View) -> dict[str, Tensor]:
        self.calls.append(1)
        return {"mass": view["mass"] + view.attention.sum() + len(self.calls)}


class Dice(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        return {"mass": torch.rand(view.positions.shape, dtype=view["mass"].dtype)}


class PythonDice(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        return {"mass": view["mass"] + view.attention.sum() * (1 + 0 * random.random())}


class Reseeds(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return super().observe(view)


class ProtectsAll(Base):
    def protected(self, view: View) -> Tensor:
        return view.valid


class ProtectsShape(Base):
    def protected(self, view: View) -> Tensor:
        return view.valid.any(-1)


class NoMask(Base):
    def protected(self, view: View) -> Tensor:
        return view.is_recent(1).float()


class OutranksProtected(Base):
    def priority(self, view: View) -> Tensor:
        return torch.full_like(view["mass"], torch.inf)


class SlotIndex(Base):
    def priority(self, view: View) -> Tensor:
        return torch.arange(view.positions.shape[-1], device=view.positions.device).expand(view.positions.shape)


class SlotIndexObserved(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        age = torch.arange(view.positions.shape[-1], device=view.positions.device)
        return {"mass": view["mass"] + view.attention.sum() * age}


class MixesHeads(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        return {"mass": view["mass"] + view.attention.sum().mean(1, keepdim=True)}


class FavoursAHead(Base):
    def priority(self, view: View) -> Tensor:
        head = torch.arange(view.positions.shape[1], device=view.positions.device).view(1, -1, 1)
        return torch.where(head == 0, view.positions, -view.positions)


class FavoursARow(Base):
    def priority(self, view: View) -> Tensor:
        row = torch.arange(view.positions.shape[0], device=view.positions.device).view(-1, 1, 1)
        return torch.where(row == 0, view.positions, -view.positions)


class MixesRows(Base):
    def priority(self, view: View) -> Tensor:
        return view["mass"].mean(0, keepdim=True) * view["mass"]


class CountsPadding(Base):
    """Columns of the batch instead of the row's own tokens."""

    def priority(self, view: View) -> Tensor:
        return (view.positions + view.seen.amax() - view.seen) % 7


class Blockwise(Base):
    """Not a fold: it forgets the blocks before the last."""

    needs = {Need.ATTENTION_ROWS}

    def observe(self, view: View) -> dict[str, Tensor]:
        return {"mass": view.attention.rows().sum(-2)}


class HalfField(Base):
    mass = SlotField(dtype="float16")


class HalfSum(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        return {"mass": view["mass"].bfloat16() + view.attention.sum().bfloat16()}


class Undeclared(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        return {"mas": view["mass"]}


class WrongShape(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        return {"mass": view.attention.sum().sum(-1, keepdim=True)}


class NotANumber(Base):
    def priority(self, view: View) -> Tensor:
        return view["mass"] / (view.positions != 3) * (view.positions != 3)


class KeepsGraph(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        with torch.enable_grad():
            weight = torch.ones((), requires_grad=True)
            return {"mass": view["mass"] + view.attention.sum() * weight}


class Learns(Base):
    def observe(self, view: View) -> dict[str, Tensor]:
        LEARNT[0].grad = torch.zeros_like(LEARNT[0])
        return super().observe(view)


LEARNT = list(models.llama("float32").parameters())


class Homeless(Base):
    def priority(self, view: View) -> Tensor:
        return view["mass"] * torch.arange(view.positions.shape[0]).view(-1, 1, 1).neg().exp()


class Unreadable(Base):
    kind: Literal["unreadable"] = "unreadable"
    limit: Any = None

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


class HoldsMore(Base):
    """Says it evicts at once, and lets tokens gather."""

    evicting: ClassVar[bool] = True

    def room(self, decoding: bool) -> float:
        return 3 if sys._getframe(1).f_code.co_filename.endswith("pool.py") else 0


class SelectsTwice(Base):
    bounded: ClassVar[bool] = False
    selects: ClassVar[bool] = True

    def select(self, view: View, query: Tensor) -> Tensor:
        return torch.tensor([0, 1, 1]).expand(*query.shape[:3], -1)


class SelectsByMask(SelectsTwice):
    def select(self, view: View, query: Tensor) -> Tensor:
        return view.valid.unsqueeze(2)


class SelectsFromElsewhere(SelectsTwice):
    def select(self, view: View, query: Tensor) -> Tensor:
        return torch.arange(view.positions.shape[-1] + 1).expand(*query.shape[:3], -1)


class SelectsAndCounts(SelectsTwice):
    calls: ClassVar[list[int]] = []

    def select(self, view: View, query: Tensor) -> Tensor:
        self.calls.append(1)
        return (view.positions[:, :, None, -1:] - len(self.calls) % 2).long()


class WrongRule(MassRule):
    def keep(self, held: list[int], seen: int) -> list[int]:
        return held[-self.budget :]


BROKEN: list[tuple[type[EvictionPolicy], str, str]] = [
    (InPlace, "purity", r"observe\(view\) in layer 0\n.*view\['mass'\] as it was; work on new tensors"),
    (Overwrites, "purity", r"priority\(view\) in layer 0\n.*view.positions as it was"),
    (Counts, "purity", r"observe\(view\) asked twice in layer 0\n.*a policy has no state beside its slot fields"),
    (Counts, "determinism", r"random numbers come from view.uniform\(seed\)"),
    (Dice, "determinism", r"two runs with different torch.manual_seed\n.*layer 0, row 0, head 0 keeps \["),
    (Dice, "random_state", r"the random state of torch as it was"),
    (PythonDice, "random_state", r"the random state of Python's random as it was"),
    (Reseeds, "random_state", r"the random state of torch as it was"),
    (ProtectsAll, "protected", r"at most 1 protected slots in a head.*\n.*layer 0, row 0, head 0 protects 15: \[0, 1"),
    (ProtectsShape, "protected", r"a mask of booleans, \[2, 2, 15\]\n.*bool, \[2, 2\]"),
    (NoMask, "protected", r"a mask of booleans, .*\n.*float32, \["),
    (OutranksProtected, "protected", r"keeps the protected \[14\]\n.*\[14\] evicted; the priority of others"),
    (SlotIndex, "slots", r"the priority of position \d+ stays .*\n.*read age from view.positions, never from the"),
    (SlotIndexObserved, "slots", r"observe\(view\)\['mass'\] of position \d+ stays"),
    (MixesHeads, "blocks", r"observed in blocks of 16 rows of one head\n.*treats rows and heads alike"),
    (FavoursAHead, "heads", r"KV heads stand in the order \[2, 0, 1, 3\]\n.*draws_by=\{.head.\}"),
    (FavoursARow, "rows", r"rows come in the order \[2, 0, 1\]\n.*draws_by=\{.row.\}"),
    (FavoursARow, "beams", r"rows reordered to \[2, 0, 0\] .*\n.*as rows that were in that order all along"),
    (MixesRows, "padding", r"row 0: 21 tokens padded to 21.*\n.*as without padding and without the others"),
    (CountsPadding, "padding", r"row 1: 11 tokens padded to 21.*\n.*keeps \[.*\n.*keeps \["),
    (Blockwise, "blocks", r"observe\(\) is a running update"),
    (HalfField, "fields", r"the slot field 'mass'\n.*stall in lower precision\n.*float16"),
    (HalfSum, "fields", r"'mass' in float32.*\n.*bfloat16"),
    (Undeclared, "fields", r"fields that are declared: mass\n.*'mas'"),
    (WrongShape, "fields", r"'mass' of shape \[2, 2, 21\]\n.*shape \[2, 2, 1\]"),
    (NotANumber, "dtypes", r"a priority that is a number\n.*NaN in layer 0, row 0, head 0, position 3"),
    (KeepsGraph, "gradients", r"observe\(view\)\['mass'\]\n.*a tensor without a graph"),
    (Learns, "gradients", r"parameters without gradients\n.*model.embed_tokens.weight has one"),
    (Homeless, "devices", r"torch.arange\(..., device=view.positions.device\)\n.*in mul: on a GPU it fails"),
    (Dice, "devices", r"torch.rand without a device, used with tensors of the cache in the slot field 'mass'"),
    (Unreadable, "configuration", r"written as .* and read again"),
    (SelectsTwice, "selection", r"in layer 0\n.*each once, or -1; row 0, KV head 0\n.*\[0, 1, 1\]"),
    (SelectsByMask, "selection", r"int64 of shape \[2, 2, 1 or 2, n\]\n.*bool of shape \[2, 2, 1, 22\]"),
    (SelectsFromElsewhere, "selection", r"slots from 0 to 21, each once"),
    (SelectsAndCounts, "purity", r"select\(view, query\) asked twice in layer 0\n.*the same answer"),
    (HoldsMore, "bounds", r"at most 1 tokens in every head after call 2 .*\n.*layer 0, row 0, head 0 holds 2"),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "check", "message"), BROKEN, ids=[f"{p.__name__}-{c}" for p, c, _ in BROKEN])
def test_what_is_broken_fails_the_check_for_it(policy: type[EvictionPolicy], check: str, message: str) -> None:
    with pytest.raises(Violation, match=message):
        CHECKS[check](Case(policy()))


def test_every_check_can_fail() -> None:
    by_framework_alone = {"positions", "no_return", "keys", "whole", "chunks"}
    assert {check for _, check, _ in BROKEN} | by_framework_alone | {"reference"} == set(CHECKS)


def test_a_sound_policy_passes_with_its_rule() -> None:
    check_policy(Base(), reference=MassRule)


def test_a_rule_that_says_otherwise() -> None:
    where = r"LlamaForCausalLM, call 1 \(21 tokens, 21 seen\): layer 0, row 0, head 0 held \[0, .*\n"
    with pytest.raises(Violation, match=where + r".*\[14, .* stay, by WrongRule\n.*kept instead of"):
        CHECKS["reference"](Case(Base(), WrongRule))
    with pytest.raises(NotImplementedError, match="Rule must define keep"):
        CHECKS["reference"](Case(Base(), Rule))


@pytest.mark.parametrize(
    ("check", "policy", "draws_by"),
    [
        ("rows", Base(), {"row"}),
        ("heads", Base(), {"head"}),
        ("padding", load({"kind": "every", "tokens": 3, "of": "h2o"}), ()),
        ("reference", Base(), ()),
        ("slots", load("full"), ()),
    ],
)
def test_checks_that_say_nothing(check: str, policy: EvictionPolicy, draws_by: Any) -> None:
    with pytest.raises(NotApplicable):
        CHECKS[check](Case(policy, draws_by=frozenset(draws_by)))


def test_everything_wrong_is_said_at_once() -> None:
    class Broken(Dice):
        mass = SlotField(dtype="float16")

    with pytest.raises(NotConforming) as caught:
        check_policy(Broken(), skip=["purity"])
    assert {"determinism", "random_state", "fields"} <= set(caught.value.found)
    assert "purity" not in caught.value.found
    assert str(caught.value).startswith(f"Broken(kind='base') fails {len(caught.value.found)} of the checks\n")
    assert "\nfields: \n  tried: " in str(caught.value)


def test_an_error_of_the_policy_is_among_them() -> None:
    class Raises(Base):
        def priority(self, view: View) -> Tensor:
            raise ZeroDivisionError("no")

    with pytest.raises(NotConforming, match=r"bounds: ZeroDivisionError: no"):
        check_policy(Raises())


def test_what_is_fine_is_not_reported() -> None:
    class Scalars(Base):
        """Scalars may be on no device, and so may what is moved before it is used."""

        def priority(self, view: View) -> Tensor:
            ages = torch.arange(view.positions.shape[-1]) * torch.ones(1)
            ages = ages.to(view.positions.device)
            return view["mass"] * torch.tensor(2.0) + 0 * ages

    CHECKS["devices"](Case(Scalars()))


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    check_policy(Base())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_keys_and_positions_are_those_of_the_tokens() -> None:
    """What a policy might do to the first layer's slots, were it not for purity."""

    class Moves(Base):
        def observe(self, view: View) -> dict[str, Tensor]:
            view.keys.mul_(2)
            return super().observe(view)

    with pytest.raises(Violation, match=r"the key of position \d+\n.*must not write to view.keys"):
        CHECKS["keys"](Case(Moves()))
    with pytest.raises(Violation, match="what LlamaForCausalLM computes without a policy"):
        CHECKS["whole"](Case(Moves()))


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_is_documented(check: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "plugins.md"
    assert f"\n| `{check}` | " in page.read_text("utf-8")
    assert CHECKS[check].__doc__


def test_pytest_is_not_needed() -> None:
    code = "import sys, kvpolicy.testing; sys.exit('pytest' in sys.modules or '_pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_spy_that_does_nothing() -> None:
    check_policy(Watched.by(Spy(), Base()), skip=["configuration"])


# -- the class to inherit --------------------------------------------------------------------------------------


class TestAttribute(PolicyTests):
    policy = Base()
    reference = MassRule


class TestFixture(PolicyTests):
    skip: ClassVar[dict[str, str]] = {"configuration": "shown here"}

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return Base()

    @pytest.fixture
    def reference(self) -> type[Rule]:
        return MassRule


class TestDraws(PolicyTests):
    policy = load("random")
    draws_by = ("row", "head")
