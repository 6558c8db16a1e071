"""Optimisers over parameters: memories of gradients, and groups that step at their own period."""

from hecate.optim.base import MatrixOptimizer
from hecate.optim.kernel_momentum import KernelMomentum
from hecate.optim.leveled import Leveled, level_groups
from hecate.optim.phi_momentum import PhiMomentum

__all__ = ["KernelMomentum", "Leveled", "MatrixOptimizer", "PhiMomentum", "level_groups"]
