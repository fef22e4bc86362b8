"""The checks: one invariant each, by name. A check passes silently or says what does not hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvpolicy.attention import blocks as attention_blocks
from kvpolicy.policy import EvictionPolicy, HeadField, SlotField, View
from kvpolicy.testing import models
from kvpolicy.testing.case import (
    Case,
    Held,
    MakeRule,
    NotApplicable,
    NotConforming,
    Run,
    Violation,
    compare_held,
    compare_runs,
    compare_values,
    prompt_and_steps,
)
from kvpolicy.testing.masked import Masked
from kvpolicy.testing.rule import Rule
from kvpolicy.testing.spy import Homeless, Spy, Watched, made_by, observed, reordered, tensors_of

Check = Callable[[Case], None]

CHECKS: dict[str, Check] = {}
"""Every check by its name, in the order in which they are run."""


def check(function: Check) -> Check:
    """Put `function` among the checks, under its own name."""
    CHECKS[function.__name__] = function
    return function


def check_policy(
    policy: EvictionPolicy,
    *,
    reference: MakeRule | None = None,
    draws_by: Iterable[str] = (),
    skip: Collection[str] = (),
) -> None:
    """Run every check on `policy`.

    Args:
        policy: a policy, or a composition of some.
        reference: its definition in plain Python, a subclass of :class:`Rule`.
        draws_by: ``"row"`` and ``"head"`` where it draws random numbers that depend on these.
        skip: names of checks to leave out.

    Raises:
        NotConforming: with all that is wrong, by the name of the check.
    """
    case = Case(policy, reference, frozenset(draws_by))
    found: dict[str, Exception] = {}
    for name, run in CHECKS.items():
        if name in skip:
            continue
        try:
            run(case)
        except NotApplicable:
            continue
        except Exception as error:  # a violation, or whatever the policy raises
            found[name] = error
    if found:
        raise NotConforming(policy, found) from next(iter(found.values()))


# -- what is held ----------------------------------------------------------------------------------------------


@check
def bounds(case: Case) -> None:
    """No head holds more than the budget after a call, for small budgets and prompts of every kind of length."""
    model = models.llama()
    for budget in case.budgets:
        for prompt in sorted({1, budget, budget + 1, case.prompt(budget)}):
            run = Run(model, case.cache(model, budget), models.ids(2, prompt + 5), prompt_and_steps(prompt, 5))
            for when in _without_gradients(run):
                decoding = "(1 token, " in when and "call 1 " not in when
                for layer in run.layers:
                    _bounded(case, decoding, budget, when, layer, run)


def _bounded(case: Case, decoding: bool, budget: int, when: str, layer: int, run: Run) -> None:
    policy = case.policy.for_layer(layer, models.LAYERS)
    after_pass = any(policy.rehearsing()) and "call 1 " not in when  # not cut like a prompt
    kept = run.cache.kept(layer)
    if policy.together:
        kept = torch.cat([run.cache.kept(layer) for layer in run.layers], 1).double().mean(1, keepdim=True)
    most = case.most(budget, layer, decoding or after_pass, kept.shape[1]).expand(kept.shape)
    if bool((kept > most).any()):
        row, head = (int(index) for index in (kept > most).nonzero()[0])
        which = "all heads on average" if policy.together else f"layer {layer}, row {row}, head {head}"
        raise Violation(
            case.tried(f"calls of {run.calls} tokens", budget),
            f"at most {most[row, head]:g} tokens in every head after {when}",
            f"{which} holds {kept[row, head]:g}",
        )


@check
def positions(case: Case) -> None:
    """Positions are in order, none is there twice, and none has not been seen."""
    model = models.llama()
    run = Run(model, case.cache(model), models.ids(2, case.prompt() + 10), prompt_and_steps(case.prompt()))
    for when in _without_gradients(run):
        for layer, row, head, held in _heads(run.held()):
            if held != sorted(set(held)) or held[-1:] > [run.cache.get_seq_length() - 1]:
                place = f"layer {layer}, row {row}, head {head}"
                raise Violation(case.tried(when), "positions in order, each once", f"{place}: {held}")


@check
def no_return(case: Case) -> None:
    """What was evicted never comes back: a call adds its own tokens and nothing else."""
    model = models.llama()
    calls = [case.prompt(), 1, 1, 5, 1, 1, 1, case.budget + 3, 1, 1]
    run = Run(model, case.cache(model), models.ids(2, sum(calls)), calls)
    before: list[Held] = []
    seen = 0
    for number, when in enumerate(_without_gradients(run)):
        new = set(range(seen, seen + calls[number]))
        now = run.held()
        for layer, row, head, was in _heads(before):
            if back := set(now[layer][row][head]) - set(was) - new:
                place = f"layer {layer}, row {row}, head {head}"
                raise Violation(
                    case.tried(when), f"only tokens held before or new; {place} held {was}", f"{sorted(back)} came back"
                )
        before, seen = now, seen + calls[number]


@check
def protected(case: Case) -> None:
    """No more is protected than the budget holds, and what is protected stays."""
    model = models.llama()
    for budget in sorted({*case.budgets, case.budget}):
        spy = _Protection(case, budget)
        cache = case.cache(model, budget, Watched.by(spy, case.policy))
        run = Run(model, cache, models.ids(2, case.prompt(budget) + 8), prompt_and_steps(case.prompt(budget), 8))
        for when in _without_gradients(run):
            for layer, row, head, held in _heads(run.held()):
                must = spy.wanted[layer][row][head] if layer in spy.wanted else []
                if gone := sorted(set(must) - set(held)):
                    raise Violation(
                        case.tried(when, budget),
                        f"layer {layer}, row {row}, head {head} keeps the protected {must}",
                        f"{gone} evicted; the priority of others is as high as can be, or ranking() ignores it",
                    )
            spy.wanted.clear()


class _Protection(Spy):
    """Notes what the policy says must stay."""

    def __init__(self, case: Case, budget: int) -> None:
        self.case, self.budget = case, budget
        self.wanted: dict[int, Held] = {}

    def ranking(self, policy: EvictionPolicy, view: View) -> tuple[Tensor, ...]:
        mask = policy.protected(view)
        if mask is None:
            mask = torch.zeros_like(view.valid)
        if mask.dtype != torch.bool or mask.shape != view.positions.shape:
            raise Violation(
                self.case.tried("protected(view)", self.budget),
                f"a mask of booleans, {list(view.positions.shape)}",
                f"{str(mask.dtype).removeprefix('torch.')}, {list(mask.shape)}",
            )
        mask = mask & view.valid
        over = mask.sum(-1, keepdim=True) > view.budget
        if bool(over.any()):
            row, head, _ = (int(index) for index in over.nonzero()[0])
            some = view.positions[row, head][mask[row, head]].sort().values.tolist()
            raise Violation(
                self.case.tried("protected(view)", self.budget),
                f"at most {self.budget} protected slots in a head (view.is_recent, is_sink and protect see to it)",
                f"layer {view.layer}, row {row}, head {head} protects {len(some)}: {some}",
            )
        shown = zip(view.positions.tolist(), mask.tolist(), strict=True)
        self.wanted[view.layer] = [
            [sorted(p for p, keep in zip(*head, strict=True) if keep) for head in zip(*row, strict=True)]
            for row in shown
        ]
        return policy.ranking(view)


@check
def selection(case: Case) -> None:
    """A step attends to slots that are there and hold a token, or to none (-1), each once."""
    if not case.policy.selects:
        return  # it attends to all that it keeps
    model, prompt = models.llama(), case.prompt()
    tokens, mask = _padded_batch([prompt, 3], steps=6)
    for ids, real in ((models.ids(2, prompt + 6), None), (tokens, mask)):
        cache = case.cache(model, policy=Watched.by(_Selected(case), case.policy))
        run = Run(model, cache, ids, prompt_and_steps(prompt, 6), real).all()
        _finite(case.tried("decode steps"), run.logits if real is None else run.logits[real.bool()])


class _Selected(Spy):
    """Looks at what is selected."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def select(self, policy: EvictionPolicy, view: View, query: Tensor) -> Tensor | None:
        found = policy.select(view, query)
        if found is not None:
            self._look(found, view, query)
        return found

    def _look(self, found: Tensor, view: View, query: Tensor) -> None:
        tried = self.case.tried(f"select(view, query) in layer {view.layer}")
        (batch, heads, slots), group = view.positions.shape, query.shape[2]
        if (
            found.dtype != torch.int64
            or found.dim() != 4
            or found.shape[:3] not in {(batch, heads, 1), query.shape[:3]}
        ):
            shape = f"int64 of shape [{batch}, {heads}, 1 or {group}, n]"
            raise Violation(tried, shape, f"{str(found.dtype).removeprefix('torch.')} of shape {list(found.shape)}")
        for row, by_head in enumerate(found.tolist()):
            for head, chosen in enumerate(some for by_query in by_head for some in by_query):
                own = [slot for slot in chosen if slot != -1]
                if len(set(own)) < len(own) or any(not 0 <= slot < slots for slot in own):
                    place = f"row {row}, KV head {head // found.shape[2]}"
                    raise Violation(tried, f"slots from 0 to {slots - 1}, each once, or -1; {place}", f"{sorted(own)}")


