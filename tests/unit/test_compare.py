"""The comparison: numbers as computed by hand, stopping and continuing, the same twice."""

from __future__ import annotations

import json
from math import exp, log
from statistics import mean
from types import SimpleNamespace

import pytest
import torch

from kvpolicy import EvictionCache
from kvpolicy.config import load
from kvpolicy.errors import KVPolicyError
from kvpolicy.evaluate.compare import Settings, compare
from kvpolicy.evaluate.models import load_model
from kvpolicy.evaluate.plan import Plan, given_text
from kvpolicy.evaluate.results import Results
from kvpolicy.evaluate.statistics import increase_interval, t_quantile
from kvpolicy.evaluate.texts import load_text, samples
from kvpolicy.report.progress import Progress
from kvpolicy.report.rows import table_rows
from tests import folder, tiny

LENGTH, COUNT = 40, 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def model_folder(place):
    return folder.save_model(place / "model")


@pytest.fixture(scope="module")
def settings(place, model_folder):
    def make(**changes):
        chosen = {
            "model": model_folder,
            "text": folder.save_text(place / "text.txt"),
            "policies": ["h2o", "streaming_llm"],
            "budgets": ["0.25", 6],
            "tokens": LENGTH,
            "samples": COUNT,
        }
        return Settings(**{**chosen, **changes})

    return make


@pytest.fixture(scope="module")
def results(settings):
    return compare(settings(batch=2))


def cells(results):
    return {(cell.policy, cell.budget): cell for cell in results.cells}


def log_probs_by_hand(model, windows, policy, budget, **options):
    """A sample at a time, a token at a time, from the very first."""
    found = []
    for window in windows:
        cache = EvictionCache(model, policy, budget, **options)
        with torch.no_grad():
            steps = [
                model(torch.tensor([[token]]), **tiny.cache_argument(cache)).logits[0, -1] for token in window[:-1]
            ]
        found.append(torch.stack(steps).double().log_softmax(-1))
    return torch.stack(found)


def test_every_number_is_what_it_is_by_hand(settings, results):
    chosen = settings()
    model, tokenizer, _ = load_model(chosen.model)
    tokens = tokenizer(load_text(chosen.text)[0])["input_ids"]
    windows, starts = samples(tokens, LENGTH, COUNT, seed=0)
    assert results.samples["positions"] == starts
    scored_from = results.samples["scored_from"]
    assert scored_from == LENGTH // 4 + 2
    targets = torch.tensor(windows)[:, scored_from:]
    full = log_probs_by_hand(model, windows, "full", None)[:, scored_from - 1 :]
    nll_full = -full.gather(-1, targets[..., None])[..., 0].mean(-1)
    for policy, budget, limit in [("full", 6, None), ("h2o", 0.25, 10), ("streaming_llm", 6, 6)]:
        cell = cells(results)[policy, budget]
        mine = log_probs_by_hand(model, windows, policy, limit)[:, scored_from - 1 :]
        nll = -mine.gather(-1, targets[..., None])[..., 0].mean(-1)
        assert cell.sample_perplexities == pytest.approx(nll.exp().tolist(), rel=1e-4)
        assert cell.perplexity == pytest.approx(exp(nll.mean()), rel=1e-4)
        assert cell.perplexity_increase == pytest.approx(exp((nll - nll_full).mean()) - 1, abs=1e-4)
        divergence = (full.exp() * (full - mine)).sum(-1).mean()
        assert cell.kl == pytest.approx(float(divergence), rel=1e-3, abs=1e-6)
        assert cell.agreement == float((full.argmax(-1) == mine.argmax(-1)).double().mean())
        assert cell.scored_tokens == COUNT * (LENGTH - scored_from)
        assert cell.budget_tokens == (limit or 6)
        assert cell.kept_tokens == (limit or LENGTH - 1)
        assert cell.evictions == LENGTH - 1 - cell.kept_tokens


