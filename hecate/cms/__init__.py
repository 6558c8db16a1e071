"""Memories of memories: layers whose parts learn at several time scales."""

from hecate.cms.self_reference import SelfReferenceConfig, SelfReferentialState
from hecate.cms.self_referential import SelfReferential

__all__ = ["SelfReferenceConfig", "SelfReferential", "SelfReferentialState"]
