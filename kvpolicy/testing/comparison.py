"""Benchmarks of policies beside the built-in ones: what ``pytest --kvpolicy-compare my_policy`` adds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy.cache import EvictionCache
from kvpolicy.config import Config, read
from kvpolicy.errors import ConfigError
from kvpolicy.testing import models

BUILT_IN = ("full", "streaming_llm", "h2o", "lru", "random")
PROMPT, BUDGET = 512, 128


def policies(config: pytest.Config) -> dict[str, Config]:
    """What is compared, by the name it is shown under: what was asked for, then the built-in ones."""
    asked = [word.strip() for word in config.getoption("kvpolicy_compare").split(",") if word.strip()]
    if not asked:
        raise ConfigError("--kvpolicy-compare needs policies: kinds or files, separated by commas")
    return {word: read(word) for word in dict.fromkeys((*asked, *BUILT_IN))}


def check(config: pytest.Config) -> None:
    """Refuse policies and models that are not there."""
    for name, compared in policies(config).items():
        if compared.policy.budgeted:
            try:
                compared.policy.check(BUDGET)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    if spec := config.getoption("kvpolicy_model"):
        from kvpolicy.evaluate.models import check_model

        check_model(spec)


class _Module(pytest.Module):
    """This module as a file of tests, wherever it is installed."""

    def _getobj(self) -> Any:
        return sys.modules[__name__]


def collected(session: pytest.Session) -> Iterator[pytest.Item]:
    """The benchmarks below as items."""
    yield from session.genitems(_Module.from_parent(session, path=Path(__file__)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each benchmark for each policy."""
    if "compared" in metafunc.fixturenames:
        found = policies(metafunc.config)
        metafunc.parametrize("compared", [config.policy for config in found.values()], ids=list(found))


@pytest.fixture(scope="module")
def compared_model(pytestconfig: pytest.Config) -> Iterator[Any]:
    """The model that was asked for, or a tiny one."""
    from kvpolicy.evaluate.models import load_model

    spec = pytestconfig.getoption("kvpolicy_model")
    with torch.no_grad():
        yield load_model(spec)[0] if spec else models.new_llama(dtype="float32")


@pytest.mark.benchmark(group=f"kvpolicy: decode step after {PROMPT} tokens, {BUDGET} kept")
def test_decode_step(compared: Any, compared_model: Any, benchmark: Any) -> None:
    cache = _cache(compared, compared_model)
    models.feed(compared_model, cache, models.ids(1, PROMPT))
    token = models.ids(1, 1)
    benchmark.pedantic(lambda: models.feed(compared_model, cache, token), rounds=30, warmup_rounds=3)
    assert not compared.bounded or int(cache.kept(0).max()) <= BUDGET + compared.room(True)


@pytest.mark.benchmark(group=f"kvpolicy: prefill of {PROMPT} tokens, cut to {BUDGET}")
def test_prefill(compared: Any, compared_model: Any, benchmark: Any) -> None:
    tokens = models.ids(1, PROMPT)

    benchmark.pedantic(
        lambda: models.feed(compared_model, _cache(compared, compared_model), tokens), rounds=10, warmup_rounds=1
    )


def _cache(policy: Any, model: Any) -> EvictionCache:
    return EvictionCache(model, policy, BUDGET if policy.budgeted else None, prefix=0)
