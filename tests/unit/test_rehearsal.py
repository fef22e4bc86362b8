"""A pass over the context before it is cut: KVzip against a plain model, and caches that are held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvpolicy import EvictionCache, EvictionPolicy, compress, load
from kvpolicy.errors import ConfigError
from kvpolicy.evaluate.plan import Plan
from kvpolicy.ragged import PAGE
from kvpolicy.rehearsal import Passage, Rehearsal
from kvpolicy.testing import check_policy
from kvpolicy.testing.masked import Masked
from tests import tiny
from tests.unit.test_policies import Trace
from tests.unit.test_step import Strict

NAME = "kvpolicy_test_rehearsal"


class Tokenizer:
    """A few tokens for any text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [2 + ord(letter) % 90 for letter in text[:5]]


class Reference:
    """KVzip as it reads: a plain model on the context and a request to repeat it, one row at a time."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.policy: Any = load({"kind": "kvzip", **options})
        self.logits: dict[int, Tensor] = {}
        AttentionMaskInterface.register(NAME, lambda **kwargs: None)

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any):
        self.group = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(self.group, 1).transpose(-1, -2) * scaling
        self.logits[module.layer_idx] = logits[0]
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        probs = logits.masked_fill(later, -torch.inf).softmax(-1)
        return (probs @ value.repeat_interleave(self.group, 1)).transpose(1, 2), probs

    def scores(self, context: Tensor, prefix: int = 0) -> dict[tuple[int, int, int], float]:
        """By layer, KV head and position."""
        encode = lambda text: Tokenizer().encode(text, add_special_tokens=False)  # noqa: E731
        chunk, lead, best = self.policy.chunk, self.policy.lead, {}
        for start in range(prefix, len(context), chunk):
            stop = min(start + chunk, len(context))
            asked = encode(self.policy.ask if start == prefix else self.policy.ask_again)
            quoted = [] if start == prefix else context[max(prefix, start - lead) : start].tolist()
            said = [*asked, *quoted, *encode(self.policy.reply), *context[start:stop].tolist()]
            self._run(torch.cat([context, torch.tensor(said)]))
            sinks = range(max(prefix, self.policy.sinks))
            for layer, logits in self.logits.items():
                for head, rows in enumerate(logits.unflatten(0, (-1, self.group))):
                    for query in range(len(context), len(context) + len(said)):
                        among = sorted({*sinks, *range(start, stop), *range(len(context), query + 1)})
                        probs = rows[:, query, among].softmax(-1).amax(0).tolist()
                        for position, p in zip(among, probs, strict=True):
                            if start <= position < stop:
                                at = (layer, head, position)
                                best[at] = max(best.get(at, 0.0), p)
        return best

    def _run(self, tokens: Tensor) -> None:
        before, self.model.config._attn_implementation = self.model.config._attn_implementation, NAME
        AttentionInterface.register(NAME, self._attend)
        try:
            with torch.no_grad():
                self.model(tokens[None], use_cache=False)
        finally:
            self.model.config._attn_implementation = before

    def kept(self, context: Tensor, budget: int, prefix: int = 0) -> list[list[list[int]]]:
        """By layer and KV head; for a context longer than the budget."""
        scores = self.scores(context, prefix)
        layers, heads = (1 + max(at[i] for at in scores) for i in range(2))
        first = max(min(self.policy.sinks, budget), prefix)
        places = [(layer, head, p) for layer in range(layers) for head in range(heads) for p in range(len(context))]
        worth = {at: (at[2] < first, scores.get(at, 2.0), -at[2]) for at in places}
        if self.policy.budgets == "global":
            tops = [max((at for at in places if at[:2] == head), key=worth.__getitem__) for head in heads_of(places)]
            rest = sorted(set(places) - set(tops), key=worth.__getitem__, reverse=True)
            chosen = {*tops, *rest[: budget * layers * heads - len(tops)]}
        else:
            chosen = set()
            for head in heads_of(places):
                mine = [at for at in places if at[:2] == head]
                chosen |= set(sorted(mine, key=worth.__getitem__, reverse=True)[:budget])
        return [
            [[p for p in range(len(context)) if (layer, head, p) in chosen] for head in range(heads)]
            for layer in range(layers)
        ]


def heads_of(places: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return sorted({at[:2] for at in places})


def held(cache: EvictionCache) -> list[list[list[list[int]]]]:
    """By row, layer and KV head."""
    layers = [cache.positions(layer).tolist() for layer in range(len(cache.layers))]
    return [[[[p for p in head if p >= 0] for head in layer[row]] for layer in layers] for row in range(len(layers[0]))]


def scores_of(cache: EvictionCache, layer: int, head: int) -> dict[int, float]:
    """Of the first row, by position."""
    positions, scores = cache.positions(layer)[0, head].tolist(), cache.scores(layer)["score"][0, head].tolist()
    return {p: score for p, score in zip(positions, scores, strict=True) if p >= 0}


def compressed(model: Any, budget: Any, ids: Tensor, mask: Tensor | None = None, prefix: Any = None, **options: Any):
    cache = EvictionCache(model, {"kind": "kvzip", **options}, budget, prefix=prefix)
    compress(model, Tokenizer(), cache, ids, mask)
    return cache


# -- the policy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "expected"), [("max", [0, 1, 3]), ("mean", [0, 1, 2])])
def test_the_worked_example(group: str, expected: list[int]) -> None:
    """Two heads of a group by two queries over five keys: the most that any gives. Their mean would differ."""
    rows = torch.tensor(
        [[[0.5, 0.1, 0.13, 0.02, 0.05], [0.1, 0.6, 0.13, 0.03, 0.05]],
         [[0.15, 0.1, 0.13, 0.3, 0.1], [0.1, 0.1, 0.13, 0.1, 0.2]]]
    )  # fmt: skip
    scores = rows.amax((0, 1)) if group == "max" else rows.mean((0, 1))
    assert sorted(scores.topk(3).indices.tolist()) == expected
    if group == "max":
        assert _shown(rows) == pytest.approx(scores.tolist(), abs=1e-6)


def _shown(rows: Tensor) -> list[float]:
    """What KVzip makes of these probabilities; what a row lacks to one goes to the pass's own token."""
    from kvpolicy.attention.rows import AttentionRows

    policy, (group, queries, keys) = load({"kind": "kvzip", "sinks": 0}), rows.shape
    probs = torch.cat([rows, 1 - rows.sum(-1, keepdim=True)], -1)
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    places = torch.full((1, 1, queries, 1), keys)
    trace = Trace(policy, 3)
    trace.positions = torch.arange(keys + 1, dtype=torch.int32).view(1, 1, -1)
    trace.fields = {"score": torch.full((1, 1, keys + 1), -1.0)}
    trace.seen = keys + 1
    view = trace.view(AttentionRows(places, logits=probs.log().view(1, 1, group, queries, -1)))
    view.rehearsal = Rehearsal(policy, 0 * one, keys * one, keys * one)
    return policy.observe(view)["score"].flatten().tolist()[:-1]


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("budgets", ["global", "uniform"])
def test_kept_are_those_of_a_plain_model(family: str, budgets: str) -> None:
    model, context, options = tiny.family(family), tiny.ids(1, 40), {"chunk": 15, "lead": 3, "budgets": budgets}
    cache = compressed(model, 12, context, **options)
    expected = Reference(model, **options)
    assert held(cache)[0] == expected.kept(context[0], 12)
    scores = expected.scores(context[0])
    for layer in range(2):
        for head, positions in enumerate(held(cache)[0][layer]):
            assert scores_of(cache, layer, head) == pytest.approx({p: scores[layer, head, p] for p in positions})


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 2)]),
    length=st.integers(2, 30),
    chunk=st.integers(1, 31),
    lead=st.integers(0, 9),
    sinks=st.integers(0, 5),
    budget=st.integers(1, 20),
    budgets=st.sampled_from(["global", "uniform"]),
    seed=st.integers(0, 1000),
)
def test_any_sizes(heads: Any, length: int, chunk: int, lead: int, sinks: int, budget: int, budgets: str, seed: int):
    model = tiny.family("llama", seed=seed, heads=heads[0], kv_heads=heads[1])
    options = {"chunk": chunk, "lead": lead, "budgets": budgets}
    budget = max(budget, sinks)
    context = tiny.ids(1, length, seed)
    cache = compressed(model, budget, context, sinks=sinks, **options)
    if length > budget:
        assert held(cache)[0] == Reference(model, sinks=sinks, **options).kept(context[0], budget)
        assert sum(int(cache.kept(layer).sum()) for layer in range(2)) == 2 * heads[1] * budget
    else:
        assert held(cache)[0] == [[list(range(length))] * heads[1]] * 2
    assert all(bool((cache.kept(layer) > 0).all()) for layer in range(2))