def test_eviction_acts_on_every_scored_token(settings):
    """One token earlier, a policy with the largest budget would still have seen everything."""
    assert Plan.of(["h2o"], [6, 9], LENGTH).scored_from == 11
    tightest = compare(settings(policies=["streaming_llm"], budgets=[36], tokens=39, samples=1))
    assert tightest.cells[-1].scored_tokens == 1
    assert tightest.cells[-1].kl > 0


def test_the_full_cache_is_there_for_every_budget(results):
    full = [cell for cell in results.cells if cell.policy == "full"]
    assert [cell.budget for cell in full] == [0.25, 6]
    assert {cell.perplexity for cell in full} == {results.cells[0].perplexity}
    assert all((cell.kl, cell.agreement, cell.perplexity_increase) == (0, 1, 0) for cell in full)


def test_batches_do_not_matter(settings, results):
    together = compare(settings())
    assert together.batch == COUNT
    for one, other in zip(results.cells, together.cells, strict=True):
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)
        assert one.agreement == other.agreement


def test_cells_of_one_batch_find_what_they_find_alone(settings):
    """Rows of the same budget together, whatever they need of attention; only their time is not known."""
    chosen = {"policies": ["h2o", "random", "tova", "snapkv", "streaming_llm"], "budgets": [6, 10], "batch": 2}
    alone, together = compare(settings(**chosen)), compare(settings(**chosen, together=3))
    assert (alone.together, together.together) == (1, 3)
    mine, theirs = cells(alone), cells(together)
    assert mine.keys() == theirs.keys()
    for key, one in mine.items():
        other = theirs[key]
        assert one.sample_perplexities == pytest.approx(other.sample_perplexities, rel=1e-5)
        assert one.kl == pytest.approx(other.kl, rel=1e-3, abs=1e-6)
        same = (one.agreement, one.kept_tokens, one.cache_bytes, one.evictions, one.scored_tokens)
        assert same == (other.agreement, other.kept_tokens, other.cache_bytes, other.evictions, other.scored_tokens)
        assert one.tokens_per_second > 0 and other.tokens_per_second is None


