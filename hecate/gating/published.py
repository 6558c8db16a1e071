"""Gates of published layers: Mamba-2 and Mamba-3, mLSTM, RWKV-7 and Momentum DeltaNet; and of layers whose memory is
read through a readout: MesaNet, Gated KalmaNet, gated slot attention, ABC, Raven."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear, logsigmoid, rms_norm, softplus

from hecate.checks import Size
from hecate.errors import ConfigError
from hecate.gating.base import Gated, Gating, Masks, Named, Parts, Shapes, Sizes, Written, latest, running, running_max
from hecate.gating.heads import head, inverse_sigmoid, normal, rate_start, rates, shrink, spread, weights
from hecate.tape.ops import unit


class Mamba2(Gating):
    r"""mamba2: M' = exp(-A dt) M + dt v k^T, d v added to the answer.

    dt = softplus(W x + b) per head is the duration of a token: it is lr, and sets retain. A and d are per head. d
    starts at 0; in the released layer it starts at 1, which outweighs the answers of a fresh memory.

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

    def parts(self, sizes: Sizes) -> Parts:
        each = (sizes.heads,)
        return {"dt.weight": weights(sizes), "dt.bias": (each, rate_start), "rate": (each, rates), "d": (each, 0.0)}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        dt = softplus(head(params, "dt", x))
        gates = {**inputs.gates, "lr": dt, "retain": torch.exp(-params["rate"].to(dt.dtype).exp() * dt)}
        return inputs._replace(gates=gates, skip=params["d"].to(inputs.v.dtype).unsqueeze(-1) * inputs.v), {}


class _TwoWrites(Gating):
    """Helper for gatings that make two writes of a token's one key and value."""

    def refusal(self, config: Any) -> str | None:
        if config.writes != 2 or not config.retention.uses_retain:
            return "it makes two writes and retain; set writes=2 and retention 'decay'"
        return None

    def pairs(self, writes: int) -> int:
        return 1


