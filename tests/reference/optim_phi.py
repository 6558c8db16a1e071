"""Momentum on features of gradients in plain numpy: formulas, loops, no autograd, no hecate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


class Tanh:
    def __call__(self, x):
        return np.tanh(x)

    def pull(self, x, v):
        return (1 - np.tanh(x) ** 2) * v


class ELU:
    def __call__(self, x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def pull(self, x, v):
        return v * np.exp(np.minimum(x, 0))


class ReLU:
    def __call__(self, x):
        return np.maximum(x, 0)

    def pull(self, x, v):
        return v * (x > 0)


@dataclass
class Linear:
    w: np.ndarray  # [c, d_phi]

    def __call__(self, x):
        return x @ self.w

    def pull(self, x, v):
        return v @ self.w.T


@dataclass
class Fourier:
    w: np.ndarray  # [c, d_phi]
    b: np.ndarray  # [d_phi]

    def __call__(self, x):
        return np.sqrt(2 / len(self.b)) * np.cos(x @ self.w + self.b)

    def pull(self, x, v):
        return -np.sqrt(2 / len(self.b)) * (np.sin(x @ self.w + self.b) * v) @ self.w.T


class Quadratic:
    """[x, vec(x x^T)]."""

    def __call__(self, x):
        pairs = np.einsum("ni,nj->nij", x, x).reshape(len(x), -1)
        return np.concatenate([x, pairs], 1)

    def pull(self, x, v):
        c = x.shape[1]
        out = np.zeros_like(x)
        for n in range(len(x)):
            square = v[n, c:].reshape(c, c)
            out[n] = v[n, :c] + square @ x[n] + square.T @ x[n]
        return out


@dataclass
class PhiMomentum:
    """One parameter, a matrix `[r, c]`."""

    phi: Any
    lift: str = "identity"
    lr: float = 0.01
    momentum: float = 0.9
    form: str = "torch"
    space: str = "weight"
    odd: bool = False
    center: bool = True
    decoder: np.ndarray | None = None
    call: Any = None
    forget: float = 0.99
    ridge: float = 1e-6
    scale: str = "none"
    guard: str = "none"
    precondition: str | None = None
    retain: float = 0.99
    eps: float = 1e-8
    nesterov: bool = False
    dampening: float = 0.0
    decay: float = 0.0
    gain: float = 1.0
    state: dict[str, Any] = field(default_factory=dict)

    def gauge(self, c):
        """|u| / |g| of the Gaussian rows that the optimiser draws, the only thing read from it."""
        draws = torch.Generator().manual_seed(0)
        rows = torch.randn(32, c, generator=draws, dtype=torch.float64).numpy()
        x = self._scaled(rows)
        updates = self._lifted(self._features(x, rows), x, rows)
        return np.linalg.norm(updates) / np.linalg.norm(rows)

    def _scaled(self, g):
        out = g.copy()
        for row in out:
            length = np.sqrt((row**2).mean() if self.scale == "rms" else (row**2).sum())
            if self.scale != "none" and length > 0:
                row /= length
        return out

    def _features(self, x, g):
        length = np.linalg.norm(g, axis=1, keepdims=True) if self.scale == "restored" else 1
        if self.odd:
            return length * (self.phi(x) - self.phi(-x)) / 2
        return length * (self.phi(x) - (self.phi(np.zeros_like(x)) if self.center else 0))

    def _lifted(self, v, x, g):
        if self.lift == "identity":
            return v / self.gain
        if self.lift == "vjp":
            if self.odd:
                return (self.phi.pull(x, v) + self.phi.pull(-x, v)) / 2 / self.gain
            return self.phi.pull(x, v) / self.gain
        if self.lift == "prefix":
            return v[:, : x.shape[1]]
        if self.lift == "callable":
            return self.call(v, g)
        return v @ self.decoder

    def _learn(self, features, x):
        d, c = features.shape[1], x.shape[1]
        if "gram" not in self.state:
            self.state |= {"gram": np.zeros((d, d)), "cross": np.zeros((d, c))}
        kept = self.forget if features.any() else 1.0
        gram, cross = self.state["gram"] * kept, self.state["cross"] * kept
        for f, row in zip(features, x, strict=True):
            gram = gram + np.outer(f, f)
            cross = cross + np.outer(f, row)
        self.state |= {"gram": gram, "cross": cross}
        damped = gram + (self.ridge * np.trace(gram) / d + np.finfo(float).tiny) * np.eye(d)
        self.decoder = np.linalg.solve(damped, cross)

    def _preconditioned(self, u):
        s, keep = self.state, self.retain
        if self.precondition == "diagonal":
            s["v"] = keep * s.get("v", 0) + (1 - keep) * u**2
            return u / (np.sqrt(s["v"]) + self.eps)
        if self.precondition == "kronecker":
            s["l"] = keep * s.get("l", 0) + (1 - keep) * u @ u.T
            s["r"] = keep * s.get("r", 0) + (1 - keep) * u.T @ u
            return self._root(s["l"]) @ u @ self._root(s["r"])
        return u

    def _root(self, a):
        values, vectors = np.linalg.eigh(a)
        values = np.maximum(values, 0)
        return vectors @ np.diag((values + self.eps * values.max()) ** -0.25) @ vectors.T

    def _guarded(self, u, g):
        for i in range(len(u)):
            if u[i] @ g[i] < 0 and self.guard != "none":
                u[i] = 0 if self.guard == "skip" else -u[i]
        return u

    def step(self, w, g):
        x = self._scaled(g)
        features = self._features(x, g)
        if self.lift == "learned":
            self._learn(features, g if self.scale == "restored" else x)
        in_phi = self.space == "phi"
        written = features
        if not in_phi:
            u = self._lifted(features, x, g)
            written = self._preconditioned(self._guarded(u, g))
        gain = (1 - self.dampening) * (-self.lr if self.form == "hope" else 1)
        m = self.momentum * self.state.get("m", 0) + gain * written
        self.state["m"] = m
        if self.nesterov:
            m = (-self.lr if self.form == "hope" else 1) * written + self.momentum * m
        if in_phi:
            m = self._preconditioned(self._lifted(m, x, g))
        w = w * (1 - self.lr * self.decay)
        return w + m if self.form == "hope" else w - self.lr * m


def kernel_step(memory, w, g, phi, lr, momentum, *, columns=True, unit=True):
    """S <- momentum S + sum_j g_j phi~(g_j)^T, w_j <- w_j - lr S phi~(g_j): new S and w."""
    keys = g.T if columns else g
    memory = momentum * memory
    lifted = []
    for key in keys:
        length = np.sqrt(key @ key)
        x = key / length if unit and length > 0 else key
        lifted.append((phi(x[None]) - phi(0 * x[None]))[0])
        memory = memory + np.outer(key, lifted[-1])
    read = np.stack([memory @ f for f in lifted])
    return memory, w - lr * (read.T if columns else read)
