"""From logits to gates: the heads that papers of 2024 to 2026 put before their memories, numpy float64.

Logits are `[T]` or `[T, ...]` with a last axis of channels; learned numbers broadcast to them. Decays come as factors.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(x, 0.0)


def gated_delta_2(erase, write, *, reflections=False):
    """b and w of GDN-2, each a sigmoid of a projection without bias; reflections double b and not w."""
    return (2.0 if reflections else 1.0) * sigmoid(erase), sigmoid(write)


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


def comba(x):
    """c = sigmoid(x), x = 1 at first."""
    return sigmoid(x)


def hgrn2(x, bound):
    """f = bound + (1 - bound) sigmoid(x) `[T, K]`."""
    return bound + (1 - bound) * sigmoid(x)


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
