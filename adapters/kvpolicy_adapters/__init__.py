"""The adapters that come with kvpolicy, one file a family. A new file here is found without being listed."""

from kvpolicy.adapter import ModelAdapter
from kvpolicy.hooks import hookimpl
from kvpolicy.plugins import subclasses_in


@hookimpl
def kvpolicy_adapters() -> list[ModelAdapter]:
    return [adapter() for adapter in subclasses_in(__name__, __path__, ModelAdapter)]
