"""Layers of the delta rule and of its steps in closed form."""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tests.reference.layers.parts import (
    Layer,
    Weights,
    asked,
    decay,
    lr_gate,
    out,
    outer,
    qkv,
    scaled,
    sigmoid_gate,
    start,
    unit,
)


def delta(x: Tensor, w: Weights) -> Tensor:
    """DeltaNet (arXiv 2406.06484): q and k of unit length behind convolution and SiLU, beta a sigmoid."""
    q, k, v = qkv(x, w)
    return out(x, corrected(start(x, w), unit(q), unit(k), v, lr_gate(x, w)), w)


def gated_delta(x: Tensor, w: Weights) -> Tensor:
    """Gated DeltaNet (arXiv 2412.06464): its decay is exp(-A softplus(W x + b)), A from U(1, 16), softplus(b) from
    [1e-3, 1e-1], here evenly over heads; ours is that of A = 1 with the sign of the logit turned."""
    q, k, v = qkv(x, w)
    alpha = sigmoid_gate(x, w, "retain")
    if "decay" in w.published:
        steps = torch.linspace(0, 1, w.heads, dtype=x.dtype)
        dt = softplus(torch.log(torch.expm1(1e-3 * 100**steps)) - x @ w["retain.weight"].mT)
        alpha = torch.exp(-(1 + 15 * steps) * dt)
    return out(x, corrected(start(x, w), unit(q), unit(k), v, lr_gate(x, w), alpha), w)


def kda(x: Tensor, w: Weights) -> Tensor:
    """Kimi Delta Attention (arXiv 2510.26692): decay of every channel from a head of low rank."""
    q, k, v = qkv(x, w)
    return out(x, corrected(start(x, w), unit(q), unit(k), v, lr_gate(x, w), decay(x, w)), w)


