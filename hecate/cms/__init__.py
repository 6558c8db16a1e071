"""Continuum memories: levels that commit at different rates, and memories that write themselves."""

from hecate.cms.cms import CMS, CMSState
from hecate.cms.config import Aggregation, CMSConfig, Composition, LevelConfig
from hecate.cms.health import LevelHealth
from hecate.cms.self_referential import SelfReferenceConfig, SelfReferential, SelfReferentialState

__all__ = [
    "CMS",
    "Aggregation",
    "CMSConfig",
    "CMSState",
    "Composition",
    "LevelConfig",
    "LevelHealth",
    "SelfReferenceConfig",
    "SelfReferential",
    "SelfReferentialState",
]