@check
def keys(case: Case) -> None:
    """A slot holds the key of the token at its position: in the first layer, the full cache's."""
    case.must_be_exact()
    model = models.llama()
    tokens = models.ids(2, case.prompt() + 10)
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        models.feed(model, full, tokens)
    spy = _Keys(case, full.layers[0].keys)
    cache = case.cache(model, policy=Watched.by(spy, case.policy), positions="original")
    Run(model, cache, tokens, prompt_and_steps(case.prompt())).all()


class _Keys(Spy):
    """Compares the keys in the first layer's slots with the full cache's."""

    def __init__(self, case: Case, full: Tensor) -> None:
        self.case, self.full = case, full

    def ranking(self, policy: EvictionPolicy, view: View) -> tuple[Tensor, ...]:
        if view.layer == 0:
            index = view.positions.clamp(min=0).long().unsqueeze(-1).expand(*view.keys.shape)
            wrong = ~torch.isclose(view.keys, self.full.gather(2, index)).all(-1) & view.valid
            if bool(wrong.any()):
                row, head, slot = (int(i) for i in wrong.nonzero()[0])
                raise Violation(
                    self.case.tried(f"{int(view.seen.max())} tokens seen"),
                    f"layer 0, row {row}, head {head}: the key of position {int(view.positions[row, head, slot])}",
                    "another key; the policy must not write to view.keys or view.positions",
                )
        return policy.ranking(view)


