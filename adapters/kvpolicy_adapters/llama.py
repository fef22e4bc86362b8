"""Llama and its many descendants: rotary positions, grouped-query attention."""

from kvpolicy.adapter import ModelAdapter


class LlamaLike(ModelAdapter):
    """Rotary positions applied before caching; keys and values straight from projections, normalised or not."""

    name = "llama-like"
    model_types = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "granite", "olmo2", "smollm3", "starcoder2"})
