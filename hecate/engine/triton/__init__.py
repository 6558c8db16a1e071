"""The project's own Triton kernels for GPUs. Triton is imported when a kernel first runs."""

from hecate.engine.triton.engine import Triton

__all__ = ["Triton"]
