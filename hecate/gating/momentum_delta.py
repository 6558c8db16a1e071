"""The gates of Momentum DeltaNet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.gating.base import Gating, Masks, Shapes, Sizes, Written, last_written
from hecate.gating.heads import head, normal, rate_start, shrink, spread

FLOOR = -2.0  # of log mu
LEAST = 1e-16  # of b, by which the next token's momentum divides: a smaller one moves no digit of a memory


class MomentumDeltaGates(Gating):
    r"""momentum_delta: gates for S' = mu S - eta e k^T, M' = alpha M + b S', with b + alpha <= 1.

    eta = 1 + tanh(W x / sqrt(d_model)), theta = arctan(eta f), b = sin(theta)^2 sigmoid(W x), alpha = cos(theta)^2
    exp(-A softplus(W x + c)), log mu = max(-A' softplus(W x + c'), -2). The step b, 1e-16 at least, goes into the slot:
    lr = b eta, retain = alpha, momentum = mu b_t / b_{t-1}, which may exceed 1. With `correction` the query is q - d k,
    of q and k as the layer leaves them: `key_norm="l2"` brings both to unit length behind it, as released.

    Formula: $\hat\eta_t = 1 + \tanh\left(\frac{w_\eta^\top x_t}{\sqrt{d_{model}}}\right),\quad \theta_t = \arctan(f\,
    \hat\eta_t),\quad b_t = \sin^2 \theta_t\, \mathrm{sigmoid}(w_b^\top x_t)$
    $\alpha_t = \cos^2 \theta_t\, \exp(-A\, \mathrm{softplus}(w_\alpha^\top x_t + c)),\quad \log \hat\mu_t = \max(-\hat
    A\, \mathrm{softplus}(w_\mu^\top x_t + \hat c), -2)$
    $\eta_t = b_t \hat\eta_t,\quad \mu_t = \hat\mu_t \frac{b_t}{b_{t-1}}$
    Shapes: f, A, A', c and d `[H]`, f, A, A' and d as logarithms; state b `[B, H]`.
    References: Momentum DeltaNet (Huang et al., 2026, arXiv 2605.05838). [GATE-MDN-D1]
    """

    kind: Literal["momentum_delta"] = "momentum_delta"
    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain", "momentum")
    correction: bool = Field(False, description="whether a query is corrected by its token's key")

    @property
    def one_key(self) -> bool:  # type: ignore[override]
        """True if it reads the one key of a token."""
        return self.correction

    def refusal(self, config: Any) -> str | None:
        algorithm, retention = config.algorithm, config.retention
        if not (algorithm.uses_momentum and retention.uses_retain):
            own = f"algorithm {algorithm.kind!r} with retention {retention.kind!r} takes not both"
            return f"it makes the gates momentum and retain, {own}; use 'momentum' with 'decay'"
        if algorithm.momentum_top <= 1:
            return f"its gate may exceed 1, the top of algorithm {algorithm.kind!r}; use 'momentum' with bounded=False"
        return None

    def shapes(self, sizes: Sizes) -> Shapes:
        weights = {f"{name}.weight": (sizes.heads, sizes.d_model) for name in ("eta", "b", "alpha", "mu")}
        numbers = ["f", "alpha.bias", "alpha.rate", "mu.bias", "mu.rate", *(["d"] if self.correction else [])]
        return weights | dict.fromkeys(numbers, (sizes.heads,))

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"b": (sizes.heads,)}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        if name.endswith("weight"):
            return normal(shape, source, sizes.d_model**-0.5)
        if name.endswith("bias"):
            return rate_start(shape, source)
        return spread(shape, source, 0.0, {"f": 4.0, "d": 1.0}.get(name, 16.0))

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        eta = 1 + torch.tanh(head(params, "eta", x) * x.shape[-1] ** -0.5)
        tangent = eta * params["f"].to(eta.dtype).exp()
        cosine = 1 / (1 + tangent.square())  # squared
        b = ((1 - cosine) * torch.sigmoid(head(params, "b", x))).clamp(min=LEAST)
        alpha = cosine * torch.exp(shrink(params, "alpha", x))
        mu = torch.exp(shrink(params, "mu", x).clamp(min=FLOOR))
        before, last = last_written(b, held["b"], masks)
        ratio = torch.where(before > 0, b / torch.where(before > 0, before, 1.0), 1.0)  # with S = 0 at the start
        q = made.q
        if self.correction:
            q = q - params["d"].exp().to(q.dtype).unsqueeze(-1) * made.k
        gates = {**made.gates, "lr": b * eta, "retain": alpha, "momentum": mu * ratio}
        return made._replace(q=q, gates=gates), {"b": last}
