"""From logits to gates: the heads that papers of 2024 to 2026 put before their memories, numpy float64.

Logits are `[T]` or `[T, ...]` with a last axis of channels; learned numbers broadcast to them. Decays come as factors.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(x, 0.0)


def mamba_decay(x, a_log, dt_bias):
    """exp(-exp(A_log) softplus(x + dt_bias)): gated DeltaNet, Comba, KDA, GDN-2, PGDN, KalmaNet.

    A_log is the log of U(1, 16) or U(0, 16) per head; dt_bias the inverse softplus of dt, log-uniform in [1e-3, 1e-1].
    """
    return np.exp(-np.exp(a_log) * softplus(x + dt_bias))


def inverse_softplus(dt):
    """dt_bias of a dt, without the overflow of log(exp(dt) - 1)."""
    return dt + np.log(-np.expm1(-dt))


def bounded_decay(x, a_log, dt_bias, lowest=-5.0):
    """Erase-then-delta, Eq 15: exp(l (1 - exp(-A/|l| softplus(x + dt_bias)))), within (exp(l), 1] for l < 0."""
    return np.exp(lowest - lowest * np.exp(-np.exp(a_log) / abs(lowest) * softplus(x + dt_bias)))


def gated_delta_2(erase, write, *, reflections=False):
    """b and w of GDN-2, each a sigmoid of a projection without bias; reflections double b and not w."""
    return (2.0 if reflections else 1.0) * sigmoid(erase), sigmoid(write)


def delta_product(x, *, reflections=True):
    """beta `[T, n]` of DeltaProduct: 2 sigmoid, so that a write may reflect."""
    return (2.0 if reflections else 1.0) * sigmoid(x)


def rwkv7_decay(x):
    """w = exp(-e^(-1/2) sigmoid(x)), x = w0 + tanh(u W1) W2: within (exp(-e^(-1/2)), 1) = (0.5452, 1)."""
    return np.exp(-np.exp(-0.5) * sigmoid(x))


def rwkv7_value(v, first, x):
    """v + (v_first - v) sigmoid(x), v_first of the first layer."""
    return v + (first - v) * sigmoid(x)


def momentum_delta(eta, beta, alpha, mu, f, a_log, mu_log, dt_bias, mu_bias, d_model, lowest=-2.0):
    """eta, beta, alpha, mu of Momentum DeltaNet from their logits `[T]`; f, a_log, mu_log and biases are a head's.

    eta = 1 + tanh(x / sqrt(d_model)), theta = arctan(eta f); beta = sin(theta)^2 sigmoid(x),
    alpha = cos(theta)^2 exp(-A softplus(x + dt_bias)), log mu = max(-A_mu softplus(x + mu_bias), lowest).
    """
    eta = 1 + np.tanh(eta / np.sqrt(d_model))
    theta = np.arctan(eta * f)
    decay = np.cos(theta) ** 2 * np.exp(-np.exp(a_log) * softplus(alpha + dt_bias))
    carry = np.exp(np.maximum(-np.exp(mu_log) * softplus(mu + mu_bias), lowest))
    return eta, np.sin(theta) ** 2 * sigmoid(beta), decay, carry


def mamba3(dt, a, trapezoid, angle, dt_bias, floor=1e-4):
    """a, dt, trapezoid `[T]` and the angle `[T, A]` a token adds: dt = softplus(x + dt_bias),
    a = exp(min(-softplus(x), -floor) dt), trapezoid = sigmoid(x), angle = dt pi tanh(x)."""
    dt = softplus(dt + dt_bias)
    return np.exp(np.minimum(-softplus(a), -floor) * dt), dt, sigmoid(trapezoid), dt[:, None] * np.pi * np.tanh(angle)


def mesa_ridge(x, floor=0.25):
    """The ridge of MesaNet `[K]`: floor + softplus(x); it starts at 1."""
    return floor + softplus(x)


def kalmanet(beta, mix, eps=1e-6):
    """beta = sigmoid(x) + eps, which scales keys and values alike, and mix = sigmoid(x)."""
    return sigmoid(beta) + eps, sigmoid(mix)


def kalman_delta(omega, r, start, r_floor=0.01, start_floor=0.1):
    """omega = softplus(x) `[T, K]`, r = floor + softplus(x) `[T]` and the first precision floor + softplus(x)."""
    return softplus(omega), r_floor + softplus(r), start_floor + softplus(start)


def q_delta(x, offset=0.9):
    """lambda = sigmoid(x - offset)."""
    return sigmoid(x - offset)


def comba(x):
    """c = sigmoid(x), x = 1 at first."""
    return sigmoid(x)


def hgrn2(x, bound):
    """f = bound + (1 - bound) sigmoid(x) `[T, K]`."""
    return bound + (1 - bound) * sigmoid(x)


def hgrn2_bounds(x):
    """Lower bounds of all layers `[layers, K]` from learned x: a softmax over layers, cumulated, 0 at the first."""
    e = np.exp(x - x.max(0))
    share = e / e.sum(0)
    return np.cumsum(share, 0) - share[:1]


def gsa(x, divisor=8.0):
    """alpha = sigmoid(x)^(1/divisor), and what is written, 1 - alpha `[T, m]`."""
    alpha = sigmoid(x) ** (1 / divisor)
    return 1 - alpha, alpha


def raven(router, strength, top):
    """alpha `[T, m]` of Raven: log alpha = strength c, c the `top` largest sigmoids of a token's router logits, brought
    to the sum 1; strength <= 0 `[T]`. A slot that is not chosen keeps all, alpha = 1."""
    scores, c = sigmoid(router), np.zeros_like(router)
    for t, row in enumerate(scores):
        chosen = np.argsort(-row)[:top]
        c[t, chosen] = row[chosen] / row[chosen].sum()
    return np.exp(strength[:, None] * c)


def retnet(heads):
    """gamma `[H]` = 1 - 2^(-5 - h)."""
    return 1 - 2.0 ** (-5.0 - np.arange(heads))


def log_linear(x, level):
    """lambda `[T, L]` = softplus(level o x), level `[L]` learned, of ones at first."""
    return softplus(level * x)