# -- what must make no difference ------------------------------------------------------------------------------


@check
def whole(case: Case) -> None:
    """A budget that holds everything changes nothing: the model computes as without a policy."""
    case.must_be_exact()
    if any(case.policy.for_layer(layer, models.LAYERS).own_budget is not None for layer in range(models.LAYERS)):
        raise NotApplicable("it has a budget of its own")
    for model in (models.llama(), models.gpt_neox()):
        tokens, mask = _padded_batch([12, 7], steps=8)
        budget = max(case.least, 32)
        ours = Run(model, case.cache(model, budget), tokens, prompt_and_steps(12, 8), mask).all()
        plain = Run(model, DynamicCache(config=model.config), tokens, ours.calls, mask).all()
        why = f"what {type(model).__name__} computes without a policy"
        real = mask.bool()
        tried = case.tried("20 tokens in all", budget)
        compare_values(tried, "logits", why, ours.logits[real], plain.logits[real])


@check
def chunks(case: Case) -> None:
    """A prompt may come in chunks: bounds hold, and one chunk as long as the prompt is the prompt."""
    model = models.llama()
    prompt = case.prompt()
    tokens = models.ids(2, prompt + 6)
    at_once = Run(model, case.cache(model), tokens, prompt_and_steps(prompt, 6)).all()
    for size in sorted({3, case.budget, prompt, prompt + 5}):
        calls = [len(part) for part in torch.arange(prompt).split(size)] + [1] * 6
        run = Run(model, case.cache(model), tokens, calls)
        for number, when in enumerate(_without_gradients(run)):
            decoding = calls[number] == 1 and number > 0
            for layer in run.layers:
                _bounded(case, decoding, case.budget, when, layer, run)
        _finite(case.tried(f"a prompt in chunks of {size} tokens"), run.logits)
        if size >= prompt:
            compare_runs(case.tried(f"a prompt in chunks of {size} tokens"), "as the prompt at once", run, at_once)


@check
def blocks(case: Case) -> None:
    """A long prompt is observed block by block, and some rows and heads at a time; it makes no difference."""
    model = models.llama()
    prompt = max(case.prompt(), 40)
    tokens = models.ids(2, prompt + 4)
    at_once = Run(model, case.cache(model), tokens, prompt_and_steps(prompt, 4)).all()
    with _small_blocks():
        in_blocks = Run(model, case.cache(model), tokens, prompt_and_steps(prompt, 4)).all()
    compare_runs(
        case.tried(f"a prompt of {prompt} tokens, observed in blocks of 16 rows of one head"),
        "as observed at once: observe() is a running update and treats rows and heads alike",
        in_blocks,
        at_once,
    )


