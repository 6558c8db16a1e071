"""The step of Mamba-2, and the gates, the turning keys and the two writes of Mamba-3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import rms_norm, softplus

from hecate.gating.base import Gating, Masks, Shapes, Sizes, Written, last_written, running
from hecate.gating.heads import head, normal, rate_start, spread


class Mamba2(Gating):
    r"""mamba2: M' = exp(-A dt) M + dt v k^T, d v added to what is read.

    dt = softplus(W x + b) per head is how long a token lasts: lr, and what decides retain. A and d per head; d starts
    at 0, in the released layer at 1, beside which what a fresh memory answers is hardly heard.

    Formula: $\eta_t = \mathrm{softplus}(W x_t + b),\quad \alpha_t = \exp(-A \eta_t)$
    $M_t = \alpha_t M_{t-1} + \eta_t v_t k_t^\top,\quad y_t = M_t q_t + d v_t$
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
        return spread(shape, source, 1.0, 16.0) if name == "rate" else torch.zeros(shape, dtype=torch.float64)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        dt = softplus(head(params, "dt", x))
        gates = {**made.gates, "lr": dt, "retain": torch.exp(-params["rate"].to(dt.dtype).exp() * dt)}
        return made._replace(gates=gates, skip=params["d"].to(made.v.dtype).unsqueeze(-1) * made.v), {}


class Mamba3(Gating):
    r"""mamba3: M' = a M + (1 - l) dt a v_{t-1} k_{t-1}^T + l dt v k^T, with q and k turned by an angle of the data.

    dt = softplus(W x + b), a = exp(-max(softplus(W x), 1e-4) dt), l = sigmoid(W x). theta_t = theta_{t-1} + dt pi
    tanh(W x) modulo 2 pi; pairs (2 i, 2 i + 1) of norm(q) + bias and norm(k) + bias turn by it, a share `turned` of
    them. The token's own key and the one before are two writes of one token; d v is added to what is read.

    Formula: $M_t = \alpha_t M_{t-1} + (1 - \lambda_t) \Delta_t \alpha_t v_{t-1} k_{t-1}^\top + \lambda_t \Delta_t v_t
    k_t^\top,\quad y_t = M_t q_t + d \odot v_t$
    $\Delta_t = \mathrm{softplus}(W_\Delta x_t + b),\quad \alpha_t = \exp(-\Delta_t \max(\mathrm{softplus}(W_\alpha
    x_t), 10^{-4})),\quad \lambda_t = \mathrm{sigmoid}(W_\lambda x_t)$
    $\theta_t = \theta_{t-1} + \pi \Delta_t \tanh(W_\theta x_t),\quad q_t \leftarrow R(\theta_t) (\mathrm{norm}(q_t) +
    b_q),\quad k_t \leftarrow R(\theta_t) (\mathrm{norm}(k_t) + b_k)$
    Shapes: dt, l `[B, T, H]`, angles `[B, T, H, A]`; state: the turned key, the value and the angle of the last token.
    References: Mamba-3 (Lahoti et al., 2026, arXiv 2603.15569), one input and one output. [GATE-MAMBA-D1]
    """

    kind: Literal["mamba3"] = "mamba3"
    turned: float = Field(0.5, ge=0, le=1, description="share of the pairs")
    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain")

    def refusal(self, config: Any) -> str | None:
        if config.writes != 2 or not config.retention.uses_retain:
            return "it makes two writes and retain; set writes=2 and retention 'decay'"
        return None

    def pairs(self, writes: int) -> int:
        return 1

    def _angles(self, sizes: Sizes) -> int:
        return int(self.turned * (sizes.d_key // 2))

    def shapes(self, sizes: Sizes) -> Shapes:
        heads, model, angles = sizes.heads, sizes.d_model, self._angles(sizes)
        found: Shapes = {
            "dt.weight": (heads, model),
            "dt.bias": (heads,),
            "a.weight": (heads, model),
            "trapezoid.weight": (heads, model),
        }
        if angles:
            found["angle.weight"] = (heads * angles, model)
        return found | {"q_bias": (heads, sizes.d_key), "k_bias": (heads, sizes.d_key), "d": (heads,)}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        key: Shapes = {"key": (sizes.heads, sizes.d_key), "value": (sizes.heads, sizes.d_value)}
        return key | {"angle": (sizes.heads, self._angles(sizes))}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        if name.endswith("weight"):
            return normal(shape, source, sizes.d_model**-0.5)
        if name == "dt.bias":
            return rate_start(shape, source)
        return torch.ones(shape, dtype=torch.float64)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        dt = softplus(head(params, "dt", x))
        wide, width = dt.dtype, made.k.shape[-1]
        a = torch.exp(-softplus(head(params, "a", x)).clamp(min=1e-4) * dt)
        share = torch.sigmoid(head(params, "trapezoid", x))
        q, k = (
            rms_norm(item.to(wide), (width,), eps=1e-6) + params[name].to(wide)
            for item, name in ((made.q, "q_bias"), (made.k, "k_bias"))
        )
        theta = held["angle"]
        if theta.shape[-1] and x.shape[1]:
            step = math.pi * torch.tanh(head(params, "angle", x).unflatten(-1, (theta.shape[1], -1))) * dt.unsqueeze(-1)
            angles = running(torch.ones_like(step), step, theta, masks)
            q, k, theta = turn(q, angles), turn(k, angles), angles[:, -1].remainder(2 * math.pi)
        before, key = last_written(k, held["key"], masks)
        earlier, value = last_written(made.v, held["value"], masks)
        both = {"lr": torch.stack(((1 - share) * dt * a, share * dt), 2), "retain": a, "erase": None, "write": None}
        pair = torch.stack((before, k), 2).to(made.k.dtype)
        values = torch.stack((earlier, made.v), 2)
        skip = params["d"].to(made.v.dtype).unsqueeze(-1) * made.v
        written = Written(q.to(made.q.dtype), pair, values, {**made.gates, **both}, skip)
        return written, {"key": key, "value": value, "angle": theta}


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """The first pairs (2 i, 2 i + 1) of x `[..., D]` turned by angle `[..., A]`, A <= D / 2; the others as they are."""
    count = 2 * angle.shape[-1]
    first, second = x[..., 0:count:2], x[..., 1:count:2]
    cosine, sine = torch.cos(angle), torch.sin(angle)
    pairs = torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1).flatten(-2)
    return torch.cat((pairs, x[..., count:]), -1)
