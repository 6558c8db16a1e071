"""Retention: how a memory keeps its past."""

from hecate.retention.base import GateForm, LinkForm, Retention, RetentionKind, StepForm
from hecate.retention.mirror import Link, MirrorRetention
from hecate.variant import import_variants

__all__ = ["GateForm", "Link", "LinkForm", "MirrorRetention", "Retention", "RetentionKind", "StepForm"]
__all__ += import_variants(__name__, Link, Retention)