@contextmanager
def _small_blocks() -> Iterator[None]:
    """Attention goes by the smallest blocks there are."""
    size = attention_blocks._CPU_BLOCK_BYTES
    attention_blocks._CPU_BLOCK_BYTES = 0
    try:
        yield
    finally:
        attention_blocks._CPU_BLOCK_BYTES = size


@check
def slots(case: Case) -> None:
    """Slots have no order: the same tokens in other slots are worth the same."""
    if not case.policy.bounded:
        raise NotApplicable("it evicts nothing: its slots are in the order in which tokens came")
    model = models.llama()
    cache = case.cache(model, policy=Watched.by(_Shuffled(case), case.policy))
    Run(model, cache, models.ids(2, case.prompt() + 10), prompt_and_steps(case.prompt())).all()


class _Shuffled(Spy):
    """Asks the policy again about the same slots in another order."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def observe(self, policy: EvictionPolicy, view: View) -> Mapping[str, Tensor]:
        found = observed(policy, view)
        order = _shuffle(view)
        for name, state in observed(policy, reordered(view, order)).items():
            if name not in policy.head_fields():
                self._compare(f"observe(view)[{name!r}]", state, found[name], order, view)
        return found

    def ranking(self, policy: EvictionPolicy, view: View) -> tuple[Tensor, ...]:
        found = policy.ranking(view)
        order = _shuffle(view)
        for number, key in enumerate(policy.ranking(reordered(view, order))):
            what = "the priority" if number == 0 else f"part {number + 1} of the priority"
            self._compare(what, key, found[number], order, view)
        return found

    def _compare(self, what: str, found: Tensor, wanted: Tensor, order: Tensor, view: View) -> None:
        positions, found = view.positions[:, :, order], _as_slots(found, view)
        wanted = _as_slots(wanted, view)[:, :, order]
        wrong = ~torch.isclose(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
        wrong = wrong.flatten(3).any(-1) if wrong.dim() > 3 else wrong
        if bool((wrong & (positions >= 0)).any()):
            row, head, slot = (int(i) for i in (wrong & (positions >= 0)).nonzero()[0])
            raise Violation(
                self.case.tried("the same tokens in other slots"),
                f"{what} of position {int(positions[row, head, slot])} stays {wanted[row, head, slot].tolist()}",
                f"{found[row, head, slot].tolist()} in layer {view.layer}, row {row}, head {head}; "
                "read age from view.positions, never from the index of a slot",
            )


def _shuffle(view: View) -> Tensor:
    slots = view.positions.shape[-1]
    return torch.randperm(slots, generator=torch.Generator().manual_seed(slots)).to(view.positions.device)


def _as_slots(state: Tensor, view: View) -> Tensor:
    """`state` with the dimensions of slots spelled out, where it broadcasts to them."""
    return state.expand(*view.positions.shape, *state.shape[3:])


@check
def rows(case: Case) -> None:
    """The rows of a batch in another order have the same outcome, in that order."""
    if "row" in case.draws_by:
        raise NotApplicable("it draws by row")
    model = models.llama()
    tokens, order = models.ids(3, case.prompt() + 8), [2, 0, 1]
    calls = prompt_and_steps(case.prompt(), 8)
    straight = Run(model, case.cache(model), tokens, calls).all()
    swapped = Run(model, case.cache(model), tokens[order], calls).all()
    compare_runs(
        case.tried(f"a batch whose rows come in the order {order}"),
        'as in the first order (if it draws by row, say draws_by={"row"})',
        swapped,
        straight,
        order,
    )


@check
def heads(case: Case) -> None:
    """The KV heads of a model in another order have the same outcome, in that order."""
    if "head" in case.draws_by:
        raise NotApplicable("it draws by head")
    if any(case.policy.for_layer(layer, models.LAYERS).divided for layer in range(models.LAYERS)):
        raise NotApplicable("it tells heads apart by their number")
    straight, order = models.with_heads_in_order((0, 1, 2, 3)), (2, 0, 1, 3)
    swapped = models.with_heads_in_order(order)
    tokens, calls = models.ids(2, case.prompt() + 8), prompt_and_steps(case.prompt(), 8)
    wanted = Run(straight, case.cache(straight), tokens, calls).all()
    found = Run(swapped, case.cache(swapped), tokens, calls).all()
    compare_held(
        case.tried(f"a model whose KV heads stand in the order {list(order)}"),
        'as in the first order (if it draws by head, say draws_by={"head"})',
        found.held(),
        [[[row[head] for head in order] for row in layer] for layer in wanted.held()],
    )


@check
def padding(case: Case) -> None:
    """A row padded on the left, among other rows, has the outcome that it has alone."""
    if case.gathers:
        raise NotApplicable("it lets tokens gather, and the rows of a batch are cut at the same time")
    model = models.llama()
    prompt = case.prompt()
    lengths = [prompt, prompt // 2 + 1, 1]
    tokens, mask = _padded_batch(lengths, steps=8)
    batch = Run(model, case.cache(model), tokens, prompt_and_steps(prompt, 8), mask).all()
    for row, length in enumerate(lengths):
        # Copies of it, so that it stays the row it was: a policy may draw by row.
        alone = tokens[row, prompt - length :].expand(3, -1)
        single = Run(model, case.cache(model), alone, prompt_and_steps(length, 8)).all()
        tried = case.tried(f"row {row}: {length} tokens padded to {prompt}, then 8 steps, among other rows")
        why = "as without padding and without the others"
        compare_held(tried, why, _row(batch.held(), row), _row(single.held(), row))
        compare_values(tried, "logits", why, batch.logits[row, -8:], single.logits[row, -8:])


def _padded_batch(lengths: list[int], steps: int) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths padded on the left, and tokens for `steps` steps: ids and mask."""
    texts = [row[:length] for row, length in zip(models.ids(len(lengths), max(lengths)), lengths, strict=True)]
    tokens, mask = models.left_padded(texts)
    more = models.ids(len(lengths), steps, seed=1)
    return torch.cat([tokens, more], 1), torch.cat([mask, torch.ones_like(more)], 1)