@pytest.mark.parametrize("budgets", ["global", "uniform"])
def test_rows_of_a_padded_batch_are_as_alone(budgets: str) -> None:
    model, options = tiny.family("llama"), {"chunk": 9, "lead": 2, "sinks": 2, "budgets": budgets}
    ids, mask = tiny.left_pad([31, 5, 18])
    cache = compressed(model, 8, ids, mask, **options)
    for row, length in enumerate([31, 5, 18]):
        own = ids[row, -length:]
        expected = Reference(model, **options).kept(own, 8) if length > 8 else [[list(range(length))] * 2] * 2
        assert held(cache)[row] == expected
    shares = compressed(model, 0.5, ids, mask, **options)
    assert [sum(len(head) for layer in row for head in layer) / 4 for row in held(shares)] == [16, 3, 9]


def test_a_prefix_stays_and_is_not_repeated() -> None:
    model, context = tiny.family("llama"), tiny.ids(2, 30)
    cache = compressed(model, 12, context, prefix=[7, 0], chunk=10)
    for row, prefix in enumerate([7, 0]):
        assert held(cache)[row] == Reference(model, chunk=10).kept(context[row], 12, prefix)
    assert all(head[:7] == list(range(7)) for layer in held(cache)[0] for head in layer)


@pytest.mark.parametrize("budgets", ["global", "uniform"])
@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_goes_on_as_the_masked_full_cache(family: str, budgets: str) -> None:
    """A question, then steps: nothing is evicted any more."""
    model, context, more = tiny.family(family), tiny.ids(2, 40), tiny.ids(2, 90, 1)
    cache, masked = compressed(model, 9, context, budgets=budgets), Masked(model)
    kept = [[held(cache)[row][layer] for row in range(2)] for layer in range(2)]
    masked.call(context, None, [])
    at = 40
    for part in more.split([6, *[1] * 84], 1):
        with torch.no_grad():
            found = model(part, use_cache=True, **tiny.cache_argument(cache)).logits
        new = list(range(40, at))
        torch.testing.assert_close(
            found, masked.call(part, None, [[[head + new for head in row] for row in layer] for layer in kept])
        )
        at += part.shape[1]
    assert cache.get_seq_length() == 130
    assert all(set(range(40, 130)) <= set(head) for row in held(cache) for layer in row for head in layer)


