"""Writing text with an evicting cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvpolicy.cache import EvictionCache
from kvpolicy.config import read
from kvpolicy.errors import ConfigError, EvaluationError
from kvpolicy.evaluate.models import cache_argument, check_model, load_model, quiet_transformers
from kvpolicy.rehearsal import compress


@dataclass(frozen=True)
class Request:
    """What to write, and with what."""

    model: str
    policy: Any
    prompt: str
    budget: Any = None
    max_new_tokens: int = 64
    chat: bool = False
    seed: int | None = None
    """Sample with this seed; ``None`` takes the likeliest token each time."""
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    prefix: int | None = None
    """First tokens that always stay."""
    positions: str | None = None
    """``original`` or ``rolled``; by default what the policy says."""


@dataclass(frozen=True)
class Written:
    """What was written, and the cache as it was left."""

    text: str
    tokens: list[str]
    """All tokens seen, prompt included, each as text."""
    cache: EvictionCache


def generate(request: Request) -> Written:
    """Answer `request`. Greedy unless it has a seed; the global random state is left as it was."""
    config = read(request.policy)  # wrong names and budgets show before a model is loaded
    if request.budget is None and config.budget is None and config.policy.budgeted:
        raise ConfigError(f"{config.policy.kind} needs a budget: --budget 64 (tokens) or --budget 0.25 (of the prompt)")
    check_model(request.model, request.dtype, request.device)
    if request.threads:
        torch.set_num_threads(request.threads)
    model, tokenizer, _ = load_model(request.model, request.dtype, request.device)
    cache = EvictionCache(
        model, request.policy, budget=request.budget, prefix=request.prefix, positions=request.positions
    )
    with quiet_transformers(), torch.random.fork_rng(enabled=request.seed is not None):
        inputs = _encode(tokenizer, request).to(model.device)
        if request.seed is not None:
            torch.manual_seed(request.seed)
        if cache.awaiting:
            _compress(model, tokenizer, cache, inputs)
        output = model.generate(
            **inputs,
            **{cache_argument(model): cache},
            max_new_tokens=request.max_new_tokens,
            do_sample=request.seed is not None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )[0]
    prompt_length = inputs["input_ids"].shape[1]
    text = tokenizer.decode(output[prompt_length:], skip_special_tokens=True)
    seen = output[: int(cache.get_seq_length())]
    return Written(text, [tokenizer.decode(token) for token in seen], cache)


def _compress(model: Any, tokenizer: Any, cache: EvictionCache, inputs: Any) -> None:
    """Read the prompt and cut it after the pass that the policy asks for; its last token is left for what follows."""
    if inputs["input_ids"].shape[1] < 2:
        raise EvaluationError(f"the prompt is a single token, of which {cache.awaiting[0].kind} has nothing to keep")
    compress(model, tokenizer, cache, inputs["input_ids"][:, :-1])


def _encode(tokenizer: Any, request: Request) -> Any:
    if not request.chat:
        inputs = tokenizer(request.prompt, return_tensors="pt")
        if not inputs["input_ids"].numel():
            raise EvaluationError("the prompt is empty: it has no token")
        return inputs
    if not tokenizer.chat_template:
        raise EvaluationError(f"{request.model} has no chat template: leave out --chat")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": request.prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
