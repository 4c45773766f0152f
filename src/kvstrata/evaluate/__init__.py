"""Evaluation: policies and budgets on tasks, paired with the full cache, at equal measured bytes."""

from kvstrata.evaluate.task import SCOPES, Example, Metric, Probe, Settings, Source, Task, Turn
from kvstrata.evaluate.tasks import TASKS

__all__ = ["SCOPES", "TASKS", "Example", "Metric", "Probe", "Settings", "Source", "Task", "Turn"]
