"""The chunk engine: writes whose gradients stand still through a chunk, or that come at its end."""

from hecate.engine.chunk.anchored import predict
from hecate.engine.chunk.engine import cell_size, chunked

__all__ = ["cell_size", "chunked", "predict"]
