"""Continuum memories: levels that commit at different rates, and memories that write themselves."""

from hecate.cms.cms import CMS
from hecate.cms.config import Aggregation, CMSConfig, Composition, LevelConfig
from hecate.cms.health import LevelHealth
from hecate.cms.self_reference import SelfReferenceConfig, SelfReferentialState
from hecate.cms.self_referential import SelfReferential
from hecate.cms.state import CMSState

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
