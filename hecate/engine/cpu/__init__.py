"""The engine called `compiled`: kernels of numba for the CPU."""

from hecate.engine.cpu.engine import by_torch, compiled, compiled_refusal, compiled_unfit, run_kernel

__all__ = ["by_torch", "compiled", "compiled_refusal", "compiled_unfit", "run_kernel"]
