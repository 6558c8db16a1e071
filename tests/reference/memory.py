"""A memory token by token, for one sequence and one head, in straight-line numpy float64.

Arrays: q, k `[T, D]`, v `[T, V]`, gates `[T]` (retain also `[T, P]`); weights are lists of
matrices, one for a matrix memory, several for a multilayer perceptron.
"""

from dataclasses import dataclass, field
from math import erf, exp, pi, sqrt

import numpy as np

EPS = 1e-6


@dataclass
class Rule:
    bias: str = "l2"
    p: float = 3.0
    eps: float = 1e-6
    delta: float = 1.0
    norm: bool = False
    decay: bool = False
    towards: str = "zero"
    momentum: bool = False
    activation: str = "gelu"
    residual: bool = False
    gated: bool = False
    norm_eps: float | None = None
    biased: bool = False
    chunk: int = 1
    commit: str = "token"
    read: str = "after"
    decay_order: str = "with_step"
    normalizer: str = "none"
    key_norm: str = "none"
    query_scale: str = "none"
    step: str = "raw"
    phi: object = field(default=lambda x: x)


@dataclass
class State:
    weights: list
    slots: list
    anchor: list
    pending: list
    kept: object
    position: int
    first: list | None = None


def start(weights):
    zeros = [np.zeros_like(w) for w in weights]
    return State(list(weights), zeros, list(weights), zeros, 1.0, 0, list(weights))


def scan(rule, q, k, v, lr, retain, momentum, weights, write=None, reset=None):
    """Outputs `[T, V]` and the final state."""
    steps = len(v)
    write = np.ones(steps, bool) if write is None else write
    reset = np.zeros(steps, bool) if reset is None else reset
    state, sums = start(weights), start([np.zeros((1, weights[0].shape[-1]))])
    rows = []
    for t in range(steps):
        if reset[t]:
            state, sums = start(weights), start([np.zeros((1, weights[0].shape[-1]))])
        old, old_sums = state, sums
        if write[t]:
            p = normalised(rule.key_norm, rule.phi(k[t]))
            rate = step_size(rule.step, lr[t], p)
            gates = rate, retain[t], momentum[t]
            state = written(rule, state, p, v[t], *gates)
            # The sum of weights is a memory of the value 1 under the Hebbian bias.
            sums = written(counting(rule), sums, p, np.ones(1), *gates)
        p = normalised(rule.key_norm, rule.phi(q[t]))
        if rule.query_scale == "key_dim":
            p = p / sqrt(len(q[t]))
        late = rule.read == "after"
        y = predict(rule, (state if late else old).weights, p)[-1]
        if rule.normalizer == "sum":
            total = ((sums if late else old_sums).weights[0] @ p).item()
            y = y / (total if total > 0 else 1.0)
        rows.append(y)
    return np.array(rows).reshape(steps, -1), state


def written(rule, state, p, v, lr, retain, momentum):
    """The state after one write."""
    retain = retain if rule.decay else 1.0
    anchor = state.weights
    if rule.chunk > 1 and rule.commit == "token":
        anchor = state.weights if state.position == 0 else state.anchor
    # What the chunk has kept so far, this token's gate included; 1 where a chunk begins.
    kept, first = state.kept * retain, anchor
    if rule.decay_order == "before_gradient":
        anchor = [kept * w + lost(rule, kept) * w0 for w, w0 in zip(first, state.first or first, strict=True)]
    z = predict(rule, anchor, p)
    grads = backprop(rule, anchor, p, z, loss_gradient(rule, z[-1], v))
    position = (state.position + 1) % rule.chunk
    if rule.commit == "chunk":
        pending = [a + lr * g for a, g in zip(state.pending, grads, strict=True)]
        if position:
            return State(state.weights, state.slots, first, pending, kept, position, state.first)
        descent, retain = pending, kept
    else:
        descent = [lr * g for g in grads]
    carried = momentum if rule.momentum else 0.0
    slots = [carried * s - g for s, g in zip(state.slots, descent, strict=True)]
    rows = zip(state.weights, slots, state.first or state.weights, strict=True)
    weights = [retain * w + s + lost(rule, retain) * w0 for w, s, w0 in rows]
    kept = kept if position else 1.0
    return State(weights, slots, first, [0 * w for w in weights], kept, position, state.first)


def lost(rule, retain):
    """What of the start takes the place of what was forgotten."""
    return 1 - retain if rule.towards == "start" else 0.0


