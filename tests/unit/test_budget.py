"""What a budget may be, and how many tokens it comes to."""

import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.budget import Budget
from kvpolicy.errors import BudgetError

tokens = st.integers(min_value=1, max_value=2**40)
shares = st.floats(min_value=0, max_value=1, exclude_min=True)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (64, Budget(tokens=64)),
        (1, Budget(tokens=1)),
        (1.0, Budget(share=1.0)),
        (0.25, Budget(share=0.25)),
        ("64", Budget(tokens=64)),
        (" 0.25 ", Budget(share=0.25)),
        ("25%", Budget(share=0.25)),
        ("33.3 %", Budget(share=0.333)),
        ("100%", Budget(share=1.0)),
        ("1e-3", Budget(share=0.001)),
    ],
)
def test_parse(value, meant):
    assert Budget.parse(value) == meant
    assert Budget.parse(meant) is meant


REMEDY = (
    "is no budget; give a number of tokens, 1 or more (64), "
    "or a share of the prompt, above 0.0 and up to 1.0 (0.25 or 25%)"
)


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 0.0, -0.5, 1.5, 64.0, float("nan"), float("inf"), True, False, None, [], 1j),
        *("", "0", "-3", "0%", "101%", "%", "many", "nan", "inf", "64.0", "6 4", "1e3"),
    ],
)
def test_what_is_no_budget(value):
    with pytest.raises(BudgetError) as caught:
        Budget.parse(value)
    assert str(caught.value) == f"{value!r} {REMEDY}"


@pytest.mark.parametrize("wrong", [{}, {"tokens": 1, "share": 1.0}])
def test_it_is_either_tokens_or_a_share(wrong):
    with pytest.raises(BudgetError, match="either tokens"):
        Budget.parse(wrong)


def test_one_token_is_not_the_whole_prompt():
    assert Budget.parse(1) != Budget.parse(1.0)
    assert len({Budget.parse(1), Budget.parse(1.0), Budget.parse("1")}) == 2


@given(tokens | shares)
def test_text_round_trip(value):
    budget = Budget.parse(value)
    assert Budget.parse(str(budget)) == budget
    assert type(budget.amount) is type(value)
    assert budget.amount == value
    assert pickle.loads(pickle.dumps(budget)) == budget


@pytest.mark.parametrize(
    ("value", "prompt", "resolved"),
    [
        (64, 10, 64),
        (0.25, 100, 25),
        (0.25, 10, 3),  # 2.5: half goes up
        (0.25, 9, 2),
        (0.1, 3, 1),  # never nothing
        (0.5, 0, 1),
        (1.0, 7, 7),
        (0.29, 50, 15),  # 14.5, where floats say 14.499999999999998
        (1 / 3, 9, 3),
    ],
)
def test_resolve(value, prompt, resolved):
    assert Budget.parse(value).resolve(prompt) == resolved


@given(tokens.filter(lambda n: n < 2**31) | shares, st.lists(st.integers(0, 2**20), min_size=1, max_size=4))
def test_tensors_resolve_like_numbers(value, prompts):
    budget = Budget.parse(value)
    resolved = budget.resolve(torch.tensor(prompts).view(-1, 1, 1))
    assert resolved.dtype == torch.int64
    assert resolved.shape == (len(prompts), 1, 1)
    assert resolved.flatten().tolist() == [budget.resolve(prompt) for prompt in prompts]


@given(shares, st.integers(0, 2**20))
def test_a_share_is_the_nearest_number_of_tokens(share, prompt):
    resolved = Budget.parse(share).resolve(prompt)
    assert 1 <= resolved <= max(1, prompt)
    assert resolved == 1 or abs(resolved - Fraction(share) * prompt) <= Fraction(1, 2) + Fraction(prompt, 10**6)