def test_what_is_written_takes_the_place_of_the_least() -> None:
    model, context = tiny.family("llama"), tiny.ids(1, 40)
    grown, cache = (compressed(model, 9, context, decode=how, sinks=2) for how in ("grow", "bounded"))
    sizes = [cache.kept(layer) for layer in range(2)]
    for step, part in enumerate(tiny.ids(1, 60, 2).split([3, *[1] * 57], 1)):
        for each in (grown, cache):
            with torch.no_grad():
                model(part, use_cache=True, **tiny.cache_argument(each))
        for layer in range(2):
            assert torch.equal(cache.kept(layer), sizes[layer]), "each head keeps its part"
            for head in range(2):
                mine, all_of_it = (held(each)[0][layer][head] for each in (cache, grown))
                scores = scores_of(grown, layer, head)
                room, new = int(sizes[layer][0, head]) - 2, 43 + step
                written = list(range(40, new))[-room:]
                first = [p for p in all_of_it if 2 <= p < 40]
                left = sorted(first, key=lambda p: (-scores[p], p))[: room - len(written)]
                assert mine == sorted([0, 1, *left, *written])


def test_generate_goes_on_from_the_context() -> None:
    model, context, question = tiny.family("llama"), tiny.ids(2, 40), tiny.ids(2, 5, 1)
    outputs = []
    for budget in (40, 12):
        cache = compressed(model, budget, context)
        outputs.append(
            model.generate(
                torch.cat([context, question], 1), max_new_tokens=6, do_sample=False, **tiny.cache_argument(cache)
            )
        )
        assert cache.get_seq_length() == 50
    plain = model.generate(torch.cat([context, question], 1), max_new_tokens=6, do_sample=False)
    assert torch.equal(outputs[0], plain), "a budget that holds everything changes nothing"


