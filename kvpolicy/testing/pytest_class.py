"""The checks as a class of tests to inherit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import pytest

from kvpolicy.policy import EvictionPolicy
from kvpolicy.testing.case import Case, NotApplicable
from kvpolicy.testing.checks import CHECKS


class PolicyTests:
    """Inherit, and give the policy: as an attribute, or as a fixture of that name.

    .. code-block:: python

        class TestMine(PolicyTests):
            policy = Mine(decay=0.9)
            reference = MineRule
    """

    policy: Any = None
    """The policy to test."""
    reference: Any = None
    """Its definition in plain Python, a subclass of :class:`kvpolicy.testing.Rule`, if there is one."""
    draws_by: ClassVar[Iterable[str]] = ()
    """``{"row", "head"}``, or one of them: what its random numbers depend on beside the token."""
    skip: ClassVar[Mapping[str, str]] = {}
    """Checks to leave out, by name, and why."""

    @pytest.fixture
    def kvpolicy_case(self, request: pytest.FixtureRequest) -> Case:
        """The policy and what is said about it."""
        return Case(self._given("policy", request), self._given("reference", request), frozenset(self.draws_by))

    def _given(self, name: str, request: pytest.FixtureRequest) -> Any:
        value = getattr(type(self), name)
        if value is None or isinstance(value, (EvictionPolicy, type)):
            return value
        return request.getfixturevalue(name)

    @pytest.mark.parametrize("check", CHECKS)
    def test_policy(self, check: str, kvpolicy_case: Case) -> None:
        """One invariant."""
        if check in self.skip:
            pytest.skip(self.skip[check])
        if kvpolicy_case.policy is None:
            pytest.fail(f"{type(self).__name__} has no policy: give it as an attribute or a fixture")
        try:
            CHECKS[check](kvpolicy_case)
        except NotApplicable as reason:
            pytest.skip(str(reason))
