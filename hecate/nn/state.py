"""What a `Memory` layer carries between calls."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hecate.rule import MemoryState, bytes_of, detached


class LayerState(NamedTuple):
    """The state of a `Memory` layer: a pytree of tensors. [NN-MEM-I6]

    Fields:
        memory: the memory of every sequence and head, in float32 or better.
        conv: the last inputs of the short convolution, `[B, kernel-1, C]`; None without one.
        conv_segment: the document of each of those, `[B, kernel-1]` int64, 0 for the present one;
            None until a `reset_mask` was given.
        features: the state of the feature memory; None without one.
        projection: what queries are projected onto; None without `query_projection`.
    """

    memory: MemoryState
    conv: Tensor | None
    conv_segment: Tensor | None
    features: MemoryState | None = None
    projection: MemoryState | None = None

    def detach(self) -> LayerState:
        """The same state cut off from the graph that produced it."""
        return detached(self)

    @property
    def bytes(self) -> int:
        """Size of all tensors; it does not grow with the number of tokens seen."""
        return bytes_of(self)
