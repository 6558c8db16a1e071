"""Inner algorithms in numpy: one matrix memory under l2, token by token, from the papers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray
Step = Callable[[Array, Array, Array, Array, float, float], Array]


def scan(step: Step, k: Array, v: Array, lr: Array, momentum: Array) -> Array:
    """States `[T, V, P]` of `M <- M + step(M, k, v, gradient of |M k - v|^2 / 2, lr, momentum)`."""
    memory = np.zeros((v.shape[1], k.shape[1]))
    states = []
    for t in range(len(k)):
        gradient = np.outer(memory @ k[t] - v[t], k[t])
        memory = memory + step(memory, k[t], v[t], gradient, lr[t], momentum[t])
        states.append(memory)
    return np.stack(states)


def nesterov() -> Step:
    s = 0.0

    def step(memory, k, v, g, lr, momentum):
        nonlocal s
        s = momentum * s - lr * g
        return momentum * s - lr * g

    return step


SCHEDULE = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]  # of the released code of Zhang et al. 2025 (2505.23884)


def newton_schulz(polynomial: str, steps: int, rescale: bool) -> Step:
    """The polynomial acts on the singular values alone."""
    rows = {"quintic": [(3.4445, -4.7750, 2.0315)] * steps, "cubic": [(1.5, -0.5, 0.0)] * steps, "schedule": SCHEDULE}
    s = 0.0

    def step(memory, k, v, g, lr, momentum):
        nonlocal s
        s = momentum * s + g
        u, sigma, w = np.linalg.svd(s, full_matrices=False)
        length = np.sqrt((s**2).sum() + 1e-14)
        x = sigma / length
        for a, b, c in rows[polynomial][:steps]:
            x = a * x + b * x**3 + c * x**5
        found = (u * x) @ w
        return -lr * found * (length / np.sqrt(min(s.shape)) if rescale else 1.0)

    return step


def adaptive(decay: float, eps: float) -> Step:
    mean = square = 0.0

    def step(memory, k, v, g, lr, momentum):
        nonlocal mean, square
        mean = momentum * mean + (1 - momentum) * g
        square = decay * square + (1 - decay) * g * g
        return -lr * mean / np.sqrt(square + eps**2)

    return step


def delta_momentum(form: str, erase: float) -> Step:
    s = None

    def step(memory, k, v, g, lr, momentum):
        nonlocal s
        s = np.zeros_like(g) if s is None else s
        c = erase / (1 + erase * np.linalg.norm(g) ** 2) if form == "stable" else 1.0
        s = s @ (momentum * np.eye(g.shape[1]) - c * g.T @ g) - lr * g
        return s

    return step


def ftrl(l1: float, l2: float) -> Step:
    """The memory is at every token the minimiser of the regularised sum of all gradients."""
    total = 0.0

    def step(memory, k, v, g, lr, momentum):
        nonlocal total
        total = total - lr * g
        return np.sign(total) * np.maximum(np.abs(total) - l1, 0) / (1 + l2) - memory

    return step


def implicit() -> Step:
    """The proximal step as the solution of its normal equations."""

    def step(memory, k, v, g, lr, momentum):
        left = np.eye(len(k)) + lr * np.outer(k, k)
        return np.linalg.solve(left, (memory + lr * np.outer(v, k)).T).T - memory

    return step


def rls(ridge: float, discount: float) -> Step:
    """Ridge regression on all tokens so far, solved afresh at each."""
    keys: list[Array] = []
    values: list[Array] = []

    def step(memory, k, v, g, lr, momentum):
        keys.append(k)
        values.append(v)
        weights = discount ** np.arange(len(keys))[::-1]
        x, y = np.stack(keys), np.stack(values)
        left = (x.T * weights) @ x + ridge * discount ** len(keys) * np.eye(len(k))
        return np.linalg.solve(left, (x.T * weights) @ y).T - memory

    return step


def omega(window: int, decay: float, heavy: bool) -> Step:
    """Gradient of the weighted loss of the last tokens; `heavy` passes it through momentum."""
    past: list[tuple[Array, Array]] = []
    s = 0.0

    def step(memory, k, v, g, lr, momentum):
        nonlocal s
        past.append((k, v))
        recent = past[-window:][::-1]
        total = sum(decay**a * np.outer(memory @ x - y, x) for a, (x, y) in enumerate(recent))
        s = (momentum * s if heavy else 0.0) - lr * total
        return s

    return step


def deep_momentum(start: Array, rate: float, objective: str) -> Step:
    w_in, w_out = start, np.zeros(start.T.shape)

    def step(memory, k, v, g, lr, momentum):
        nonlocal w_in, w_out
        grad_in, grad_out, curvature = np.zeros_like(w_in), np.zeros_like(w_out), 0.0
        for row in g:
            hidden = np.tanh(w_in @ row)
            if objective == "descent":
                curvature += hidden @ hidden + (w_out**2).sum() * (row @ row)
            error = w_out @ hidden + row if objective == "descent" else np.ones_like(row)
            grad_out += np.outer(error, hidden)
            grad_in += np.outer((w_out.T @ error) * (1 - hidden**2), row)
        step_size = rate / (1 + rate * curvature)
        w_in = start + momentum * (w_in - start) - step_size * grad_in
        w_out = momentum * w_out - step_size * grad_out
        return lr * np.stack([w_out @ np.tanh(w_in @ row) for row in g])

    return step
