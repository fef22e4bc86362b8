"""Any other decoder whose attention goes through transformers' attention interface."""

import sys

from torch import nn

from kvpolicy.adapter import ModelAdapter


class Generic(ModelAdapter):
    """Asked last. Models with attention code of their own (Falcon, BLOOM, MPT, GPT-Neo) are not accepted."""

    name = "generic"
    positions = frozenset({"original", "rolled"})
    fallback = True

    def accepts(self, model: nn.Module) -> bool:
        modules = self.attention_modules(model)
        return bool(modules) and all(
            hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS") for module in modules
        )
