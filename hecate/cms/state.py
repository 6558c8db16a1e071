"""What a `CMS` carries between calls, and the tokens that its levels count."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hecate.nn import LayerState
from hecate.rule import bytes_of, detached


class CMSState(NamedTuple):
    """The state of a `CMS`: a pytree of tensors. [CMS-LAYER-I1]

    Fields:
        levels: the state of every level, from fast to slow.
        written: tokens written since the start or the last reset, `[B]` int64.
    """

    levels: tuple[LayerState, ...]
    written: Tensor

    def detach(self) -> CMSState:
        """The same state cut off from the graph that produced it."""
        return detached(self)

    @property
    def bytes(self) -> int:
        """Size of all tensors; it does not grow with the number of tokens seen."""
        return bytes_of(self)
