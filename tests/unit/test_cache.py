"""What a user may do with an EvictionCache, and what must hold after it."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import EvictionCache
from kvpolicy.errors import BudgetError, ConfigError, KVPolicyError
from kvpolicy.pool import GROWTH, SlotPool
from tests import tiny
from tests.reference import RULES

BOUNDED = [kind for kind in RULES if kind != "full"]
every_policy = pytest.mark.parametrize("kind", list(RULES))
every_bounded = pytest.mark.parametrize("kind", BOUNDED)
every_family = pytest.mark.parametrize("family", list(tiny.FAMILIES))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.family("llama", dtype=torch.float32)


def feed(model: Any, cache: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, attention_mask=mask, use_cache=True, **tiny.cache_argument(cache), **more).logits


def decode(model: Any, cache: Any, steps: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    tokens = tiny.ids(rows, steps, seed)
    return torch.cat([feed(model, cache, tokens[:, i : i + 1]) for i in range(steps)], 1)


def state(cache: EvictionCache) -> list[Any]:
    return [cache.positions(layer).tolist() for layer in range(len(cache.layers))]


# -- budget at least the length: nothing changes ---------------------------------------------------------------


@every_family
@every_policy
@pytest.mark.parametrize("padded", [False, True])
def test_a_budget_that_holds_everything_changes_nothing(kind: str, family: str, padded: bool) -> None:
    model = tiny.family(family, dtype=torch.float32)
    tokens, mask = tiny.left_pad([12, 7, 1]) if padded else (tiny.ids(1, 12), torch.ones(1, 12, dtype=torch.long))
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "output_logits": True}
    plain = model.generate(tokens, return_dict_in_generate=True, **options)
    cache = EvictionCache(model, kind, budget=40)
    ours = model.generate(tokens, return_dict_in_generate=True, **tiny.cache_argument(cache), **options)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), rtol=1e-5, atol=1e-5)


def test_both_names_of_the_argument(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = EvictionCache(model, "h2o", budget=8)
        model.generate(tiny.ids(1, 12), past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert cache.kept(0).tolist() == [[8, 8]]


# -- bounds ----------------------------------------------------------------------------------------------------


@every_family
@every_bounded
@pytest.mark.parametrize("budget", [1, 2, 3, 10])
@pytest.mark.parametrize("prompt", [1, 2, 3, 10, 11, 40])
def test_kept_never_exceeds_the_budget(kind: str, family: str, budget: int, prompt: int) -> None:
    model = tiny.family(family, dtype=torch.float32)
    cache = EvictionCache(model, kind, budget=budget)
    feed(model, cache, tiny.ids(2, prompt))
    for step in range(12):
        seen = prompt + step
        for layer in range(len(cache.layers)):
            assert bool((cache.kept(layer) == min(seen, budget)).all())
            assert cache.positions(layer).shape == (2, cache.kept(layer).shape[1], min(seen, budget))
        assert cache.get_seq_length() == seen
        assert cache.get_mask_sizes(1, 0)[0] == min(seen, budget) + 1
        decode(model, cache, 1, rows=2, seed=step)


@every_bounded
def test_the_newest_token_survives_and_generated_tokens_are_among_the_kept(kind: str, model: Any) -> None:
    cache = EvictionCache(model, kind, budget=16)
    feed(model, cache, tiny.ids(1, 32))
    for step in range(150):
        decode(model, cache, 1, seed=step)
        assert bool((cache.positions(1)[..., -1] == 32 + step).all())
    assert bool((cache.positions(1) >= 32).any(-1).all())


@every_bounded
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_everything_stays_finite(kind: str, dtype: torch.dtype, budget: int) -> None:
    for family in tiny.FAMILIES:
        model = tiny.family(family, dtype=dtype)
        tokens, mask = tiny.left_pad([9, 2, 1])
        cache = EvictionCache(model, kind, budget=budget)
        logits = feed(model, cache, tokens, mask)
        assert bool(logits[mask.bool()].isfinite().all())
        for step in range(6):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
            assert bool(feed(model, cache, tiny.ids(3, 1, step), mask).isfinite().all())
        assert all(scores.dtype in (torch.float32, torch.int32) for scores in cache.scores(0).values())


def test_scores_do_not_stall_in_low_precision() -> None:
    """Many small additions, which bfloat16 could not hold."""
    model = tiny.family("llama", dtype=torch.bfloat16, layers=1)
    cache = EvictionCache(model, {"kind": "h2o", "recent": 0}, budget=8)
    feed(model, cache, tiny.ids(1, 8))
    decode(model, cache, 1500)
    total = cache.scores(0)["mass"].sum(-1)
    # Every query gives away a mass of one; what the evicted had is gone, the rest must be there.
    assert bool((total > 750).all())
    assert bool((total <= 1508.5).all())


def tensors_alive() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_memory_is_flat_over_three_thousand_steps(model: Any) -> None:
    cache = EvictionCache(model, "h2o", budget=64)
    feed(model, cache, tiny.ids(1, 100))
    decode(model, cache, 2)
    held = cache.nbytes()
    addresses = [pool.keys.data_ptr() for pool in cache.layers]
    gc.collect()
    alive = tensors_alive()
    for seed in range(3):
        decode(model, cache, 1000, seed=seed)
    gc.collect()
    assert cache.nbytes() == held
    assert [pool.keys.data_ptr() for pool in cache.layers] == addresses
    assert tensors_alive() <= alive + 8


# -- bytes -----------------------------------------------------------------------------------------------------


def formula(cache: EvictionCache, rows: int, heads: int, slots: int, width: int, fields: int, full: bool) -> int:
    """A slot is a key, a value, a 4-byte position and fields; a row adds the tokens seen, a head the free slot."""
    per_slot = 2 * width * 4 + 4 + fields
    return len(cache.layers) * (rows * heads * slots * per_slot + rows * 4 + rows * heads * 8 * full)


@pytest.mark.parametrize(("kind", "fields"), [("h2o", 4), ("lru", 8), ("random", 4), ("streaming_llm", 0)])
@pytest.mark.parametrize("prompt", [5, 20, 21, 100])
def test_bytes_follow_the_formula(kind: str, fields: int, prompt: int, model: Any) -> None:
    cache = EvictionCache(model, kind, budget=20)
    assert cache.nbytes() == 0
    feed(model, cache, tiny.ids(3, prompt))
    assert cache.nbytes() == formula(cache, 3, 2, 21, 8, fields, full=prompt > 20)
    decode(model, cache, 30, rows=3)
    assert cache.nbytes() == formula(cache, 3, 2, 21, 8, fields, full=True)


def test_bytes_of_the_full_cache_grow_in_blocks(model: Any) -> None:
    cache = EvictionCache(model, "full")
    feed(model, cache, tiny.ids(1, 10))
    for seen in (11, 64, 65, 129):
        decode(model, cache, seen - cache.get_seq_length())
        assert cache.nbytes() == formula(cache, 1, 2, -(-seen // GROWTH) * GROWTH, 8, 0, full=False)


def test_the_prompt_is_really_freed(model: Any) -> None:
    cache = EvictionCache(model, "h2o", budget=10)
    feed(model, cache, tiny.ids(1, 2000))
    for pool in cache.layers:
        for tensor in (pool.keys, pool.values):
            assert tensor.untyped_storage().nbytes() == 2 * 11 * 8 * 4


# -- batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    ["full", "h2o", "lru", "streaming_llm", {"kind": "random", "rows": "shared"}, {"kind": "h2o", "sinks": 2}],
    ids=str,
)
@every_family
@pytest.mark.parametrize("budget", [6, 0.5])
def test_rows_of_a_padded_batch_are_as_if_alone(policy: Any, family: str, budget: int | float) -> None:
    if policy == "full":
        budget = 60
    model = tiny.family(family)
    lengths = [20, 9, 3]
    tokens, mask = tiny.left_pad(lengths)
    more = tiny.ids(3, 25, seed=9)
    together = EvictionCache(model, policy, budget=budget)
    # Positions as generate gives them; left to themselves, models count the padding.
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    first = feed(model, together, tokens, mask, position_ids=places)
    logits = []
    for step in range(25):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        places = mask.sum(-1, keepdim=True) - 1
        logits.append(feed(model, together, more[:, step : step + 1], mask, position_ids=places))
    for row, length in enumerate(lengths):
        alone = EvictionCache(model, policy, budget=budget)
        one = feed(model, alone, tokens[row : row + 1, -length:])
        torch.testing.assert_close(first[row : row + 1, -length:], one, rtol=1e-9, atol=1e-9)
        for step in range(25):
            one = feed(model, alone, more[row : row + 1, step : step + 1])
            torch.testing.assert_close(logits[step][row : row + 1], one, rtol=1e-9, atol=1e-9)
        for layer in range(len(alone.layers)):
            held = together.positions(layer)[row]
            mine = [[p for p in head if p >= 0] for head in held.tolist()]
            assert mine == alone.positions(layer)[0].tolist()


def test_padding_is_never_kept_before_a_real_token(model: Any) -> None:
    tokens, mask = tiny.left_pad([30, 4])
    cache = EvictionCache(model, "streaming_llm", budget=8)
    feed(model, cache, tokens, mask)
    assert cache.positions(0)[1].tolist() == [[-1, -1, -1, -1, 0, 1, 2, 3]] * 2
    assert cache.kept(0).tolist() == [[8, 8], [4, 4]]


def test_beams_equal_the_unpatched_model_and_reorder_everything(model: Any) -> None:
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    cache = EvictionCache(model, "h2o", budget=64)
    plain = model.generate(tiny.ids(2, 10), **options)
    assert torch.equal(model.generate(tiny.ids(2, 10), **tiny.cache_argument(cache), **options), plain)
    tight = EvictionCache(model, "random", budget=8)
    model.generate(tiny.ids(2, 10), **tiny.cache_argument(tight), **options)
    before = tight.positions(1)
    tight.reorder_cache(torch.tensor([5, 0, 0, 1, 2, 3]))
    assert torch.equal(tight.positions(1), before[[5, 0, 0, 1, 2, 3]])


def test_several_continuations_of_one_prompt(model: Any) -> None:
    cache = EvictionCache(model, "h2o", budget=8)
    feed(model, cache, tiny.ids(1, 20))
    with pytest.raises(ConfigError, match=r"holds 1 rows and the call brings 4.*batch_repeat_interleave"):
        decode(model, cache, 1, rows=4)
    cache.reset()
    feed(model, cache, tiny.ids(1, 20))
    cache.batch_repeat_interleave(4)
    assert decode(model, cache, 5, rows=4).shape[0] == 4
    cache.batch_select_indices(torch.tensor([2]))
    assert cache.kept(0).shape[0] == 1


# -- turns, chunks, reuse --------------------------------------------------------------------------------------


def test_a_second_turn_processes_only_the_new_tokens(model: Any) -> None:
    cache = EvictionCache(model, "h2o", budget=16)
    first = model.generate(tiny.ids(1, 10), max_new_tokens=30, do_sample=False, **tiny.cache_argument(cache))
    assert cache.get_seq_length() == 39
    history = torch.cat([first, tiny.ids(1, 5, seed=3)], 1)
    model.generate(history, max_new_tokens=1, do_sample=False, **tiny.cache_argument(cache))
    assert cache.get_seq_length() == 45
    assert bool((cache.kept(0) == 16).all())


@every_policy
def test_a_prompt_in_chunks_within_the_budget_is_the_whole_prompt(kind: str) -> None:
    model = tiny.family("llama")
    tokens = tiny.ids(1, 40)
    budget = None if kind == "full" else 50
    whole, parts = EvictionCache(model, kind, budget=budget), EvictionCache(model, kind, budget=budget)
    expected = feed(model, whole, tokens)
    actual = torch.cat([feed(model, parts, tokens[:, a:b]) for a, b in [(0, 1), (1, 2), (2, 17), (17, 40)]], 1)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(decode(model, parts, 20), decode(model, whole, 20), rtol=1e-9, atol=1e-9)
    assert state(parts) == state(whole)


@every_policy
def test_reset_shared_policies_and_caches_in_turn_are_as_fresh(kind: str, model: Any) -> None:
    policy = kvpolicy.load(kind)
    budget = None if kind == "full" else 9

    def run(cache: EvictionCache, seed: int) -> tuple[torch.Tensor, list[Any]]:
        logits = torch.cat([feed(model, cache, tiny.ids(1, 14 + seed, seed)), decode(model, cache, 12)], 1)
        return logits, state(cache)

    fresh = {seed: run(EvictionCache(model, kind, budget=budget), seed) for seed in (0, 1)}
    reused = EvictionCache(model, policy, budget=budget)
    for seed in (0, 1, 0):
        logits, kept = run(reused, seed)
        assert torch.equal(logits, fresh[seed][0])
        assert kept == fresh[seed][1]
        reused.reset()
        assert reused.get_seq_length() == 0
        assert reused.nbytes() == 0
    one, two = EvictionCache(model, policy, budget=budget), EvictionCache(model, policy, budget=budget)
    feed(model, one, tiny.ids(1, 14, 0))
    feed(model, two, tiny.ids(1, 15, 1))
    tokens = tiny.ids(1, 12, 1)
    for step in range(12):
        feed(model, one, tokens[:, step : step + 1])
        feed(model, two, tokens[:, step : step + 1])
    assert [state(one), state(two)] == [fresh[0][1], fresh[1][1]]


def test_the_random_state_is_untouched_and_seeds_repeat(model: Any) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    runs = []
    for seed in (1, 1, 2):
        cache = EvictionCache(model, {"kind": "random", "seed": seed}, budget=12)
        feed(model, cache, tiny.ids(2, 40))
        decode(model, cache, 20, rows=2)
        runs.append(state(cache))
    assert torch.equal(torch.get_rng_state(), before)
    assert runs[0] == runs[1] != runs[2]
    layers, rows = runs[0], runs[0][0]
    assert layers[0] != layers[1], "layers draw independently"
    assert rows[0] != rows[1], "rows draw independently"
    assert rows[0][0] != rows[0][1], "heads draw independently"


# -- budgets ---------------------------------------------------------------------------------------------------


def test_a_share_is_fixed_by_the_first_call(model: Any) -> None:
    cache = EvictionCache(model, "h2o", budget=0.25)
    feed(model, cache, tiny.ids(1, 42))
    assert bool((cache.kept(0) == 11).all()), "10.5, rounded half up"
    feed(model, cache, tiny.ids(1, 100))
    assert bool((cache.kept(0) == 11).all())


def test_each_row_has_its_own_share(model: Any) -> None:
    tokens, mask = tiny.left_pad([40, 8])
    cache = EvictionCache(model, "h2o", budget=0.5)
    feed(model, cache, tokens, mask)
    assert cache.kept(0).tolist() == [[20, 20], [4, 4]]
    for step in range(30):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        feed(model, cache, tiny.ids(2, 1, step), mask)
        assert cache.kept(1).tolist() == [[20, 20], [4, 4]]


def test_a_share_of_a_prompt_that_comes_in_chunks(model: Any) -> None:
    cache = EvictionCache(model, "h2o", budget=0.25, prompt_length=80)
    for start in range(0, 80, 16):
        feed(model, cache, tiny.ids(1, 16, start))
    assert bool((cache.kept(0) == 20).all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h2o",), "h2o needs a budget"),
        (("h2o", 0), "0 is no budget"),
        (("h2o", -3), "-3 is no budget"),
        (("h2o", 1.5), "1.5 is no budget"),
        (("h2o", True), "True is no budget"),
        (("h20", 8), "did you mean 'h2o'"),
        (({"kind": "h2o", "recnt": 3}, 8), "did you mean 'recent'"),
        (({"kind": "streaming_llm", "sinks": 9}, 8), "cannot hold the 9"),
        (("nowhere.yaml", 8), "nowhere.yaml: cannot be read"),
    ],
)
def test_impossible_requests_are_refused(arguments: tuple[Any, ...], message: str, model: Any) -> None:
    with pytest.raises(KVPolicyError, match=message):
        EvictionCache(model, *arguments)


def test_options_of_the_cache_are_checked(model: Any) -> None:
    with pytest.raises(ConfigError, match="positions='round' is not one of original, rolled"):
        EvictionCache(model, "h2o", budget=8, positions="round")
    with pytest.raises(ConfigError, match="positions='rolled' is not available for opt models"):
        EvictionCache(tiny.family("opt"), "h2o", budget=8, positions="rolled")
    with pytest.raises(ConfigError, match="prompt_length must be"):
        EvictionCache(model, "h2o", budget=0.5, prompt_length=0)
    with pytest.raises(ConfigError, match="layer 7 does not exist"):
        EvictionCache(model, "h2o", budget=8).kept(7)


def test_the_full_cache_refuses_to_exceed_a_budget(model: Any) -> None:
    cache = EvictionCache(model, "full", budget=8)
    feed(model, cache, tiny.ids(1, 8))
    with pytest.raises(BudgetError, match="9 tokens do not fit its budget of 8"):
        decode(model, cache, 1)


def test_what_cannot_be_rolled_back_is_refused(model: Any) -> None:
    cache = EvictionCache(model, "h2o", budget=8)
    with pytest.raises(ConfigError, match="cannot be cropped"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="crop"):
        model.generate(
            tiny.ids(1, 12), prompt_lookup_num_tokens=2, max_new_tokens=8, do_sample=False, **tiny.cache_argument(cache)
        )


def test_an_interrupted_call_is_noticed(model: Any) -> None:
    cache = EvictionCache(model, "h2o", budget=8)
    with pytest.raises(KVPolicyError, match="2-D attention mask"):
        feed(model, cache, tiny.ids(1, 4), torch.zeros(1, 1, 4, 4))
    with pytest.raises(KVPolicyError, match=r"did not finish in layer 0.*cache\.reset\(\)"):
        feed(model, cache, tiny.ids(1, 4))
    cache.reset()
    feed(model, cache, tiny.ids(1, 4))


def test_an_inference_cache_keeps_no_graph(model: Any) -> None:
    cache = EvictionCache(model, "h2o", budget=8)
    model(tiny.ids(1, 12), use_cache=True, **tiny.cache_argument(cache))
    assert not any(pool.keys.requires_grad for pool in cache.layers)


def test_an_empty_cache_answers(model: Any) -> None:
    cache = EvictionCache(model, "h2o", budget=8)
    assert cache.get_seq_length() == 0
    assert cache.kept(0).numel() == cache.positions(0).numel() == cache.nbytes() == 0
    assert "h2o" in repr(cache)
    assert all(isinstance(pool, SlotPool) for pool in cache.layers)
