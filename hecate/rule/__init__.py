"""Memory rules: four knobs, their configuration, their state, and the rules of the literature."""

from hecate.rule.config import MemoryConfig
from hecate.rule.rule import MemoryRule, TokenGates
from hecate.rule.state import Gates, MemoryState

__all__ = ["Gates", "MemoryConfig", "MemoryRule", "MemoryState", "TokenGates"]
