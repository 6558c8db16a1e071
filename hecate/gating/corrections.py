"""Gatings that correct writes or reads: by the token's own key or gates, as in Comba, HGRN2 and preconditioners; or,
for memories that take one step per chunk, by values of later tokens and an lr for every weight."""

from __future__ import annotations

import math
from functools import reduce
from operator import add
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, silu, softplus

from hecate.gating.base import Gated, Gating, Masks, Named, Parts, Shapes, Sizes, Written, latest, running
from hecate.gating.heads import head, inverse_sigmoid, inverse_softplus, rate_start, rates, shrink
from hecate.tape import can_inspect, is_traced
from hecate.tape.ops import joined, unit
from hecate.variant import Conflicts


class Comba(Gating):
    r"""comba: the error is taken at c k, and the memory is read at q - d c k.

    c = sigmoid(a) per head closes the loop at the state (`erase`), d per head at the read, of q and k as the layer
    leaves them: with `key_norm="l2"` and the layer's qk_norm "none" both are brought to unit length after the
    correction, as in the released layer, with qk_norm "l2" before it. phi should be the identity. Released kernels
    normalise c k as well, which cancels c in what is erased; the paper does not.

    Formula: $\mathrm{erase}_t = c = \mathrm{sigmoid}(a),\quad q_t \leftarrow q_t - d\, c\, k_t$
    Shapes: a and d `[H]`.
    References: Comba (Hu et al., 2025, arXiv 2506.02475). [GATE-COMBA-D1]
    """

    kind: Literal["comba"] = "comba"
    one_key: ClassVar[bool] = True
    _makes: ClassVar[tuple[str, ...]] = ("erase",)
    correction: float = Field(1.0, description="d at the start; 0.02 is suggested for small models")
    feedback: float = Field(1.0, description="a at the start")

    def refusal(self, config: Any) -> str | None:
        if config.key_norm == "sum":
            return "key_norm='sum' is for features without a sign, which a corrected query has; use 'l2'"
        return None

    def parts(self, sizes: Sizes) -> Parts:
        return {"a": ((sizes.heads,), self.feedback), "d": ((sizes.heads,), self.correction)}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        c = torch.sigmoid(params["a"])
        q = inputs.q - (params["d"] * c).to(inputs.q.dtype).unsqueeze(-1) * inputs.k
        return inputs._replace(q=q, gates={**inputs.gates, "erase": c.expand(inputs.k.shape[:-1])}), {}


class Complement(Gating):
    r"""complement: retain = sigmoid(a k + b) per channel; the written key is 1 - retain.

    The layer's key is the forget gate's logit, as in the released layer, which does not normalise it
    (`layer_qk_norm="none"`) and has neither an activation for it nor lr. a starts at 1, b at retain 0.9 for k = 0:
    ours, for the paper's lower bounds. With `keys` keys stay and retain has a head of its own.

    Formula: $\alpha_t = \mathrm{sigmoid}(a \odot k_t + b),\quad \mathrm{write}_t = 1 - \alpha_t,\quad k_t \leftarrow 1$
    Shapes: a and b `[H, D]`; phi keeps the width D of keys.
    References: HGRN2 (Qin et al., 2024, arXiv 2404.07904). [GATE-TIED-D1]
    """

    kind: Literal["complement"] = "complement"
    one_key: ClassVar[bool] = True
    _makes: ClassVar[tuple[str, ...]] = ("write",)
    keys: bool = Field(False, description="whether the layer's keys stay; else the written key is 1 - retain alone")
    lr: bool = Field(True, description="whether lr has its head; else it is the algorithm's lr")
    query: Literal["none", "silu"] = Field("none", description="what is done to queries alone")

    @property
    def replaces(self) -> tuple[str, ...]:
        heads = {"retain": self.keys, "lr": self.lr}
        return (*[name for name, has_head in heads.items() if not has_head], *self._makes)

    def refusal(self, config: Any) -> str | None:
        if not config.retention.uses_retain:
            return f"retention {config.retention.kind!r} has no retain gate"
        alike = self.keys or config.retention.gate_form.channels
        return None if alike else "it makes a retain gate per channel; set retention.channels, or gating.keys"

    def parts(self, sizes: Sizes) -> Parts:
        keys = sizes.heads, sizes.d_key
        return {} if self.keys else {"a": (keys, 1.0), "b": (keys, inverse_sigmoid(0.9))}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        k, retain = inputs.k, inputs.gates.get("retain")
        if not self.keys:
            logits = params["a"] * k.to(torch.promote_types(k.dtype, torch.float32)) + params["b"]
            k, retain = torch.ones_like(k), torch.sigmoid(logits)
        if retain is None:
            raise TypeError("a config without retain was not refused")
        q = silu(inputs.q) if self.query == "silu" else inputs.q
        return inputs._replace(q=q, k=k, gates={**inputs.gates, "retain": retain, "write": 1 - retain}), {}