def _row(held: list[Held], row: int) -> list[Held]:
    return [[layer[row]] for layer in held]


@check
def beams(case: Case) -> None:
    """Rows that are copied and reordered, as beams are, take what the policy remembers with them."""
    model = models.llama()
    prompt, order = case.prompt(), [2, 0, 0]
    tokens, more = models.ids(3, prompt + 4), models.ids(3, 5, seed=1)
    moved = Run(model, case.cache(model), tokens, prompt_and_steps(prompt, 4)).all()
    before = moved.held()
    moved.cache.reorder_cache(torch.tensor(order))
    tried = case.tried(f"rows reordered to {order} after {prompt + 4} tokens")
    compare_held(tried, "each row takes its tokens along", moved.held(), [[m[row] for row in order] for m in before])
    selected = Run(model, case.cache(model), tokens, prompt_and_steps(prompt, 4)).all()
    selected.cache.batch_select_indices(torch.tensor([1]))
    compare_held(case.tried("row 1 selected"), "it stays as it is", selected.held(), [[m[1]] for m in before])
    if "row" in case.draws_by:
        return
    again = Run(model, case.cache(model), tokens[order], prompt_and_steps(prompt, 4)).all()
    for run in (moved, again):
        Run(model, run.cache, more, [1] * 5).all()
    compare_held(tried + ", then 5 steps", "as rows that were in that order all along", moved.held(), again.held())


# -- what a policy must not do ---------------------------------------------------------------------------------


@check
def determinism(case: Case) -> None:
    """Two runs are the same, whatever the global random state is."""
    model = models.llama()
    tokens, calls = models.ids(2, case.prompt() + 10), prompt_and_steps(case.prompt())
    runs = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            runs.append(Run(model, case.cache(model), tokens, calls).all())
    compare_runs(
        case.tried("two runs with different torch.manual_seed"),
        "the same: random numbers come from view.uniform(seed)",
        runs[1],
        runs[0],
    )


@check
def random_state(case: Case) -> None:
    """The global random states are neither moved nor seeded."""
    model = models.llama()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8191)  # a seed that nobody sets by chance
        before = _random_states()
        Run(model, case.cache(model), models.ids(2, case.prompt() + 10), prompt_and_steps(case.prompt())).all()
        after = _random_states()
    for name, state in before.items():
        if state != after[name]:
            raise Violation(
                case.tried("one run"),
                f"the random state of {name} as it was; random numbers come from view.uniform(seed)",
                "another state",
            )


def _random_states() -> dict[str, Any]:
    return {"torch": torch.get_rng_state().tolist(), "Python's random": random.getstate()}


