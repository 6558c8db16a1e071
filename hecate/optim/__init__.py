"""Optimisers over parameters that are memories of gradients."""

from hecate.optim.base import MatrixOptimizer
from hecate.optim.kernel_momentum import KernelMomentum
from hecate.optim.phi_momentum import PhiMomentum

__all__ = ["KernelMomentum", "MatrixOptimizer", "PhiMomentum"]
