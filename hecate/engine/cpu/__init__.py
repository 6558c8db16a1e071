"""The engines `compiled` and `compiled_layers`: kernels of numba for the CPU."""

from hecate.engine.cpu.arrays import lies, padded, share_out
from hecate.engine.cpu.deep import CompiledLayers
from hecate.engine.cpu.engine import Compiled, load_kernels

__all__ = ["Compiled", "CompiledLayers", "lies", "load_kernels", "padded", "share_out"]
