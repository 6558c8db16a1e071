"""How attention tells tokens at different distances apart."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hecate.variant import Variant

Params = dict[str, Tensor]


class Position(Variant, family="position"):
    """What the position of a token does to attention; positions count the written tokens of a document. [ATT-POS-D1]

    A kind turns vectors (`turned`), keeps a share of the past per token (`retain`), or has a free weight per distance
    (`factors`). Every learned parameter has a leading axis of key heads.
    """

    @property
    def needs_order(self) -> bool:
        """Whether queries and keys have to be of the same tokens."""
        return True

    @property
    def needs_position(self) -> bool:
        """Whether tokens have to be counted from call to call."""
        return self.needs_order

    @property
    def turns_features(self) -> bool:
        """Whether `turned` acts on phi(q) and phi(k) in the sum of values, not on q and k ahead of phi."""
        return False

    @property
    def weighs_distance(self) -> bool:
        """Whether a distance has a factor, by `retain` or `factors`, in the sum of values and that of weights."""
        return False

    @property
    def sums_past(self) -> bool:
        """Whether sums of fixed size stand for the past, so that a state can be gone on from."""
        return True

    def init(
        self,
        width: int,
        *,
        heads: int = 1,
        causal: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Params:
        """Learned parameters as they start, for vectors of a width; nothing is drawn."""
        start = self.start(width, heads, causal=causal)
        return {name: value.to(dtype=dtype, device=device) for name, value in start.items()}

    def start(self, width: int, heads: int, *, causal: bool) -> Params:
        """What `init` gives, in float64 on the CPU."""
        return {}

    def refusal(self, width: int) -> str | None:
        """Why vectors of a width cannot be given positions; None if they can."""
        return None

    def check_past(self, given: str, instead: str) -> None:
        """Refuses what stands for earlier tokens, such as "a state", where `sums_past` is False."""

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        """x `[B, T, G, width]` turned by position `[B, T]`, in x's dtype."""
        return x

    def retain(self, like: Tensor, params: Params) -> Tensor | None:
        """What is kept of the past per token, `[B, S, G]` for keys `[B, S, G, *]`; None: all of it."""
        return None

    def factors(self, like: Tensor, params: Params, *, causal: bool) -> Tensor | None:
        """Factors of distances 0..S - 1 for keys `[B, S, G, *]`, or -(S - 1)..S - 1 if not causal: `[G, S]` or
        `[G, 2 S - 1]`; None without a free weight per distance."""
        return None


PositionKind = Position


class NoPosition(Position):
    """none: weights phi(q_i).phi(k_j), whatever the distance.

    The feature map itself may depend on positions (`cosformer`).

    References: Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236). [ATT-POS-D1]"""

    kind: Literal["none"] = "none"

    @property
    def needs_order(self) -> bool:
        return False
