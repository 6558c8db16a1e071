"""The chunk engine: writes whose gradients stand still through a chunk, or that come at its end."""

from hecate.engine.chunk.batched import predict
from hecate.engine.chunk.engine import Chunk
from hecate.engine.chunk.fused import Fused

__all__ = ["Chunk", "Fused", "predict"]