def gated_delta_2(x: Tensor, w: Weights) -> Tensor:
    """Gated DeltaNet-2 (arXiv 2605.22791): M <- M diag(a); M <- M - (M (b * k) - w * v) k^T."""
    q, k, v = qkv(x, w)
    q, k, alpha = unit(q), unit(k), decay(x, w)
    erase, value = sigmoid_gate(x, w, "erase"), sigmoid_gate(x, w, "value")
    m, ys = start(x, w), []
    for t in range(x.shape[1]):
        m = scaled(m, alpha[:, t])
        m = m - outer(asked(m, erase[:, t] * k[:, t]) - value[:, t] * v[:, t], k[:, t])
        ys.append(asked(m, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def delta_product(x: Tensor, w: Weights) -> Tensor:
    """DeltaProduct, gated (arXiv 2502.10297): two steps of beta up to 2 a token, decay ahead of the first."""
    writes = w.config["writes"]
    q, k, v = qkv(x, w)
    q, alpha, beta = unit(q), decay(x, w), 2 * sigmoid_gate(x, w, "lr")
    # Projections have the writes outermost, [n, H, D] in a row.
    k, v = (item.flatten(2).unflatten(-1, (writes, w.heads, -1)) for item in (k, v))
    k, beta = unit(k), beta.unflatten(-1, (writes, w.heads))
    m, ys = start(x, w), []
    for t in range(x.shape[1]):
        m = scaled(m, alpha[:, t])
        for j in range(writes):
            error = v[:, t, j] - asked(m, k[:, t, j])
            m = m + outer(beta[:, t, j, :, None] * error, k[:, t, j])
        ys.append(asked(m, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def rwkv7(x: Tensor, w: Weights) -> Tensor:
    """RWKV-7 (arXiv 2503.14456): S <- S (diag(w) - kk^T (a * kk)) + v k~^T, r, k, v without an activation. Beside the
    norm goes the token's own value (`bonus`), weighed by r (r_k * k~), r_k from -0.04."""
    r, k, v = qkv(x, w, active=False)

    def low(gate: str, inner: Tensor) -> Tensor:
        up = inner @ w[f"{gate}.up"].mT
        return torch.sigmoid(up.unflatten(-1, (w.heads, -1)) + w[f"{gate}.bias"])

    kept = torch.exp(-math.exp(-0.5) * low("w", torch.tanh(x @ w["w.down"].mT)))
    a = low("alpha", x @ w["alpha.down"].mT)
    kk = k * w["xi"]
    kk = kk / kk.norm(dim=-1, keepdim=True)
    written = k * (1 + (a - 1) * w["zeta"])
    m, ys = start(x, w), []
    for t in range(x.shape[1]):
        erased = outer(asked(m, kk[:, t]), a[:, t] * kk[:, t])
        m = scaled(m, kept[:, t]) - erased + outer(v[:, t], written[:, t])
        ys.append(asked(m, r[:, t]))
    bonus = -0.04 * (r * written).sum(-1, keepdim=True) * v
    return out(x, torch.stack(ys, 1), w, bonus if "bonus" in w.published else None)


def efla(x: Tensor, w: Weights) -> Tensor:
    """EFLA (arXiv 2512.12602) in DeltaNet's layer, k of its own length: steps (1 - exp(-beta |k|^2)) / |k|^2."""
    q, k, v = qkv(x, w)
    square, beta = (k * k).sum(-1), lr_gate(x, w)
    return out(x, corrected(start(x, w), q, k, v, -torch.expm1(-beta * square) / square), w)


def longhorn(x: Tensor, w: Weights) -> Tensor:
    """Longhorn (arXiv 2407.14207): the proximal step beta / (1 + beta |k|^2) for k of its own length. The released
    layer keeps of M (I - c k k^T) the diagonal (`diagonal`), and adds the value that came in (`skip`)."""
    q, k, v = qkv(x, w)
    beta = lr_gate(x, w)
    step = beta / (1 + beta * (k * k).sum(-1))
    if "diagonal" not in w.published:
        y = corrected(start(x, w), q, k, v, step)
    else:
        m, ys = start(x, w), []
        for t in range(x.shape[1]):
            m = m * (1 - step[:, t, :, None] * k[:, t] ** 2).unsqueeze(2)
            m = m + outer(step[:, t, :, None] * v[:, t], k[:, t])
            ys.append(asked(m, q[:, t]))
        y = torch.stack(ys, 1)
    return out(x, y + v if "skip" in w.published else y, w)


def dgd(x: Tensor, w: Weights) -> Tensor:
    """Delta gradient descent (arXiv 2512.24695, Eq 57 and 88): M <- alpha M - c M k k^T + c v k^T, c = beta / (1 + beta
    |k|^2); the state that is erased from is the one before the decay."""
    q, k, v = qkv(x, w)
    beta, alpha = lr_gate(x, w), sigmoid_gate(x, w, "retain")
    step = beta / (1 + beta * (k * k).sum(-1))
    m, ys = start(x, w), []
    for t in range(x.shape[1]):
        error = step[:, t, :, None] * (v[:, t] - asked(m, k[:, t]))
        m = scaled(m, alpha[:, t]) + outer(error, k[:, t])
        ys.append(asked(m, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def corrected(m: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor | None = None) -> Tensor:
    """Answers of M <- M alpha (I - beta k k^T) + beta v k^T; alpha per head or per channel."""
    ys = []
    for t in range(q.shape[1]):
        m = m if alpha is None else scaled(m, alpha[:, t])
        m = m + outer(beta[:, t, :, None] * (v[:, t] - asked(m, k[:, t])), k[:, t])
        ys.append(asked(m, q[:, t]))
    return torch.stack(ys, 1)


LAYERS: dict[str, Layer] = {
    "delta": delta,
    "gated_delta": gated_delta,
    "kda": kda,
    "gated_delta_2": gated_delta_2,
    "delta_product": delta_product,
    "rwkv7": rwkv7,
    "efla": efla,
    "longhorn": longhorn,
    "dgd": dgd,
}
