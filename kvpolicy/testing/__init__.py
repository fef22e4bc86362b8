"""Tests for policies of one's own: every invariant that makes a policy correct, each a named check.

.. code-block:: python

    from kvpolicy.testing import PolicyTests

    class TestMine(PolicyTests):
        policy = Mine()

Outside pytest, :func:`check_policy` does the same. Models are tiny, random and made on the spot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.testing.case import Case, NotApplicable, NotConforming, Violation
from kvpolicy.testing.checks import CHECKS, check_policy
from kvpolicy.testing.rule import Rule

if TYPE_CHECKING:
    from kvpolicy.testing.pytest_class import PolicyTests

__all__ = ["CHECKS", "Case", "NotApplicable", "NotConforming", "PolicyTests", "Rule", "Violation", "check_policy"]


def __getattr__(name: str) -> Any:
    if name != "PolicyTests":  # the only one that needs pytest
        raise AttributeError(f"module 'kvpolicy.testing' has no attribute {name!r}")
    from kvpolicy.testing.pytest_class import PolicyTests

    return PolicyTests