class Mamba3(_TwoWrites):
    r"""mamba3: M' = a M + (1 - l) dt a v_{t-1} k_{t-1}^T + l dt v k^T, with q and k turned by an angle of the data.

    dt = softplus(W x + b), a = exp(-max(softplus(W x), 1e-4) dt), l = sigmoid(W x). theta_t = theta_{t-1} + dt pi
    tanh(W x) modulo 2 pi; pairs (2 i, 2 i + 1) of norm(q) + bias and norm(k) + bias turn by it, a share `turned` of
    them. The token's own key and the one before are two writes of one token; d v is added to the answer.

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

    def _angles(self, sizes: Sizes) -> int:
        return int(self.turned * (sizes.d_key // 2))

    def parts(self, sizes: Sizes) -> Parts:
        heads, weight, key = sizes.heads, weights(sizes), ((sizes.heads, sizes.d_key), 1.0)
        parts: Parts = {"dt.weight": weight, "dt.bias": ((heads,), rate_start)}
        parts |= {"a.weight": weight, "trapezoid.weight": weight}
        if angles := self._angles(sizes):
            parts["angle.weight"] = (heads * angles, sizes.d_model), weight[1]
        return parts | {"q_bias": key, "k_bias": key, "d": ((heads,), 1.0)}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        key: Shapes = {"key": (sizes.heads, sizes.d_key), "value": (sizes.heads, sizes.d_value)}
        return key | {"angle": (sizes.heads, self._angles(sizes))}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        dt = softplus(head(params, "dt", x))
        wide, width = dt.dtype, inputs.k.shape[-1]
        a = torch.exp(-softplus(head(params, "a", x)).clamp(min=1e-4) * dt)
        share = torch.sigmoid(head(params, "trapezoid", x))
        q = rms_norm(inputs.q.to(wide), (width,), eps=1e-6) + params["q_bias"].to(wide)
        k = rms_norm(inputs.k.to(wide), (width,), eps=1e-6) + params["k_bias"].to(wide)
        theta = state["angle"]
        if theta.shape[-1] and x.shape[1]:
            step = math.pi * torch.tanh(head(params, "angle", x).unflatten(-1, (theta.shape[1], -1))) * dt.unsqueeze(-1)
            angles = running(torch.ones_like(step), step, theta, masks)
            q, k, theta = turn(q, angles), turn(k, angles), angles[:, -1].remainder(2 * math.pi)
        before, key = latest(k, state["key"], masks)
        earlier, value = latest(inputs.v, state["value"], masks)
        both = {"lr": torch.stack(((1 - share) * dt * a, share * dt), 2), "retain": a, "erase": None, "write": None}
        pair = torch.stack((before, k), 2).to(inputs.k.dtype)
        values = torch.stack((earlier, inputs.v), 2)
        skip = params["d"].to(inputs.v.dtype).unsqueeze(-1) * inputs.v
        written = Written(q.to(inputs.q.dtype), pair, values, {**inputs.gates, **both}, skip)
        return written, {"key": key, "value": value, "angle": theta}


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """The first pairs (2 i, 2 i + 1) of x `[..., D]` turned by angle `[..., A]`, A <= D / 2; the others as they are."""
    count = 2 * angle.shape[-1]
    first, second = x[..., 0:count:2], x[..., 1:count:2]
    cosine, sine = torch.cos(angle), torch.sin(angle)
    pairs = torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1).flatten(-2)
    return torch.cat((pairs, x[..., count:]), -1)


class MLSTM(Gating):
    r"""mlstm: lr = exp(i), retain = sigmoid(f), answers divided by max(|z.q|, 1), with numbers that stay in range.

    With m_t = max(log retain + m_{t-1}, i), memory and z hold exp(-m) of themselves: lr' = exp(i - m_t), retain' =
    exp(log retain + m_{t-1} - m_t), both in [0, 1], and the divisor is max(|z.q|, exp(-m_t)), the gate `floor` of
    `normalizer="max"`. Answers do not depend on m, so no gradient flows through it. A state carries m, which is 0 at
    the start and after a reset.

    Formula: $m_t = \max(\log\, \mathrm{sigmoid}(f_t) + m_{t-1},\ i_t),\quad i_t = w_i^\top x_t + b_i,\quad f_t =
    w_f^\top x_t + b_f$
    $\eta_t = \exp(i_t - m_t),\quad \alpha_t = \exp(\log\, \mathrm{sigmoid}(f_t) + m_{t-1} - m_t),\quad \mathrm{floor}_t
    = \exp(-m_t)$
    Shapes: i and f `[B, T, H]`; state m `[B, H]`.
    References: xLSTM (Beck et al., 2024, arXiv 2405.04517). [GATE-MLSTM-D1]
    """

    kind: Literal["mlstm"] = "mlstm"
    one_key: ClassVar[bool] = True
    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain", "floor")

    def refusal(self, config: Any) -> str | None:
        if config.normalizer != "max" or not config.retention.uses_retain:
            return "it makes lr, retain and the floor of the divisor; set normalizer='max' and retention 'decay'"
        return None

    def parts(self, sizes: Sizes) -> Parts:
        weight, each = ((sizes.heads, sizes.d_model), 0.0), (sizes.heads,)
        rising = torch.linspace(3.0, 6.0, sizes.heads, dtype=torch.float64)
        biases: Parts = {"i.bias": (each, partial(normal, std=0.1)), "f.bias": (each, lambda *_: rising)}
        return {"i.weight": weight, "f.weight": weight, **biases}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"m": (sizes.heads,)}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        i, log_retain = head(params, "i", x), logsigmoid(head(params, "f", x))
        with torch.no_grad():
            m = running_max(log_retain, i, state["m"], masks)
            before, last = latest(m, state["m"], Masks(None, masks.reset))
        log_scaled = log_retain + (before - m)
        log_scaled = log_scaled - log_scaled.detach().relu()  # above 0 by rounding alone
        gates = {"lr": torch.exp(i - m), "retain": torch.exp(log_scaled), "floor": torch.exp(-m)}
        return inputs._replace(gates={**inputs.gates, **gates}), {"m": last}


class RWKV7(_TwoWrites):
    r"""rwkv7: M' = M diag(w) - (M kk) (alpha * kk)^T + v k~^T, as two writes of which the first erases.

    kk = normalise(k * xi) is the key of the erasure, which writes along alpha * kk, and k~ = k * (1 + (alpha - 1) *
    zeta) is the key of the write; w = exp(-e^(-1/2) sigmoid(w_0 + tanh(x W_1) W_2)) in (0.545, 1) and alpha =
    sigmoid(a_0 + x A_1 A_2) per channel. The erasure reads the memory before its decay, decay_order="with_step". Token
    shift, the value residual across layers and the bonus behind the norm are not here; W_1 and A_1 start at N(0,
    0.02^2), not at 0, where W_2 would learn nothing.

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
        return 0.0  # for the layer's keys: the key of the erasure has unit length, whatever they are

    def parts(self, sizes: Sizes) -> Parts:
        keys, parts = (sizes.heads, sizes.d_key), Parts()
        slower = torch.linspace(-6.0, -1.0, sizes.d_key, dtype=torch.float64).expand(keys)  # along the channels
        for gate in ("w", "alpha"):
            parts[f"{gate}.down"] = (self.rank, sizes.d_model), partial(normal, std=0.02)
            parts[f"{gate}.up"] = (math.prod(keys), self.rank), partial(normal, std=0.1 * self.rank**-0.5)
            parts[f"{gate}.bias"] = keys, (lambda *_: slower) if gate == "w" else 0.0
        return parts | {"xi": (keys, 0.7), "zeta": (keys, 1.0)}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        wide, keys = torch.promote_types(x.dtype, torch.float32), inputs.k.shape[-2:]
        x = x.to(wide)

        def low(gate: str, squash: bool) -> Tensor:
            inner = linear(x, params[f"{gate}.down"].to(wide))
            inner = torch.tanh(inner) if squash else inner
            logits = linear(inner, params[f"{gate}.up"].to(wide)).unflatten(-1, keys)
            return torch.sigmoid(logits + params[f"{gate}.bias"].to(wide))

        w, alpha = torch.exp(-math.exp(-0.5) * low("w", True)), low("alpha", False)
        k = inputs.k.to(wide)
        erased = unit(k * params["xi"].to(wide))
        written = k * (1 + (alpha - 1) * params["zeta"].to(wide))
        ones = torch.ones_like(alpha)
        both = {
            "lr": ones[..., 0].unsqueeze(2).expand(*x.shape[:2], 2, keys[0]),
            "erase": torch.stack((ones[..., 0], torch.zeros_like(ones[..., 0])), 2),
            "write": torch.stack((alpha, ones), 2),
            "retain": w,
        }
        pair = torch.stack((erased, written), 2).to(inputs.k.dtype)
        values = torch.stack((torch.zeros_like(inputs.v), inputs.v), 2)
        return inputs._replace(k=pair, v=values, gates={**inputs.gates, **both}), {}


