"""The engine called `compiled`: kernels of numba for the CPU."""

from hecate.engine.cpu.engine import Compiled as Compiled
