"""DuoAttention: which heads stream, what they hold, files with gates, and making such a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_plugins.duo_attention import DuoAttention

from kvpolicy import EvictionCache, load
from kvpolicy.config import read, to_yaml
from kvpolicy.errors import BudgetError, ConfigError
from kvpolicy.evaluate.plan import Plan
from kvpolicy.explain import explain
from kvpolicy.rehearsal import compress
from kvpolicy.select import survivors
from kvpolicy.testing import check_policy
from tests import tiny
from tests.unit.test_policies import Trace
from tests.unit.test_reference import compare
from tests.unit.test_rehearsal import Tokenizer

GATES = {0: [0.9, 0.2], 1: [0.1, 0.6]}
DUO: dict[str, Any] = {"kind": "duo_attention", "heads": GATES, "sinks": 2, "recent": 5}


def as_heads(options: dict[str, Any] = DUO) -> dict[str, Any]:
    """The same written with `layers` and `heads`, for the reference."""
    window = {"kind": "streaming_llm", "sinks": options["sinks"]}
    layers = {
        str(layer): {
            "kind": "heads",
            "at": {",".join(str(head) for head, gate in enumerate(gates) if gate > 0.5) or "none": "full"},
            "default": window,
        }
        for layer, gates in options["heads"].items()
    }
    return {"kind": "layers", "at": layers, "default": "full"}


def fed(model: Any, cache: EvictionCache, tokens: torch.Tensor) -> None:
    with torch.no_grad():
        model(tokens, use_cache=True, **tiny.cache_argument(cache))


def test_the_worked_example() -> None:
    model = tiny.family("llama", layers=1)
    policy = {"kind": "duo_attention", "heads": [[0.9, 0.2]], "sinks": 1, "recent": 2}
    for parts in ([6], [1] * 6, [2, 4]):
        cache = EvictionCache(model, policy)
        for part in tiny.ids(1, 6).split(parts, 1):
            fed(model, cache, part)
        assert [[p for p in head if p >= 0] for head in cache.positions(0)[0].tolist()] == [[*range(6)], [0, 4, 5]]


def test_a_streaming_head_by_hand() -> None:
    policy = load({"kind": "duo_attention", "heads": [[0.2]], "sinks": 1, "recent": 2}).for_layer(0, 1)
    trace = Trace(policy, 3)
    trace.observe([[1.0]] * 6)
    view = trace.view()
    assert survivors(policy.ranking(view), view, 3)[1].flatten().tolist() == [0, 4, 5]


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_against_the_reference(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.family(family, **({"kv_heads": 2} if family == "llama" else {"heads": 2}))
    tokens, mask = tiny.left_pad([17, 5])
    more = tiny.ids(2, 90, seed=7)
    tokens, mask = torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    monkeypatch.setattr(
        "tests.unit.test_reference.EvictionCache", lambda model, *given, **named: EvictionCache(model, DUO)
    )
    compare(as_heads(), model, 7, tokens, [10, 7, *[1] * 70, 9, *[1] * 11], mask)


def test_a_prefix_is_kept_by_streaming_heads_too() -> None:
    model = tiny.family("llama")
    cache = EvictionCache(model, DUO, prefix=4)
    fed(model, cache, tiny.ids(1, 30))
    assert cache.positions(0)[0, 1].tolist()[-7:] == [0, 1, 2, 3, 27, 28, 29]
    with pytest.raises(BudgetError, match="cannot hold"):
        EvictionCache(model, DUO, prefix=7)


def test_checks() -> None:
    check_policy(load(DUO))


@given(
    gates=st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=5),
    sparsity=st.floats(0, 1),
    threshold=st.floats(0, 1),
)
def test_which_heads_stream(gates: list[list[float]], sparsity: float, threshold: float) -> None:
    policy: Any = load({"kind": "duo_attention", "heads": gates, "threshold": threshold})
    assert policy.retrieval() == [[gate > threshold for gate in layer] for layer in gates]
    policy = load({"kind": "duo_attention", "heads": gates, "sparsity": sparsity})
    found = [
        (gate, keeps)
        for layer, its in zip(gates, policy.retrieval(), strict=True)
        for gate, keeps in zip(layer, its, strict=True)
    ]
    streaming, full = [g for g, keeps in found if not keeps], [g for g, keeps in found if keeps]
    assert abs(len(streaming) - sparsity * len(found)) <= 0.5 + 1e-4
    assert not streaming or not full or max(streaming) <= min(full)


def test_no_budget_and_one_run_for_all_budgets() -> None:
    model = tiny.family("llama")
    with pytest.raises(
        BudgetError, match="duo_attention says by itself how many tokens it keeps: leave the budget out"
    ):
        EvictionCache(model, DUO, 16)
    runs = Plan.of([load(DUO), "h2o"], [6, 9], 64).runs
    assert [run.budget for run in runs if run.policy.kind == "duo_attention"] == [None]


def test_bytes_and_what_explain_says() -> None:
    model = tiny.family("llama", dtype=torch.float32)
    cache = EvictionCache(model, DUO)
    fed(model, cache, tiny.ids(1, 200))
    slot = 2 * 8 * 4 + 4
    for layer, pool in enumerate(cache.layers):
        assert sorted(cache.kept(layer)[0].tolist()) == [7, 200]
        tables = pool.pages.nbytes() + pool.free.nbytes + pool.shares.nbytes + pool.seen.nbytes
        assert pool.nbytes() - tables == (16 + 272) * slot
    found = explain(load(DUO), model.config, 200)
    assert [layer.tokens for layer in found.layers] == [104, 104]
    assert found.layers[0].slots == (16 + 272) // 2
    assert found.layers[0].least == 7
    assert list(found.layers[0].certain) == [(0, 1), (195, 199)]


# -- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["heads.yaml", "heads.json"])
def test_a_profile_is_a_policy_and_can_be_named_by_one(tmp_path: Path, name: str) -> None:
    about = {"command": 'kvpolicy profile "x": [y]', "tokens": 3}
    text = {
        "heads.yaml": "kind: duo_attention\nheads:\n  0: [0.9, 0.2]\n  1: [0.1, 0.6]\n"
        f"about:\n  command: {json.dumps(about['command'])}\n  tokens: 3\n",
        "heads.json": json.dumps(
            {"kind": "duo_attention", "heads": {"0": [0.9, 0.2], "1": [0.1, 0.6]}, "about": about}
        ),
    }
    (tmp_path / name).write_text(text[name], "utf-8")
    policy: Any = load(tmp_path / name)
    assert policy.heads == ((0.9, 0.2), (0.1, 0.6)) and policy.about["command"] == 'kvpolicy profile "x": [y]'
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(f"kind: duo_attention\nheads: ../{name}\nsinks: 3\n")
    (tmp_path / "more.yaml").write_text(f"extends: {name}\nsinks: 3\nsparsity: 0.5\n")
    for file in (tmp_path / "sub" / "mine.yaml", tmp_path / "more.yaml"):
        mine: Any = load(file)
        assert mine.heads == policy.heads and mine.sinks == 3
    (tmp_path / "again.yaml").write_text(to_yaml(mine))
    assert load(tmp_path / "again.yaml") == mine


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (
            "heads:\n  0: [0.9, 0.2]\n  1: [0.1, high]\n",
            "heads.yaml:3:12: heads.1.1: needs a number from 0 to 1, not 'high'",
        ),
        (
            "heads:\n  0: [0.9, 0.2]\n  1: [0.1, 1.5]\n",
            "heads.yaml:3:12: heads.1.1: needs a number from 0 to 1, not 1.5",
        ),
        ("0: [0.9, true]\n", "heads.yaml:1:10: 0.1: needs a number from 0 to 1, not True"),
        ("heads:\n  0: [0.9]\n  2: [0.1]\n", "heads.yaml:2:3: heads: layer 1 is missing"),
        (
            "heads:\n  0: [0.9]\n  x: [0.1]\n",
            "heads.yaml:2:3: heads: needs numbers of layers (0, 1, ...) and their gates, not 'x'",
        ),
        ("heads:\n  0: 0.9\n", "heads.yaml:2:6: heads.0: needs a list of gates, one for each KV head"),
        ("heads: 3\n", "heads.yaml:1:8: heads: needs gates by layer"),
        ("heads: [\n", "heads.yaml:2:1: is not valid YAML"),
    ],
)
def test_profiles_that_are_wrong(tmp_path: Path, profile: str, message: str) -> None:
    (tmp_path / "heads.yaml").write_text(profile)
    (tmp_path / "mine.yaml").write_text("kind: duo_attention\nheads: heads.yaml\n")
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "mine.yaml")
    assert str(error.value).startswith(f"{tmp_path}/mine.yaml:2:8: heads: {tmp_path}/{message}")
    assert "\n" not in str(error.value)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("kind: duo_attention\nheads: heads.yaml\n")
    with pytest.raises(ConfigError, match=r"mine.yaml:2:8: heads: .*heads.yaml: cannot be read: No such file"):
        read(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": [[0.9, 0.2]]}, "duo_attention: heads has gates for 1 layers, the model has 2"),
        ({"heads": [[0.9, 0.2]] * 3}, "heads has gates for 3 layers, the model has 2"),
        ({"heads": [[0.9, 0.2], [0.1, 0.2, 0.9]]}, "heads has 3 gates for layer 1, and there the model has 2 KV heads"),
        ({"heads": [[0.9], [0.9]]}, "heads has 1 gates for layer 0, and there the model has 2 KV heads"),
        ({"heads": [[0.9, 1], [0.1, -1]]}, r"heads\.1\.1: must be greater than or equal to 0"),
        ({"heads": [[], [0.9]]}, r"heads\.0"),
        ({}, "heads: is missing"),
        ({"heads": GATES, "recent": 0}, "recent: must be"),
        ({"heads": GATES, "sparsity": 0.5, "threshold": 0.3}, "threshold and sparsity say the same in two ways"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvictionCache(tiny.family("llama"), {"kind": "duo_attention", **options})


# -- making a profile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("join", ["max", "mean"])
def test_gates_are_joined_scores_of_the_pass(join: Any) -> None:
    model, contexts = tiny.family("llama"), list(tiny.ids(3, 30))
    expected = []
    for context in contexts:
        cache = EvictionCache(model, {"kind": "kvzip", "budgets": "uniform"}, 30)
        compress(model, Tokenizer(), cache, context[None])
        scores = torch.stack([cache.scores(layer)["score"][0] for layer in range(2)])[..., 4:]
        expected.append(scores.amax(-1) if join == "max" else scores.mean(-1))
    policy = DuoAttention.profiled(model, Tokenizer(), contexts, join=join)
    expected_gates = torch.stack(expected).double().mean(0).tolist()
    assert [list(gates) for gates in policy.heads] == [[round(g, 6) for g in layer] for layer in expected_gates]
    fed(model, EvictionCache(model, policy), contexts[0][None])


def test_gates_are_a_line_for_each_layer() -> None:
    policy = DuoAttention(heads=((0.25, 1.0), (0.123456, 0.0)), about={"texts": ["ä"]})
    written = "kind: duo_attention\nheads:\n  '0': [0.25, 1.0]\n  '1': [0.123456, 0.0]\nabout:\n  texts:\n  - ä\n"
    assert to_yaml(policy) == written