def test_bytes_are_those_of_what_is_kept() -> None:
    """After the cut, after a question of several tokens, and after an answer: pages, and 64 tokens ahead at most."""
    model = tiny.family("llama", dtype=torch.float32, heads=8, kv_heads=4)
    cache = compressed(model, 60, tiny.ids(2, 400), chunk=128)
    slot = 2 * 8 * 4 + 4 + 4  # key and value, position, score
    for part in ([], [30], [1] * 100, [2, 1]):
        for count in part:
            with torch.no_grad():
                model(tiny.ids(2, count), use_cache=True, **tiny.cache_argument(cache))
        for layer, pool in enumerate(cache.layers):
            tables = pool.pages.nbytes() + pool.free.nbytes + pool.shares.nbytes + pool.seen.nbytes
            kept = cache.kept(layer)
            assert kept.max() >= kept.min() + 10, "otherwise nothing is shown"
            assert int(kept.sum()) < (pool.nbytes() - tables) / slot <= int((kept + 64 + PAGE).sum())


def test_beams_after_the_cut() -> None:
    model, context = tiny.family("llama"), tiny.ids(3, 40)

    def run(rows: list[int], change: Any) -> tuple[Tensor, Any]:
        cache = compressed(model, 9, context[rows])
        change(cache)
        with torch.no_grad():
            for step in range(70):
                logits = model(tiny.ids(1, 1, step).expand(3, 1), **tiny.cache_argument(cache)).logits
        return logits, held(cache)

    logits, positions = run([0, 1, 2], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])))
    expected, places = run([2, 0, 0], lambda cache: None)
    torch.testing.assert_close(logits, expected)
    assert positions == places


# -- in compositions -------------------------------------------------------------------------------------------


def test_parts_rehearse_and_the_others_do_not_notice() -> None:
    """KVzip in one layer, H2O in the other; KVzip for prompts and a sliding window for what is written."""
    model, context = tiny.family("llama"), tiny.ids(1, 40)
    options = {"kind": "kvzip", "budgets": "uniform"}
    mixed = EvictionCache(model, {"kind": "layers", "at": {"0": options}, "default": "h2o"}, 10)
    compress(model, Tokenizer(), mixed, context)
    h2o = EvictionCache(model, "h2o", 10)
    with torch.no_grad():
        model(context, **tiny.cache_argument(h2o))
    assert held(mixed)[0][1] == held(h2o)[0][1]
    torch.testing.assert_close(mixed.scores(1)["mass"], h2o.scores(1)["mass"])
    assert held(mixed)[0][0] == held(compressed(model, 10, context, budgets="uniform"))[0][0]

    phases = EvictionCache(model, {"kind": "phases", "prefill": {"kind": "kvzip"}, "decode": "recent"}, 10)
    compress(model, Tokenizer(), phases, context)
    assert held(phases) == held(compressed(model, 10, context))
    with torch.no_grad():
        for step in range(30):
            model(tiny.ids(1, 1, step), **tiny.cache_argument(phases))
    newest = max((head for layer in held(phases)[0] for head in layer), key=len)
    assert newest == list(range(70 - len(newest), 70))


def test_a_union_observes_what_its_part_asked_for() -> None:
    model, context = tiny.family("llama"), tiny.ids(1, 40)
    policy = load(
        {
            "kind": "union",
            "parts": [
                {"take": 3, "of": "recent"},
                {"of": {"kind": "kvzip", "sinks": 0, "decode": "bounded", "budgets": "uniform"}},
            ],
        }
    )
    cache = EvictionCache(model, policy, 10)
    compress(model, Tokenizer(), cache, context)
    scores = Reference(model, sinks=0).scores(context[0])
    for layer in range(2):
        for head in range(2):
            best = sorted(range(37), key=lambda p: (-scores[layer, head, p], p))[:7]
            assert held(cache)[0][layer][head] == sorted([*best, 37, 38, 39])


# -- what is refused -------------------------------------------------------------------------------------------


