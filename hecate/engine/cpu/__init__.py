"""The engine called `compiled`: kernels of numba for the CPU."""

from hecate.engine.cpu.engine import by_torch, run_kernel

__all__ = ["by_torch", "run_kernel"]
