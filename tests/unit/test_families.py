"""Each family of models: exact while everything fits, bounded when it does not, as before once detached.

Windows, chunks and caps are set so small that ignoring one would show in the logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

import kvpolicy
from kvpolicy import EvictionCache
from kvpolicy.errors import UnsupportedModelError
from tests import tiny

SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
}
MULTI_HEAD = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
GPT = {"vocab_size": tiny.VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = {"sliding_window": 6}
SLIDING = WINDOW | {"layer_types": MIXED}
QWEN = WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
LLAMA4 = SIZES | {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1}

Config = tuple[str, dict[str, Any]]
"""A config class by its name without ``Config``, and its arguments."""

SERVED: dict[str, Config] = {
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", SIZES | WINDOW),
    "mistral without window": ("Mistral", SIZES | {"sliding_window": None}),
    "mixtral": ("Mixtral", SIZES | WINDOW | {"num_local_experts": 4}),
    "qwen2": ("Qwen2", SIZES | QWEN),
    "qwen2_moe": ("Qwen2Moe", SIZES | EXPERTS | QWEN),
    "qwen3": ("Qwen3", SIZES | QWEN),
    "qwen3_moe": ("Qwen3Moe", SIZES | EXPERTS | QWEN),
    "gemma2": ("Gemma2", SIZES | WINDOW | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 5}),
    "gemma3_text": ("Gemma3Text", SIZES | SLIDING),
    "phi": ("Phi", MULTI_HEAD | {"num_key_value_heads": 2}),
    "phi normalised": ("Phi", MULTI_HEAD | {"qk_layernorm": True}),
    "phi3": ("Phi3", SIZES | WINDOW | {"pad_token_id": 0}),
    "phimoe": ("Phimoe", SIZES | WINDOW | {"num_local_experts": 4}),
    "gpt2": ("GPT2", GPT),
    "gpt2 scaled": ("GPT2", GPT | {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    "gpt2 upcast": ("GPT2", GPT | {"reorder_and_upcast_attn": True}),
    "gpt_neox": ("GPTNeoX", MULTI_HEAD | {"rotary_pct": 0.5}),
    "opt": ("OPT", MULTI_HEAD | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "gpt_oss": ("GptOss", SIZES | SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere2": ("Cohere2", SIZES | SLIDING),
    "granite": ("Granite", SIZES | {"attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    "olmo2": ("Olmo2", SIZES),
    "stablelm": ("StableLm", SIZES | {"partial_rotary_factor": 0.5}),
    "stablelm normalised": ("StableLm", SIZES | {"qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", SIZES | WINDOW),
    "glm4": ("Glm4", SIZES | {"pad_token_id": 0}),
    "smollm3": ("SmolLM3", SIZES | SLIDING | {"use_sliding_window": True}),
    "llama4_text without chunks": ("Llama4Text", LLAMA4 | {"no_rope_layers": [0, 0, 0]}),
}
if tiny.NEWEST:  # before, GPT-J had attention of its own
    SERVED["gptj"] = ("GPTJ", GPT | {"rotary_dim": 4})

LATENT = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 12, "v_head_dim": 8, "head_dim": 4,
    "moe_intermediate_size": 16, "num_key_value_heads": 4,
}  # fmt: skip
GEMMA3N = SIZES | WINDOW | {
    "num_hidden_layers": 4, "layer_types": [*MIXED, "full_attention"], "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
SEQ2SEQ = {"vocab_size": tiny.VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}

T5 = {"vocab_size": tiny.VOCAB, "d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4}
GPT_NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
GEMMA3 = {"text_config": SIZES | SLIDING, "vision_config": VISION | {"image_size": 28, "patch_size": 14}}

INTERFACE = "no attention that goes through transformers' attention interface"
CACHED = "attends to the keys and values it caches"
REFUSED: dict[str, tuple[Config, str]] = {
    "llama4_text": (("Llama4Text", LLAMA4 | {"attention_chunk_size": 6}), "chunked_attention layers"),
    "deepseek_v3": (("DeepseekV3", SIZES | LATENT), CACHED),
    "diffllama": (("DiffLlama", SIZES), CACHED),
    "jetmoe": (("JetMoe", SIZES | {"kv_channels": 8, "num_local_experts": 2}), CACHED),
    "doge": (("Doge", SIZES), "a mask of its own"),
    "moshi": (("Moshi", SIZES | WINDOW | {"ffn_dim": 48}), "does not mask by the sliding window"),
    "gemma3n_text": (("Gemma3nText", GEMMA3N), "share the keys and values of others"),
    "qwen3_next": (("Qwen3Next", SIZES | EXPERTS | {"num_hidden_layers": 4}), "linear_attention layers"),
    "falcon": (("Falcon", MULTI_HEAD | {"alibi": True}), INTERFACE),
    "bloom": (("Bloom", {"vocab_size": tiny.VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}), INTERFACE),
    "mpt": (("Mpt", {"vocab_size": tiny.VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4}), INTERFACE),
    "gpt_neo": (("GPTNeo", GPT_NEO), INTERFACE),
    "mamba": (("Mamba", {"vocab_size": tiny.VOCAB, "hidden_size": 32, "num_hidden_layers": 2}), INTERFACE),
    "bert": (("Bert", MULTI_HEAD), "is not causal"),
    "gemma3_text": (("Gemma3Text", SIZES | {"use_bidirectional_attention": True}), "is not causal"),
    "t5": (("T5", T5), "encoder-decoder"),
    "bart": (("Bart", SEQ2SEQ), "encoder-decoder"),
    "gemma3": (("Gemma3", GEMMA3), "multimodal model; .* language model, model.model.language_model"),
}
if not tiny.NEWEST:
    REFUSED["gptj"] = (("GPTJ", GPT | {"rotary_dim": 4}), INTERFACE)


def config_of(config: Config) -> Any:
    name, options = config
    return getattr(transformers, f"{name}Config")(**options)


def build(family: str, attention: str | None) -> Any:
    """A model with wide weights; loaded with `attention`, or what transformers takes by default."""
    config = config_of(SERVED[family])
    if attention is not None:
        config._attn_implementation = attention
    model = tiny.build(config, torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def implementation(family: str, attention: str | None) -> str | None:
    """Older SDPA silently left Gemma 2's cap out; kvpolicy honours it whatever the model was loaded with."""
    return "eager" if family == "gemma2" else attention


