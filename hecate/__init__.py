"""hecate: memories that are written and read at every token.

A `MemoryRule` is four knobs (structure, attentional bias, retention, algorithm); a feature map phi
takes keys and queries to phi-space before any of them; `memory_scan` runs it over a sequence.
"""

from hecate import algorithm, bias, phi, retention, structure
from hecate.engine import memory_scan, memory_step
from hecate.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HealthWarning,
    HecateError,
    NonFiniteError,
    ShapeError,
    StabilityWarning,
)
from hecate.phi import FeatureMapKind
from hecate.rule import Gates, MemoryConfig, MemoryRule, MemoryState, memory_weights, named_rule

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FeatureMapKind",
    "Gates",
    "HealthWarning",
    "HecateError",
    "MemoryConfig",
    "MemoryRule",
    "MemoryState",
    "NonFiniteError",
    "ShapeError",
    "StabilityWarning",
    "__version__",
    "algorithm",
    "bias",
    "memory_scan",
    "memory_step",
    "memory_weights",
    "named_rule",
    "phi",
    "retention",
    "structure",
]
