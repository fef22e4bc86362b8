"""KV-cache eviction policies for Hugging Face transformers.

>>> from kvpolicy import EvictionCache
>>> cache = EvictionCache(model, "h2o", budget=512)           # doctest: +SKIP
>>> model.generate(**inputs, past_key_values=cache)           # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are imported when first used: `import kvpolicy` and `kvpolicy --help` must not wait for torch.
_HOME = {
    "EvictionPolicy": "kvpolicy.policy",
    "HeadField": "kvpolicy.policy",
    "SlotField": "kvpolicy.policy",
    "Need": "kvpolicy.policy",
    "Share": "kvpolicy.policy",
    "View": "kvpolicy.policy",
    "EvictionCache": "kvpolicy.cache",
    "ModelAdapter": "kvpolicy.adapter",
    "attach": "kvpolicy.adapter",
    "detach": "kvpolicy.adapter",
    "compress": "kvpolicy.rehearsal",
    "load": "kvpolicy.config",
    "policies": "kvpolicy.plugins",
    "hookimpl": "kvpolicy.hooks",
    "KVPolicyError": "kvpolicy.errors",
}

if TYPE_CHECKING:
    from kvpolicy.adapter import ModelAdapter, attach, detach
    from kvpolicy.cache import EvictionCache
    from kvpolicy.config import load
    from kvpolicy.errors import KVPolicyError
    from kvpolicy.hooks import hookimpl
    from kvpolicy.plugins import policies
    from kvpolicy.policy import EvictionPolicy, HeadField, Need, Share, SlotField, View
    from kvpolicy.rehearsal import compress

__all__ = [
    "EvictionCache",
    "EvictionPolicy",
    "HeadField",
    "KVPolicyError",
    "ModelAdapter",
    "Need",
    "Share",
    "SlotField",
    "View",
    "attach",
    "compress",
    "detach",
    "hookimpl",
    "load",
    "policies",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvpolicy' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
