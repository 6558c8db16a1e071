"""Memory rules: four knobs, their configuration, their state, and the rules of the literature."""

from hecate.rule.config import LAYER_FIELDS, RULES, Difference, MemoryConfig, Named, NamedRule, named_rule
from hecate.rule.layer import LAYER, LayerOptions, OutputGate
from hecate.rule.rule import MemoryRule, TokenGates
from hecate.rule.state import Gates, MemoryState, memory_weights
from hecate.states import bytes_of

__all__ = [
    "LAYER",
    "LAYER_FIELDS",
    "RULES",
    "Difference",
    "Gates",
    "LayerOptions",
    "MemoryConfig",
    "MemoryRule",
    "MemoryState",
    "Named",
    "NamedRule",
    "OutputGate",
    "TokenGates",
    "bytes_of",
    "memory_weights",
    "named_rule",
]
