"""Layers whose memory is a sum of values by keys, with what each token keeps of it."""

import math

import torch
from torch import Tensor
from torch.nn.functional import elu, logsigmoid, silu, softplus

from tests.reference.layers.parts import Layer, Weights, asked, logits, out, outer, qkv, root_mean, scaled, start


def hebbian(x: Tensor, w: Weights) -> Tensor:
    """Fast weights by the sum rule (arXiv 2102.11174): W <- W + v k^T with linear q, k and v."""
    q, k, v = qkv(x, w, active=False)
    return out(x, summed(start(x, w), q, k, v), w)


def linear_attention(x: Tensor, w: Weights) -> Tensor:
    """Transformers are RNNs (arXiv 2006.16236): phi = elu + 1, divided by the sum of what keys weigh."""
    q, k, v = qkv(x, w, active=False)
    q, k = elu(q) + 1, elu(k) + 1
    # A memory that does not start empty adds its start to the values alone.
    return out(x, summed(start(x, w), q, k, v) / (k.cumsum(1) * q).sum(-1, keepdim=True), w)


def retnet(x: Tensor, w: Weights) -> Tensor:
    """RetNet (arXiv 2307.08621): gamma_h = 1 - 2^(-5-h), q and k turned by their position (`turned`)."""
    q, k, v = qkv(x, w, active=False)
    if "turned" in w.published:
        q, k = turned(q), turned(k)
    gamma = 1 - torch.exp2(-5 - torch.arange(w.heads, dtype=x.dtype))
    return out(x, summed(start(x, w), q / math.sqrt(q.shape[-1]), k, v, gamma.expand(*x.shape[:2], -1)), w)