def test_without_the_pass_it_is_refused() -> None:
    model, ids = tiny.family("llama"), tiny.ids(1, 20)
    cache = EvictionCache(model, "kvzip", 8)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"kvzip chooses by a pass .* kvpolicy\.compress\(model, tokenizer, cache"
        ):
            model(ids, **tiny.cache_argument(cache))
    compress(model, Tokenizer(), cache, ids)
    with pytest.raises(ConfigError, match="or it is done"):
        compress(model, Tokenizer(), cache, ids)
    cache.reset()
    with pytest.raises(ConfigError, match="kvzip chooses by a pass"):
        model(ids, **tiny.cache_argument(cache))
    compress(model, Tokenizer(), cache, tiny.ids(1, 20, 1))
    assert held(cache) == held(compressed(model, 8, tiny.ids(1, 20, 1)))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"tokens": 8, "heads": "adaptive"}, "kvzip says by itself how the budget is divided: leave heads out"),
        ({"tokens": 8, "layers": "pyramid"}, "leave layers out of the budget"),
        ({"share": 0.5, "of": "seen"}, "kvzip divides a budget where a prompt is cut"),
    ],
)
def test_budgets_that_contradict_it(budget: Any, message: str) -> None:
    model = tiny.family("llama")
    with pytest.raises(ConfigError, match=message):
        EvictionCache(model, "kvzip", budget)
    if "tokens" in budget:
        EvictionCache(model, {"kind": "kvzip", "budgets": "uniform"}, budget)


def test_what_cannot_be_held() -> None:
    model, kvzip = tiny.family("llama"), {"kind": "kvzip", "budgets": "uniform"}
    with pytest.raises(ConfigError, match=r"budget\.layers: cake divides while a prompt is read"):
        EvictionCache(model, kvzip, {"tokens": 8, "layers": "cake"})
    with pytest.raises(ConfigError, match="kivi has layers stored in a way of their own, which cannot be held"):
        EvictionCache(model, {"kind": "kivi", "of": kvzip}, 40)
    for policy, budget in (("h2o", {"tokens": 8, "layers": "cake"}), ({"kind": "kivi", "of": "h2o"}, 40)):
        with pytest.raises(ConfigError, match="held"), EvictionCache(model, policy, budget).held():
            pass


def test_rolled_positions_are_those_of_what_is_held() -> None:
    """The pass sees the whole context, in which places and positions are the same; what follows is closed up."""
    model, context, more = tiny.family("llama"), tiny.ids(1, 30), tiny.ids(1, 12, 1)
    policy = {"kind": "kvzip", "budgets": "uniform", "chunk": 12}
    rolled = EvictionCache(model, policy, 9, positions="rolled")
    compress(model, Tokenizer(), rolled, context)
    assert held(rolled)[0] == Reference(model, budgets="uniform", chunk=12).kept(context[0], 9)
    with torch.no_grad():
        first = [model(part, use_cache=True, **tiny.cache_argument(rolled)).logits for part in more.split(1, 1)]
        again = EvictionCache(model, policy, 9, positions="rolled")
        compress(model, Tokenizer(), again, context)
        whole = model(more, use_cache=True, **tiny.cache_argument(again)).logits
    torch.testing.assert_close(torch.cat(first, 1), whole)


def test_what_compress_refuses() -> None:
    model, ids = tiny.family("llama"), tiny.ids(1, 20)
    with pytest.raises(ConfigError, match="h2o has no pass over the context"):
        compress(model, Tokenizer(), EvictionCache(model, "h2o", 8), ids)
    with pytest.raises(ConfigError, match="needs the model's tokenizer"):
        compress(model, None, EvictionCache(model, "kvzip", 8), ids)
    cache = EvictionCache(model, "kvzip", 8)
    with torch.no_grad(), cache.held():
        model(ids, **tiny.cache_argument(cache))
    with pytest.raises(ConfigError, match="has read 20 tokens and the context has 19"):
        compress(model, Tokenizer(), cache, ids[:, 1:])


# -- caches that are held, and passes --------------------------------------------------------------------------


