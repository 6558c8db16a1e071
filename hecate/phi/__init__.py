"""Feature maps: the functions that take keys and queries to phi-space."""

from hecate.phi.base import FeatureMap, FeatureMapKind, Params, Traits
from hecate.variant import import_variants

__all__ = ["FeatureMap", "FeatureMapKind", "Params", "Traits"]
__all__ += import_variants(__name__, FeatureMap)
