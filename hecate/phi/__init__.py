"""Feature maps: the functions that take keys and queries to phi-space."""

from hecate.phi.base import FeatureMap, FeatureMapKind, Params, Traits
from hecate.phi.elu import ELU
from hecate.phi.identity import Identity

__all__ = ["ELU", "FeatureMap", "FeatureMapKind", "Identity", "Params", "Traits"]
