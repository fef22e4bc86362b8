"""The comparison: every policy at every budget on the same tokens, beside the full cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import product
from math import exp
from os import PathLike
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch

from kvpolicy.errors import EvaluationError
from kvpolicy.evaluate import results as outcome
from kvpolicy.evaluate.models import check_model, load_model
from kvpolicy.evaluate.plan import BASELINE, Plan, Run, Target
from kvpolicy.evaluate.results import Cell, Results
from kvpolicy.evaluate.score import Measurement, Setup, Tape, measure
from kvpolicy.evaluate.statistics import RULE, increase_interval
from kvpolicy.evaluate.task import Context, EvaluationTask, chosen, record, run_task
from kvpolicy.evaluate.texts import load_text, samples, windows_of
from kvpolicy.report.progress import Progress

LARGEST_BATCH = 8

BUDGET_RULE = (
    "Tokens kept in every layer, row and KV head after each step, whatever the policy; where a budget is divided "
    "over layers, their mean. A policy that selects what a step attends to keeps everything, and the budget is of what "
    "it attends to. A share is of the tokens of a sample, rounded half up, at least one."
)
PHASE = (
    "decode: the first tokens of each sample, as many as the budget holds, are fed in one call that evicts "
    "nothing; all others one by one, with an eviction in every step. All policies are scored on the same "
    "tokens, from `samples.scored_from` on, where even the largest budget no longer sees everything."
)


@dataclass(frozen=True)
class Settings:
    """What to compare, on what."""

    model: str
    text: str
    policies: Sequence[Any]
    """Kinds, files, mappings or policies; ``all`` is everything installed."""
    budgets: Sequence[Any] = ()
    """Tokens, or shares of a sample."""
    tokens: int = 512
    """Length of a sample."""
    samples: int = 4
    seed: int = 0
    batch: int | None = None
    """Samples decoded together; by default all, up to 8."""
    together: int = 1
    """Cells decoded as rows of one batch: much faster, and the time of each is then not known."""
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    tasks: Sequence[Any] = ()
    """Evaluation tasks to run for each cell beside: names or :class:`~kvpolicy.evaluate.task.EvaluationTask`."""
    prefix: int | None = None
    """First tokens of each sample that always stay, whatever the policy."""
    positions: str | None = None
    """The mode of positions, ``original`` or ``rolled``, for all; by default what each policy says."""

    def __post_init__(self) -> None:
        for name, least in {"tokens": 4, "samples": 1, "batch": 1, "threads": 1, "together": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise EvaluationError(f"{name} must be at least {least}, not {value}")

    @property
    def rows(self) -> int:
        """Samples in one batch."""
        return min(self.batch or LARGEST_BATCH, self.samples)


def compare(
    settings: Settings,
    out: str | PathLike[str] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Results:
    """Run a comparison. After each run the cells found so far are in ``results.json`` in the folder `out`.

    With `resume`, cells of an earlier run into the same folder are kept, if its settings were the same.
    """
    comparison = _Comparison(settings, Path(out) if out is not None else None, progress or Progress())
    return comparison.run(resume, overwrite)


@dataclass
class _Comparison:
    settings: Settings
    out: Path | None
    progress: Progress
    results: Results = field(init=False)
    tasks: list[EvaluationTask] = field(init=False)
    setup: Setup = field(init=False)
    tokenizer: Any = field(init=False)

    def run(self, resume: bool, overwrite: bool) -> Results:
        started = perf_counter()
        plan = Plan.of(self.settings.policies, self.settings.budgets, self.settings.tokens)
        self.tasks = chosen(self.settings.tasks, self.settings.tokens)
        text, text_record = load_text(self.settings.text)
        earlier = _earlier(self.out, resume, overwrite) if self.out is not None else None
        check_model(self.settings.model, self.settings.dtype, self.settings.device)
        _check_length(text, self.settings)
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        self.progress.stage(f"loading {self.settings.model}")
        model, self.tokenizer, model_record = load_model(self.settings.model, self.settings.dtype, self.settings.device)
        _check_model_length(model, plan.length)
        windows, positions = windows_of(
            text, self.tokenizer, self.settings.tokens, self.settings.samples, self.settings.seed
        )
        self.results = self._head(plan, model, model_record, text_record, positions)
        if earlier is not None:
            self._take_over(earlier)
        tokens = torch.tensor(windows, device=model.device)
        its = self.settings
        self.setup = Setup(model, tokens, plan.scored_from, its.rows, its.prefix, its.positions)
        for run in plan.runs:
            self.setup.cache(run.policy, run.budget)  # refuses what cannot work, before any work
        try:
            self._measure(plan)
        finally:
            self.progress.close()
        self.results.seconds += perf_counter() - started
        self._save()
        return self.results

    def _head(self, plan: Plan, model: Any, model_record: Any, text_record: Any, positions: list[int]) -> Results:
        return Results(
            command=outcome.command_line(),
            model=model_record,
            text=text_record,
            samples={
                "count": self.settings.samples,
                "length": self.settings.tokens,
                "positions": positions,
                "seed": self.settings.seed,
                "scored_from": plan.scored_from,
                "prefix": self.settings.prefix,
                "cache_positions": self.settings.positions,
            },
            batch=self.settings.rows,
            together=self.settings.together,
            device=_device_name(model.device),
            threads=torch.get_num_threads(),
            budget_rule=BUDGET_RULE,
            phase=PHASE,
            interval_rule=RULE,
            versions=outcome.versions(),
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            tasks={task.name: record(task) for task in self.tasks},
        )

    def _take_over(self, earlier: Results) -> None:
        if differences := earlier.differences(self.results):
            raise EvaluationError(
                f"cannot resume {self.out}: its cells were measured otherwise ({'; '.join(differences)}); "
                "use the same settings, another --out, or --overwrite"
            )
        self.results.take(earlier)

    def _measure(self, plan: Plan) -> None:
        full, *others = plan.runs
        pending = [run for run in others if not self._finished(run)]
        scored = [full, *pending] if pending or not self._finished(full) else []
        runs = [run for run in plan.runs if run in scored or not self._examined(run)]
        if not runs:
            return
        self._save()
        windows = self.setup.windows
        self.progress.start(len(runs), len(scored) * (windows.numel() - len(windows)))
        with _tape(self.out, self.setup) as tape:
            baseline = None
            for some in self._together(runs, scored):
                started = perf_counter()
                self.progress.begin(some[0].label if len(some) == 1 else f"{len(some)} cells")
                if some[0] in scored:
                    cells = [(run.policy, run.budget) for run in some]
                    measured = measure(self.setup, cells, tape, self.progress.advance)
                    baseline = baseline or measured[0]
                    for run, found in zip(some, measured, strict=True):
                        for target in run.targets:
                            self._put(self._cell(run, target, found, baseline))
                    self._save()
                for run in some:
                    self._examine(run)
                    perplexity = self._found(run.name, run.targets[0]).perplexity
                    self.progress.finish(run.label, (perf_counter() - started) / len(some), perplexity)

    def _together(self, runs: list[Run], scored: list[Run]) -> Iterator[list[Run]]:
        """`runs` in groups to measure as one batch: the full cache and what is not scored alone."""
        alike: dict[Any, list[Run]] = {}
        for index, run in enumerate(runs):
            alone = self.settings.together == 1 or run.name == BASELINE or run not in scored
            key = ("alone", index) if alone else ("held", self.setup.held_at_first(run.policy, run.budget))
            alike.setdefault(key, []).append(run)
        for group in alike.values():
            for start in range(0, len(group), self.settings.together):
                yield group[start : start + self.settings.together]

    def _examine(self, run: Run) -> None:
        """Run the tasks that cells of `run` have no numbers of yet; after each one they are on disk."""
        for task, targets in product(self.tasks, run.alike()):
            cells = [self._found(run.name, target) for target in targets]
            if all(task.name in cell.tasks for cell in cells):
                continue
            self.progress.task(task.name)
            budget = targets[0].budget if run.policy.budgeted else None
            context = Context(
                model=self.setup.model,
                tokenizer=self.tokenizer,
                policy=run.policy,
                budget=budget,
                samples=self.setup.windows,
                batch=self.setup.batch,
                seed=self.settings.seed,
                prefix=self.settings.prefix,
                positions=self.settings.positions,
            )
            numbers = run_task(task, context, run.name if budget is None else f"{run.name} {targets[0]}")
            for cell in cells:
                cell.tasks[task.name] = numbers
            self._save()

    def _cell(self, run: Run, target: Target, found: Measurement, baseline: Measurement) -> Cell:
        differences = [mine - full for mine, full in zip(found.sample_nll, baseline.sample_nll, strict=True)]
        evictions = found.seen - found.kept
        timed = self.settings.together == 1 and found.decode_seconds > 0
        return Cell(
            policy=run.name,
            config=run.policy.model_dump(mode="json"),
            budget=target.given,
            budget_tokens=target.tokens,
            kept_tokens=found.kept,
            mean_kept_tokens=found.mean_kept,
            evictions=evictions,
            perplexity=exp(mean(found.sample_nll)),
            perplexity_increase=exp(mean(differences)) - 1,
            interval=increase_interval(differences),
            kl=found.kl / found.scored,
            agreement=found.agreed / found.scored,
            tokens_per_second=found.scored / found.decode_seconds if timed else None,
            tokens_per_second_per_row=found.decode_calls / found.decode_seconds if timed else None,
            cache_bytes=found.cache_bytes,
            scored_tokens=found.scored,
            sample_perplexities=[exp(nll) for nll in found.sample_nll],
            seconds=found.seconds,
            attended_tokens=found.attended,
            notes=list(_notes(run, found)),
        )

    def _put(self, cell: Cell) -> None:
        """Add `cell`, in place of one with the same name; if that was of the same policy, its tasks are kept."""
        for index, other in enumerate(self.results.cells):
            if _name(other) == _name(cell):
                cell.tasks = other.tasks if other.config == cell.config else {}
                self.results.cells[index] = cell
                return
        self.results.cells.append(cell)

    def _found(self, name: str, target: Target) -> Cell:
        return next(cell for cell in self.results.cells if _name(cell) == (name, str(target.given)))

    def _finished(self, run: Run) -> bool:
        config = run.policy.model_dump(mode="json")
        found = {_name(cell) for cell in self.results.cells if cell.config == config}
        return all((run.name, str(target.given)) in found for target in run.targets)

    def _examined(self, run: Run) -> bool:
        cells = [self._found(run.name, target) for target in run.targets]
        return all(task.name in cell.tasks for task in self.tasks for cell in cells)

    def _save(self) -> None:
        if self.out is not None:
            self.results.save(self.out)


def _name(cell: Cell) -> tuple[str, str]:
    return cell.policy, str(cell.budget)  # as text: 1 is a token, 1.0 everything


def _notes(run: Run, found: Measurement) -> Iterator[str]:
    if (storage := run.policy.storage) is not None and (remark := storage.remark(found.kept)):
        yield remark
    if run.budget is None:
        return
    if found.attended is not None:
        yield from _selection_notes(run, found.attended, found.seen)
    elif found.fewest == found.seen:
        yield "nothing was evicted"
    if run.budget.heads is not None and not run.policy.room(decoding=True):
        yield "all heads kept the same, as they are divided where a prompt is cut and here tokens come one by one"
    if run.budget.measured is not None and run.policy.bounded:
        yield "all layers kept the same, as they are measured where a prompt is cut and here tokens come one by one"


def _selection_notes(run: Run, attended: float, seen: int) -> Iterator[str]:
    what = "some layers keep everything" if run.policy.bounded else "everything is kept, and no bytes are saved"
    yield f"{what}: a step attends to {attended:.0f} of {seen} tokens at the end, in the layers that select them"
    if attended > run.targets[0].tokens and attended < seen:
        yield "that is more than its budget, which the policy does not go below"


def _earlier(out: Path, resume: bool, overwrite: bool) -> Results | None:
    """Make `out` a folder to write to; return what an earlier run left there, if that is to be continued."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"cannot write to {out}: {error.strerror}; give --out a folder") from error
    if resume and overwrite:
        raise EvaluationError("--resume continues and --overwrite starts anew: give one of the two")
    if overwrite or not (out / outcome.FILE).exists():
        return None
    if not resume:
        raise EvaluationError(
            f"{out} holds results of an earlier run: add --resume to go on, or --overwrite to start anew"
        )
    return Results.load(out)


def _check_length(text: str, settings: Settings) -> None:
    """A token is at least one byte: what cannot fit is known before a model is loaded."""
    if (most := len(text.encode())) < settings.tokens * settings.samples:
        samples([0] * most, settings.tokens, settings.samples, settings.seed)


def _check_model_length(model: Any, length: int) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and length > most:
        raise EvaluationError(
            f"samples of {length} tokens are longer than the model's {most} positions: lower --tokens"
        )


def _tape(out: Path | None, setup: Setup) -> Any:
    from contextlib import closing
    from tempfile import gettempdir

    return closing(Tape(out or Path(gettempdir()), setup.scored))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
