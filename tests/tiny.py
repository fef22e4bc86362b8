"""Tiny random models. Weights are drawn wide, so that attention is far from uniform and decisions from ties."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, OPTConfig, PreTrainedConfig

VOCAB = 97


def llama(heads: int = 4, kv_heads: int = 2, layers: int = 2, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=8 * heads, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096, **more,
    )  # fmt: skip


def opt(heads: int = 4, layers: int = 2, **more: Any) -> OPTConfig:
    return OPTConfig(
        vocab_size=VOCAB, hidden_size=8 * heads, ffn_dim=48, num_hidden_layers=layers, num_attention_heads=heads,
        word_embed_proj_dim=8 * heads, max_position_embeddings=4096, dropout=0.0, **more,
    )  # fmt: skip


def gpt_neox(heads: int = 4, layers: int = 2, **more: Any) -> GPTNeoXConfig:
    return GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=8 * heads, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=4096, rotary_pct=0.5, **more,
    )  # fmt: skip


FAMILIES = {"llama": llama, "opt": opt, "gpt_neox": gpt_neox}


NEWEST = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)


def cache_argument(cache: Any) -> dict[str, Any]:
    """The cache under the name this transformers gives it."""
    return {"cache" if NEWEST else "past_key_values": cache}


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A model of `config` in eval mode; loaded as users load it, with SDPA where the family has it."""
    torch.manual_seed(seed)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, None
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.normal_(0.0, 0.35)
    return model


def family(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **more: Any) -> Any:
    return build(FAMILIES[name](**more), dtype, seed)


def ids(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def left_pad(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths padded on the left: ids and mask, ``[rows, max(lengths)]``."""
    width = max(lengths)
    tokens, mask = (
        torch.zeros(len(lengths), width, dtype=torch.long),
        torch.zeros(len(lengths), width, dtype=torch.long),
    )
    for row, length in enumerate(lengths):
        tokens[row, width - length :] = ids(1, length, seed + row)[0]
        mask[row, width - length :] = 1
    return tokens, mask
