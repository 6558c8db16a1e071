"""Continuum memories: levels that commit at different rates, and memories that write themselves."""

from hecate.cms.cms import CMS, CarryMemory, CMSState
from hecate.cms.config import Aggregation, CMSConfig, Composition, LevelConfig, Levels
from hecate.cms.health import LevelHealth
from hecate.cms.self_referential import SelfReferenceConfig, SelfReferential, SelfReferentialState

__all__ = [
    "CMS",
    "Aggregation",
    "CMSConfig",
    "CMSState",
    "CarryMemory",
    "Composition",
    "LevelConfig",
    "LevelHealth",
    "Levels",
    "SelfReferenceConfig",
    "SelfReferential",
    "SelfReferentialState",
]
