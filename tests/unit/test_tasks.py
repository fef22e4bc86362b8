"""Evaluation tasks: run for every cell, kept, continued, shown; and recall, the one that comes with kvpolicy."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from kvpolicy import EvictionCache, cli
from kvpolicy.budget import Budget
from kvpolicy.config import load
from kvpolicy.errors import KVPolicyError
from kvpolicy.evaluate.compare import Settings, compare
from kvpolicy.evaluate.models import load_model
from kvpolicy.evaluate.results import Results
from kvpolicy.evaluate.task import Context, EvaluationTask, Metric
from kvpolicy.evaluate.tasks.recall import Recall, common_words
from kvpolicy.plugins import registry
from kvpolicy.report.html import report
from kvpolicy.report.progress import Progress
from kvpolicy.report.rows import columns, table_rows
from kvpolicy.report.table import results_table
from tests import folder, tiny

LENGTH, COUNT = 40, 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    where = tmp_path_factory.mktemp("tasks")
    folder.save_model(where / "model")
    folder.save_text(where / "text.txt")
    return where


@pytest.fixture
def settings(place):
    def make(**changes):
        chosen = {
            "model": str(place / "model"), "text": str(place / "text.txt"), "policies": ["h2o", "streaming_llm"],
            "budgets": ["0.25", 10], "tokens": LENGTH, "samples": COUNT, "batch": 2,
        }  # fmt: skip
        return Settings(**{**chosen, **changes})

    return make


class Held(EvaluationTask):
    """How much a cache holds of ten tokens."""

    name = "held"
    metrics = {
        "tokens": Metric("tokens held", "tokens", better=None),
        "loss": Metric("share given up", "share", better="lower"),
    }

    def __init__(self):
        self.cells = []

    def run(self, context):
        self.cells.append((context.policy.kind, context.budget and context.budget.amount))
        cache = context.new_cache()
        context.model(context.samples[:, :10], **tiny.cache_argument(cache))
        held = float(cache.kept(0).max())
        return {"tokens": held, "loss": 1 - held / 10}


@dataclass(frozen=True)
class Broken(EvaluationTask):
    """Fails under one policy."""

    how: str
    name = "broken"
    metrics = {"number": Metric("a number")}

    def run(self, context):
        if context.policy.kind == "streaming_llm":
            if self.how == "raises":
                raise RuntimeError("no\nluck")
            return {"nan": {"number": float("nan")}, "other": {"numbre": 1.0}, "none": None}[self.how]
        return {"number": 1.0}


class Random(EvaluationTask):
    """A number that torch draws."""

    name = "random"
    metrics = {"number": Metric("a number")}

    def run(self, context):
        return {"number": float(torch.rand(()))}


def numbers(results, task):
    return {(cell.policy, str(cell.budget)): cell.tasks.get(task) for cell in results.cells}


# -- in a comparison ---------------------------------------------------------------------------------------


def test_every_cell_is_examined_and_a_share_is_of_the_tasks_own_prompt(settings):
    task = Held()
    found = numbers(compare(settings(tasks=[task])), "held")
    assert task.cells == [
        ("full", None), ("h2o", 0.25), ("h2o", 10), ("streaming_llm", 0.25), ("streaming_llm", 10),
    ]  # fmt: skip
    assert {name: metrics["tokens"] for name, metrics in found.items()} == {
        ("full", "0.25"): 10, ("full", "10"): 10, ("h2o", "0.25"): 3, ("h2o", "10"): 10,
        ("streaming_llm", "0.25"): 3, ("streaming_llm", "10"): 10,
    }  # fmt: skip


def test_resume_runs_only_the_tasks_that_are_missing(settings, tmp_path):
    first = compare(settings(policies=["h2o"]), tmp_path)
    assert all(cell.tasks == {} for cell in first.cells)
    task = Held()
    second = compare(settings(policies=["h2o"], tasks=[task]), tmp_path, resume=True)
    assert len(task.cells) == 3
    assert [cell.seconds for cell in second.cells] == [cell.seconds for cell in first.cells]
    third = compare(settings(policies=["h2o", "lru"], tasks=[task]), tmp_path, resume=True)
    assert task.cells[3:] == [("lru", 0.25), ("lru", 10)]
    assert Results.load(tmp_path) == third
    without = compare(settings(policies=["h2o", "lru"]), tmp_path, resume=True)
    assert (without.tasks, numbers(without, "held")) == (third.tasks, numbers(third, "held"))


def test_a_task_with_other_options_is_run_anew(settings, tmp_path):
    compare(settings(tasks=[Recall(cue=2, answer=3)]), tmp_path)
    again = compare(settings(tasks=[Recall(cue=2, answer=4)]), tmp_path, resume=True)
    assert again.tasks["recall"]["options"] == {"cue": 2, "answer": 4}
    assert {found["tokens"] for found in numbers(again, "recall").values()} == {COUNT * 4}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "task broken under streaming_llm 0.25: RuntimeError: no luck"),
        ("nan", "task broken under streaming_llm 0.25: number is nan"),
        ("other", "task broken under streaming_llm 0.25: it must return the metrics number, not numbre"),
        ("none", "task broken under streaming_llm 0.25: it must return the metrics number, not None"),
    ],
)
def test_a_failing_task_is_named_and_finished_cells_stay(settings, tmp_path, how, message):
    with pytest.raises(KVPolicyError) as caught:
        compare(settings(tasks=["recall", Broken(how)], tokens=80), tmp_path)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    left = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [list(cell["tasks"]) for cell in left if cell["policy"] != "streaming_llm"] == [["recall", "broken"]] * 4
    whole = compare(settings(tasks=["recall"], tokens=80), tmp_path, resume=True)
    assert all("recall" in cell.tasks for cell in whole.cells)


def test_random_numbers_follow_from_the_seed_and_the_global_state_is_left_alone(settings):
    before = torch.get_rng_state()
    first, second, other = (
        {found["number"] for found in numbers(compare(settings(tasks=[Random()], seed=seed)), "random").values()}
        for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert first == second != other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["recal"]}, "unknown task 'recal'; did you mean 'recall'?"),
        ({"tasks": [3]}, "3 is no evaluation task"),
        ({"tasks": ["recall"]}, "task recall needs samples of at least 72 tokens, not 40: raise --tokens"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(settings, monkeypatch, changes, message):
    monkeypatch.setattr("kvpolicy.evaluate.compare.load_model", None)
    with pytest.raises(KVPolicyError) as caught:
        compare(settings(**changes))
    assert message in str(caught.value)


def test_progress_names_the_task(settings):
    class Told(Progress):
        def __init__(self):
            self.told = []

        def start(self, runs, tokens):
            self.told.append((runs, tokens))

        def begin(self, label):
            self.told.append(label)

        def task(self, name):
            self.told.append(name)

        def finish(self, label, seconds, perplexity):
            self.told.append(f"{label} done")

    told = Told()
    compare(settings(policies=["full"], tasks=[Held()]), progress=told)
    assert told.told == [(1, COUNT * (LENGTH - 1)), "full", "held", "full done"]


def test_results_and_report_show_what_was_found(settings):
    results = compare(settings(tasks=[Held()]))
    results.cells[-1].tasks.clear()  # stopped before it was run
    names = [column.name for column in columns(results)]
    assert names[-2:] == ["held\ntokens", "held\nloss"]
    shown = [row[-2:] for row in table_rows(results)]
    ten, three = ["10 tokens", "0.0 %"], ["3 tokens", "70.0 %"]
    assert shown == [ten, three, ten, three, ["–", "–"]]
    page = report(results)
    assert "Held: tokens" in page  # the chart of the first metric
    assert "<b>held</b>: How much a cache holds of ten tokens." in page
    assert "loss is share given up; lower is better." in page
    headers = {str(column.header) for column in results_table(results, 60).columns}
    assert "held\ntokens" in headers
    assert "held\nloss" not in headers  # spared first
    console = Console(width=160)
    with console.capture() as captured:
        console.print(results_table(results, 160))
    assert "70.0 %" in captured.get()


def test_numbers_below_zero_are_not_drawn(settings):
    results = compare(settings(policies=["h2o"], budgets=[6], tasks=[Random()]))
    for cell in results.cells:
        cell.tasks["random"]["number"] *= -1
    assert "Random: number" not in report(results)


def test_from_the_command_line(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    words = "compare --model model --text text.txt --policies h2o --budgets 8 --tokens 80 --samples 1 --out out"
    monkeypatch.setattr(sys, "argv", ["kvpolicy", *words.split(), "--tasks", "recall"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    assert "accuracy" in capsys.readouterr().out
    cells = json.loads((place / "out" / "results.json").read_text())["cells"]
    assert all(cell["tasks"]["recall"]["tokens"] == 16 for cell in cells)


# -- recall ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def context(place):
    model, tokenizer, _ = load_model(str(place / "model"))
    samples = torch.full((4, LENGTH), 96)
    samples[:, 0] = 95
    return Context(model, tokenizer, load("full"), None, samples, batch=3, seed=0)


def test_prompts_hold_the_passage_at_even_depths_and_end_with_it(context):
    rows = Recall(cue=3, answer=4).rows(context)
    assert rows.shape == context.samples.shape
    depths = []
    for row in rows.tolist():
        passage = row[-7:]
        depths += [start for start in range(LENGTH - 7) if row[start : start + 7] == passage]
    assert depths == [4, 10, 17, 23]
    assert (rows[:, 0] == 95).all()
    assert torch.equal(rows, Recall(cue=3, answer=4).rows(context))
    assert not torch.equal(rows, Recall(cue=3, answer=4).rows(replace(context, seed=1)))


@pytest.mark.parametrize(("policy", "budget"), [("full", None), ("streaming_llm", Budget(share=0.5))])
def test_accuracy_is_what_it_is_by_hand(context, policy, budget):
    task = Recall(cue=3, answer=4)
    context = replace(context, policy=load(policy), budget=budget)
    with torch.no_grad():
        right = 0
        for row in task.rows(context):
            cache = EvictionCache(context.model, policy, budget)
            context.model(row[None, :-5], **tiny.cache_argument(cache))
            for index in range(LENGTH - 5, LENGTH - 1):
                logits = context.model(row[None, index : index + 1], **tiny.cache_argument(cache)).logits[0, -1]
                right += int(logits.argmax() == row[index + 1])
        assert task.run(context) == {"accuracy": right / 16, "tokens": 16}


def test_only_predictions_after_the_cut_count(context, monkeypatch):
    def knows(context, rows, first):
        """Says right what the first call predicts, wrong what comes next, then right."""
        for index in range(first, LENGTH):
            guess = rows[:, index] if index != first + 1 else rows[:, index] - 1
            yield index, torch.nn.functional.one_hot(guess, 97)

    monkeypatch.setattr(Context, "decode", knows)
    assert Recall(cue=3, answer=4).run(context) == {"accuracy": 0.75, "tokens": 16}


def test_words_are_whole_and_frequent_or_any_tokens_will_do(context):
    texts = ["<s>", *(("Ġ" if index % 2 else "") + "word" for index in range(1, 1200))]
    large = SimpleNamespace(
        all_special_ids=[0],
        get_vocab=lambda: {str(index): index for index in range(1200)},
        convert_ids_to_tokens=lambda ids: [texts[index] for index in ids],
    )
    assert common_words(large) == list(range(1, 1000, 2))
    assert set(common_words(context.tokenizer)) == set(range(1, len(context.tokenizer)))


def test_recall_is_installed():
    assert registry().task("recall") == Recall()
