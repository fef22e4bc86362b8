"""Fifo: everything a policy must hold, its definition in plain Python, and its name."""

from kvpolicy_fifo import Fifo

import kvpolicy
from kvpolicy.testing import PolicyTests, Rule


class FifoRule(Rule):
    """What it keeps, for one layer, row and KV head, one token at a time."""

    def keep(self, held: list[int], seen: int) -> list[int]:
        return held[-self.budget :]


class TestFifo(PolicyTests):
    policy = Fifo()
    reference = FifoRule


def test_it_is_installed_under_its_name() -> None:
    assert kvpolicy.load("fifo") == Fifo()
