"""The step of Mamba-2, from which both of its gates follow, and its skip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hecate.gating.base import Gating, Masks, Shapes, Sizes, Written
from hecate.gating.heads import head, normal, rate_start, spread


class Mamba2(Gating):
    """mamba2: M' = exp(-A dt) M + dt v k^T, d v added to what is read.

    dt = softplus(W x + b) per head is how long a token lasts: lr, and what decides retain. A and d per head.

    Shapes: dt `[B, T, H]`; W `[H, d_model]`, b, log A (`rate`) and d `[H]`.
    References: Transformers are SSMs (Dao and Gu, 2024, arXiv 2405.21060). [GATE-MAMBA2-D1]
    """

    kind: Literal["mamba2"] = "mamba2"
    one_key: ClassVar[bool] = True
    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain")

    def refusal(self, config: Any) -> str | None:
        return None if config.retention.uses_retain else f"retention {config.retention.kind!r} has no retain gate"

    def shapes(self, sizes: Sizes) -> Shapes:
        own: Shapes = {"dt.weight": (sizes.heads, sizes.d_model)}
        return own | dict.fromkeys(("dt.bias", "rate", "d"), (sizes.heads,))

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        if name == "dt.weight":
            return normal(shape, source, sizes.d_model**-0.5)
        if name == "dt.bias":
            return rate_start(shape, source)
        return spread(shape, source, 1.0, 16.0) if name == "rate" else torch.ones(shape, dtype=torch.float64)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        dt = softplus(head(params, "dt", x))
        gates = {**made.gates, "lr": dt, "retain": torch.exp(-params["rate"].to(dt.dtype).exp() * dt)}
        return made._replace(gates=gates, skip=params["d"].to(made.v.dtype).unsqueeze(-1) * made.v), {}