FLOOR = -2.0  # least log mu
LEAST = 1e-16  # of b, by which the next token's momentum is divided; a smaller one changes no digit of a memory


class MomentumDeltaGates(Gating):
    r"""momentum_delta: gates for S' = mu S - eta e k^T, M' = alpha M + b S', with b + alpha <= 1.

    eta = 1 + tanh(W x / sqrt(d_model)), theta = arctan(eta f), b = sin(theta)^2 sigmoid(W x), alpha = cos(theta)^2
    exp(-A softplus(W x + c)), log mu = max(-A' softplus(W x + c'), -2). The step b, 1e-16 at least, goes into the slot:
    lr = b eta, retain = alpha, momentum = mu b_t / b_{t-1}, which may exceed 1. With `correction` the query is q - d k,
    of q and k as the layer leaves them: `key_norm="l2"` then brings both to unit length, as released.

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
            kinds = f"algorithm {algorithm.kind!r} with retention {retention.kind!r} takes not both"
            return f"it makes the gates momentum and retain, {kinds}; use 'momentum' with 'decay'"
        if algorithm.momentum_top <= 1:
            return f"its gate may exceed 1, the top of algorithm {algorithm.kind!r}; use 'momentum' with bounded=False"
        return None

    def parts(self, sizes: Sizes) -> Parts:
        maps = {f"{name}.weight": weights(sizes) for name in ("eta", "b", "alpha", "mu")}
        tops = {"f": 4.0, "alpha.bias": None, "alpha.rate": 16.0, "mu.bias": None, "mu.rate": 16.0}
        tops |= {"d": 1.0} if self.correction else {}
        draws = {name: rate_start if top is None else partial(spread, low=0.0, high=top) for name, top in tops.items()}
        return maps | {name: ((sizes.heads,), draw) for name, draw in draws.items()}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"b": (sizes.heads,)}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        eta = 1 + torch.tanh(head(params, "eta", x) * x.shape[-1] ** -0.5)
        tangent = eta * params["f"].to(eta.dtype).exp()
        cosine = 1 / (1 + tangent.square())  # squared
        b = ((1 - cosine) * torch.sigmoid(head(params, "b", x))).clamp(min=LEAST)
        alpha = cosine * torch.exp(shrink(params, "alpha", x))
        mu = torch.exp(shrink(params, "mu", x).clamp(min=FLOOR))
        before, last = latest(b, state["b"], masks)
        ratio = torch.where(before > 0, b / torch.where(before > 0, before, 1.0), 1.0)  # at the start S = 0
        q = inputs.q
        if self.correction:
            q = q - params["d"].exp().to(q.dtype).unsqueeze(-1) * inputs.k
        gates = {**inputs.gates, "lr": b * eta, "retain": alpha, "momentum": mu * ratio}
        return inputs._replace(q=q, gates=gates), {"b": last}


_TOP = 32  # default of `Raven.top`


def _gate_refusal(config: Any, gate: str, readout: str) -> str | None:
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
        return _gate_refusal(config, "ridge", "ridge")

    def parts(self, sizes: Sizes) -> Parts:
        return {"r": ((sizes.heads, sizes.d_key), math.log(math.expm1(self.ridge - self.least)))}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        r = params["r"].to(torch.promote_types(x.dtype, torch.float32))
        ridge = (self.least + softplus(r)).expand(*x.shape[:2], *r.shape)
        return inputs._replace(gates={**inputs.gates, "ridge": ridge}), {}


class KalmaNet(Gating):
    r"""kalmanet: lr = (b + 1e-6)^2, b the layer's own lr; mix = sigmoid(W x + c).

    The released code scales both keys and values by b, so that a token has the weight b^2. The start of mix is ours:
    while few tokens are written the solution is up to 1 / (relative |H|_F) times as long as the query.

    Formula: $\eta_t \leftarrow (\eta_t + 10^{-6})^2,\quad \mathrm{mix}_t = \mathrm{sigmoid}(w^\top x_t + c)$
    Shapes: mix `[B, T, H]`, c `[H]`.
    References: Gated KalmaNet (2025, arXiv 2511.21016). [GATE-KALMA-D1]
    """

    kind: Literal["kalmanet"] = "kalmanet"
    mix: float = Field(0.25, gt=0, lt=1, description="at the start")

    def refusal(self, config: Any) -> str | None:
        return _gate_refusal(config, "mix", "ridge")

    def parts(self, sizes: Sizes) -> Parts:
        each = (sizes.heads,)
        return {"mix.weight": ((*each, sizes.d_model), 0.0), "mix.bias": (each, inverse_sigmoid(self.mix))}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        lr, mix = inputs.gates["lr"], torch.sigmoid(head(params, "mix", x))
        if lr is None:
            raise TypeError("lr has a head")
        return inputs._replace(gates={**inputs.gates, "lr": (lr + 1e-6).square(), "mix": mix}), {}


class _Slotted(Gating):
    """Helper for gatings with a score for each slot, a linear map of x."""

    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain")
    channels: ClassVar[tuple[str, ...]] = ("retain", "write")

    def refusal(self, config: Any) -> str | None:
        return _gate_refusal(config, "write", "slots")

    def parts(self, sizes: Sizes) -> Parts:
        return {"slots.weight": weights(sizes, sizes.d_key)}


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

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        log = logsigmoid(_scores(params, x)) / self.temperature
        return inputs._replace(gates={**inputs.gates, "retain": torch.exp(log), "write": -torch.expm1(log)}), {}


class ABC(_Slotted):
    r"""abc: every slot holds a mean weighted by exp(s), s = W x within [-limit, limit].

    With Z_t the log of the sum of exp(s) so far, retain = exp(Z_{t-1} - Z_t) and write = exp(s - Z_t), and retain is 1
    at the first token. The state is exp(-m) times the sum, with m the running maximum of s, so that numbers stay in
    range; no gradient flows through m, on which nothing depends.

    Formula: $\alpha_t = \exp(Z_{t-1} - Z_t),\quad \mathrm{write}_t = \exp(s_t - Z_t)$
    $Z_t = \log \sum_{i \leq t} \exp(s_i),\quad s_t = \max(-\mathrm{limit}, \min(\mathrm{limit}, W x_t))$
    Shapes: retain and write `[B, T, H, D]`; state m and the sum `[B, H, D]`.
    References: ABC (Peng et al., 2021, arXiv 2110.02488). [GATE-ABC-D1]
    """

    kind: Literal["abc"] = "abc"
    limit: float = Field(32.0, gt=0, le=80)

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"m": (sizes.heads, sizes.d_key), "sum": (sizes.heads, sizes.d_key)}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        s, since = _scores(params, x).clamp(-self.limit, self.limit), Masks(None, masks.reset)
        with torch.no_grad():
            m = running_max(torch.zeros_like(s), s, state["m"], masks)
            before, last = latest(m, state["m"], since)
        fall, weight = torch.exp(before - m), torch.exp((s - m).clamp(max=0))  # above 0 at unwritten tokens alone
        total = running(fall, weight, state["sum"], masks)
        earlier, final = latest(total, state["sum"], since)
        some = total > 0  # nothing may be written before an unwritten token
        divisor = torch.where(some, total, 1.0)
        retain = torch.where(earlier > 0, earlier * fall / divisor, 1.0)
        retain = retain - (retain.detach() - 1).relu()  # above 1 by rounding alone
        gates = {**inputs.gates, "retain": retain, "write": weight / divisor}
        return inputs._replace(gates=gates), {"m": last, "sum": final}


class Raven(_Slotted):
    r"""raven: retain = exp(g c_i) in slot i, write = 1 - retain, c the largest of sigmoid(W x), scaled to the sum 1.

    g = -A softplus(a x + b) per head sets how much a token replaces, c how that is divided among slots: the product of
    retain over slots is exp(g). A slot that is not chosen has c = 0, keeps all (retain is 1) and is given nothing
    (write is 0), to the last bit. Of equal scores the first slots are chosen. A, a and b start as Mamba-2 starts them,
    W at N(0, 1/d_model), ours. The choice itself has no derivative.

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

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        shares = _shares(_scores(params, x), _TOP if self.top is None else self.top)
        log = shrink(params, "share", x).unsqueeze(-1) * shares
        return inputs._replace(gates={**inputs.gates, "retain": torch.exp(log), "write": -torch.expm1(log)}), {}


def _shares(scores: Tensor, top: int) -> Tensor:
    """The `top` largest sigmoids over their sum, 0 elsewhere; as a softmax of logarithms, which never divides by 0."""
    logs = logsigmoid(scores)
    if top < scores.shape[-1]:
        # By scores, which differ even where their sigmoids have reached 1; stable, so that ties always go to the first.
        order = scores.detach().sort(dim=-1, descending=True, stable=True).indices
        unchosen = torch.ones_like(scores, dtype=torch.bool).scatter(-1, order[..., :top], False)
        logs = logs.masked_fill(unchosen, -torch.inf)
    return torch.softmax(logs, -1)
