"""Gatings that correct what is written or read by the token's own key or gates: Comba, HGRN2, preconditioners."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, silu

from hecate.gating.base import Gated, Gating, Masks, Named, Parts, Shapes, Sizes, Written, running
from hecate.gating.heads import head, logit, rate_start, rates, shrink
from hecate.tape import can_inspect, is_traced
from hecate.tape.ops import joined, unit
from hecate.variant import Conflicts


class Comba(Gating):
    r"""comba: the memory is asked at c k, and read at q - d c k.

    c = sigmoid(a) per head closes the loop at the state (`erase`), d per head at the read, of q and k as the layer
    leaves them: with `key_norm="l2"` and the layer's qk_norm "none" both are brought to unit length behind the
    correction, as in the released layer, with "l2" ahead of it. phi is to be the identity. Released kernels normalise c
    k as well, which cancels c in what is erased; the paper does not.

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

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
        c = torch.sigmoid(params["a"])
        q = made.q - (params["d"] * c).to(made.q.dtype).unsqueeze(-1) * made.k
        return made._replace(q=q, gates={**made.gates, "erase": c.expand(made.k.shape[:-1])}), {}


class Complement(Gating):
    r"""complement: retain = sigmoid(a k + b) per channel; what is not kept is written, with the key 1 - retain.

    The layer's key is the forget gate's logit, as in the released layer, which leaves it its length
    (`layer_qk_norm="none"`) and has neither an activation of it nor lr. a starts at 1, b at retain 0.9 for k = 0: ours,
    for the paper's lower bounds. With `keys` keys stay and retain has a head of its own.

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
        return tuple([name for name, own in (("retain", self.keys), ("lr", self.lr)) if not own] + [*self._makes])

    def refusal(self, config: Any) -> str | None:
        if not config.retention.uses_retain:
            return f"retention {config.retention.kind!r} has no retain gate"
        alike = self.keys or config.retention.gate_form.channels
        return None if alike else "it makes a retain gate per channel; set retention.channels, or gating.keys"

    def parts(self, sizes: Sizes) -> Parts:
        keys = sizes.heads, sizes.d_key
        return {} if self.keys else {"a": (keys, 1.0), "b": (keys, logit(0.9))}

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
        k, retain = made.k, made.gates.get("retain")
        if not self.keys:
            logits = params["a"] * k.to(torch.promote_types(k.dtype, torch.float32)) + params["b"]
            k, retain = torch.ones_like(k), torch.sigmoid(logits)
        if retain is None:
            raise TypeError("a config without retain was not refused")
        q = silu(made.q) if self.query == "silu" else made.q
        return made._replace(q=q, k=k, gates={**made.gates, "retain": retain, "write": 1 - retain}), {}


class Curvature(Gating):
    r"""curvature: the written key is the key times base^(-r / (1 + |r|)), r = log(A + eps) - c, per channel.

    A_t = decay_t A_{t-1} + rate_t k_t * k_t runs over the squares of the keys so far, the token's own among them: a
    diagonal of their curvature. Channels that were written often are written more cautiously. The factor lies in
    (1/base, base), so that with lr up to 2 an eigenvalue could reach 1 - 2 base: keep lr at most 2 / base.

    `gate` is what makes decay of W x + b: "sigmoid", which starts at `decay`, or "softplus", exp(-A softplus(W x + b)),
    as released, A per head starting in U(1, 16), softplus(b) log-uniform in [1e-3, 1e-1].

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
        if config.algorithm.lr * self.base > config.algorithm.stable_step:
            limit = config.algorithm.stable_step
            return (
                f"lr={config.algorithm.lr:g} times base={self.base:g} passes {limit:g}, where writes of one key, again "
                "and again, diverge; lower one"
            )
        return None

    def parts(self, sizes: Sizes) -> Parts:
        own, each, soft = ((sizes.heads, sizes.d_model), 0.0), (sizes.heads,), self.gate == "softplus"
        found: Parts = {"decay.weight": own, "rate.weight": own}
        found["decay.bias"] = each, rate_start if soft else logit(self.decay)
        found |= {"rate.bias": (each, logit(self.rate)), "center": (each, self.center)}
        return found | ({"decay.rate": (each, rates)} if soft else {})

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"curvature": (sizes.heads, sizes.d_key)}

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
        rate = torch.sigmoid(head(params, "rate", x)).unsqueeze(-1)
        soft = self.gate == "softplus"
        decay = shrink(params, "decay", x).exp() if soft else torch.sigmoid(head(params, "decay", x))
        decay = decay.unsqueeze(-1)
        square = made.k.to(decay.dtype).square()
        total = running(decay, rate * square, held["curvature"], masks)
        r = torch.log(total + self.eps) - params["center"].to(total.dtype).unsqueeze(-1)
        factor = torch.exp(-math.log(self.base) * r / (1 + r.abs()))
        last = total[:, -1] if x.shape[1] else held["curvature"]
        return made._replace(gates={**made.gates, "write": factor}), {"curvature": last}


