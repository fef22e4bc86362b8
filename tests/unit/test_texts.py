"""Texts, and samples that never overlap."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import EvaluationError
from kvpolicy.evaluate.texts import load_text, sample_positions, samples


def test_a_file_and_its_record(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Grüße\n", "utf-8")
    text, record = load_text(str(file))
    assert text == "Grüße\n"
    assert record == {
        "spec": str(file),
        "sha256": hashlib.sha256("Grüße\n".encode()).hexdigest(),
        "characters": 6,
    }


def test_the_builtin_text_is_long_and_always_the_same():
    text, record = load_text("builtin:python-docs")
    assert len(text) == record["characters"] > 100_000
    assert load_text("builtin:python-docs") == (text, record)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no text file"), (b" \n", "is empty"), (b"abc\xff", "not UTF-8 .at byte 3.")],
)
def test_texts_that_are_none(tmp_path, content, message):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(EvaluationError, match=message):
        load_text(str(file))


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(EvaluationError, match="cannot read"):
        load_text(str(tmp_path))


def test_an_unknown_builtin_text_names_those_there_are():
    with pytest.raises(EvaluationError, match="known: builtin:python-docs"):
        load_text("builtin:bible")


@given(st.data())
def test_samples_fit_and_never_overlap(data):
    length, count = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 10))
    available = length * count + data.draw(st.integers(0, 50))
    starts = sample_positions(available, length, count, data.draw(st.integers(0, 5)))
    assert len(starts) == count
    assert starts[0] >= 0
    assert starts[-1] + length <= available
    assert all(later - earlier >= length for earlier, later in pairwise(starts))


def test_every_placement_is_equally_likely():
    drawn = Counter(tuple(sample_positions(5, 2, 2, seed)) for seed in range(3000))
    assert set(drawn) == {(0, 2), (0, 3), (1, 3)}
    assert all(900 < times < 1100 for times in drawn.values())


def test_samples_repeat_by_seed_and_leave_global_randomness_alone():
    before = random.getstate(), torch.get_rng_state()
    windows, starts = samples(range(1000), 10, 3, seed=7)
    assert windows == [list(range(start, start + 10)) for start in starts]
    assert (windows, starts) == samples(range(1000), 10, 3, seed=7)
    assert starts != samples(range(1000), 10, 3, seed=8)[1]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(("available", "fits"), [(100, "3 samples of 30 would fit"), (20, "a sample of 20 would fit")])
def test_a_short_text_says_what_fits(available, fits):
    with pytest.raises(EvaluationError, match=f"the text has {available} tokens.*{fits}"):
        sample_positions(available, 30, 4, seed=0)
