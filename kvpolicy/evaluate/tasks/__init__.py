"""The evaluation tasks that come with kvpolicy, one file each."""

from kvpolicy.evaluate.task import EvaluationTask
from kvpolicy.hooks import hookimpl
from kvpolicy.plugins import subclasses_in


@hookimpl
def kvpolicy_tasks() -> list[EvaluationTask]:
    return [task() for task in subclasses_in(__name__, __path__, EvaluationTask)]