class Curvature(Gating):
    r"""curvature: the written key is the key times base^(-r / (1 + |r|)), r = log(A + eps) - c, per channel.

    A_t = decay_t A_{t-1} + rate_t k_t * k_t sums the squares of the keys so far, the token's own included: a diagonal
    of their curvature. Channels that were written often are written with smaller steps. The factor lies in (1/base,
    base), so that with lr up to 2 an eigenvalue could reach 1 - 2 base: keep lr at most 2 / base.

    `gate` turns W x + b into decay: "sigmoid", which starts at `decay`, or "softplus", exp(-A softplus(W x + b)), as
    released, A per head starting in U(1, 16), softplus(b) log-uniform in [1e-3, 1e-1].

    Formula: $A_t = \mathrm{decay}_t A_{t-1} + \mathrm{rate}_t\, k_t \odot k_t,\quad r_t = \log(A_t + \varepsilon) - c$
    $\mathrm{write}_t = \mathrm{base}^{-r_t / (1 + |r_t|)}$
    Shapes: decay and rate `[B, T, H]`, rate = sigmoid(W x + b), c `[H]`, A `[B, H, D]`.
    References: Preconditioned DeltaNet (Tumma et al., 2026, arXiv 2604.21100). [GATE-CURV-D1]
    """

    kind: Literal["curvature"] = "curvature"
    one_key: ClassVar[bool] = True
    channels: ClassVar[tuple[str, ...]] = ("write",)
    _makes: ClassVar[tuple[str, ...]] = ("write",)
    base: float = Field(1.5, gt=1)
    eps: float = Field(1e-6, gt=0)
    center: float = Field(-0.2, description="c at the start")
    gate: Literal["sigmoid", "softplus"] = "sigmoid"
    decay: float = Field(0.99, gt=0, lt=1, description="at the start, of a sigmoid")
    rate: float = Field(0.5, gt=0, lt=1, description="at the start")

    def conflicts(self) -> Conflicts:
        if self.gate == "softplus" and self.decay != type(self).model_fields["decay"].default:
            where = "is where a sigmoid starts, and gate='softplus' draws its start"
            yield ("decay",), f"decay={self.decay:g} {where}; leave decay out, or use gate='sigmoid'"

    @property
    def erases(self) -> float:
        return self.base

    def refusal(self, config: Any) -> str | None:
        lr, limit = config.algorithm.lr, config.algorithm.stable_step
        if lr * self.base <= limit:
            return None
        beyond = f"lr={lr:g} times base={self.base:g} passes {limit:g}"
        return f"{beyond}, where writes of one key, again and again, diverge; lower one"

    def parts(self, sizes: Sizes) -> Parts:
        weight, each, soft = ((sizes.heads, sizes.d_model), 0.0), (sizes.heads,), self.gate == "softplus"
        parts: Parts = {"decay.weight": weight, "rate.weight": weight}
        parts["decay.bias"] = each, rate_start if soft else inverse_sigmoid(self.decay)
        parts |= {"rate.bias": (each, inverse_sigmoid(self.rate)), "center": (each, self.center)}
        return parts | ({"decay.rate": (each, rates)} if soft else {})

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"curvature": (sizes.heads, sizes.d_key)}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        rate = torch.sigmoid(head(params, "rate", x)).unsqueeze(-1)
        soft = self.gate == "softplus"
        decay = shrink(params, "decay", x).exp() if soft else torch.sigmoid(head(params, "decay", x))
        decay = decay.unsqueeze(-1)
        square = inputs.k.to(decay.dtype).square()
        total = running(decay, rate * square, state["curvature"], masks)
        r = torch.log(total + self.eps) - params["center"].to(total.dtype).unsqueeze(-1)
        factor = torch.exp(-math.log(self.base) * r / (1 + r.abs()))
        last = total[:, -1] if x.shape[1] else state["curvature"]
        return inputs._replace(gates={**inputs.gates, "write": factor}), {"curvature": last}


