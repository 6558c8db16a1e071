"""Memory rules of 2026 in the forms their papers print, one head, numpy float64.

q, k `[T, K]`, v `[T, V]`, gates `[T]` unless said otherwise, decays as factors and not as logarithms. Queries are read
as they are: the K^(-1/2) of most papers is the caller's. Matrix memories are returned `[V, K]`, whatever side of the
state a paper writes the keys on. Letters are each paper's own.
"""

import numpy as np


def gated_delta_2(q, k, v, alpha, b, w):
    """Hatamizadeh et al. 2026 (2605.22791): S = (I - k (b o k)^T) diag(alpha) S + k (w o v)^T, y = S^T q.

    alpha and the erase gate b `[T, K]`, the write gate w `[T, V]`.
    """
    s, out = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(v)):
        s = (np.eye(len(s)) - np.outer(k[t], b[t] * k[t])) @ np.diag(alpha[t]) @ s + np.outer(k[t], w[t] * v[t])
        out.append(s.T @ q[t])
    return np.array(out), s.T


def momentum_delta(q, k, v, alpha, beta, mu, eta, *, decayed=True):
    """Huang et al. 2026 (2605.05838): M = mu M - eta (S p - v) k^T, S = alpha S + beta M, y = S q.

    p = alpha k is the paper's; `decayed=False` is p = k. Returns y, S and M.
    """
    s = m = np.zeros((v.shape[1], k.shape[1]))
    out = []
    for t in range(len(v)):
        p = alpha[t] * k[t] if decayed else k[t]
        m = mu[t] * m - eta[t] * np.outer(s @ p - v[t], k[t])
        s = alpha[t] * s + beta[t] * m
        out.append(s @ q[t])
    return np.array(out), s, m


# Preconditioners: the written key is the read one times a factor that follows from keys and gates.


def curvature(k, decay, rate, x=1.5, eps=1e-6, center=-0.2):
    """The factors of Preconditioned DeltaNet (Tumma et al. 2026, 2604.21100) `[T, K]` for decay, rate `[T]`:

    A = decay A + rate k o k, r = log(A + eps) - center, factor = x^(-r / (1 + |r|)).
    """
    a, out = np.zeros(k.shape[1]), []
    for t in range(len(k)):
        a = decay[t] * a + rate[t] * k[t] ** 2
        r = np.log(a + eps) - center
        out.append(x ** (-r / (1 + np.abs(r))))
    return np.array(out)


def preconditioned_delta(q, k, v, factor, beta, alpha):
    """PGDN and PKDA: S = S diag(alpha), S = S - beta (S k - v) (factor o k)^T; alpha `[T]` or `[T, K]`."""
    s, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        s = s * alpha[t]
        s = s - beta[t] * np.outer(s @ k[t] - v[t], factor[t] * k[t])
        out.append(s @ q[t])
    return np.array(out), s


def hypergradient(k, forget, eta=1.0, start=0.0, *, divide=False, low=None, high=None):
    """The factors d of Online Scaled DeltaNet (Zhou et al. 2026, 2605.13473) `[T, K]`, as its authors' code has them:

    token t writes d_t o k; then d = forget_t d + eta (1 - d.(k o k)) k o k, clipped to [low, high]. beta is not in it;
    `divide` divides the gradient by |k|^2 + 1e-5.
    """
    d, out = np.full(k.shape[1], start), []
    for t in range(len(k)):
        out.append(d)
        square = k[t] ** 2
        gradient = (1 - d @ square) * square
        d = forget[t] * d + eta * (gradient / (square.sum() + 1e-5) if divide else gradient)
        d = d if low is None else np.clip(d, low, high)
    return np.array(out)


# Mamba-3.


def rotate(x, angle, *, halves=False):
    """Pairs of channels of x `[..., N]` turned by angle `[..., A]`, A <= N / 2: neighbours (2i, 2i + 1), or by
    `halves` (i, i + N / 2); pairs beyond A stay as they are."""
    half = x.shape[-1] // 2
    first, second = (slice(0, half), slice(half, None)) if halves else (slice(0, None, 2), slice(1, None, 2))
    out = np.empty_like(x)
    cos, sin = np.ones((*x.shape[:-1], half)), np.zeros((*x.shape[:-1], half))
    cos[..., : angle.shape[-1]], sin[..., : angle.shape[-1]] = np.cos(angle), np.sin(angle)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def mamba3(q, k, v, a, dt, trapezoid, angle, d=0.0):
    """Lahoti et al. 2026 (2603.15569), one input and one output: q and k turn by the cumulated angle `[T, A]`, and

    S = a S + (1 - trapezoid) dt a v_{t-1} k_{t-1}^T + trapezoid dt v k^T, y = S q + d v; a, dt, trapezoid `[T]`.
    """
    theta = np.cumsum(angle, 0) % (2 * np.pi)
    q, k = rotate(q, theta), rotate(k, theta)
    s, key, value, out = np.zeros((v.shape[1], k.shape[1])), np.zeros(k.shape[1]), np.zeros(v.shape[1]), []
    for t in range(len(v)):
        s = a[t] * s + (1 - trapezoid[t]) * dt[t] * a[t] * np.outer(value, key)
        s = s + trapezoid[t] * dt[t] * np.outer(v[t], k[t])
        out.append(s @ q[t] + d * v[t])
        key, value = k[t], v[t]
    return np.array(out), s


# Memories that are trained a chunk at a time.


def in_place_ttt(x, target, w_gate, w_up, w_down, conv, chunk, eta):
    """In-Place TTT (2604.06169): z = silu(W_gate x) o (W_up x), y = W_down z by the weights of the chunk's start,
    then W_down += eta sum over the chunk of v z^T, v the depthwise convolution of the chunk's targets alone.

    x `[T, D]`, target `[T, V]`, w_gate and w_up `[F, D]`, w_down `[V, F]`, conv `[5, V]`: taps -2 to 2, zeros beyond
    the chunk. A chunk that is not full does not step.
    """
    hidden = x @ w_gate.T
    z = hidden / (1 + np.exp(-hidden)) * (x @ w_up.T)
    out = []
    for at in range(0, len(x), chunk):
        rows = range(at, min(at + chunk, len(x)))
        out += [w_down @ z[t] for t in rows]
        if len(rows) < chunk:
            break
        for t in rows:
            v = np.zeros(target.shape[1])
            for tap in range(5):
                if at <= t + tap - 2 < at + chunk:
                    v = v + conv[tap] * target[t + tap - 2]
            w_down = w_down + eta * np.outer(v, z[t])
    return np.array(out), w_down
