"""The tasks, each file one kind of examples. Importing this package fills `TASKS`."""

from kvstrata.evaluate.task import TASKS
from kvstrata.evaluate.tasks import agent, copying, documents, needles, ruler

__all__ = ["TASKS", "agent", "copying", "documents", "needles", "ruler"]