def run(model: Any, cache: Any, lengths: list[int], steps: int) -> Tensor:
    """Logits of the real tokens over a left-padded prompt and `steps` of decode."""
    rows = len(lengths)
    prompt, mask = tiny.left_pad(lengths)
    mask = torch.cat([mask, mask.new_ones(rows, steps)], 1)
    logits, seen = [], 0
    for part in (prompt, *tiny.ids(rows, steps, seed=5).split(1, 1)):
        seen += part.shape[1]
        given = {"attention_mask": None if rows == 1 else mask[:, :seen], **tiny.cache_argument(cache)}
        with torch.no_grad():
            logits.append(model(part, use_cache=True, **given).logits)
    return torch.cat(logits, 1)[mask.bool()]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("lengths", [[13], [13, 9, 4]], ids=["one row", "padded"])
@pytest.mark.parametrize("attention", [None, "eager"], ids=["default", "eager"])
@pytest.mark.parametrize("family", SERVED)
def test_exact_while_everything_fits_and_as_before_once_detached(
    family: str, attention: str | None, lengths: list[int]
) -> None:
    model = build(family, implementation(family, attention))
    before = model.config._attn_implementation
    expected = run(model, DynamicCache(config=model.config), lengths, 8)
    with kvpolicy.attach(model):
        assert_close(run(model, EvictionCache(model, "h2o", budget=64), lengths, 8), expected)
    assert model.config._attn_implementation == before
    assert torch.equal(run(model, DynamicCache(config=model.config), lengths, 8), expected)


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm"])
@pytest.mark.parametrize("family", SERVED)
def test_bounded_and_finite_under_a_tight_budget(family: str, policy: str) -> None:
    model = build(family, implementation(family, None))
    cache = EvictionCache(model, policy, budget=7)
    assert bool(run(model, cache, [13, 9, 4], 20).isfinite().all())
    assert cache.get_seq_length() == 33
    assert all(bool((cache.kept(layer) == 7).all()) for layer in range(3))


@pytest.mark.parametrize("family", SERVED)
def test_policies_observe_what_the_model_attends_to(family: str) -> None:
    """After the norms of queries and keys, the rotation, the cap and the window that a family has."""
    model, tokens = build(family, "eager"), tiny.ids(2, 17)
    with torch.no_grad():
        attentions = model(tokens, output_attentions=True, use_cache=False).attentions
        cache = EvictionCache(model, {"kind": "h2o", "recent": 1}, budget=64)
        model(tokens[:, :13], **tiny.cache_argument(cache))
        for token in tokens[:, 13:].split(1, 1):
            model(token, **tiny.cache_argument(cache))
    for layer, probs in enumerate(attentions):
        mass = cache.scores(layer)["mass"]
        assert_close(mass, probs.unflatten(1, (mass.shape[1], -1)).mean(2).sum(-2))


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name(family: str) -> None:
    config, reason = REFUSED[family]
    config = config_of(config)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__}.*'{family}'.*{reason}"):
        kvpolicy.attach(model)
    assert "kvpolicy" not in str(model.config._attn_implementation)


def test_positions_in_three_dimensions_of_an_image_text_model() -> None:
    """The language model inside such a model is served, positions of images included."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2VLTextConfig(**SIZES, rope_parameters=rope, pad_token_id=0)
    model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel(config).eval()
    positions = torch.stack([torch.arange(12), torch.arange(12) // 3, torch.arange(12) % 5])[:, None]
    with torch.no_grad():
        arguments = {"input_ids": tiny.ids(1, 12), "position_ids": positions, "use_cache": True}
        expected = model(**arguments).last_hidden_state
        cache = EvictionCache(model, "h2o", budget=64)
        assert_close(model(**arguments, **tiny.cache_argument(cache)).last_hidden_state, expected)
