"""What linear attention carries between calls."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hecate.rule import bytes_of, detached


class LinearAttentionState(NamedTuple):
    """The sums over the tokens written so far, in float32 or better: a pytree. [LIN-ATT-I1]

    Fields:
        weighted: sum of v phi(k)^T, one per key head, `[B, G, V, P]`.
        total: sum of phi(k), `[B, G, P]`; None without a normaliser.
        seen: tokens counted so far in the present document, `[B]` int64; None where nothing
            depends on positions.
    """

    weighted: Tensor
    total: Tensor | None
    seen: Tensor | None

    def detach(self) -> LinearAttentionState:
        """The same state cut off from the graph that produced it."""
        return detached(self)

    @property
    def bytes(self) -> int:
        """Size of all tensors; it does not grow with the number of tokens seen."""
        return bytes_of(self)
