"""Memory rules: four knobs, their configuration, their state, and the rules of the literature."""

from hecate.rule import named
from hecate.rule.config import LAYER_FIELDS, RULES, Difference, MemoryConfig, Named, NamedRule, named_rule
from hecate.rule.rule import MemoryRule, TokenGates
from hecate.rule.state import Gates, MemoryState, memory_weights
from hecate.states import bytes_of

__all__ = [
    "LAYER_FIELDS",
    "RULES",
    "Difference",
    "Gates",
    "MemoryConfig",
    "MemoryRule",
    "MemoryState",
    "Named",
    "NamedRule",
    "TokenGates",
    "bytes_of",
    "memory_weights",
    "named",
    "named_rule",
]
