"""Muon, M3, delta and deep momentum and DGD in plain numpy, from their formulas, one matrix."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

QUINTIC, CUBIC = [(3.4445, -4.7750, 2.0315)] * 5, [(1.5, -0.5, 0.0)] * 5


def newton_schulz(u, coefficients=QUINTIC, eps=1e-7):
    """By the singular values: each goes through a polynomial a s + b s^3 + c s^5 a step."""
    left, s, right = np.linalg.svd(u / max(np.sqrt((u**2).sum()), eps), full_matrices=False)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return left @ np.diag(s) @ right


def adjustment(how, rows, columns):
    return {
        "original": np.sqrt(max(1, rows / columns)),
        "match_rms_adamw": 0.2 * np.sqrt(max(rows, columns)),
        "none": 1.0,
    }[how]


@dataclass
class Muon:
    lr: float
    momentum: float = 0.95
    nesterov: bool = True
    decay: float = 0.1
    coefficients: list = field(default_factory=lambda: QUINTIC)
    how: str = "original"
    m: np.ndarray | float = 0.0

    def step(self, w, g):
        self.m = self.momentum * self.m + (1 - self.momentum) * g
        u = self.momentum * self.m + (1 - self.momentum) * g if self.nesterov else self.m
        ratio = adjustment(self.how, *w.shape)
        return w - self.lr * self.decay * w - self.lr * ratio * newton_schulz(u, self.coefficients)


@dataclass
class M3:
    lr: float
    momentum: float = 0.95
    slow_momentum: float = 0.9
    slow: float = 0.5
    slow_period: int = 3
    slow_from: str = "close"
    accumulate: str = "ema_mean"
    second_moment: str = "none"
    vector: str = ""  # "adam", "row": how a vector is treated; "" for matrices
    retain: float = 0.99
    decay: float = 0.0
    eps: float = 1e-7
    past: list = field(default_factory=list)
    late: np.ndarray | float = 0.0

    def average(self, items, rate):
        """What the recursion comes to: a weighted sum, and the sum of its weights."""
        if self.accumulate == "sum":
            return rate * sum(items), 1.0
        weights = [(1 - rate) * rate ** (len(items) - 1 - i) for i in range(len(items))]
        return sum(a * x for a, x in zip(weights, items, strict=True)), 1 - rate ** len(items)

    def root(self):
        v, share = self.average([g**2 for g in self.past], self.retain)
        return np.sqrt(v / share) + self.eps

    def output(self, items, rate):
        m, share = self.average(items, rate)
        if self.vector == "adam":
            return m / share
        return newton_schulz(m / self.root() if self.second_moment == "before" else m)

    def step(self, w, g):
        self.past.append(g)
        f, t, late = self.slow_period, len(self.past), self.late
        if t % f == 0:
            windows = [self.past[i : i + f] for i in range(0, t, f)]
            read = {"sum": sum, "ema_mean": lambda x: sum(x) / f, "ema_last": lambda x: x[-1]}[self.accumulate]
            self.late = self.output([read(x) for x in windows], self.slow_momentum)
        late = self.late if self.slow_from == "close" else late
        u = self.output(self.past, self.momentum) + self.slow * late
        if self.vector == "adam" or self.second_moment == "after":
            u = u / self.root()
        ratio = 1.0 if self.vector == "adam" else adjustment("original", *w.shape)
        return w - self.lr * self.decay * w - self.lr * ratio * u


@dataclass
class DeltaMomentum:
    lr: float
    momentum: float = 0.9
    erase: float = 1.0
    reading: str = "matrix"
    form: str = "stable"
    decay: float = 0.0
    m: np.ndarray | None = None

    def factor(self, square):
        return self.erase / (1 + self.erase * square) if self.form == "stable" else self.erase

    def step(self, w, g):
        m = np.zeros_like(w) if self.m is None else self.m
        square, eye = (g**2).sum(), np.eye(w.shape[1])
        if self.reading == "scalar":
            kept = self.momentum - self.erase * square
            m = (max(0.0, kept) if self.form == "stable" else kept) * m
        elif self.reading == "matrix":
            m = m @ (self.momentum * eye - self.factor(square) * g.T @ g)
        else:
            m = np.stack(
                [
                    a @ (self.momentum * eye - self.factor((b**2).sum()) * np.outer(b, b))
                    for a, b in zip(m, g, strict=True)
                ]
            )
        self.m = m + g
        return w - self.lr * self.decay * w - self.lr * self.m


@dataclass
class DeepMomentum:
    lr: float
    start: np.ndarray  # W_1 [width, c]
    momentum: float = 0.9
    rate: float = 0.1
    objective: str = "descent"
    decay: float = 0.0
    scaled: bool = False
    orthogonal: bool = False

    def __post_init__(self):
        self.length = 1.0
        self.w1, self.w2 = self.start.copy(), np.zeros(self.start.T.shape)

    def train(self, rows):
        """One step of the network on the sum over rows."""
        if self.scaled:
            kept = rows[np.any(rows != 0, axis=1)]
            self.length = np.sqrt((kept**2).mean())
        rows = rows / self.length
        d1, d2 = np.zeros_like(self.w1), np.zeros_like(self.w2)
        hidden = [np.tanh(self.w1 @ g) for g in rows]
        for g, h in zip(rows, hidden, strict=True):
            error = self.w2 @ h + g if self.objective == "descent" else np.ones_like(g)
            d2 += np.outer(error, h)
            d1 += np.outer((self.w2.T @ error) * (1 - h**2), g)
        c = self.rate
        if self.objective == "descent":
            bound = sum((h**2).sum() for h in hidden) + (self.w2**2).sum() * (rows**2).sum()
            c = c / (1 + c * bound)
        self.w1 = self.start + self.momentum * (self.w1 - self.start) - c * d1
        self.w2 = self.momentum * self.w2 - c * d2

    def read(self, w, g):
        u = np.stack([self.length * self.w2 @ np.tanh(self.w1 @ (row / self.length)) for row in g])
        u = newton_schulz(u) if self.orthogonal else u
        return w - self.lr * self.decay * w + self.lr * u

    def step(self, w, g):
        self.train(g)
        return self.read(w, g)


def dgd(w, x, g, lr, batch="mean", decay=0.0):
    """One step on samples x [n, in] with the gradients g [n, out] of their own losses."""
    new, eye = (1 - lr * decay) * w, np.eye(w.shape[1])
    at = w.copy()
    for a, b in zip(x, g, strict=True):
        c = lr / (1 + lr * a @ a)
        if batch == "mean":
            new -= c * (np.outer(w @ a, a) + np.outer(b, a)) / len(x)
        else:
            at = at @ (eye - c * np.outer(a, a)) - c * np.outer(b, a)
    return new if batch == "mean" else at - lr * decay * w