class Hypergradient(Gating):
    r"""hypergradient: the written key is d * k; then d becomes forget d + eta (1 - d.s) s, s = k * k, per channel.

    k is of unit length. (1 - d.s) s is minus the gradient in d of |e'|^2 / (2 |e|^2), e the token's error and e' its
    error after a write with lr = 1; lr itself does not enter. d, its learned start too, is kept within `low` and
    `high`; without `high` nothing keeps d.s below 2 / lr, beyond which writes grow, though each step heads for d.s = 1.

    Formula: $\mathrm{write}_t = d_t,\quad d_{t+1} = \mathrm{forget}_t\, d_t + \mathrm{eta}\, (1 - d_t^\top s_t)\,
    s_t,\quad s_t = k_t \odot k_t$
    Shapes: s and d `[B, T, H, D]`; forget `[B, T, H]` = sigmoid(W x + b), or 1 for None; the start of d `[H, D]`.
    Cost: a triangular system per 64 tokens while d stays within its bounds; otherwise, and under torch.compile, a loop
    over tokens.
    References: OSDN (Zhou et al., 2026, arXiv 2605.13473), taken from its authors' programs (Lhongpei/OSLA), not from
    the paper. d starts at 0 in their first, as here at 1 in their last; later trials have eta 0.003, d in [2/3, 1.5].
    That an unwritten token leaves d, and that its start is kept within the bounds, is ours.
    [GATE-OSDN-D1, GATE-OSDN-I1]
    """

    kind: Literal["hypergradient"] = "hypergradient"
    one_key: ClassVar[bool] = True
    channels: ClassVar[tuple[str, ...]] = ("write",)
    _makes: ClassVar[tuple[str, ...]] = ("write",)
    _tokens: ClassVar[int] = 64  # of a chunk
    eta: float = Field(1.0, ge=0, le=2)
    forget: float | None = Field(0.999, gt=0, lt=1, description="at the start; None forgets nothing")
    begin: float = Field(1.0, ge=0, description="d at the start")
    low: float = Field(0.0, ge=0)
    high: float | None = Field(None, gt=0)

    def refusal(self, config: Any) -> str | None:
        traits, lr, limit = config.feature_map.traits(), config.algorithm.lr, config.algorithm.stable_step
        if config.key_norm != "l2":
            return f"it steps by keys of unit length, and key_norm is {config.key_norm!r}; set key_norm='l2'"
        if not (traits.componentwise and traits.degree == 1 and traits.parity == "odd"):  # no multiple of x
            return f"d has the key's channels, not those of feature_map {config.feature_map.kind!r}; use 'identity'"
        if self.high is not None and not self.low < self.high <= limit / lr:
            return f"high={self.high:g} has to lie above low={self.low:g}, and times lr={lr:g} within {limit:g}"
        return None

    def parts(self, sizes: Sizes) -> Parts:
        parts: Parts = {"start": ((sizes.heads, sizes.d_key), self.begin)}
        if self.forget is not None:
            parts["forget.weight"] = (sizes.heads, sizes.d_model), 0.0
            parts["forget.bias"] = (sizes.heads,), inverse_sigmoid(self.forget)
        return parts

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"moved": (sizes.heads, sizes.d_key)}  # d less its start

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        s = unit(inputs.k.to(torch.promote_types(x.dtype, torch.float32))).square()
        fall = torch.zeros_like(s[..., 0]) if self.forget is None else logsigmoid(head(params, "forget", x))
        if masks.write is not None:
            off = ~masks.write.unsqueeze(-1)
            s, fall = s.masked_fill(off.unsqueeze(-1), 0.0), fall.masked_fill(off, 0.0)
        start, factors = params["start"].to(s.dtype).clamp(self.low, self.high), []
        d = start + state["moved"].to(s.dtype)
        for at in range(0, x.shape[1], self._tokens):
            reset = None if masks.reset is None else masks.reset[:, at : at + self._tokens]
            before, d = self._chunk(s[:, at : at + self._tokens], fall[:, at : at + self._tokens], reset, d, start)
            factors.append(before)
        # `forget` acts from the next token on, so the gate of a single token is in no factor.
        factor = joined(torch.cat(factors, 1) if factors else s, fall)
        return inputs._replace(gates={**inputs.gates, "write": factor}), {"moved": d - start}

    def _chunk(self, s: Tensor, fall: Tensor, reset: Tensor | None, d: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """d before each token, and after the last."""
        recorded = s.is_cuda and torch.cuda.is_current_stream_capturing()
        if s.shape[1] > 1 and can_inspect(s, fall, d) and not (recorded or is_traced(s, fall, d)):
            solution = _solve_chunk(s, fall, reset, d, start, self.eta)
            if all(torch.equal(item.detach().clamp(self.low, self.high), item.detach()) for item in solution):
                return solution
        factors = []
        for t in range(s.shape[1]):
            d = d if reset is None else torch.where(reset[:, t, None, None], start, d)
            factors.append(d)
            step = self.eta * (1 - (d * s[:, t]).sum(-1, keepdim=True)) * s[:, t]
            d = (fall[:, t].exp().unsqueeze(-1) * d + step).clamp(self.low, self.high)
        return torch.stack(factors, 1), d


def _solve_chunk(
    s: Tensor, fall: Tensor, reset: Tensor | None, d: Tensor, start: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """`Hypergradient._chunk` without bounds, with F_t the product of forget up to t: the e_t = 1 - d_(t-1).s_t solve
    the triangular system of d_(t-1) = F_(t-1) d_0 + eta sum_(j<t) F_(t-1) / F_j e_j s_j."""
    s, upto = s.transpose(1, 2), fall.transpose(1, 2).cumsum(-1)
    before = pad(upto[..., :-1], (1, 0))
    earlier = torch.ones(s.shape[2], s.shape[2], dtype=torch.bool, device=s.device).tril(-1)
    first, since = d.unsqueeze(2), before
    if reset is not None:
        document = reset.unsqueeze(1).cumsum(-1)
        earlier = earlier & (document.unsqueeze(-1) == document.unsqueeze(-2))
        latest = torch.where(reset, torch.arange(s.shape[2], device=s.device), 0).cummax(-1).values.unsqueeze(1)
        since = before - before.gather(-1, latest.expand(before.shape))
        first = torch.where(document.unsqueeze(-1) > 0, start.unsqueeze(1), first)
    decay = eta * (before.unsqueeze(-1) - upto.unsqueeze(-2)).masked_fill(~earlier, -torch.inf).exp()
    carried = since.exp().unsqueeze(-1) * first
    missing = 1 - (carried * s).sum(-1, keepdim=True)
    steps = torch.linalg.solve_triangular(decay * (s @ s.mT), missing, upper=False, unitriangular=True) * s
    factors = carried + decay @ steps
    return factors.transpose(1, 2), fall[:, -1].exp().unsqueeze(-1) * factors[:, :, -1] + eta * steps[:, :, -1]


class TargetConv(Gating):
    r"""target_conv: v_t becomes sum_o c_o * v_(t+o), o from -(taps - 1 - ahead) to ahead, inside the chunk.

    A depthwise convolution with `ahead` taps over tokens to come, zeros beyond the chunk. It is causal because writes
    of a chunk act from the next one on, and exact token by token because a Hebbian sum does not depend on order: the
    product of k_t and v_(t+o) is written when the later of both has come. So a token makes 1 + ahead writes: (k_t, sum
    over o <= 0 of c_o v_(t+o)) and (k_(t-o), c_o v_t) for each o > 0. Any split of a sequence gives the same; a chunk
    that is not full has not stepped. lr is the algorithm's own for all tokens.

    Formula: $v_t \leftarrow \sum_{o=-(\mathrm{taps}-1-\mathrm{ahead})}^{\mathrm{ahead}} c_o \odot v_{t+o} \quad
    \text{within the chunk}$
    Shapes: c `[taps, H, V]`, 0 at the start except for the token's own tap; state: the last keys and values written,
    `[B, H, D]` and `[B, H, V]`, and the number of tokens in the chunk so far.
    Cost: 1 + ahead times the features of keys and the writes.
    Warning: with own=0, as in the paper for models that are already trained, nothing is written until c has moved, and
    a matrix that starts at zero answers zero. The paper multiplies by a matrix after the convolution; here the layer's
    projection of values comes before it, and with a diagonal one they are the same.
    References: In-Place Test-Time Training (2026, arXiv 2604.06169). [GATE-TARGET-D1]
    """

    kind: Literal["target_conv"] = "target_conv"
    taps: int = Field(5, ge=1, le=64)
    ahead: int = Field(2, ge=1, le=8, description="taps over tokens to come")
    own: float = Field(1.0, description="the token's own tap at the start; 0: no write at all")
    _makes: ClassVar[tuple[str, ...]] = ("lr",)

    def conflicts(self) -> Conflicts:
        if self.ahead >= self.taps:
            yield ("ahead",), f"{self.ahead} taps ahead and the token's own are more than taps={self.taps}; raise taps"

    def refusal(self, config: Any) -> str | None:
        if config.writes != self.ahead + 1:
            writes = f"{self.ahead} taps ahead make {self.ahead + 1} writes of a token"
            return f"{writes}, got writes={config.writes}; set both alike"
        if config.commit != "chunk" or config.read != "before":
            return "it looks ahead within a chunk, which is causal with commit='chunk' and read='before' alone"
        if not config.forms.target:
            return f"bias {config.bias.kind!r} makes a write depend on those before it, and it changes their order"
        if config.normalizer != "none":
            return f"normalizer={config.normalizer!r} would count each of its writes as a token; it needs 'none'"
        if config.on_nonfinite == "skip":
            return "on_nonfinite='skip' would leave out tokens of a chunk that it has counted; use another"
        return None

    def pairs(self, writes: int) -> int:
        return 1

    @property
    def _behind(self) -> int:
        return self.taps - 1 - self.ahead

    def parts(self, sizes: Sizes) -> Parts:
        def start(shape: tuple[int, ...], _: torch.Generator) -> Tensor:
            taps = torch.zeros(shape, dtype=torch.float64)
            taps[self._behind] = self.own
            return taps

        return {"conv": ((self.taps, sizes.heads, sizes.d_value), start)}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        keys = {f"key{j}": (sizes.heads, sizes.d_key) for j in range(1, self.ahead + 1)}
        values = {f"value{j}": (sizes.heads, sizes.d_value) for j in range(1, self._behind + 1)}
        return {**keys, **values, "count": (1,)}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        after: dict[str, Tensor] = {}

        def back(now: Tensor, name: str, depth: int) -> list[Tensor]:
            """Tensors of the token and of the written tokens before it, the nearest first."""
            history = [now]
            for j in range(1, depth + 1):
                before, after[f"{name}{j}"] = latest(history[-1], state[f"{name}{j}"], masks)
                history.append(before.to(now.dtype))
            return history

        keys, values = back(inputs.k, "key", self.ahead), back(inputs.v, "value", self._behind)
        place, after["count"] = _places(x, state["count"], masks)
        taps, place, behind = params["conv"].to(inputs.v.dtype), place.unsqueeze(-1), self._behind
        past = reduce(add, [taps[behind - j] * torch.where(place >= j, v, 0.0) for j, v in enumerate(values)])
        later = [taps[behind + j] * torch.where(place >= j, inputs.v, 0.0) for j in range(1, self.ahead + 1)]
        written = inputs._replace(k=torch.stack(keys, 2), v=torch.stack([past, *later], 2))
        return written, after


class LargeChunk(Gating):
    r"""large_chunk: lr = softplus(W x + b), momentum the mean of sigmoid(W x + b) over the chunk so far, retain 1.

    Every weight of a memory has an lr of its own, which weighs the tokens of a chunk against each other; no ceiling
    bounds it. The step that closes a chunk takes the momentum of its last written token: the mean over the chunk.

    Formula: $\eta_{t,i} = \mathrm{softplus}(w_i^\top x_t + b_i) \ \text{for weight } i,\quad \alpha_t = 1$
    $\mu_t = \frac{1}{t - s + 1} \sum_{j=s}^{t} \mathrm{sigmoid}(w^\top x_j + b),\quad s \ \text{the first token of the
    chunk}$
    Shapes: lr `[B, T, H, W]`, W in `[W, H, d_model]` for each of W weights, momentum `[B, T, H]`; state: the sum of the
    chunk's gates `[B, H]` and the number of tokens in the chunk so far.
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

    def parts(self, sizes: Sizes) -> Parts:
        each, heads = (sizes.weights, sizes.heads), (sizes.heads,)
        parts: Parts = {"lr.weight": ((*each, sizes.d_model), 0.0), "momentum.weight": ((*heads, sizes.d_model), 0.0)}
        return parts | {"lr.bias": (each, inverse_softplus(self.lr)), "momentum.bias": (heads, 0.0)}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"total": (sizes.heads,), "count": (1,)}

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        lr = torch.einsum("btd,whd->bthw", wide, params["lr.weight"].to(wide.dtype))
        lr = softplus(lr + params["lr.bias"].mT.to(wide.dtype))
        momentum = torch.sigmoid(head(params, "momentum", x))
        place, count = _places(x, state["count"], masks)
        place = place.to(momentum.dtype)
        total = running((place > 0).to(momentum.dtype), momentum, state["total"], masks)
        gates = {**inputs.gates, "lr": lr, "momentum": total / (place + 1)}
        last = total[:, -1] if x.shape[1] else state["total"]
        return inputs._replace(gates=gates), {"total": last, "count": count}


def _places(x: Tensor, state: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """The place of every written token in its chunk `[B, T, 1]`, and the number of tokens in the chunk so far `[B, 1]`,
    from that of the state."""
    one = torch.ones(*x.shape[:2], 1, dtype=state.dtype, device=x.device)
    count = running(one, one, state, masks)
    last = count[:, -1] if x.shape[1] else state
    return (count - 1).remainder(masks.chunk), last.remainder(masks.chunk)
