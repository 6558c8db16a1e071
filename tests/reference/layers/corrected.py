"""Layers of the delta rule whose key, query or write is corrected: Comba, the preconditioned ones, Momentum DeltaNet,
and the rule that learns keys from values."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tests.reference.layers.parts import (
    Layer,
    Weights,
    asked,
    decay,
    logits,
    lr_gate,
    out,
    outer,
    qkv,
    scaled,
    sigmoid_gate,
    start,
    unit,
)


def comba(x: Tensor, w: Weights) -> Tensor:
    """Comba (arXiv 2506.02475): the memory is asked at p = c k and read at q - d p, which is brought to unit length as
    k is. The released kernels do so with p, too (`unit_erase`)."""
    q, k, v = qkv(x, w)
    c, d = torch.sigmoid(w["a"])[:, None], w["d"][:, None]
    q, k = unit(q - d * c * k), unit(k)
    p = k if "unit_erase" in w.published else c * k
    beta, alpha = lr_gate(x, w), decay(x, w)
    m, ys = start(x, w), []
    for t in range(x.shape[1]):
        m = scaled(m, alpha[:, t])
        m = m + outer(beta[:, t, :, None] * (v[:, t] - asked(m, p[:, t])), k[:, t])
        ys.append(asked(m, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def preconditioned(x: Tensor, w: Weights) -> Tensor:
    """Preconditioned DeltaNet (arXiv 2604.21100), gated or with decay of every channel: A <- a A + b k * k, the written
    key k x^(-r / (1 + |r|)) with r = log(A + eps) - c and x = 1.5."""
    q, k, v = qkv(x, w)
    q, k = unit(q), unit(k)
    fade, rate = decay(x, w, "decay"), sigmoid_gate(x, w, "rate")
    total, factors = torch.zeros_like(k[:, 0]), []
    for t in range(x.shape[1]):
        total = fade[:, t, :, None] * total + rate[:, t, :, None] * k[:, t] ** 2
        r = torch.log(total + 1e-6) - w["center"][:, None]
        factors.append(1.5 ** (-r / (1 + r.abs())))
    return out(x, written(x, w, q, k, v, torch.stack(factors, 1) * k, decay(x, w)), w)


def osdn(x: Tensor, w: Weights) -> Tensor:
    """Online Scaled DeltaNet (arXiv 2605.13473), by its authors' programs: the written key is d * k, d <- f d + (1 -
    d.s) s within [0, inf), s = k * k, f a sigmoid, d learned at first."""
    q, k, v = qkv(x, w)
    q, k = unit(q), unit(k)
    d, forget, factors = w["start"].clamp(min=0).expand_as(k[:, 0]), sigmoid_gate(x, w, "forget"), []
    for t in range(x.shape[1]):
        factors.append(d)
        s = k[:, t] ** 2
        d = (forget[:, t, :, None] * d + (1 - (d * s).sum(-1, keepdim=True)) * s).clamp(min=0)
    return out(x, written(x, w, q, k, v, torch.stack(factors, 1) * k), w)


def written(
    x: Tensor, w: Weights, q: Tensor, k: Tensor, v: Tensor, along: Tensor, alpha: Tensor | None = None
) -> Tensor:
    """Answers of M <- M alpha, M <- M + beta (v - M k) along^T."""
    beta, m, ys = lr_gate(x, w), start(x, w), []
    for t in range(x.shape[1]):
        m = m if alpha is None else scaled(m, alpha[:, t])
        m = m + outer(beta[:, t, :, None] * (v[:, t] - asked(m, k[:, t])), along[:, t])
        ys.append(asked(m, q[:, t]))
    return torch.stack(ys, 1)


def momentum_delta(x: Tensor, w: Weights) -> Tensor:
    """Momentum DeltaNet (arXiv 2605.05838): S <- mu S + eta (v - alpha M k) k^T, M <- alpha M + beta S, with bounds
    sin^2 and cos^2 of an angle on beta and alpha; q - d k is brought to unit length."""
    q, k, v = qkv(x, w)
    q, k = unit(q - w["d"].exp()[:, None] * k), unit(k)
    eta = 1 + torch.tanh(logits(x, w, "eta") / x.shape[-1] ** 0.5)
    angle = torch.arctan(eta * w["f"].exp())
    beta = torch.sin(angle) ** 2 * torch.sigmoid(logits(x, w, "b"))
    alpha = torch.cos(angle) ** 2 * decay(x, w, "alpha")
    mu = torch.exp((-w["mu.rate"].exp() * softplus(logits(x, w, "mu"))).clamp(min=-2))
    m, ys = start(x, w), []
    s = torch.zeros_like(m)
    for t in range(x.shape[1]):
        m = scaled(m, alpha[:, t])
        s = scaled(s, mu[:, t]) + outer(eta[:, t, :, None] * (v[:, t] - asked(m, k[:, t])), k[:, t])
        m = m + beta[:, t, :, None, None] * s
        ys.append(asked(m, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def oja(x: Tensor, w: Weights) -> Tensor:
    """The gated Oja rule of flash-linear-attention: M predicts the key from the value, of which every channel decays;
    there is no layer of it, and that its gates are sigmoids is ours."""
    q, k, v = qkv(x, w)
    q, k, v = unit(q), unit(k), unit(v)
    kept, beta = torch.sigmoid(logits_of_channels(x, w)), lr_gate(x, w)
    m, ys = start(x, w), []  # [B, H, P, V]
    for t in range(x.shape[1]):
        m = m * kept[:, t].unsqueeze(2)
        m = m + outer(beta[:, t, :, None] * (k[:, t] - asked(m, v[:, t])), v[:, t])
        ys.append(torch.einsum("bhpv,bhp->bhv", m, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def logits_of_channels(x: Tensor, w: Weights) -> Tensor:
    return torch.einsum("btd,hvd->bthv", x, w["retain_value.weight"]) + w["retain_value.bias"]


LAYERS: dict[str, Layer] = {
    "comba": comba,
    "pgdn": preconditioned,
    "pkda": preconditioned,
    "osdn": osdn,
    "momentum_delta": momentum_delta,
    "oja": oja,
}