@check
def purity(case: Case) -> None:
    """observe, protected and priority change nothing they are shown, and answer the same when asked again."""
    model = models.llama("float32")
    cache = case.cache(model, policy=Watched.by(_Pure(case), case.policy))
    Run(model, cache, models.ids(2, case.prompt() + 6), prompt_and_steps(case.prompt(), 6)).all()


def _if_any(mask: Tensor | None) -> dict[Any, Tensor]:
    return {} if mask is None else {"": mask}


class _Pure(Spy):
    """Compares what the policy is shown before and after it has looked, and asks everything twice."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def observe(self, policy: EvictionPolicy, view: View) -> Mapping[str, Tensor]:
        return self._twice("observe(view)", view, lambda: observed(policy, view))

    def select(self, policy: EvictionPolicy, view: View, query: Tensor) -> Tensor | None:
        found = self._twice("select(view, query)", view, lambda: _if_any(policy.select(view, query)))
        return found.get("")

    def ranking(self, policy: EvictionPolicy, view: View) -> tuple[Tensor, ...]:
        self._twice("protected(view)", view, lambda: _if_any(policy.protected(view)))
        keys = self._twice("priority(view)", view, lambda: dict(enumerate(policy.ranking(view))))
        return tuple(keys.values())

    def _twice(self, what: str, view: View, call: Callable[[], dict[Any, Tensor]]) -> Any:
        before = {name: state.clone() for name, state in tensors_of(view).items()}
        with torch.random.fork_rng(devices=[]):
            first = {name: state.clone() for name, state in call().items()}
            second = call()
        for name, state in tensors_of(view).items():
            if not _same(state, before[name]):
                raise Violation(
                    self.case.tried(f"{what} in layer {view.layer}"),
                    f"{name} as it was; work on new tensors (a + b, not a.add_(b))",
                    "it was changed in place",
                )
        for key, state in first.items():
            if not _same(state, second[key]):
                raise Violation(
                    self.case.tried(f"{what} asked twice in layer {view.layer}"),
                    "the same answer: a policy has no state beside its slot fields",
                    f"another{f' for {key!r}' if isinstance(key, str) and key else ''}",
                )
        return second


def _same(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one, two) or bool(torch.isclose(one, two, rtol=0, atol=0, equal_nan=True).all())


@check
def fields(case: Case) -> None:
    """observe returns fields that are declared, of their shape, summed up in float32 at least."""
    for name, field in _declared(case.policy).items():
        if field.dtype in ("float16", "bfloat16"):
            raise Violation(
                case.tried(f"the {field.noun} {name!r}"),
                'dtype="float32" or "float64": sums of many small numbers stall in lower precision',
                f'dtype="{field.dtype}"',
            )
    model = models.llama("bfloat16")
    cache = case.cache(model, policy=Watched.by(_Fields(case), case.policy))
    Run(model, cache, models.ids(2, case.prompt() + 4), prompt_and_steps(case.prompt(), 4)).all()


def _declared(policy: EvictionPolicy) -> dict[str, SlotField | HeadField]:
    return {**policy.slot_fields(), **policy.head_fields()}


class _Fields(Spy):
    """Looks at what observe returns, in a model of low precision."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def observe(self, policy: EvictionPolicy, view: View) -> Mapping[str, Tensor]:
        found = observed(policy, view)
        declared = _declared(policy)
        for name, state in found.items():
            if name not in declared:
                raise Violation(
                    self.case.tried("observe(view)"),
                    f"fields that are declared: {', '.join(declared) or 'none'}",
                    f"{name!r}",
                )
            if state.shape != view[name].shape:
                raise Violation(
                    self.case.tried("observe(view)"),
                    f"{name!r} of shape {list(view[name].shape)}",
                    f"shape {list(state.shape)}",
                )
            if declared[name].dtype != "model" and state.dtype.is_floating_point and state.dtype.itemsize < 4:
                raise Violation(
                    self.case.tried("observe(view) in a bfloat16 model"),
                    f"{name!r} in float32, as view[{name!r}] and view.attention are; convert keys by .float()",
                    str(state.dtype).removeprefix("torch."),
                )
        return found