def test_the_same_twice_and_global_randomness_is_left_alone(settings):
    before = torch.get_rng_state()
    first, second = (compare(settings(policies=["random", "lru"], budgets=[6])) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(first.cells, second.cells, strict=True):
        assert (one.perplexity, one.kl, one.agreement) == (other.perplexity, other.kl, other.agreement)


def test_what_is_named_twice_is_measured_once(settings):
    found = compare(settings(policies=["h2o", "h2o", "full"], budgets=["6", 6, "0.15"]))
    assert [(cell.policy, cell.budget) for cell in found.cells] == [
        ("full", 6), ("full", 0.15), ("h2o", 6), ("h2o", 0.15),
    ]  # fmt: skip
    assert found.cells[2].seconds == found.cells[3].seconds  # 0.15 of 40 tokens are 6


@pytest.mark.parametrize(
    ("budget", "given", "text", "tokens", "mean"),
    [
        ({"share": 0.25, "layers": {"kind": "given", "weights": {"0": 3}}}, None,
         "0.25 (layers given weights={'0': 3.0})", 10, 10),
        ({"share": "25%", "of": "seen", "min": 4}, {"share": 0.25, "of": "seen", "min": 4},
         "0.25 (of seen, min 4)", 10, 10),
        ({"share": 0.5, "max": 8}, None, "0.5 (max 8)", 8, 8),
        ({"tokens": 7}, 7, "7", 7, 7),
    ],
)  # fmt: skip
def test_budgets_that_say_more(settings, budget, given, text, tokens, mean):
    """The first call evicts nothing whatever the budget is, so numbers are those of feeding token by token."""
    found = compare(settings(policies=["h2o"], budgets=[budget]))
    cell = found.cells[-1]
    if given is not None:
        assert cell.budget == given
    assert given_text(cell.budget) == text
    assert (cell.budget_tokens, cell.mean_kept_tokens) == (tokens, mean)
    scored_from = found.samples["scored_from"]
    model, tokenizer, _ = load_model(settings().model)
    tokens = tokenizer(load_text(settings().text)[0])["input_ids"]
    windows, _ = samples(tokens, LENGTH, COUNT, seed=0)
    mine = log_probs_by_hand(model, windows, "h2o", budget, prompt_length=LENGTH)[:, scored_from - 1 :]
    nll = -mine.gather(-1, torch.tensor(windows)[:, scored_from:, None])[..., 0].mean(-1)
    assert cell.perplexity == pytest.approx(exp(nll.mean()), rel=1e-4)


def test_what_is_divided_otherwise_is_another_cell(settings, tmp_path):
    budgets = [6, {"tokens": 6, "layers": {"kind": "given", "weights": {"0": 3}}}, {"tokens": 6, "layers": "uniform"}]
    chosen = settings(policies=["streaming_llm"], budgets=budgets)
    found = compare(chosen, tmp_path)
    uniform, lower, same = found.cells[3:]
    assert (lower.kept_tokens, lower.mean_kept_tokens) == (9, 6)
    assert lower.perplexity != uniform.perplexity == same.perplexity
    assert compare(chosen, tmp_path, resume=True).cells == found.cells


def test_all_is_every_kind_that_needs_no_options():
    named = {run.name for run in Plan.of(["all"], [6], LENGTH).runs}
    assert {"full", "h2o", "snapkv"} <= named
    assert not {"union", "protect", "span"} & named


def test_what_selects_is_said_to_keep_everything(settings):
    """Its budget is of what a step attends to; each budget is a cell of its own, as for policies that evict."""
    policy = load({"kind": "quest", "page": 2, "least": 3, "full_layers": 1})
    found = compare(settings(policies=[policy], budgets=[8, 4]))
    full, _, eight, four = found.cells
    assert eight.cache_bytes == four.cache_bytes > full.cache_bytes
    assert [(c.kept_tokens, c.evictions, c.attended_tokens) for c in (eight, four)] == [(39, 0, 7), (39, 0, 5)]
    assert full.attended_tokens is None
    assert [row[1] for row in table_rows(found)] == ["–", "8", "4"], "a row for each budget"
    assert eight.kl != four.kl > 0
    kept = "everything is kept, and no bytes are saved: a step attends to {} of 39 tokens at the end, in the layers "
    assert eight.notes == [kept.format(7) + "that select them"]
    assert four.notes == [
        kept.format(5) + "that select them",
        "that is more than its budget, which the policy does not go below",
    ]
    scored_from = found.samples["scored_from"]
    assert scored_from == 10
    model, tokenizer, _ = load_model(settings().model)
    tokens = tokenizer(load_text(settings().text)[0])["input_ids"]
    windows, _ = samples(tokens, LENGTH, COUNT, seed=0)
    mine = log_probs_by_hand(model, windows, policy, 8)[:, scored_from - 1 :]
    nll = -mine.gather(-1, torch.tensor(windows)[:, scored_from:, None])[..., 0].mean(-1)
    assert eight.perplexity == pytest.approx(exp(nll.mean()), rel=1e-4)


def test_layers_that_evict_nothing_are_not_nothing(settings):
    """Nothing was evicted is said only where it is true of all layers."""
    policy = {"kind": "layers", "at": {"0": "full"}, "default": "lru"}
    found = compare(settings(policies=[load(policy)], budgets=[6]))
    assert found.cells[-1].notes == []
    assert found.cells[-1].mean_kept_tokens == (LENGTH - 1 + 6) / 2


def test_heads_that_are_never_divided_are_pointed_out(settings):
    for policy, notes in [("h2o", 1), ({"kind": "every", "tokens": 4, "of": "h2o"}, 0)]:
        found = compare(settings(policies=[load(policy)], budgets=[{"tokens": 8, "heads": "adaptive"}], samples=1))
        assert len(found.cells[-1].notes) == notes
        assert (found.cells[-1].kept_tokens > 8) == (not notes)


def test_layers_that_are_never_measured_are_pointed_out(settings):
    found = compare(settings(policies=["h2o"], budgets=[8, {"tokens": 8, "layers": "cake"}], samples=1))
    *_, even, cell = found.cells
    assert even.notes == []
    assert cell.notes == [
        "all layers kept the same, as they are measured where a prompt is cut and here tokens come one by one"
    ]
    assert (cell.kept_tokens, cell.mean_kept_tokens, cell.kl) == (8, 8, even.kl)


def test_policies_from_files_bring_their_budget(settings, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("kind: random\nsinks: 0\nrecent: 0\nbudget: 8\n")
    found = compare(settings(policies=[str(file)], budgets=[]))
    cell = found.cells[-1]
    assert (cell.policy, cell.budget, cell.config["sinks"]) == (str(file), 8, 0)


class Stopping(Progress):
    """Ctrl-C after so many runs; counts the runs begun."""

    def __init__(self, after=99):
        self.begun, self.after = [], after

    def begin(self, label):
        if len(self.begun) == self.after:
            raise KeyboardInterrupt
        self.begun.append(label)


def test_stopping_keeps_finished_cells_and_resume_continues(settings, results, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        compare(settings(batch=2), tmp_path, progress=Stopping(after=3))
    left = json.loads((tmp_path / "results.json").read_text())
    assert [cell["policy"] for cell in left["cells"]] == ["full", "full", "h2o", "h2o"]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    rest = Stopping()
    resumed = compare(settings(batch=2), tmp_path, resume=True, progress=rest)
    assert rest.begun == ["full", "streaming_llm 0.25", "streaming_llm 6"]
    assert list(cells(resumed)) == list(cells(results))
    assert [cell.perplexity for cell in resumed.cells] == [cell.perplexity for cell in results.cells]
    assert [cell.kl for cell in resumed.cells] == [cell.kl for cell in results.cells]
    assert Results.load(tmp_path) == resumed
    nothing = Stopping()
    compare(settings(batch=2), tmp_path, resume=True, progress=nothing)
    assert nothing.begun == []


def test_resume_measures_anew_what_was_configured_otherwise(settings, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"kind": "h2o"}')
    chosen = settings(policies=[str(file), "lru"], budgets=[6])
    compare(chosen, tmp_path)
    file.write_text('{"kind": "h2o", "recent": 0}')
    again = Stopping()
    found = compare(chosen, tmp_path, resume=True, progress=again)
    assert again.begun == ["full", f"{file} 6"]
    assert cells(found)[str(file), 6].config["recent"] == 0


def test_only_the_same_comparison_is_resumed(settings, tmp_path):
    compare(settings(budgets=[6]), tmp_path)
    with pytest.raises(KVPolicyError, match="add --resume to go on, or --overwrite"):
        compare(settings(budgets=[6]), tmp_path)
    with pytest.raises(KVPolicyError, match=r"cannot resume.*samples.seed: 0 -> 1.*same settings") as caught:
        compare(settings(budgets=[6], seed=1), tmp_path, resume=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(KVPolicyError, match="one of the two"):
        compare(settings(budgets=[6]), tmp_path, resume=True, overwrite=True)
    assert compare(settings(budgets=[6], seed=1), tmp_path, overwrite=True).samples["seed"] == 1


def test_results_that_cannot_be_read_are_not_resumed(settings, tmp_path):
    (tmp_path / "results.json").write_text('{"cells": [{}]}')
    with pytest.raises(KVPolicyError, match="cannot be read as results"):
        compare(settings(), tmp_path, resume=True)


def test_the_file_says_where_numbers_are_from(settings, tmp_path):
    compare(settings(budgets=[6]), tmp_path / "a" / "b")
    found = json.loads((tmp_path / "a" / "b" / "results.json").read_text())
    assert found["samples"] | {"positions": []} == {
        "count": COUNT, "length": LENGTH, "positions": [], "seed": 0, "scored_from": 8, "prefix": None,
        "cache_positions": None,
    }  # fmt: skip
    assert found["model"]["parameters"] > 0
    assert found["model"]["dtype"] == "float32"
    assert {"python", "torch", "transformers", "kvpolicy", "platform", "cpu"} <= set(found["versions"])
    for key in (
        "kvpolicy",
        "command",
        "text",
        "budget_rule",
        "phase",
        "threads",
        "device",
        "started",
        "seconds",
    ):
        assert found[key]
    assert {
        "policy", "config", "budget", "budget_tokens", "kept_tokens", "perplexity", "perplexity_increase",
        "interval", "kl", "agreement", "tokens_per_second", "cache_bytes", "evictions",
    } <= set(found["cells"][0])  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ["h3o"]}, "unknown policy 'h3o'; did you mean 'h2o'"),
        ({"policies": []}, "no policy given"),
        ({"budgets": []}, "no budget for h2o"),
        ({"policies": ["full"], "budgets": []}, "no budget given"),
        ({"budgets": [0]}, "0 is no budget"),
        ({"budgets": ["lots"]}, "'lots' is no budget"),
        ({"budgets": [LENGTH]}, "leaves nothing to score in samples of 40 tokens"),
        ({"budgets": ["1.0"]}, r"1.0 \(40 tokens\) leaves nothing to score"),
        ({"text": "nowhere.txt"}, "no text file nowhere.txt"),
        ({"model": "./nowhere"}, "no model at ./nowhere"),
        ({"samples": 1000}, "the text has 2000 tokens, too few for 1000 samples of 40; 50 samples"),
        ({"tokens": 5000, "samples": 1}, "the text has 2000 tokens"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(settings, monkeypatch, changes, message):
    monkeypatch.setattr("kvpolicy.evaluate.compare.load_model", None)
    with pytest.raises(KVPolicyError, match=message):
        compare(settings(**changes))


@pytest.mark.parametrize("changes", [{"samples": 0}, {"batch": 0}, {"threads": -1}, {"tokens": 1}])
def test_numbers_that_cannot_be(settings, changes):
    with pytest.raises(KVPolicyError, match=f"{next(iter(changes))} must be at least"):
        settings(**changes)


def test_predictions_that_are_not_finite_are_an_error(settings, tmp_path):
    model = tiny.family("llama", torch.float32)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    folder.save_tokenizer(tmp_path)
    with pytest.raises(KVPolicyError, match="full: predictions are not finite in float32"):
        compare(settings(model=str(tmp_path)))


def test_a_disk_without_room_is_an_error(settings, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(KVPolicyError, match=r"where 0\.0 GB are free"):
        compare(settings(), tmp_path)


def test_intervals():
    for freedom, exact in [(1, 12.706), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)]:
        assert t_quantile(freedom) == pytest.approx(exact, rel=2e-3)
    low, high = increase_interval([0.1, 0.2, 0.3])
    assert log(1 + low) + log(1 + high) == pytest.approx(2 * mean([0.1, 0.2, 0.3]))
    assert log(1 + high) - 0.2 == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert increase_interval([0.1]) is None


def test_a_prefix_stays_under_every_policy(settings, model):
    found = compare(settings(policies=["recent"], budgets=[10], prefix=3))
    assert found.samples["prefix"] == 3
    without = compare(settings(policies=["recent"], budgets=[10]))
    assert found.cells[1].perplexity != without.cells[1].perplexity
    assert found.cells[1].kept_tokens == 10
    sinks = compare(settings(policies=[{"kind": "streaming_llm", "sinks": 3}], budgets=[10]))
    assert found.cells[1].perplexity == pytest.approx(sinks.cells[1].perplexity)


def test_positions_are_those_asked_for(settings, model):
    """By the command for all, or by a policy for itself; the full cache sees no difference."""
    rolled = load({"kind": "streaming_llm", "positions": "rolled"})
    plain = compare(settings(policies=["streaming_llm", rolled], budgets=[6]))
    asked = compare(settings(policies=["streaming_llm"], budgets=[6], positions="rolled"))
    assert asked.samples["cache_positions"] == "rolled"
    full, original, own = plain.cells
    other, all_rolled = asked.cells
    assert other.perplexity == pytest.approx(full.perplexity, rel=1e-4)
    assert all_rolled.perplexity == pytest.approx(own.perplexity, rel=1e-6)
    assert abs(original.perplexity / own.perplexity - 1) > 1e-3
    with pytest.raises(KVPolicyError, match="positions='round' is not one of"):
        compare(settings(positions="round"))
