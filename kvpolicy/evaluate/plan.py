"""What a comparison is going to measure, settled and checked before any model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from kvpolicy.budget import Budget
from kvpolicy.config import read
from kvpolicy.errors import ConfigError, EvaluationError
from kvpolicy.plugins import registry
from kvpolicy.policy import EvictionPolicy

log = getLogger(__name__)

BASELINE = "full"


def given_text(given: int | float | dict[str, Any]) -> str:
    """A budget as one would write it, in one line: ``0.25``, ``0.25 (min 64, layers pyramid)``."""
    if not isinstance(given, dict):
        return str(given)
    amount, *others = given.items()
    return f"{amount[1]} ({', '.join(f'{name} {_short(value)}' for name, value in others)})"


def _short(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return " ".join([value["kind"], *(f"{name}={option}" for name, option in value.items() if name != "kind")])


@dataclass(frozen=True)
class Target:
    """One budget, as given and in tokens."""

    budget: Budget
    tokens: int

    @property
    def given(self) -> int | float | dict[str, Any]:
        """The budget as one would write it: a number, or a mapping where there is more to say."""
        options = self.budget.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        for name in options.keys() & {"layers", "heads"}:
            allocator = getattr(self.budget, name)
            options[name] = {"kind": allocator.kind, **allocator.model_dump(mode="json", exclude_defaults=True)}
        return self.budget.amount if len(options) == 1 else options

    def __str__(self) -> str:
        return given_text(self.given)


@dataclass(frozen=True)
class Run:
    """One measurement, for all budgets that it stands for: any, where the policy has no use for one."""

    name: str
    policy: EvictionPolicy
    targets: tuple[Target, ...]

    @property
    def budget(self) -> Budget | None:
        """The budget to run under."""
        return self.targets[0].budget if self.policy.budgeted else None

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name} {self.targets[0]}" if self.policy.budgeted else self.name

    def alike(self) -> list[tuple[Target, ...]]:
        """The budgets that nothing can tell apart: a share of a sample is another one of some other prompt."""
        return [(target,) for target in self.targets] if self.policy.budgeted else [self.targets]


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, the full cache first, and the tokens that all of them are scored on."""

    runs: tuple[Run, ...]
    length: int
    scored_from: int
    """Index in a sample of the first token that is scored.

    Under a budget of B the first eviction follows the token at index B; the token at B + 1 is the first that
    cannot see everything, and it predicts the one at B + 2. From there on even the largest budget makes a
    difference, and all runs are scored on the same tokens.
    """

    @classmethod
    def of(cls, policies: Sequence[Any], budgets: Sequence[Any], length: int) -> Plan:
        """Resolve names, files and budgets; raise what a user should know first."""
        configs = {name: read(source) for name, source in _named(policies)}
        for name, config in configs.items():
            if any(config.policy.rehearsing()):
                raise ConfigError(
                    f"{name} chooses by a pass over a prompt that was read in full, and a comparison feeds its text "
                    "token by token: leave it out of --policies (kvpolicy generate runs it)"
                )
        given = list(dict.fromkeys(Budget.parse(budget) for budget in budgets))
        targets = {name: _targets(name, given, config.budget, length) for name, config in configs.items()}
        runs = [Run(BASELINE, read(BASELINE).policy, _union(targets.values()))]
        for name, config in configs.items():
            if not config.policy.budgeted:
                if name != BASELINE:
                    runs.append(Run(name, config.policy, targets[name]))
                continue
            for same in _alike(targets[name]):
                config.policy.check(same[0].tokens)
                runs.append(Run(name, config.policy, same))
        largest = max((target for run in runs for target in run.targets), key=lambda target: target.tokens)
        if largest.tokens + 2 >= length:
            raise EvaluationError(
                f"a budget of {largest} ({largest.tokens} tokens) leaves nothing to score "
                f"in samples of {length} tokens: lower --budgets or raise --tokens"
            )
        return cls(tuple(runs), length, largest.tokens + 2)


def _named(policies: Sequence[Any]) -> list[tuple[str, Any]]:
    """Names and sources, each once; ``all`` is everything installed that needs nothing but a budget."""
    named: dict[str, Any] = {}
    for policy in policies:
        if policy == "all":
            lacking = {kind: _lacks(found) for kind, found in sorted(registry().policies.items())}
            named.update((kind, kind) for kind, lack in lacking.items() if not lack)
            for lack in dict.fromkeys(filter(None, lacking.values())):
                log.info("all leaves out what %s: %s", lack, ", ".join(k for k, why in lacking.items() if why == lack))
        elif isinstance(policy, EvictionPolicy):
            options = policy.model_dump(exclude={"kind"}, exclude_defaults=True)
            named[" ".join([policy.kind, *(f"{key}={value}" for key, value in options.items())])] = policy
        else:
            named[str(policy)] = policy
    if not named:
        raise ConfigError("no policy given: name kinds or files (h2o,streaming_llm), or all")
    return list(named.items())


def _lacks(policy: type[EvictionPolicy]) -> str:
    """What a comparison cannot give a policy of which only the kind is known; nothing, if that says what it does."""
    if any(option.is_required() for option in policy.model_fields.values()):
        return "needs options"
    kind = policy.model_fields["kind"].default
    return "needs a pass over a prompt" if any(policy(kind=kind).rehearsing()) else ""


def _targets(name: str, given: list[Budget], own: Budget | None, length: int) -> tuple[Target, ...]:
    """The budgets of the command, or else the one in the policy's file."""
    budgets = given or ([own] if own is not None else [])
    if not budgets and name != BASELINE:
        raise ConfigError(f"no budget for {name}: give --budgets 0.25,64, or put one into its file")
    return tuple(Target(budget, budget.resolve(length)) for budget in budgets)


def _alike(targets: Iterable[Target]) -> list[tuple[Target, ...]]:
    """What comes to the same tokens in a sample, divided in the same way, is measured once."""
    found: dict[Budget, list[Target]] = {}
    for target in targets:
        budget = target.budget
        if not budget.grows:
            budget = Budget(tokens=target.tokens, layers=budget.layers, heads=budget.heads)
        found.setdefault(budget, []).append(target)
    return [tuple(same) for same in found.values()]


def _union(targets: Iterable[tuple[Target, ...]]) -> tuple[Target, ...]:
    found = tuple(dict.fromkeys(target for some in targets for target in some))
    if not found:
        raise ConfigError("no budget given: give --budgets 0.25,64")
    return found
