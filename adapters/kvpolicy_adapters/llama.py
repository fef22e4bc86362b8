"""Llama and its many descendants: rotary positions, grouped-query attention."""

from kvpolicy.adapter import ModelAdapter


class LlamaLike(ModelAdapter):
    """Rotary positions applied before caching; keys and values straight from projections, normalised or not.

    Sliding windows, capped logits (Gemma 2) and attention sinks (gpt-oss) are honoured; chunked attention
    (Llama 4 as published) is refused.
    """

    name = "llama-like"
    positions = frozenset({"original", "rolled"})
    model_types = frozenset(
        {
            *(
                "llama",
                "llama4_text",
                "mistral",
                "mixtral",
                "qwen2",
                "qwen2_moe",
                "qwen3",
                "qwen3_moe",
                "gemma2",
            ),
            *("gemma3_text", "phi", "phi3", "phimoe", "gpt_oss", "cohere2", "granite", "olmo2", "stablelm"),
            *("starcoder2", "glm4", "smollm3"),
        }
    )
