"""What pytest gets: fixtures, the class of tests, and the comparison, each in a run of pytest of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from kvpolicy import load
from kvpolicy.testing import CHECKS, check_policy, comparison
from tests import folder

pytest_plugins = ["pytester"]

POLICY = """
from typing import Any, Literal
import pytest
import torch
from kvpolicy import EvictionPolicy
from kvpolicy.testing import CHECKS, PolicyTests, Rule

class Newest(EvictionPolicy):
    kind: Literal["newest"] = "newest"
    def priority(self, view):
        return view.positions

class NewestRule(Rule):
    def keep(self, held, seen):
        return held[-self.budget :]

class Careless(Newest):
    def priority(self, view):
        return torch.rand(view.positions.shape)
"""


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """What inner runs import is forgotten after them, and much of torch cannot be imported twice."""
    check_policy(load("h2o"))
    assert comparison


def test_the_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import torch

        def test_cache(kvpolicy_model, kvpolicy_cache):
            cache = kvpolicy_cache("h2o", 4, positions="original")
            kvpolicy_model.generate(torch.ones(1, 9, dtype=torch.long), max_new_tokens=2, past_key_values=cache)
            assert cache.kept(0).tolist() == [[4, 4]]

        def test_no_budget(kvpolicy_cache):
            assert kvpolicy_cache("full").budget is None

        models = set()

        def test_one(kvpolicy_model):
            models.add(id(kvpolicy_model))

        def test_the_same(kvpolicy_model):
            assert id(kvpolicy_model) in models
    """)
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=4)


def test_the_class_of_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        POLICY
        + """
class TestAttribute(PolicyTests):
    policy = Newest()
    reference = NewestRule

class TestFixture(PolicyTests):
    @pytest.fixture
    def policy(self):
        return Newest()

    @pytest.fixture
    def reference(self):
        return NewestRule

class TestWithout(PolicyTests):
    policy = Newest()
    draws_by = {"row"}
    skip = {"keys": "known"}

class TestCareless(PolicyTests):
    policy = Careless()

class TestNothing(PolicyTests):
    pass
"""
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rsf", "--tb=short")
    outcomes = Counter()
    for report in result.reprec.getreports("pytest_runtest_logreport"):
        if report.when == "call" or report.outcome != "passed":
            outcomes[report.nodeid.split("::")[1], report.outcome] += 1
    careless = outcomes.pop(("TestCareless", "failed"))
    assert 0 < careless < len(CHECKS)
    del outcomes["TestCareless", "passed"], outcomes["TestCareless", "skipped"]
    assert outcomes == {
        ("TestAttribute", "passed"): len(CHECKS),
        ("TestFixture", "passed"): len(CHECKS),
        ("TestWithout", "passed"): len(CHECKS) - 3,
        ("TestWithout", "skipped"): 3,
        ("TestNothing", "failed"): len(CHECKS),
    }
    result.stdout.fnmatch_lines_random(["SKIPPED*known", "SKIPPED*it draws by row", "SKIPPED*no reference is given"])
    result.stdout.fnmatch_lines(["E * tried: *two runs with different torch.manual_seed"])
    result.stdout.fnmatch_lines(["E * TestNothing has no policy: give it as an attribute or a fixture"])
    result.stdout.fnmatch_lines(["FAILED *::TestCareless::test_policy[[]determinism[]] - *"])


def compare(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    return pytester.runpytest("-p", "no:cacheprovider", *words)


def test_a_comparison(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # benchmarks do not run where tests run side by side
    pytester.makepyfile("def test_other(): pass")
    result = compare(pytester, "--kvpolicy-compare", "snapkv", "--benchmark-only")
    result.assert_outcomes(passed=12, skipped=1)
    shown = result.stdout.str()
    assert "kvpolicy: decode step after 512 tokens, 128 kept': 6 tests" in shown
    assert "kvpolicy: prefill of 512 tokens, cut to 128': 6 tests" in shown
    named = {*re.findall(r"test_decode_step\[(\w+)\]", shown)}
    assert named == {*re.findall(r"test_prefill\[(\w+)\]", shown)}
    assert named == {"snapkv", "full", "streaming_llm", "h2o", "lru", "random"}


def test_a_comparison_of_files_and_of_what_is_built_in(pytester: pytest.Pytester) -> None:
    pytester.makefile(".yaml", mine="kind: union\nparts: [sinks, recent]\n")
    result = compare(pytester, "--kvpolicy-compare", "mine.yaml,lru", "--benchmark-disable", "-v", "-k", "prefill")
    result.assert_outcomes(passed=6, deselected=6)
    result.stdout.fnmatch_lines_random(["*test_prefill[[]mine.yaml[]] PASSED*", "*test_prefill[[]lru[]] PASSED*"])


def test_a_comparison_on_a_model_of_ones_own(pytester: pytest.Pytester) -> None:
    folder.save_model(pytester.path / "model")
    result = compare(pytester, "--kvpolicy-compare", "h2o", "--kvpolicy-model", "./model", "--benchmark-disable")
    result.assert_outcomes(passed=10)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kvpolicy-compare", "h3o"], "unknown policy 'h3o'; did you mean 'h2o'?*"),
        (["--kvpolicy-compare", " , "], "--kvpolicy-compare needs policies: kinds or files, separated by commas"),
        (["--kvpolicy-compare", "big.yaml"], "big.yaml: streaming_llm: a budget of 128 tokens cannot hold the 500 *"),
        (["--kvpolicy-compare", "lru", "--kvpolicy-model", "./none"], "no model at ./none: *"),
        (["--kvpolicy-model", "./none"], "--kvpolicy-model says what --kvpolicy-compare runs on; *"),
        (
            ["--kvpolicy-compare", "lru", "--benchmark-only", "-p", "no:benchmark"],
            "--kvpolicy-compare needs pytest-benchmark: pip install pytest-benchmark",
        ),
    ],
)
def test_what_cannot_be_compared(pytester: pytest.Pytester, words: list[str], message: str) -> None:
    pytester.makefile(".yaml", big="kind: streaming_llm\nsinks: 500\n")
    result = compare(pytester, *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert "Traceback" not in result.stderr.str()


def test_torch_waits_until_something_is_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys

        def test_light():
            assert "kvpolicy.pytest_plugin" in sys.modules
            assert not {"torch", "transformers", "pydantic"} & {*sys.modules}
    """)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q"], capture_output=True, text=True, cwd=pytester.path)
    assert done.returncode == 0, done.stdout
