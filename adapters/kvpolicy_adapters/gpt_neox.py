"""GPT-NeoX and Pythia: rotary positions on part of each head, one fused query-key-value projection."""

from kvpolicy.adapter import ModelAdapter


class GPTNeoX(ModelAdapter):
    """The cache arrives as ``layer_past``; no grouped queries."""

    name = "gpt_neox"
    model_types = frozenset({"gpt_neox"})
    positions = frozenset({"original", "rolled"})
