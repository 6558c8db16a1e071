"""Continuum memories: levels that commit at different rates."""

from hecate.cms.cms import CMS
from hecate.cms.config import CMSConfig, LevelConfig
from hecate.cms.health import LevelHealth
from hecate.cms.state import CMSState

__all__ = ["CMS", "CMSConfig", "CMSState", "LevelConfig", "LevelHealth"]
