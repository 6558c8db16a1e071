"""The chunk engine: writes whose gradients stand still through a chunk, or that come at its end."""

from hecate.engine.chunk.batched import predict
from hecate.engine.chunk.engine import chunk_refusal, chunk_steps, chunked, known_position, span_size

__all__ = ["chunk_refusal", "chunk_steps", "chunked", "known_position", "predict", "span_size"]
