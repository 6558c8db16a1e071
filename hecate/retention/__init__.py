"""Retention: how a memory keeps its past."""

from hecate.retention.base import GateForm, Retention, RetentionKind
from hecate.retention.mirror import Link, MirrorRetention
from hecate.variant import import_variants

__all__ = ["GateForm", "Link", "MirrorRetention", "Retention", "RetentionKind"]
__all__ += import_variants(__name__, Link, Retention)
