"""The hooks a plugin may implement. Register a module under the ``kvpolicy`` entry-point group.

.. code-block:: toml

    [project.entry-points.kvpolicy]
    my-policy = "my_package"
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvpolicy.adapter import ModelAdapter
    from kvpolicy.allocator import Allocator
    from kvpolicy.evaluate.task import EvaluationTask
    from kvpolicy.observer import Observer
    from kvpolicy.policy import EvictionPolicy

GROUP = "kvpolicy"

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def kvpolicy_policies() -> Iterable[type[EvictionPolicy]]:  # type: ignore[empty-body]
    """Policy classes, each named by its literal ``kind``."""


@hookspec
def kvpolicy_adapters() -> Iterable[ModelAdapter]:  # type: ignore[empty-body]
    """Adapters, each binding one family of attention, named by ``name``."""


@hookspec
def kvpolicy_allocators() -> Iterable[type[Allocator]]:  # type: ignore[empty-body]
    """Allocator classes, each named by its literal ``kind``: how a budget is divided over layers or heads."""


@hookspec
def kvpolicy_observers() -> Iterable[Observer]:  # type: ignore[empty-body]
    """Observers, each named by ``name``: told what every cache observes and evicts, and deciding nothing."""


@hookspec
def kvpolicy_tasks() -> Iterable[EvaluationTask]:  # type: ignore[empty-body]
    """Evaluation tasks, each named by ``name``."""
