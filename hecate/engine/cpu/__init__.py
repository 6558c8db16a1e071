"""The engines `compiled` and `compiled_layers`: kernels of numba for the CPU."""

from hecate.engine.cpu.deep import CompiledLayers
from hecate.engine.cpu.engine import Compiled

__all__ = ["Compiled", "CompiledLayers"]
