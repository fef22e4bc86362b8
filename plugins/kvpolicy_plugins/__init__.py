"""The policies and allocators that come with kvpolicy, one file each. A new file here is found without being listed."""

from kvpolicy.allocator import Allocator
from kvpolicy.hooks import hookimpl
from kvpolicy.plugins import subclasses_in
from kvpolicy.policy import EvictionPolicy


@hookimpl
def kvpolicy_policies() -> list[type[EvictionPolicy]]:
    return subclasses_in(__name__, __path__, EvictionPolicy)


@hookimpl
def kvpolicy_allocators() -> list[type[Allocator]]:
    return subclasses_in(__name__, __path__, Allocator)
