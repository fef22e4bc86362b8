"""Policies made of policies, one file each. They are ordinary policies with a ``kind`` and nest freely."""

from kvpolicy.compose._base import Composite, Wrapper, has_score
from kvpolicy.compose.blend import Blend
from kvpolicy.compose.cascade import Cascade
from kvpolicy.compose.every import Every
from kvpolicy.compose.heads import Heads
from kvpolicy.compose.layers import Layers
from kvpolicy.compose.phases import Phases
from kvpolicy.compose.protect import Protect
from kvpolicy.compose.rolled import Rolled
from kvpolicy.compose.union import Part, Union
from kvpolicy.hooks import hookimpl
from kvpolicy.plugins import subclasses_in
from kvpolicy.policy import EvictionPolicy

__all__ = [
    "Blend",
    "Cascade",
    "Composite",
    "Every",
    "Heads",
    "Layers",
    "Part",
    "Phases",
    "Protect",
    "Rolled",
    "Union",
    "Wrapper",
    "has_score",
]


@hookimpl
def kvpolicy_policies() -> list[type[EvictionPolicy]]:
    return subclasses_in(__name__, __path__, EvictionPolicy)
