"""The gates and the two writes of RWKV-7."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear

from hecate.checks import Size
from hecate.gating.base import Gating, Masks, Shapes, Sizes, Written
from hecate.gating.heads import normal
from hecate.tape.ops import unit


class RWKV7(Gating):
    r"""rwkv7: M' = M diag(w) - (M kk) (alpha * kk)^T + v k~^T, as two writes of which the first erases.

    kk = normalise(k * xi) is erased with, weighed by alpha where it is written, and k~ = k * (1 + (alpha - 1) * zeta)
    is written; w = exp(-e^(-1/2) sigmoid(w_0 + tanh(x W_1) W_2)) in (0.545, 1) and alpha = sigmoid(a_0 + x A_1 A_2) per
    channel. The erasure reads the memory as it was, decay_order="with_step". Token shift, the value residual across
    layers and the bonus behind the norm are not here; W_1 and A_1 start at N(0, 0.02^2), not at 0, from where W_2 would
    learn nothing.

    Formula: $M_t = M_{t-1} \mathrm{diag}(w_t) - (M_{t-1} \kappa_t) (a_t \odot \kappa_t)^\top + v_t \tilde k_t^\top$
    $\kappa_t = \frac{k_t \odot \xi}{\Vert k_t \odot \xi \Vert},\quad \tilde k_t = k_t \odot (1 + (a_t - 1) \odot
    \zeta)$
    $w_t = \exp(-e^{-1/2}\, \mathrm{sigmoid}(w_0 + W_2 \tanh(W_1 x_t))),\quad a_t = \mathrm{sigmoid}(a_0 + A_2 A_1 x_t)$
    Shapes: w and alpha `[B, T, H, D]`, xi and zeta `[H, D]`, ranks shared by all heads.
    References: RWKV-7 (Peng et al., 2025, arXiv 2503.14456). [GATE-RWKV-D1]
    """

    kind: Literal["rwkv7"] = "rwkv7"
    rank: Annotated[Size, Field(ge=1)] = 32
    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain", "erase", "write")
    channels: ClassVar[tuple[str, ...]] = ("retain", "write")

    @property
    def erases(self) -> float:
        return 0.0  # of the layer's keys: what is erased with is of unit length, whatever they are

    def refusal(self, config: Any) -> str | None:
        if config.writes != 2 or not config.retention.uses_retain:
            return "it makes two writes and retain; set writes=2 and retention 'decay'"
        return None

    def pairs(self, writes: int) -> int:
        return 1

    def shapes(self, sizes: Sizes) -> Shapes:
        keys = sizes.heads, sizes.d_key
        low: Shapes = {"down": (self.rank, sizes.d_model), "up": (math.prod(keys), self.rank), "bias": keys}
        gates: Shapes = {f"{gate}.{name}": shape for gate in ("w", "alpha") for name, shape in low.items()}
        return gates | {"xi": keys, "zeta": keys}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        if name.endswith("down"):
            return normal(shape, source, 0.02)
        if name.endswith("up"):
            return normal(shape, source, 0.1 * self.rank**-0.5)
        if name == "w.bias":  # from quick to slow along the channels
            return torch.linspace(-6.0, -1.0, shape[-1], dtype=torch.float64).expand(shape)
        return torch.full(shape, {"xi": 0.7, "zeta": 1.0}.get(name, 0.0), dtype=torch.float64)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        wide = torch.promote_types(x.dtype, torch.float32)
        seen, keys = x.to(wide), made.k.shape[-2:]

        def low(gate: str, squash: bool) -> Tensor:
            inner = linear(seen, params[f"{gate}.down"].to(wide))
            inner = torch.tanh(inner) if squash else inner
            logits = linear(inner, params[f"{gate}.up"].to(wide)).unflatten(-1, keys)
            return torch.sigmoid(logits + params[f"{gate}.bias"].to(wide))

        w, alpha = torch.exp(-math.exp(-0.5) * low("w", True)), low("alpha", False)
        k = made.k.to(wide)
        erased = unit(k * params["xi"].to(wide))
        written = k * (1 + (alpha - 1) * params["zeta"].to(wide))
        ones = torch.ones_like(alpha)
        both = {
            "lr": ones[..., 0].unsqueeze(2).expand(*x.shape[:2], 2, keys[0]),
            "erase": torch.stack((ones[..., 0], torch.zeros_like(ones[..., 0])), 2),
            "write": torch.stack((alpha, ones), 2),
            "retain": w,
        }
        pair = torch.stack((erased, written), 2).to(made.k.dtype)
        values = torch.stack((torch.zeros_like(made.v), made.v), 2)
        return made._replace(k=pair, v=values, gates={**made.gates, **both}), {}
