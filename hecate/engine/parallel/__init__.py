"""The parallel engine: exact, blocks of tokens at once, for memories affine in their state."""

from hecate.engine.parallel.engine import parallel

__all__ = ["parallel"]