def predict(rule, weights, p):
    """Pre-activations of every layer; the last one is the prediction."""
    if rule.gated:
        return [gated(rule, weights, p)]
    z, h = [], p
    for w, b in layers(rule, weights):
        z.append(w @ h + b)
        h = np.array([ACTIVATIONS[rule.activation][0](x) for x in z[-1]])
    if rule.norm_eps is not None:
        z[-1] = (z[-1] - z[-1].mean()) / sqrt(z[-1].var() + rule.norm_eps)
    if rule.residual:
        z[-1] = z[-1] + p
    return z


def layers(rule, weights):
    """Matrix and bias of each layer; a bias is a column."""
    if rule.biased:
        return [(w, b[:, 0]) for w, b in zip(weights[::2], weights[1::2], strict=True)]
    return [(w, 0.0) for w in weights]


def gated(rule, weights, p):
    """W2 (act(W1 p) * (W3 p))."""
    value = np.vectorize(ACTIVATIONS[rule.activation][0])
    w1, w2, w3 = weights
    return w2 @ (value(w1 @ p) * (w3 @ p))


def gated_gradients(rule, weights, p, u):
    value, slope = (np.vectorize(item) for item in ACTIVATIONS[rule.activation])
    w1, w2, w3 = weights
    a, b, e = w1 @ p, w3 @ p, w2.T @ u
    return [np.outer(e * b * slope(a), p), np.outer(u, value(a) * b), np.outer(e * value(a), p)]


def norm_gradient(rule, weights, p, u):
    """The cotangent below the norm, through its Jacobian written out."""
    bare = predict(changed(rule, norm_eps=None, residual=False), weights, p)[-1]
    n, std = len(bare), sqrt(bare.var() + rule.norm_eps)
    y = (bare - bare.mean()) / std
    jacobian = (np.eye(n) - 1 / n - np.outer(y, y) / n) / std
    return jacobian.T @ u


def backprop(rule, weights, p, z, u):
    if rule.gated:
        return gated_gradients(rule, weights, p, u)
    value, slope = ACTIVATIONS[rule.activation]
    grads, d = [], u if rule.norm_eps is None else norm_gradient(rule, weights, p, u)
    matrices = [w for w, _ in layers(rule, weights)]
    for index in reversed(range(len(matrices))):
        below = p if index == 0 else np.array([value(x) for x in z[index - 1]])
        grads = [np.outer(d, below), *([d[:, None]] if rule.biased else []), *grads]
        if index:
            d = (matrices[index].T @ d) * np.array([slope(x) for x in z[index - 1]])
    return grads


def loss(rule, pred, v):
    e = pred - v
    if rule.bias == "dot":
        return -(pred @ v)
    if rule.bias == "l2":
        return 0.5 * e @ e
    if rule.bias == "lp":
        size = abs(e) if rule.p >= 2 else np.sqrt(e**2 + rule.eps**2) - rule.eps
        return np.sum(size**rule.p) / rule.p
    sizes = [sqrt(e @ e)] if rule.norm else abs(e)
    return sum(s**2 / 2 if s <= rule.delta else rule.delta * (s - rule.delta / 2) for s in sizes)


def loss_gradient(rule, pred, v):
    if rule.bias == "dot":
        return -v
    e = pred - v
    if rule.bias == "l2":
        return e
    if rule.bias == "lp" and rule.p >= 2:
        return np.sign(e) * abs(e) ** (rule.p - 1)
    if rule.bias == "lp":
        r = np.sqrt(e**2 + rule.eps**2)
        return (r - rule.eps) ** (rule.p - 1) * e / r
    if rule.norm:
        return e * min(1.0, rule.delta / max(sqrt(e @ e), 1e-300))
    return np.array([min(max(x, -rule.delta), rule.delta) for x in e])


def normalised(kind, p):
    total = {"none": 1.0, "l2": sqrt(p @ p), "sum": p.sum()}[kind]
    return p / total if total > 0 else p


def step_size(kind, lr, p):
    return (
        lr / {"raw": 1.0, "normalized": EPS + p @ p, "key_normalized": EPS + p @ p, "implicit": 1 + lr * (p @ p)}[kind]
    )


def counting(rule):
    """A matrix under the Hebbian bias, with the same conventions."""
    plain = {"residual": False, "gated": False, "norm_eps": None, "biased": False}
    return changed(rule, bias="dot", **plain)


def changed(rule, **fields):
    return Rule(**{**rule.__dict__, **fields})


def elu(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def _sigmoid(x):
    return 1 / (1 + exp(-x))


ACTIVATIONS = {
    "gelu": (
        lambda x: x * (1 + erf(x / sqrt(2))) / 2,
        lambda x: (1 + erf(x / sqrt(2))) / 2 + x * exp(-x * x / 2) / sqrt(2 * pi),
    ),
    "silu": (lambda x: x * _sigmoid(x), lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "relu": (lambda x: max(x, 0.0), lambda x: float(x > 0)),
}