def test_a_context_read_in_pieces() -> None:
    model, ids = tiny.family("llama"), tiny.ids(2, 40)
    cache = EvictionCache(model, {"kind": "kvzip", "chunk": 16}, 0.25)
    with torch.no_grad(), cache.held():
        for part in ids.split([17, 1, 1, 21], 1):
            model(part, use_cache=True, **tiny.cache_argument(cache))
    compress(model, Tokenizer(), cache, ids)
    assert held(cache) == held(compressed(model, 0.25, ids, chunk=16))


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", {"kind": "every", "tokens": 3, "of": "lru"}])
@pytest.mark.parametrize("budget", [8, 0.25, {"tokens": 8, "heads": {"kind": "adaptive", "alpha": 0.0}}])
def test_what_is_read_while_held_is_one_prompt(policy: Any, budget: Any) -> None:
    model, ids, more = tiny.family("llama"), tiny.ids(2, 40), tiny.ids(2, 30, 1)

    def run(parts: list[int]) -> EvictionCache:
        cache = EvictionCache(model, policy, budget)
        with torch.no_grad():
            with cache.held():
                for part in ids.split(parts, 1):
                    model(part, use_cache=True, **tiny.cache_argument(cache))
            for part in more[:, :9].split(1, 1):
                model(part, use_cache=True, **tiny.cache_argument(cache))
            with cache.held():
                for part in more[:, 9:].split([1, 8, 1, 11], 1):
                    model(part, use_cache=True, **tiny.cache_argument(cache))
        return cache

    whole, pieces = run([40]), run([1, 20, 1, 18])
    assert held(whole) == held(pieces)
    plain = EvictionCache(model, policy, budget)
    with torch.no_grad():
        model(ids, **tiny.cache_argument(plain))
        for part in more[:, :9].split(1, 1):
            model(part, use_cache=True, **tiny.cache_argument(plain))
        model(more[:, 9:], use_cache=True, **tiny.cache_argument(plain))
    assert held(plain) == held(whole)


def test_an_error_while_held_does_not_leave_it_so() -> None:
    model, cache = tiny.family("llama"), EvictionCache(tiny.family("llama"), "h2o", 8)
    cache = EvictionCache(model, "h2o", 8)
    with pytest.raises(RuntimeError), cache.held():
        raise RuntimeError
    with torch.no_grad():
        model(tiny.ids(1, 20), **tiny.cache_argument(cache))
    assert int(cache.kept(0).max()) == 8


def test_a_pass_leaves_nothing_behind() -> None:
    """Tokens of the pass are gone, and so is what others noted about them."""
    model, ids = tiny.family("llama", dtype=torch.float32), tiny.ids(1, 30)
    cache = EvictionCache(model, "kvzip", 1.0)
    compress(model, Tokenizer(), cache, ids)
    plain = EvictionCache(model, "full")
    with torch.no_grad():
        model(ids, **tiny.cache_argument(plain))
        ours, theirs = (model(ids[:, :4], use_cache=True, **tiny.cache_argument(c)).logits for c in (cache, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert cache.get_seq_length() == 34
    assert (cache.scores(0)["score"][..., 30:] == -1).all()


class Asking(EvictionPolicy):
    """A pass of someone else's: each token of the context once more, alone."""

    kind: str = "asking"

    def rehearsal(self, context, encode, prefix=0):
        return [Passage(context[i : i + 1], i, i + 1) for i in range(len(context))]

    def priority(self, view):
        return view.positions


def test_a_pass_of_ones_own() -> None:
    model, ids = tiny.family("llama"), tiny.ids(2, 12)
    cache = EvictionCache(model, Asking(), 5)
    compress(model, Tokenizer(), cache, ids)
    assert held(cache) == [[[list(range(7, 12))] * 2] * 2] * 2
    with torch.no_grad():
        model(ids[:, :1], **tiny.cache_argument(cache))
    assert held(cache) == [[[list(range(8, 13))] * 2] * 2] * 2


# -- where it does not apply -----------------------------------------------------------------------------------


def test_a_comparison_leaves_it_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "kvpolicy"):
        named = {run.name for run in Plan.of(["all"], [6], 64).runs}
    assert "kvzip" not in named and "h2o" in named
    assert "all leaves out what needs a pass over a prompt: kvzip" in caplog.messages
    with pytest.raises(ConfigError, match=r"^kvzip chooses by a pass over a prompt .* leave it out of --policies"):
        Plan.of(["h2o", "kvzip"], [6], 64)


@pytest.mark.parametrize("budgets", ["global", "uniform"])
@pytest.mark.parametrize("decode", ["grow", "bounded"])
def test_checks(budgets: str, decode: str) -> None:
    check_policy(load({"kind": "kvzip", "chunk": 5, "sinks": 1, "budgets": budgets, "decode": decode}))


def test_a_step_after_the_cut_waits_for_nothing() -> None:
    model, ids = tiny.family("llama", dtype=torch.float32), tiny.ids(2, 40)
    for decode in ("grow", "bounded"):
        cache = compressed(model, 9, ids, decode=decode)
        for step in range(20):
            with torch.no_grad(), Strict():
                model(tiny.ids(2, 1, step), position_ids=torch.full((2, 1), 40 + step), **tiny.cache_argument(cache))