@check
def dtypes(case: Case) -> None:
    """In float32 and bfloat16 logits are finite, scores are of the declared type, and no priority is NaN."""
    for dtype in ("float32", "bfloat16"):
        model = models.llama(dtype)
        prompt = case.prompt()
        tokens, mask = _padded_batch([prompt, 3], steps=6)
        tried = case.tried(f"a {dtype} model and a padded batch")
        cache = case.cache(model, policy=Watched.by(_NoNaN(tried), case.policy))
        run = Run(model, cache, tokens, prompt_and_steps(prompt, 6), mask).all()
        _finite(tried, run.logits[mask.bool()])
        for layer in run.layers:
            declared = _declared(case.policy.for_layer(layer, models.LAYERS))
            for name, score in (cache.scores(layer) | cache.head_state(layer)).items():
                wanted = dtype if declared[name].dtype == "model" else declared[name].dtype
                if score.dtype != getattr(torch, wanted):
                    raise Violation(tried, f"{name!r} in {wanted}", str(score.dtype))


class _NoNaN(Spy):
    """Looks for priorities that are no numbers."""

    def __init__(self, tried: str) -> None:
        self.tried = tried

    def ranking(self, policy: EvictionPolicy, view: View) -> tuple[Tensor, ...]:
        found = policy.ranking(view)
        for key in found:
            wrong = _as_slots(key.isnan(), view) & view.valid
            if bool(wrong.any()):
                row, head, slot = (int(i) for i in wrong.nonzero()[0])
                place = f"layer {view.layer}, row {row}, head {head}, position {int(view.positions[row, head, slot])}"
                raise Violation(self.tried, "a priority that is a number", f"NaN in {place}")
        return found


def _finite(tried: str, logits: Tensor) -> None:
    if not bool(logits.isfinite().all()):
        raise Violation(tried, "finite logits", f"{int((~logits.isfinite()).sum())} that are not")


@check
def devices(case: Case) -> None:
    """Tensors are made where the cache is. Looked for on the CPU; run as well on a GPU that is there."""
    model = models.llama()
    tokens, calls = models.ids(2, case.prompt() + 4), prompt_and_steps(case.prompt(), 4)
    Run(model, case.cache(model, policy=Watched.by(_Devices(case), case.policy)), tokens, calls).all()
    if torch.cuda.is_available():
        model = models.new_llama(dtype="float32").to("cuda")
        run = Run(model, case.cache(model), tokens.to("cuda"), calls).all()
        _finite(case.tried("a model on cuda"), run.logits)


class _Devices(Spy):
    """Notices tensors that are made on no device in particular."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def observe(self, policy: EvictionPolicy, view: View) -> Mapping[str, Tensor]:
        with Homeless(self._say):
            found = observed(policy, view)
        for name, state in found.items():
            if maker := made_by(state):
                self._say(maker, f"the {_declared(policy)[name].noun} {name!r}")
        return found

    def select(self, policy: EvictionPolicy, view: View, query: Tensor) -> Tensor | None:
        with Homeless(self._say):
            return policy.select(view, query)

    def ranking(self, policy: EvictionPolicy, view: View) -> tuple[Tensor, ...]:
        with Homeless(self._say):
            return policy.ranking(view)

    def _say(self, maker: str, used_in: str) -> None:
        raise Violation(
            self.case.tried("observe(view), protected(view) and priority(view)"),
            f"{maker}(..., device=view.positions.device)",
            f"{maker} without a device, used with tensors of the cache in {used_in}: on a GPU it fails, or waits",
        )


@check
def gradients(case: Case) -> None:
    """No graph is kept, and parameters get no gradients."""
    model = models.llama("float32")
    cache = case.cache(model, policy=Watched.by(_NoGraph(case), case.policy))
    run = Run(model, cache, models.ids(2, case.prompt() + 4), prompt_and_steps(case.prompt(), 4))
    with torch.enable_grad():
        for _ in run.each():
            pass
    if touched := [name for name, parameter in model.named_parameters() if parameter.grad is not None]:
        for parameter in model.parameters():
            parameter.grad = None
        raise Violation(case.tried("one run"), "parameters without gradients", f"{touched[0]} has one")


class _NoGraph(Spy):
    """Looks for graphs in what the policy returns."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def observe(self, policy: EvictionPolicy, view: View) -> Mapping[str, Tensor]:
        found = observed(policy, view)
        self._look({f"observe(view)[{name!r}]": state for name, state in found.items()})
        return found

    def ranking(self, policy: EvictionPolicy, view: View) -> tuple[Tensor, ...]:
        found = policy.ranking(view)
        self._look({f"priority(view)[{number}]": key for number, key in enumerate(found)})
        return found

    def _look(self, returned: dict[str, Tensor]) -> None:
        for what, state in returned.items():
            if state.requires_grad:
                raise Violation(self.case.tried(what), "a tensor without a graph", "it requires gradients")


