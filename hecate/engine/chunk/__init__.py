"""The chunk engine: writes whose gradients stand still through a chunk, or that come at its end."""

from hecate.engine.chunk.blocks import predict
from hecate.engine.chunk.engine import Chunk, Fused

__all__ = ["Chunk", "Fused", "predict"]
