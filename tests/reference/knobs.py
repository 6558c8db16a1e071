"""Losses and retentions in numpy float64, one weight of one memory at a time.

Retentions with a link carry their dual state from token to token and never invert anything: the
memory is only ever computed from it. Those without carry the memory.
"""

from math import exp, log, sqrt

import numpy as np

from tests.reference import memory as plain

# Losses: (pred, v) -> number, and their gradients by pred.


def l1(pred, v, eps=1e-6):
    e = pred - v
    loss = sum(sqrt(x * x + eps * eps) - eps for x in e)
    return loss, np.array([x / sqrt(x * x + eps * eps) for x in e])


def yaad(pred, v, delta=1.0, eps=1e-6):
    e = pred - v
    if sqrt(sum(x * x for x in e)) <= delta:
        return 0.5 * sum(x * x for x in e), e
    loss, sign = l1(pred, v, eps)
    return delta * (loss - delta / 2), delta * sign


def robust(pred, v, radius=0.1, eps=1e-6):
    e = pred - v
    r = sqrt(e @ e + eps * eps)
    loss = e @ e / 2 + radius * (r - eps) + radius**2 / 2
    return loss, e + radius * e / r


def kl(pred, v, target="softmax", temperature=1.0):
    share = softmax(pred)
    told = softmax(v / temperature) if target == "softmax" else v
    loss = sum(t * log(t / s) for t, s in zip(told, share, strict=True) if t > 0)
    return loss, share - told


def l2(pred, v):
    return (pred - v) @ (pred - v) / 2, pred - v


LOSSES = {"l1": l1, "yaad": yaad, "robust": robust, "kl": kl, "l2": l2}


def softmax(x):
    e = np.array([exp(value - max(x)) for value in x])
    return e / e.sum()


# Retentions: start(weights) -> carried, advance(carried, D, retain) -> carried, memory(carried).


class Decayed:
    """A dual state that starts at the initial weights; the memory is a function of it."""

    def start(self, weights):
        return weights

    def advance(self, carried, direction, retain):
        return retain * carried + direction

    def memory(self, carried):
        return carried


class Softmax(Decayed):
    def __init__(self, scale=1.0):
        self.scale = scale

    def memory(self, carried):
        return np.array([self.scale * softmax(row) for row in carried])


class Banks:
    """Two non-negative banks, told the same with opposite signs, on one simplex per row."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def start(self, weights):
        return self._shared(np.exp(weights), np.exp(-weights))

    def advance(self, carried, direction, retain):
        more, less = carried
        return self._shared(more**retain * np.exp(direction), less**retain * np.exp(-direction))

    def memory(self, carried):
        return carried[0] - carried[1]

    def _shared(self, more, less):
        total = (more + less).sum(1, keepdims=True) / self.scale
        return more / total, less / total


class Sigmoid(Decayed):
    def __init__(self, low=0.0, high=1.0):
        self.low, self.high = low, high

    def memory(self, carried):
        return self.low + (self.high - self.low) / (1 + np.exp(-carried))


class Lq(Decayed):
    def __init__(self, q=4.0, form="exact"):
        self.q, self.form, self.p = q, form, q / (q - 1)

    def start(self, weights):
        if self.form == "exact":
            return weights_to_dual(weights, self.q)
        weights = weights + weights.size ** (-1 / self.q)
        size = norm(weights, self.q) ** (1 / (3 - self.q))  # |A|, from |M| = |A|^(3-q)
        return weights * size ** (self.q - 2)

    def memory(self, carried):
        if self.form == "paper":
            return carried / norm(carried, self.q) ** (self.q - 2)
        return weights_to_dual(carried, self.p)


def weights_to_dual(w, q):
    """Gradient of 1/2 |W|_q^2."""
    return np.sign(w) * abs(w) ** (q - 1) / norm(w, q) ** (q - 2)


def norm(x, q):
    return np.sum(abs(x) ** q) ** (1 / q)


class ElasticNet(Decayed):
    def __init__(self, threshold):
        self.threshold = threshold

    def advance(self, carried, direction, retain):
        moved = retain * carried + direction
        shrunk = [0.0 if abs(x) <= self.threshold else x - np.sign(x) * self.threshold for x in moved.ravel()]
        return np.array(shrunk).reshape(moved.shape)


class Coupled(Decayed):
    def advance(self, carried, direction, retain):
        return retain * (carried + direction)


class Sphere(Decayed):
    """Slots are columns, or rows; each turns by the part of D at a right angle to it, or is added
    to and brought back to its length."""

    def __init__(self, slot="column", form="tangent"):
        self.slot, self.form = slot, form

    def start(self, weights):
        weights = weights.T if self.slot == "column" else weights
        rows = [row + np.eye(len(row))[i % len(row)] for i, row in enumerate(weights)]
        if self.form == "tangent":
            rows = [row / sqrt(row @ row) for row in rows]
        return self._turned(rows)

    def advance(self, carried, direction, retain):
        if self.slot == "column":
            carried, direction = carried.T, direction.T
        rows = []
        for slot, d in zip(carried, direction, strict=True):
            if self.form == "divide":
                moved = retain * slot + d
                rows.append(moved * sqrt((slot @ slot) / (moved @ moved)))
                continue
            moved = retain * slot + d - slot * (slot @ d)
            rows.append(moved / sqrt(moved @ moved))
        return self._turned(rows)

    def _turned(self, rows):
        return np.array(rows).T if self.slot == "column" else np.array(rows)


class Capped(Decayed):
    """The memory of an inner retention that carries memories, kept within a ball."""

    def __init__(self, norm, inner):
        self.norm, self.inner = norm, inner

    def start(self, weights):
        return self._fit(self.inner.start(weights))

    def advance(self, carried, direction, retain):
        return self._fit(self.inner.advance(carried, direction, retain))

    def _fit(self, memory):
        length = sqrt(np.sum(memory**2))
        return memory if length <= self.norm else memory * self.norm / length


def scan(loss, retention, q, k, v, lr, retain, momentum, weights):
    """Outputs `[T, V]` and the final memories of a matrix (one weight) or a silu MLP (several)."""
    rule = plain.Rule(activation="silu")
    carried = [retention.start(w) for w in weights]
    slots = [np.zeros_like(w) for w in weights]
    rows = []
    for t in range(len(v)):
        memory = [retention.memory(c) for c in carried]
        z = plain.predict(rule, memory, k[t])
        grads = plain.backprop(rule, memory, k[t], z, loss(z[-1], v[t])[1])
        slots = [momentum[t] * s - lr[t] * g for s, g in zip(slots, grads, strict=True)]
        carried = [retention.advance(c, s, retain[t]) for c, s in zip(carried, slots, strict=True)]
        rows.append(plain.predict(rule, [retention.memory(c) for c in carried], q[t])[-1])
    return np.array(rows), [retention.memory(c) for c in carried]


def lattice(q, k, v, lr, mu, slots):
    """Slots S `[m, d]` of unit length, keys of width m: h = S^T k - v, S_i turned by k_i h."""
    rows = []
    for t in range(len(v)):
        h = slots.T @ k[t] - v[t]
        moved = []
        for i, s in enumerate(slots):
            delta = k[t, i] * (h - s * (s @ h))
            s = mu[t] * s - lr[t] * delta
            moved.append(s / np.linalg.norm(s))
        slots = np.array(moved)
        rows.append(slots.T @ q[t])
    return np.array(rows), slots
