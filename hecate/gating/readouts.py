"""Gates of memories that are read through a readout: MesaNet, Gated KalmaNet, gated slot attention, ABC, Raven."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear, logsigmoid, softplus

from hecate.checks import Size
from hecate.errors import ConfigError
from hecate.gating.base import Gated, Gating, Masks, Named, Parts, Shapes, Sizes, Written, latest, running, running_max
from hecate.gating.heads import drawn, head, logit, rate_start, shrink, spread, weights

_TOP = 32  # slots that a token of Raven goes to


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

    def parts(self, sizes: Sizes) -> Parts:
        return {"r": ((sizes.heads, sizes.d_key), math.log(math.expm1(self.ridge - self.least)))}

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
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

    def parts(self, sizes: Sizes) -> Parts:
        return {"mix.weight": ((sizes.heads, sizes.d_model), 0.0), "mix.bias": ((sizes.heads,), logit(self.mix))}

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
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

    def parts(self, sizes: Sizes) -> Parts:
        return {"slots.weight": ((sizes.heads, sizes.d_key, sizes.d_model), drawn(sizes))}


def _scores(params: Named, x: Tensor) -> Tensor:
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

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
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

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
        s, since = _scores(params, x).clamp(-self.limit, self.limit), Masks(None, masks.reset)
        with torch.no_grad():
            m = running_max(torch.zeros_like(s), s, held["m"], masks)
            before, last = latest(m, held["m"], since)
        fall, own = torch.exp(before - m), torch.exp((s - m).clamp(max=0))  # above 0 at unwritten tokens alone
        total = running(fall, own, held["sum"], masks)
        earlier, final = latest(total, held["sum"], since)
        some = total > 0  # an unwritten token may stand where nothing was written
        divisor = torch.where(some, total, 1.0)
        kept = torch.where(earlier > 0, earlier * fall / divisor, 1.0)
        kept = kept - (kept.detach() - 1).relu()  # above 1 by rounding alone
        return made._replace(gates={**made.gates, "retain": kept, "write": own / divisor}), {"m": last, "sum": final}


class Raven(_Slotted):
    r"""raven: retain = exp(g c_i) in slot i, write = 1 - retain, c the largest sigmoid(W x), brought to the sum 1.

    g = -A softplus(a x + b) per head is how much a token replaces, c how that is shared out: the product of retain over
    slots is exp(g). A slot that is not chosen has c = 0, keeps all (retain is 1) and is given nothing (write is 0), to
    the last bit. Of equal scores the first slots are chosen. A, a and b start as Mamba-2 starts them, W at
    N(0, 1/d_model), ours. The choice itself has no derivative.

    Formula: $\alpha_t = \exp(g_t c_t),\quad \mathrm{write}_t = 1 - \alpha_t,\quad g_t = -A\, \mathrm{softplus}(a^\top
    x_t + b)$
    $c_{t,i} = \frac{\mathrm{sigmoid}(W x_t)_i}{\sum_{j \in T} \mathrm{sigmoid}(W x_t)_j} \ \text{if } i \in
    T,\ \text{else } 0,\quad T \ \text{the largest of them}$
    Shapes: retain and write `[B, T, H, D]`; W `[H, D, d_model]`, a `[H, d_model]`, A and b `[H]`.
    References: Raven (Afzal, Bick et al., goombalab, 2026) by its authors' pages and its layer in
    flash-linear-attention; a paper could not be read. Left out: Gumbel noise on W x while training, SiLU of values,
    the gate per slot of GLA in the place of g. [GATE-RAVEN-D1]
    """

    kind: Literal["raven"] = "raven"
    top: Size | None = Field(
        None, ge=1, description="slots that a token goes to; None: 32, or all where there are fewer"
    )

    def parts(self, sizes: Sizes) -> Parts:
        if self.top is not None and self.top > sizes.d_key:
            few = f"a token goes to {self.top} slots, and there are {sizes.d_key}, as many as a key is wide"
            raise ConfigError(f"{few}; lower top or widen keys", path=("gating", "top"))
        each, rate = (sizes.heads,), partial(spread, low=0.0, high=16.0)
        share = {"share.weight": weights(sizes), "share.bias": (each, rate_start), "share.rate": (each, rate)}
        return super().parts(sizes) | share

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
        shares = _shares(_scores(params, x), _TOP if self.top is None else self.top)
        log = shrink(params, "share", x).unsqueeze(-1) * shares
        return made._replace(gates={**made.gates, "retain": torch.exp(log), "write": -torch.expm1(log)}), {}


def _shares(scores: Tensor, top: int) -> Tensor:
    """The `top` largest sigmoids over their sum, 0 elsewhere; as a softmax of logarithms, which never divides by 0."""
    logs = logsigmoid(scores)
    if top < scores.shape[-1]:
        # By scores, which differ where their sigmoids have reached 1; stable, so that equal ones are chosen alike.
        order = scores.detach().sort(dim=-1, descending=True, stable=True).indices
        left = torch.ones_like(scores, dtype=torch.bool).scatter(-1, order[..., :top], False)
        logs = logs.masked_fill(left, -torch.inf)
    return torch.softmax(logs, -1)
