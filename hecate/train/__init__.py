"""Experiments: strict configs, a deterministic loop, verified checkpoints and a report."""

from hecate.optim import OptimizerKind
from hecate.train.checkpoint import (
    Checkpoint,
    checkpoints,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from hecate.train.compose import dump_experiment, load_experiment, presets
from hecate.train.config import BudgetConfig, ExperimentConfig, OptimConfig, SampleConfig
from hecate.train.evaluate import generate
from hecate.train.run import Hooks, RunResult, open_run, run_experiment
from hecate.train.trained import open_model
from hecate.train.trainer import Trainer, build_model

__all__ = [
    "BudgetConfig", "Checkpoint", "ExperimentConfig", "Hooks", "OptimConfig", "OptimizerKind", "RunResult",
    "SampleConfig", "Trainer", "build_model", "checkpoints", "dump_experiment", "generate",
    "load_checkpoint", "load_experiment", "newest_checkpoint", "open_model", "open_run", "presets",
    "prune_checkpoints", "run_experiment", "save_checkpoint",
]  # fmt: skip
