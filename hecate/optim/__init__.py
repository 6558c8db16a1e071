"""Optimisers over parameters: memories of gradients, and groups that step at their own period."""

from hecate.optim.base import MatrixOptimizer, OptimizerKind
from hecate.optim.leveled import Leveled, level_groups
from hecate.optim.memories import DGD, DeepMomentum, DeltaMomentum
from hecate.optim.muon import M3, Muon
from hecate.optim.phi_momentum import KernelMomentum, PhiMomentum

__all__ = [
    "DGD",
    "M3",
    "DeepMomentum",
    "DeltaMomentum",
    "KernelMomentum",
    "Leveled",
    "MatrixOptimizer",
    "Muon",
    "OptimizerKind",
    "PhiMomentum",
    "level_groups",
]