@check
def configuration(case: Case) -> None:
    """A policy is its configuration: written down and read again it is equal, and it can be a key."""
    written = case.policy.model_dump(mode="json")
    again = type(case.policy).model_validate(written)
    if again != case.policy or hash(again) != hash(case.policy):
        raise Violation(case.tried(f"written as {written} and read again"), repr(case.policy), repr(again))


# -- what the author says it means -----------------------------------------------------------------------------


@check
def reference(case: Case) -> None:
    """The policy keeps what its definition in plain Python keeps, decision by decision."""
    if case.reference is None:
        raise NotApplicable("no reference is given")
    case.must_be_exact()
    prompt = case.prompt()
    _against_rule(case, models.llama(), models.ids(2, prompt + 31), [prompt] + [1] * 20 + [5, 1, 1, 3, 1])
    _against_rule(case, models.gpt_neox(), models.ids(1, prompt + 20), [1] * (prompt + 20))
    if not case.gathers:
        tokens, mask = _padded_batch([prompt, prompt // 2], steps=10)
        _against_rule(case, models.llama(), tokens, prompt_and_steps(prompt), mask)


def _against_rule(case: Case, model: Any, tokens: Tensor, calls: list[int], mask: Tensor | None = None) -> None:
    """Run the policy; feed each head's rule with the rows of the debugging attention, and compare each decision.

    Positions are original, whatever the policy says.
    """
    run = Run(model, case.cache(model, positions="original"), tokens, calls, mask)
    full = Masked(model)
    rules: dict[tuple[int, int, int], Rule] = {}
    before: list[Held] = []
    at = 0
    for number, when in enumerate(_without_gradients(run)):
        stop = at + calls[number]
        real = None if mask is None else mask[:, :stop]
        logits = full.call(tokens[:, at:stop], real, before)
        now = run.held()
        for layer, row, head, kept in _heads(now):
            was = before[layer][row][head] if before else []
            rule = rules.get((layer, row, head))
            if rule is None:
                assert case.reference is not None
                rule = rules[layer, row, head] = case.reference(case.policy, case.budget, layer, row, head)
            decoding = calls[number] == 1 and number > 0
            most = float(case.most(case.budget, layer, decoding, len(now[layer][row]))[0, head])
            _decide(case, f"{type(model).__name__}, {when}", full, (layer, row, head), rule, was, kept, most)
        shown = slice(None) if real is None else real[:, at:stop].bool()
        tried = case.tried(f"{type(model).__name__}, {when}")
        compare_values(
            tried, "logits", "as over the full cache with the evicted masked", run.logits[:, at:][shown], logits[shown]
        )
        before, at = now, stop


def _decide(
    case: Case,
    when: str,
    full: Masked,
    where: tuple[int, int, int],
    rule: Rule,
    was: list[int],
    kept: list[int],
    most: float,
) -> None:
    layer, row, head = where
    numbers = full.positions[row].tolist()
    probs, allowed = (part[row, head].tolist() for part in full.rows[layer])
    held = list(was)
    for query, given, saw in zip(numbers[-len(probs) :], probs, allowed, strict=True):
        if query >= 0:
            held.append(query)
            rule.observe(query, {p: q for p, q, shown in zip(numbers, given, saw, strict=True) if shown})
    rule.finish(numbers[-1] + 1)
    wanted = held
    if len(held) > most:
        wanted = sorted(rule.keep(list(held), numbers[-1] + 1))
    if kept != wanted:
        raise Violation(
            case.tried(f"{when}: layer {layer}, row {row}, head {head} held {held}"),
            f"{wanted} stay, by {type(rule).__name__}",
            f"{kept} stay; kept instead of {sorted(set(wanted) - set(kept))}: {sorted(set(kept) - set(wanted))}",
        )


def _without_gradients(run: Run) -> Iterator[str]:
    """The calls of a run, one by one."""
    with torch.no_grad():
        yield from run.each()


def _heads(held: list[Held]) -> Iterator[tuple[int, int, int, list[int]]]:
    """Layer, row, head, and what that head holds."""
    for layer, by_row in enumerate(held):
        for row, by_head in enumerate(by_row):
            for head, positions in enumerate(by_head):
                yield layer, row, head, positions
