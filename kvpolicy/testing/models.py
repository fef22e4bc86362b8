"""Tiny random models and tokens: no files, no network, and the global random state stays as it was.

Weights are drawn wide, so that attention is far from uniform and decisions are far from ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvpolicy.evaluate.models import cache_argument, quiet_transformers

VOCABULARY = 97
LAYERS = 2


def new_llama(kv_heads: int = 2, dtype: str = "float64", **more: Any) -> Any:
    """A Llama with two query heads to each KV head."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16 * kv_heads, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=2 * kv_heads, num_key_value_heads=kv_heads, max_position_embeddings=4096, **more,
    )  # fmt: skip
    return build(config, dtype)


@cache
def llama(dtype: str = "float64") -> Any:
    """The Llama of most checks, made once."""
    return new_llama(dtype=dtype)


@cache
def gpt_neox() -> Any:
    """A GPT-NeoX, made once: as many KV heads as query heads, and half of each head rotated."""
    from transformers import GPTNeoXConfig

    config = GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=4096, rotary_pct=0.5,
    )  # fmt: skip
    return build(config, "float64")


@cache
def with_heads_in_order(order: tuple[int, ...]) -> Any:
    """A Llama whose KV heads, and what belongs to them, stand in `order`; it computes the same."""
    heads = len(order)
    model = new_llama(heads)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                rows = projection.weight.unflatten(0, (heads, -1))
                projection.weight.copy_(rows[list(order)].flatten(0, 1))
            columns = attention.o_proj.weight.unflatten(1, (heads, -1))
            attention.o_proj.weight.copy_(columns[:, list(order)].flatten(1, 2))
    return model


def build(config: Any, dtype: str, seed: int = 0) -> Any:
    """A random model of `config` in eval mode."""
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, None
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "norm" not in name:
                    parameter.normal_(0.0, 0.35)
    return model


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Random tokens ``[rows, tokens]``; neither padding nor the first of a sentence."""
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


class Tokenizer:
    """Some tokens for any text: what policies ask a model to do has to be something."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return [2 + ord(letter) % (VOCABULARY - 2) for letter in text[:4]]


def left_padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths padded on the left: ids and mask, ``[rows, longest]``."""
    width = max(map(len, rows))
    tokens = torch.stack([torch.cat([row.new_zeros(width - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    return tokens, mask


def feed(model: Any, cache: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """One call of `model` with `cache`: the logits. `mask` marks what is no padding, from the first call on."""
    given: dict[str, Any] = {cache_argument(model): cache}
    if mask is not None:
        given["attention_mask"] = mask
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    logits: Tensor = model(tokens, use_cache=True, **given).logits
    return logits
