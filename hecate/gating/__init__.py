"""Gating: maps from a layer's projections and gates to the inputs of its memory."""

from hecate.gating.base import Gating, GatingKind, Masks, Sizes, Written
from hecate.gating.heads import Head
from hecate.variant import import_variants

__all__ = ["Gating", "GatingKind", "Head", "Masks", "Sizes", "Written"]
__all__ += import_variants(__name__, Gating)
