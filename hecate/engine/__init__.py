"""Engines: ways to run the same semantics, the token loop being the truth."""

from hecate.engine.call import Call
from hecate.engine.features import memory_features
from hecate.engine.scan import memory_scan, memory_step
from hecate.engine.select import Engine, choose_engine

__all__ = ["Call", "Engine", "choose_engine", "memory_features", "memory_scan", "memory_step"]
