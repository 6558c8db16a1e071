"""Gates of memories that are read through a readout: MesaNet, Gated KalmaNet, gated slot attention, ABC."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear, logsigmoid, softplus

from hecate.gating.base import Gating, Masks, Shapes, Sizes, Written, last_written, running, running_max
from hecate.gating.heads import head, logit, normal


def _needed(config: Any, gate: str, readout: str) -> str | None:
    return None if gate in config.readout.gates else f"it makes the gate {gate}; set readout='{readout}'"


class Mesa(Gating):
    r"""mesa: ridge = least + softplus(r), per head and channel.

    The gates lr and retain are those of the layer.

    Formula: $\mathrm{ridge} = \mathrm{least} + \mathrm{softplus}(r)$
    Shapes: r `[H, D]`, the same for every token; phi keeps the width D of keys.
    References: MesaNet (von Oswald et al., 2025, arXiv 2506.05233). [GATE-MESA-D1]
    """

    kind: Literal["mesa"] = "mesa"
    channels: ClassVar[tuple[str, ...]] = ("ridge",)
    least: float = Field(0.25, gt=0)
    ridge: float = Field(1.0, gt=0, description="at the start")

    def refusal(self, config: Any) -> str | None:
        if self.ridge <= self.least:
            return f"ridge={self.ridge:g} has to start above its least {self.least:g}"
        return _needed(config, "ridge", "ridge")

    def shapes(self, sizes: Sizes) -> Shapes:
        return {"r": (sizes.heads, sizes.d_key)}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        return torch.full(shape, math.log(math.expm1(self.ridge - self.least)), dtype=torch.float64)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        r = params["r"].to(torch.promote_types(x.dtype, torch.float32))
        ridge = (self.least + softplus(r)).expand(*x.shape[:2], *r.shape)
        return made._replace(gates={**made.gates, "ridge": ridge}), {}


class KalmaNet(Gating):
    r"""kalmanet: lr = (b + 1e-6)^2, b the layer's own lr; mix = sigmoid(W x + c).

    The released code scales keys and values by b both, so that a token weighs b^2. Where mix starts is ours: while few
    tokens are written the solution is up to 1 / (relative |H|_F) times as long as the query.

    Formula: $\eta_t \leftarrow (\eta_t + 10^{-6})^2,\quad \mathrm{mix}_t = \mathrm{sigmoid}(w^\top x_t + c)$
    Shapes: mix `[B, T, H]`, c `[H]`.
    References: Gated KalmaNet (2025, arXiv 2511.21016). [GATE-KALMA-D1]
    """

    kind: Literal["kalmanet"] = "kalmanet"
    mix: float = Field(0.25, gt=0, lt=1, description="at the start")

    def refusal(self, config: Any) -> str | None:
        return _needed(config, "mix", "ridge")

    def shapes(self, sizes: Sizes) -> Shapes:
        return {"mix.weight": (sizes.heads, sizes.d_model), "mix.bias": (sizes.heads,)}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        return torch.full(shape, 0.0 if name == "mix.weight" else logit(self.mix), dtype=torch.float64)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        lr, mix = made.gates["lr"], torch.sigmoid(head(params, "mix", x))
        if lr is None:
            raise TypeError("lr has a head")
        return made._replace(gates={**made.gates, "lr": (lr + 1e-6).square(), "mix": mix}), {}


class _Slotted(Gating):
    """Helper for gatings whose slots hear one linear map of x each."""

    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain")
    channels: ClassVar[tuple[str, ...]] = ("retain", "write")

    def refusal(self, config: Any) -> str | None:
        return _needed(config, "write", "slots")

    def shapes(self, sizes: Sizes) -> Shapes:
        return {"slots.weight": (sizes.heads, sizes.d_key, sizes.d_model)}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        return normal(shape, source, sizes.d_model**-0.5)


def _scores(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    weight, wide = params["slots.weight"], torch.promote_types(x.dtype, torch.float32)
    return linear(x.to(wide), weight.flatten(0, 1).to(wide)).unflatten(-1, weight.shape[:2])


class GSA(_Slotted):
    r"""gsa: retain = sigmoid(W x)^(1/temperature) for each slot, write = 1 - retain.

    Formula: $\alpha_t = \mathrm{sigmoid}(W x_t)^{1 / \tau},\quad \mathrm{write}_t = 1 - \alpha_t,\quad \tau =
    \mathrm{temperature}$
    Shapes: retain and write `[B, T, H, D]`.
    References: Gated Slot Attention (Zhang et al., 2024, arXiv 2409.07146). [GATE-GSA-D1]
    """

    kind: Literal["gsa"] = "gsa"
    temperature: float = Field(8.0, gt=0)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        log = logsigmoid(_scores(params, x)) / self.temperature
        return made._replace(gates={**made.gates, "retain": torch.exp(log), "write": -torch.expm1(log)}), {}


class ABC(_Slotted):
    r"""abc: every slot holds a mean weighed by exp(s), s = W x within [-limit, limit].

    With Z_t the log of the sum of exp(s) so far, retain = exp(Z_{t-1} - Z_t) and write = exp(s - Z_t), and retain is 1
    at the first token. What is carried is exp(-m) of the sum, m its running maximum, so that numbers stay in range; no
    gradient flows through m, on which nothing depends.

    Formula: $\alpha_t = \exp(Z_{t-1} - Z_t),\quad \mathrm{write}_t = \exp(s_t - Z_t)$
    $Z_t = \log \sum_{i \leq t} \exp(s_i),\quad s_t = \max(-\mathrm{limit}, \min(\mathrm{limit}, W x_t))$
    Shapes: retain and write `[B, T, H, D]`; state m and the sum `[B, H, D]`.
    References: ABC (Peng et al., 2021, arXiv 2110.02488). [GATE-ABC-D1]
    """

    kind: Literal["abc"] = "abc"
    limit: float = Field(32.0, gt=0, le=80)

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"m": (sizes.heads, sizes.d_key), "sum": (sizes.heads, sizes.d_key)}

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        s, since = _scores(params, x).clamp(-self.limit, self.limit), Masks(None, masks.reset)
        with torch.no_grad():
            m = running_max(torch.zeros_like(s), s, held["m"], masks)
            before, last = last_written(m, held["m"], since)
        fall, own = torch.exp(before - m), torch.exp((s - m).clamp(max=0))  # above 0 at unwritten tokens alone
        total = running(fall, own, held["sum"], masks)
        earlier, final = last_written(total, held["sum"], since)
        some = total > 0  # an unwritten token may stand where nothing was written
        divisor = torch.where(some, total, 1.0)
        kept = torch.where(earlier > 0, earlier * fall / divisor, 1.0)
        kept = kept - (kept.detach() - 1).relu()  # above 1 by rounding alone
        return made._replace(gates={**made.gates, "retain": kept, "write": own / divisor}), {"m": last, "sum": final}