class Hypergradient(Gating):
    r"""hypergradient: the written key is d * k; then d becomes forget d + eta (1 - d.s) s, s = k * k, per channel.

    k is of unit length. (1 - d.s) s is minus the gradient in d of |e'|^2 / (2 |e|^2), e the token's error and e' what a
    write with lr = 1 leaves of it; lr itself is not in it. d, its learned start too, is kept within `low` and `high`;
    without `high` nothing holds d.s under 2 / lr, where writes grow, though d.s = 1 is where each step heads.

    Formula: $\mathrm{write}_t = d_t,\quad d_{t+1} = \mathrm{forget}_t\, d_t + \mathrm{eta}\, (1 - d_t^\top s_t)\,
    s_t,\quad s_t = k_t \odot k_t$
    Shapes: s and d `[B, T, H, D]`; forget `[B, T, H]` = sigmoid(W x + b), or 1 for None; the start of d `[H, D]`.
    Cost: a triangular system per 64 tokens where d stays within; else, and compiled, they go token by token.
    References: OSDN (Zhou et al., 2026, arXiv 2605.13473), read in its authors' programs (Lhongpei/OSLA), not in the
    paper. d starts at 0 in their first, as here at 1 in their last; later trials have eta 0.003, d in [2/3, 1.5]. That
    an unwritten token leaves d, and its start within the bounds, are ours. [GATE-OSDN-D1, GATE-OSDN-I1]
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
        found: Parts = {"start": ((sizes.heads, sizes.d_key), self.begin)}
        if self.forget is not None:
            found["forget.weight"] = (sizes.heads, sizes.d_model), 0.0
            found["forget.bias"] = (sizes.heads,), logit(self.forget)
        return found

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"moved": (sizes.heads, sizes.d_key)}  # d less its start

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
        s = unit(made.k.to(torch.promote_types(x.dtype, torch.float32))).square()
        fall = torch.zeros_like(s[..., 0]) if self.forget is None else logsigmoid(head(params, "forget", x))
        if masks.write is not None:
            off = ~masks.write.unsqueeze(-1)
            s, fall = s.masked_fill(off.unsqueeze(-1), 0.0), fall.masked_fill(off, 0.0)
        start, factors = params["start"].to(s.dtype).clamp(self.low, self.high), []
        d = start + held["moved"].to(s.dtype)
        for at in range(0, x.shape[1], self._tokens):
            reset = None if masks.reset is None else masks.reset[:, at : at + self._tokens]
            own, d = self._chunk(s[:, at : at + self._tokens], fall[:, at : at + self._tokens], reset, d, start)
            factors.append(own)
        # What a token forgets is seen by the next one: a single token's gate is in no factor.
        factor = joined(torch.cat(factors, 1) if factors else s, fall)
        return made._replace(gates={**made.gates, "write": factor}), {"moved": d - start}

    def _chunk(self, s: Tensor, fall: Tensor, reset: Tensor | None, d: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """d before each token, and after the last."""
        recorded = s.is_cuda and torch.cuda.is_current_stream_capturing()
        if s.shape[1] > 1 and can_inspect(s, fall, d) and not (recorded or is_traced(s, fall, d)):
            found = _solved(s, fall, reset, d, start, self.eta)
            if all(torch.equal(item.detach().clamp(self.low, self.high), item.detach()) for item in found):
                return found
        factors = []
        for t in range(s.shape[1]):
            d = d if reset is None else torch.where(reset[:, t, None, None], start, d)
            factors.append(d)
            step = self.eta * (1 - (d * s[:, t]).sum(-1, keepdim=True)) * s[:, t]
            d = (fall[:, t].exp().unsqueeze(-1) * d + step).clamp(self.low, self.high)
        return torch.stack(factors, 1), d


def _solved(
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
    kept = eta * (before.unsqueeze(-1) - upto.unsqueeze(-2)).masked_fill(~earlier, -torch.inf).exp()
    carried = since.exp().unsqueeze(-1) * first
    missing = 1 - (carried * s).sum(-1, keepdim=True)
    steps = torch.linalg.solve_triangular(kept * (s @ s.mT), missing, upper=False, unitriangular=True) * s
    factors = carried + kept @ steps
    return factors.transpose(1, 2), fall[:, -1].exp().unsqueeze(-1) * factors[:, :, -1] + eta * steps[:, :, -1]
