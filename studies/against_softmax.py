"""Attention weights of a kernel beside those of softmax: what `kernels` and `maps` share."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.phi import FeatureMap, Params


class Tokens(NamedTuple):
    """Queries `[Q, d]`, keys `[S, d]` and values `[S, d]` of one seed: normal, float64."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def drawn(cls, seed: int, d: int, queries: int, keys: int, scale: float = 1.0) -> Tokens:
        """Entries of q and k have the standard deviation `scale`, those of v have 1."""
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(count, d, generator=g, dtype=torch.float64) for count in (queries, keys, keys))
        return cls(scale * q, scale * k, v)

    def scores(self) -> Tensor:
        """q.k / sqrt(d)."""
        return self.q @ self.k.T / math.sqrt(self.q.shape[-1])

    def softmax(self) -> Tensor:
        """The weights to compare with."""
        return self.scores().softmax(-1)

    def kernel(self, phi: FeatureMap, params: Params, scale: float = 1.0) -> Tensor:
        """phi(scale q).phi(scale k) `[Q, S]`; token number i has position i."""
        q, k = (features(phi, params, scale * x) for x in (self.q, self.k))
        return q @ k.T


def features(phi: FeatureMap, params: Params, x: Tensor) -> Tensor:
    """phi of rows, with their numbers as positions where the map wants any."""
    position = torch.arange(x.shape[0], device=x.device) if phi.needs_position else None
    return phi(x, params, position=position)


def parameters(phi: FeatureMap, d: int, seed: int, dtype: torch.dtype = torch.float64) -> Params:
    """Fresh ones: random maps are drawn, learned maps stay untrained."""
    return phi.init(d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def normalised(kernel: Tensor) -> Tensor:
    """Weights: a row of kernel values over its sum; uniform where the sum is exactly 0."""
    total = kernel.sum(-1, keepdim=True)
    return torch.where(total == 0, 1 / kernel.shape[-1], kernel / total)


def distance(weights: Tensor, target: Tensor) -> float:
    """Mean total variation: the share of attention that goes to other keys. 1 at most if >= 0."""
    return float((weights - target).abs().sum(-1).mean() / 2)


def keys_in_use(weights: Tensor) -> float:
    """1 / sum w^2, averaged over queries: S when uniform, 1 when one key has it all."""
    return float((1 / weights.square().sum(-1)).mean())


def correlation(kernel: Tensor, target: Tensor) -> float:
    """Mean over queries of the correlation with the softmax weights; no normaliser is involved."""
    a, b = (x - x.mean(-1, keepdim=True) for x in (kernel, target))
    size = a.norm(dim=-1) * b.norm(dim=-1)
    return float(((a * b).sum(-1) / size.clamp(min=torch.finfo(a.dtype).tiny)).mean())


def output_error(weights: Tensor, target: Tensor, v: Tensor) -> float:
    """Median over queries of |read - softmax read|, over that of the plain mean of the values."""
    read, wanted = weights @ v, target @ v
    off = (read - wanted).norm(dim=-1).median()
    return float(off / (v.mean(0) - wanted).norm(dim=-1).median())
