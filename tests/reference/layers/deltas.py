"""Layers of the delta rule."""

import torch
from torch import Tensor

from tests.reference.layers.parts import Layer, Weights, decay, lr_gate, out, qkv, start, unit


def delta(x: Tensor, w: Weights) -> Tensor:
    """DeltaNet (arXiv 2406.06484): q and k of unit length behind convolution and SiLU, beta a sigmoid."""
    q, k, v = qkv(x, w)
    return out(x, delta_rule(start(x, w), unit(q), unit(k), v, lr_gate(x, w)), w)


def kda(x: Tensor, w: Weights) -> Tensor:
    """Kimi Delta Attention (arXiv 2510.26692): decay of every channel from a head of low rank."""
    q, k, v = qkv(x, w)
    return out(x, delta_rule(start(x, w), unit(q), unit(k), v, lr_gate(x, w), decay(x, w)), w)


def delta_rule(m: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor | None = None) -> Tensor:
    """Answers of M <- M alpha (1 - beta k k^T) + beta v k^T; alpha per head or per channel."""
    ys = []
    for t in range(q.shape[1]):
        if alpha is not None:
            a = alpha[:, t, :, None] if alpha.dim() == 4 else alpha[:, t, :, None, None]
            m = m * a
        error = v[:, t] - torch.einsum("bhvp,bhp->bhv", m, k[:, t])
        m = m + torch.einsum("bhv,bhp->bhvp", beta[:, t, :, None] * error, k[:, t])
        ys.append(torch.einsum("bhvp,bhp->bhv", m, q[:, t]))
    return torch.stack(ys, 1)


LAYERS: dict[str, Layer] = {"delta": delta, "kda": kda}
