"""Retention: how a memory keeps its past."""

from hecate.retention.base import Retention, RetentionKind
from hecate.retention.decay import Decay
from hecate.retention.none import NoRetention

__all__ = ["Decay", "NoRetention", "Retention", "RetentionKind"]
