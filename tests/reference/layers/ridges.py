"""Layers that answer with the optimum of a ridge regression, solved anew at every token."""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tests.reference.layers.parts import (
    Layer,
    Weights,
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


def mesa(x: Tensor, w: Weights) -> Tensor:
    """MesaNet (arXiv 2506.05233) with gamma at 1: M_t = argmin sum_i beta_i |M k_i - v_i|^2 + lambda |M - M_0|^2."""
    q, k, v = qkv(x, w)
    q, k, beta, ridge = unit(q), unit(k), lr_gate(x, w), w.config["algorithm"]["ridge"]
    eye = torch.eye(k.shape[-1], dtype=x.dtype)
    h, g = ridge * eye.expand(*k[:, 0].shape, -1), ridge * start(x, w)
    ys = []
    for t in range(x.shape[1]):
        weight = beta[:, t, :, None]
        h, g = h + outer(weight * k[:, t], k[:, t]), g + outer(weight * v[:, t], k[:, t])
        ys.append((g @ torch.linalg.solve(h, q[:, t].unsqueeze(-1))).squeeze(-1))
    return out(x, torch.stack(ys, 1), w)


def gated_mesa(x: Tensor, w: Weights) -> Tensor:
    """MesaNet (arXiv 2506.05233): G <- gamma G + beta v k^T, H <- gamma H + beta k k^T, y = G (H + Lambda)^-1 q, Lambda
    of each channel at least 1/4."""
    q, k, v = qkv(x, w)
    q, k, beta, gamma = unit(q), unit(k), lr_gate(x, w), sigmoid_gate(x, w, "retain")
    penalty = torch.diag_embed(0.25 + softplus(w["r"]))
    h, g, ys = torch.zeros_like(outer(k[:, 0], k[:, 0])), start(x, w), []
    for t in range(x.shape[1]):
        weight = beta[:, t, :, None]
        h = scaled(h, gamma[:, t]) + outer(weight * k[:, t], k[:, t])
        g = scaled(g, gamma[:, t]) + outer(weight * v[:, t], k[:, t])
        ys.append((g @ torch.linalg.solve(h + penalty, q[:, t].unsqueeze(-1))).squeeze(-1))
    return out(x, torch.stack(ys, 1), w)


def gated_kalmanet(x: Tensor, w: Weights) -> Tensor:
    """Gated KalmaNet (arXiv 2511.21016): keys and values scaled by b + 1e-6, a ridge of 0.02 |H|_F, the query mixed
    with the solution by a gate; solved exactly."""
    q, k, v = qkv(x, w)
    b, alpha = sigmoid_gate(x, w, "lr").unsqueeze(-1) + 1e-6, decay(x, w)
    q, k, v = unit(q) / math.sqrt(q.shape[-1]), b * unit(k), b * v
    mix = sigmoid_gate(x, w, "mix")
    eye = torch.eye(k.shape[-1], dtype=x.dtype)
    h, g, ys = torch.zeros_like(outer(k[:, 0], k[:, 0])), start(x, w), []
    for t in range(x.shape[1]):
        h = scaled(h, alpha[:, t]) + outer(k[:, t], k[:, t])
        g = scaled(g, alpha[:, t]) + outer(v[:, t], k[:, t])
        ridge = 0.02 * h.flatten(-2).norm(dim=-1)[..., None, None]
        solved = torch.linalg.solve(h + ridge * eye, q[:, t].unsqueeze(-1)).squeeze(-1)
        share = mix[:, t, :, None]
        ys.append((g @ (share * solved + (1 - share) * q[:, t]).unsqueeze(-1)).squeeze(-1))
    return out(x, torch.stack(ys, 1), w)


LAYERS: dict[str, Layer] = {"mesa": mesa, "gated_mesa": gated_mesa, "gated_kalmanet": gated_kalmanet}
