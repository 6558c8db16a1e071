"""Kernels of flash-linear-attention; the package is loaded where one runs."""

from hecate.engine.fla.engine import Fla

__all__ = ["Fla"]
