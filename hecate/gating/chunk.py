"""Gates of memories that take one step a chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from hecate.gating.base import Gating, Masks, Shapes, Sizes, Written, running
from hecate.gating.heads import head, inverse_softplus


class LargeChunk(Gating):
    """large_chunk: lr = softplus(W x + b), momentum the mean of sigmoid(W x + b) over the chunk so far, retain 1.

    Every weight of a memory has an lr of its own, which weighs the tokens of a chunk against each other; no ceiling
    bounds it. The step that closes a chunk takes the momentum of its last written token: the mean over the chunk.

    Shapes: lr `[B, T, H, W]`, W in `[W, H, d_model]` for each of W weights, momentum `[B, T, H]`; state: the sum of the
    chunk's gates `[B, H]` and how many tokens of it have come.
    References: Test-Time Training Done Right (Zhang et al., 2025, arXiv 2505.23884), released code. [GATE-LARGE-D1]
    """

    kind: Literal["large_chunk"] = "large_chunk"
    one_key: ClassVar[bool] = True
    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain", "momentum")
    lr: float = Field(1e-3, gt=0, description="where x is 0, at the start")
    def refusal(self, config: Any) -> str | None:
        if not config.algorithm.uses_momentum:
            return f"it makes momentum, and algorithm {config.algorithm.kind!r} has none; use one that has"
        reason = config.rates_refusal()
        return None if reason is None else f"it makes an lr for each weight, but {reason}"

    def shapes(self, sizes: Sizes) -> Shapes:
        rows = {"lr": (sizes.weights, sizes.heads), "momentum": (sizes.heads,)}
        heads: Shapes = {f"{name}.weight": (*shape, sizes.d_model) for name, shape in rows.items()}
        return heads | {f"{name}.bias": shape for name, shape in rows.items()}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"total": (sizes.heads,), "count": (1,)}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        return torch.full(shape, inverse_softplus(self.lr) if name == "lr.bias" else 0.0, dtype=torch.float64)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        lr = torch.einsum("btd,whd->bthw", wide, params["lr.weight"].to(wide.dtype))
        lr = softplus(lr + params["lr.bias"].mT.to(wide.dtype))
        own = torch.sigmoid(head(params, "momentum", x))
        one = torch.ones(*x.shape[:2], 1, dtype=held["count"].dtype, device=x.device)
        count = running(one, one, held["count"], masks)
        place = (count - 1).remainder(masks.chunk).to(own.dtype)  # of a written token
        total = running((place > 0).to(own.dtype), own, held["total"], masks)
        gates = {**made.gates, "lr": lr, "momentum": total / (place + 1)}
        if not x.shape[1]:
            return made._replace(gates=gates), dict(held)
        return made._replace(gates=gates), {"total": total[:, -1], "count": count[:, -1].remainder(masks.chunk)}
