"""The chunk engine: writes whose gradients stand still through a chunk, or that come at its end."""

from hecate.engine.chunk.batched import predict
from hecate.engine.chunk.engine import chunked, span_size

__all__ = ["chunked", "predict", "span_size"]
