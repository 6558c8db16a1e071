"""Evaluations: needles in text, chains of assignments, loss by position and synthetic tasks, for any causal model."""

from hecate.evals.base import Evaluation, Given, Part, Reader, Result, Row
from hecate.evals.run import PUBLISHED, Published, Report, evaluate_run, evaluate_tasks, evaluation_of, task_names
from hecate.evals.tasks import LossByPosition, Niah, Synthetic, VariableTracking

__all__ = [
    "PUBLISHED", "Evaluation", "Given", "LossByPosition", "Niah", "Part", "Published", "Reader", "Report", "Result",
    "Row", "Synthetic", "VariableTracking", "evaluate_run", "evaluate_tasks", "evaluation_of", "task_names",
]  # fmt: skip
