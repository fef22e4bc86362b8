"""Explanations: the numbers are those that a cache then has, errors come first, and nothing but a config is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, LlamaConfig, MambaConfig

from kvpolicy import EvictionCache, EvictionPolicy, cli
from kvpolicy.errors import BudgetError, ConfigError
from kvpolicy.explain import Shape, explain, runs
from kvpolicy.policy import Need
from kvpolicy.report.explain import explanation_report, need_text
from tests import folder, tiny

LAYERS, HEADS, PROMPT = 4, 2, 150

PARTS = {"kind": "union", "parts": [{"take": 4, "of": "sinks"}, {"take": 0.5, "of": "recent"}, "heavy"]}
PROTECT = {"kind": "protect", "sinks": 3, "spans": [[40, 50]], "recent": 0.25, "of": "h2o"}
SNAP = {"kind": "snapkv", "window": 8}
PYRAMID = {"share": 0.2, "layers": {"kind": "pyramid", "beta": 4}}


class KeysDecide(EvictionPolicy):
    """Neither needs nor state, and yet not by position alone."""

    kind: Literal["keys_decide"] = "keys_decide"

    def priority(self, view):
        return view.keys.norm(dim=-1)


@pytest.fixture(scope="module")
def model():
    return tiny.family("llama", torch.float32, heads=4, kv_heads=HEADS, layers=LAYERS)


def kept_by(model, source, prompt, **options):
    cache = EvictionCache(model, source, **options)
    with torch.no_grad():
        model(tiny.ids(1, prompt), **tiny.cache_argument(cache))
    return cache


EVEN = [
    ("full", {}),
    ("h2o", {"budget": 40}),
    ("quest", {"budget": 40}),
    ({"kind": "quest", "page": 7, "full_layers": 0}, {"budget": 0.25}),
    ({"kind": "criticalkv", "of": "h2o"}, {"budget": 40}),
    ("h2o", {"budget": 400}),
    ("lru", {"budget": 0.25}),
    ("random", {"budget": 0.1}),
    ("streaming_llm", {"budget": "20%", "prefix": 12}),
    (PARTS, {"budget": 41}),
    (PARTS, {"budget": PYRAMID}),
    (PROTECT, {"budget": 60, "prefix": 5}),
    (KeysDecide(), {"budget": 20}),
    ({"kind": "every", "tokens": 8, "of": PROTECT}, {"budget": 50}),
    ({"kind": "every", "tokens": 8, "of": "h2o"}, {"budget": PROMPT - 3}),
    ({"kind": "cascade", "narrow": "recent", "to": 2.0, "pick": SNAP}, {"budget": 30}),
    ({"kind": "cascade", "narrow": "streaming_llm", "to": 50, "pick": "recent"}, {"budget": 30}),
    ({"kind": "blend", "parts": ["h2o", "recent"]}, {"budget": 30}),
    ({"kind": "phases", "prefill": SNAP, "decode": "full"}, {"budget": 30}),
    ({"kind": "phases", "prefill": "full", "decode": "h2o"}, {"budget": 30}),
    ({"kind": "layers", "at": {"0": "full", "-1:": PARTS}, "default": "h2o"}, {"budget": PYRAMID}),
    ("h2o", {"budget": {"share": 0.2, "of": "seen", "min": 8, "max": 25}}),
]


@pytest.mark.parametrize(("source", "options"), EVEN, ids=str)
def test_numbers_are_those_of_the_cache(model, source, options):
    found = explain(source, model.config, PROMPT, dtype="float32", **options)
    cache = kept_by(model, source, PROMPT, **options)
    for index, numbers in enumerate(found.layers):
        held = cache.positions(index)[0]
        cut = numbers.tokens is not None and numbers.tokens + cache.policy.for_layer(index, LAYERS).room(False) < PROMPT
        assert (cache.kept(index) == (numbers.tokens if cut else PROMPT)).all()
        assert numbers.bytes.total == cache.layers[index].nbytes()
        for first, last in numbers.certain:
            assert all(set(range(first, last + 1)) <= set(head.tolist()) for head in held)
    assert found.bytes.total == cache.nbytes()


@pytest.mark.parametrize("source", ["h2o", PARTS, PROTECT], ids=str)
@pytest.mark.parametrize("layers", [None, {"kind": "pyramid", "beta": 4}])
def test_no_head_has_less_than_its_floor(model, source, layers):
    budget = {"share": 0.4, "heads": {"kind": "adaptive", "alpha": 0.3}, **({"layers": layers} if layers else {})}
    found = explain(source, model.config, PROMPT, budget=budget)
    cache = kept_by(model, source, PROMPT, budget=budget)
    for index, numbers in enumerate(found.layers):
        kept = cache.kept(index)
        assert int(kept.sum()) == HEADS * numbers.tokens
        assert 0 < numbers.least <= int(kept.min())
        assert numbers.least < numbers.tokens or source == PROTECT
    assert explain(source, model.config, 20, budget={"tokens": 30, "heads": "adaptive"}).layers[0].least == 30


def test_certain_is_only_what_positions_decide(model):
    def certain(source, **options):
        return explain(source, model.config, PROMPT, **options).layers[-1].certain

    assert certain("streaming_llm", budget=20) == ((0, 3), (134, 149))
    assert certain("h2o", budget=20) == ((140, 149),)
    assert certain(KeysDecide(), budget=20) == ((149, 149),)
    assert certain(PARTS, budget=24) == ((0, 3), (140, 149))
    assert certain({"kind": "blend", "parts": ["recent", "h2o"]}, budget=20) == ((140, 149),)
    both = [{"kind": "h2o", "sinks": 12, "recent": 0}, {"kind": "lru", "recent": 12}]
    assert certain({"kind": "blend", "parts": both}, budget=20) == ()  # not all of 24 can stay
    assert certain("h2o", budget=200) == ((0, 149),)
    assert certain("full") == ((0, 149),)


def test_parts_share_the_budget_down_the_tree(model):
    source = {"kind": "every", "tokens": 4, "of": {"kind": "protect", "sinks": 4, "of": PARTS}}
    found = explain(source, model.config, PROMPT, budget=50, prefix=10)
    parts = {path: (part.kind, part.tokens) for path, part in found.layers[0].tree.walk()}
    assert parts == {
        "": ("protect", 50), "of": ("every", 40), "of.of": ("protect", 40), "of.of.of": ("union", 36),
        "of.of.of.0": ("sinks", 4), "of.of.of.1": ("recent", 16), "of.of.of.2": ("heavy", 16),
    }  # fmt: skip
    assert found.overshoot == 3
    assert list(found.fields) == ["of.of.of.2.mass"]
    assert found.needs == (Need.ATTENTION_SUM,)


def test_layers_are_grouped_and_totals_are_exact(model):
    found = explain("h2o", model.config, PROMPT, budget=PYRAMID)
    assert [(*layers, numbers.tokens) for layers, numbers in found.groups()] == [(0, 53), (1, 38), (2, 22), (3, 7)]
    assert found.tokens == 4 * 30
    same = explain("h2o", model.config, PROMPT, budget=30)
    assert [layers for layers, _ in same.groups()] == [[0, 1, 2, 3]]
    mixed = explain({"kind": "layers", "at": {"1": "full"}, "default": "h2o"}, model.config, PROMPT, budget=30)
    assert [layers for layers, _ in mixed.groups()] == [[0, 2, 3], [1]]
    assert mixed.tokens == 3 * 30 + PROMPT


def text_of(found):
    console = Console(width=128)
    with console.capture() as captured:
        for part in explanation_report(found, "it"):
            console.print(part, highlight=False)
    return " ".join(captured.get().split())


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (64, "64 tokens for each KV head of each layer"),
        (0.25, "0.25 of 150 prompt tokens = 38 for each KV head"),
        ({"share": 0.25, "min": 64}, "0.25 of 150 prompt tokens = 38, raised to 64, for each"),
        ({"share": 0.25, "max": 16}, "0.25 of 150 prompt tokens = 38, lowered to 16, for each"),
        ({"share": 0.25, "of": "seen"}, "0.25 of 150 tokens seen = 38 for each KV head of each layer then one more for "
         "each 4 tokens"),
        (PYRAMID, "30 for each KV head of each layer on average"),
        (PYRAMID, "pyramid (beta 4.0, window 0): 53 to 7 tokens, in all 120 = 4 × 30"),
        ({"tokens": 40, "layers": "cake"}, "cake (tau1 1.0, tau2 1.0, window 32): measured while the prompt is read"),
        ({"tokens": 40, "layers": "cake"}, "is read, in all 160 = 4 × 40"),
        ({"tokens": 40, "layers": "cake"}, "the last 32 rows of attention: a prompt is attended fused"),
        ({"tokens": 160, "layers": "cake"}, "window 32): all the same, as the prompt fits, in all 640 = 4 × 160"),
        ({"tokens": 64, "heads": "adaptive"}, "adaptive (alpha 0.2): what 2 heads have is divided anew at each cut"),
    ],
)  # fmt: skip
def test_the_budget_in_words(model, budget, text):
    assert text in text_of(explain("h2o", model.config, PROMPT, budget=budget))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("h2o", "one token goes for each that comes"),
        ("full", "nothing goes"),
        ({"kind": "phases", "prefill": SNAP, "decode": "full"}, "what is written stays: the cache grows with it"),
        ({"kind": "every", "tokens": 8, "of": "h2o"}, "up to 8 tokens beyond the budget come before the next cut"),
        (SNAP, "the last 8 rows of attention: a prompt is attended fused, and these rows once more"),
        ("lru", "every row of attention: a prompt is attended in blocks, not fused"),
        ("streaming_llm", "nothing: a prompt is attended fused"),
        ("lru", "(bytes of a slot: last_used 4, mass 4)"),
        (PARTS, "├── 1 recent"),
        (SNAP, "snapkv window=8"),
        ({"kind": "layers", "at": {"1": "full"}, "default": "h2o"}, "all have the same; 1 more evict nothing"),
    ],
)  # fmt: skip
def test_costs_in_words(model, source, text):
    assert text in text_of(explain(source, model.config, PROMPT, budget=None if source == "full" else 40))


def test_every_need_has_words():
    for need in (Need.ATTENTION_SUM, Need.ATTENTION_ROWS, Need.LOGITS):
        assert need_text(need).endswith("a prompt is attended in blocks, not fused")
        assert need.name not in need_text(need)
    assert need_text(Need.ATTENTION_LAST).startswith("the last row of attention")
    assert need_text(Need.QUERIES).endswith("unless nothing else is needed")
    assert need_text(Need.ROTATION).endswith("costs nothing")


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ("h2o", {}, BudgetError, "h2o needs a budget: --budget 512"),
        ({"kind": "h2o", "sinks": 12}, {"budget": PYRAMID}, BudgetError,
         "layer 3: h2o: a budget of 7 tokens cannot hold the 12 it must protect (sinks=12)"),
        ("h2o", {"budget": PYRAMID, "prefix": 9}, BudgetError, "layer 3: protect: a budget of 7 tokens"),
        ({"kind": "h2o", "sinks": 40}, {"budget": {"share": 0.2, "of": "seen"}}, BudgetError,
         "h2o: a budget of 30 tokens cannot hold the 40"),
        ("full", {"budget": 20}, BudgetError, "a prompt of 150 tokens does not fit its budget of 20"),
        ({"kind": "protect", "prefix": True, "of": "h2o"}, {"budget": 20}, ConfigError, "--prefix 50), or 0"),
        ({"kind": "layers", "at": {"9": "full"}, "default": "h2o"}, {"budget": 20}, ConfigError,
         "the model has layers 0 to 3"),
        ("h2o", {"budget": "much"}, BudgetError, "'much' is no budget"),
    ],
)  # fmt: skip
def test_what_a_cache_would_refuse_is_refused(model, source, options, error, message):
    with pytest.raises(error) as caught:
        explain(source, model.config, PROMPT, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shapes_of_configs():
    assert Shape.of(LlamaConfig(num_attention_heads=8, hidden_size=64, num_hidden_layers=3)) == Shape(
        layers=3, kv_heads=8, head_dim=8, dtype="float32"
    )
    assert Shape.of(GPT2Config(dtype="bfloat16")) == Shape(layers=12, kv_heads=12, head_dim=64, dtype="bfloat16")
    assert Shape.of(LlamaConfig(head_dim=6, num_key_value_heads=2), "float16").token == 2 * 2 * 6 * 2
    with pytest.raises(ConfigError, match="the config of a mamba model does not say"):
        Shape.of(MambaConfig())


def test_runs():
    assert list(runs([0, 1, 2, 5, 7, 8])) == [(0, 2), (5, 5), (7, 8)]
    assert list(runs([])) == []


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "budgets.md").read_text()
    written = page.partition("```yaml\n# mine.yaml\n")[2].partition("```")[0]
    shown = page.partition("```text\nmine.yaml on ")[2].partition("```")[0].partition("\n")[2]
    (tmp_path / "mine.yaml").write_text(written)
    monkeypatch.chdir(tmp_path)
    smollm2 = LlamaConfig(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576)
    console = Console(width=128)
    with console.capture() as captured:
        for part in explanation_report(explain("mine.yaml", smollm2, 1000, prefix=50), ""):
            console.print(part, highlight=False)
    printed = [line.rstrip() for line in captured.get().splitlines()[2:]]
    assert printed == shown.splitlines()


# -- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    folder.save_model(tmp_path / "model")
    (tmp_path / "mine.yaml").write_text("kind: h2o\nsinks: 4\nbudget: {share: 0.25, layers: pyramid}\n")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()  # they are not needed

    def run(*words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["kvpolicy", "explain", *words, "--model", "model"])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code or 0, *capsys.readouterr()

    return run


def test_explain_prints_text(command):
    status, out, err = command("mine.yaml", "--prompt-tokens", "400")
    assert (status, err) == (0, "")
    assert "mine.yaml on model, a prompt of 400 tokens" in out
    assert "0.25 of 400 prompt tokens = 100 for each KV head of each layer on average" in out
    assert "in all 200 = 2 × 100" in out


def test_explain_prints_json(command):
    status, out, err = command("mine.yaml", "--prompt-tokens", "400", "--json", "--dtype", "bfloat16")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["source"], found["spec"], found["prompt_tokens"], found["budget_tokens"]) == (
        "mine.yaml", "model", 400, 100,
    )  # fmt: skip
    assert [(layer["layers"], layer["tokens"]) for layer in found["layers"]] == [([0], 195), ([1], 5)]
    assert found["layers"][1]["tree"] == {"name": "", "kind": "h2o", "options": {"sinks": 4}, "tokens": 5, "parts": []}
    assert found["slot_fields"] == {"mass": {"dtype": "float32", "shape": [], "bytes": 4}}
    assert found["bytes"]["full_cache"] == 2 * 400 * 2 * 2 * 8 * 2
    phases = command("h2o", "--budget", "8", "--prompt-tokens", "40", "--json", "--prefix", "3")[1]
    assert json.loads(phases)["policy"]["kind"] == "protect"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine.yaml", "--prompt-tokens", "80"], "layer 1: h2o: a budget of 1 tokens cannot hold"),
        (["h3o", "--prompt-tokens", "80"], "did you mean 'h2o'?"),
        (["h2o", "--prompt-tokens", "80"], "h2o needs a budget"),
        (["h2o", "--prompt-tokens", "80", "--budget", "8", "--dtype", "int3"], "unknown dtype 'int3'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command, words, message):
    status, out, err = command(*words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_config_that_cannot_be_read_is_one_line(command, tmp_path):
    (tmp_path / "model" / "config.json").write_text("{")
    status, out, err = command("h2o", "--prompt-tokens", "80", "--budget", "8")
    assert (status, out) == (2, "")
    assert "cannot load the config of model 'model'" in err
    assert err.count("\n") == 1


def test_what_selects_keeps_everything_and_attends_to_some(command):
    words = ["quest", "--prompt-tokens", "400", "--budget", "64"]
    out = " ".join(command(*words)[1].split())
    assert "nothing goes in layers 1 a step attends to some 64 tokens" in out
    assert "low 32 for 16 together, high 32 for 16 together" in out
    found = json.loads(command(*words, "--json")[1])
    assert [(layer["layers"], layer["tokens"], layer["attends"]) for layer in found["layers"]] == [
        ([0], None, None), ([1], None, 64),
    ]  # fmt: skip
    assert found["slot_fields"]["low"] == {"dtype": "model", "shape": ["head_dim"], "bytes": 32, "every": 16}