def turned(x: Tensor) -> Tensor:
    """Rotary embedding: pairs (i, i + D/2) turn by t 10000^(-2 i / D)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 10000 ** (-torch.arange(half, dtype=x.dtype) / half)
    cosine, sine = torch.cos(angles).unsqueeze(1), torch.sin(angles).unsqueeze(1)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)


def gla(x: Tensor, w: Weights) -> Tensor:
    """Gated Linear Attention (arXiv 2312.06635): every channel keeps sigmoid(W_2 W_1 x + b)^(1/16)."""
    q, k, v = qkv(x, w, active=False)
    kept = torch.exp(logsigmoid(logits(x, w, "retain").unflatten(-1, (w.heads, -1))) / 16)
    return out(x, summed(start(x, w), q / math.sqrt(q.shape[-1]), k, v, kept), w)


def mamba2(x: Tensor, w: Weights) -> Tensor:
    """Mamba-2 (arXiv 2405.21060): h <- exp(-A dt) h + dt x B^T, y = h C + D x. B and C are of each head (shared ones
    are rows that repeat), without a bias of the convolution. D starts at 1 (`skip_start`)."""
    c, b, v = qkv(x, w)
    dt = softplus(logits(x, w, "dt"))
    y = summed(start(x, w), c, b, dt.unsqueeze(-1) * v, torch.exp(-w["rate"].exp() * dt))
    d = torch.ones_like(w["d"]) if "skip_start" in w.published else w["d"]
    return out(x, y + d[:, None] * v, w)


def mamba3(x: Tensor, w: Weights) -> Tensor:
    """Mamba-3 (arXiv 2603.15569), one input and one output: trapezoidal steps, B and C normalised, biased and turned by
    angles of the data, no convolution."""
    c, b, v = qkv(x, w, active=False)
    heads, width = w.heads, c.shape[-1]
    dt = softplus(logits(x, w, "dt"))
    kept = torch.exp(-softplus(logits(x, w, "a")).clamp(min=1e-4) * dt)
    share = torch.sigmoid(logits(x, w, "trapezoid"))
    c, b = root_mean(c, 1e-6) + w["q_bias"], root_mean(b, 1e-6) + w["k_bias"]
    pace = (x @ w["angle.weight"].mT).unflatten(-1, (heads, -1))
    theta = torch.cumsum(dt.unsqueeze(-1) * math.pi * torch.tanh(pace), 1)
    spin = torch.polar(torch.ones_like(theta), theta)

    def spun(item: Tensor) -> Tensor:
        pairs = torch.view_as_complex(item[..., : 2 * theta.shape[-1]].unflatten(-1, (-1, 2)).contiguous()) * spin
        return torch.cat([torch.view_as_real(pairs).flatten(-2), item[..., 2 * theta.shape[-1] :]], -1)

    assert 2 * theta.shape[-1] <= width
    c, b = spun(c), spun(b)
    m, ys = start(x, w), []
    for t in range(x.shape[1]):
        m = scaled(m, kept[:, t])
        if t:
            before = ((1 - share) * dt * kept)[:, t, :, None]
            m = m + outer(before * v[:, t - 1], b[:, t - 1])
        m = m + outer((share * dt)[:, t, :, None] * v[:, t], b[:, t])
        ys.append(asked(m, c[:, t]))
    return out(x, torch.stack(ys, 1) + w["d"][:, None] * v, w)


def hgrn2(x: Tensor, w: Weights) -> Tensor:
    """HGRN2 (arXiv 2404.07904), by the released layer: q behind SiLU, f the logit of what is kept, 1 - sigmoid(f) the
    key. a f + b is our start of f, for its lower bound."""
    q, f, v = qkv(x, w, active=False)
    kept = torch.sigmoid(w["a"] * f + w["b"])
    return out(x, summed(start(x, w), silu(q), 1 - kept, v, kept), w)


def mlstm(x: Tensor, w: Weights) -> Tensor:
    """The mLSTM (arXiv 2405.04517): C <- f C + exp(i) v k^T, n <- f n + exp(i) k, h = C q / max(|n q|, 1)."""
    q, k, v = qkv(x, w)
    i, f = logits(x, w, "i"), torch.sigmoid(logits(x, w, "f"))
    q, lr = q / math.sqrt(q.shape[-1]), torch.exp(i).unsqueeze(-1)
    sums = summed(torch.zeros_like(k[:, 0]).unsqueeze(2), q, k, lr, f)
    return out(x, summed(start(x, w), q, k, lr * v, f) / sums.abs().clamp(min=1), w)


def raven(x: Tensor, w: Weights) -> Tensor:
    """Raven by its layer in flash-linear-attention: q, k and v behind SiLU, q and k of unit root mean square, a router
    to slots that share out one decay. Its answers go through SiLU (`answers`)."""
    q, k, v = (silu((x @ w[f"{name}.weight"].mT).unflatten(-1, (w.heads, -1))) for name in "qkv")
    q, k = root_mean(q), root_mean(k)
    scores = torch.sigmoid(logits(x, w, "slots"))
    top = scores.topk(min(32, scores.shape[-1]), -1)
    chosen = torch.zeros_like(scores).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    g = -w["share.rate"].exp() * softplus(logits(x, w, "share"))
    kept = torch.exp(g.unsqueeze(-1) * chosen)
    # Slots [B, H, M]: keys [B, H, M, D], values [B, H, M, V]; keys start empty.
    keys = torch.zeros(len(x), w.heads, kept.shape[-1], k.shape[-1], dtype=x.dtype)
    values, ys = start(x, w).mT, []
    for t in range(x.shape[1]):
        keys = kept[:, t].unsqueeze(-1) * keys + outer(1 - kept[:, t], k[:, t])
        values = kept[:, t].unsqueeze(-1) * values + outer(1 - kept[:, t], v[:, t])
        z = torch.softmax(asked(keys, q[:, t]), -1)
        ys.append(asked(values.mT, z))
    y = torch.stack(ys, 1)
    return out(x, silu(y) if "answers" in w.published else y, w)


def summed(m: Tensor, q: Tensor, k: Tensor, v: Tensor, retain: Tensor | None = None) -> Tensor:
    """Answers of M <- M retain + v k^T, retain per head or per channel."""
    ys = []
    for t in range(q.shape[1]):
        m = (m if retain is None else scaled(m, retain[:, t])) + outer(v[:, t], k[:, t])
        ys.append(asked(m, q[:, t]))
    return torch.stack(ys, 1)


LAYERS: dict[str, Layer] = {
    "hebbian": hebbian,
    "linear_attention": linear_attention,
    "retnet": retnet,
    "gla": gla,
    "mamba2": mamba2,
    "mamba3": mamba3,
    "hgrn2": hgrn2,
    "mlstm": mlstm,
    "raven": raven,
}
