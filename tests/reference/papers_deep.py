"""Deep memories in the forms their papers print, one head, numpy float64.

k, q `[T, D]` are already normalised, v `[T, V]`, gates `[T]`; letters are each paper's own.
"""

from math import erf, exp, pi, sqrt

import numpy as np

# MIRAS (Behrouz et al. 2025, 2504.13173): M(x) = x + LN(W2 gelu(W1 x)), V = D.


@np.vectorize
def gelu(x):
    return x * (1 + erf(x / sqrt(2))) / 2


@np.vectorize
def gelu_slope(x):
    return (1 + erf(x / sqrt(2))) / 2 + x * exp(-x * x / 2) / sqrt(2 * pi)


def miras_read(w1, w2, x, eps=1e-6):
    z = w2 @ gelu(w1 @ x)
    return x + (z - z.mean()) / np.sqrt(z.var() + eps)


def miras_gradients(w1, w2, x, u, eps=1e-6):
    """Gradients by W1 and W2 from that by the prediction, through the norm."""
    z1 = w1 @ x
    h = gelu(z1)
    z2 = w2 @ h
    std = np.sqrt(z2.var() + eps)
    hat = (z2 - z2.mean()) / std
    g2 = (u - u.mean() - hat * (u * hat).mean()) / std
    return np.outer((w2.T @ g2) * gelu_slope(z1), x), np.outer(g2, h)


def cube_root(a, eps):
    """sign(a) |a|^(1/3), with its chord below eps, where its slope would be infinite."""
    return a * np.maximum(np.abs(a), eps) ** (-2 / 3)


def moneta(q, k, v, eta, alpha, w1, w2, eps):
    """A = alpha A - eta grad 1/3 |M(k) - v|_3^3, W = argmax of <A, W> - |W|_4^2 / 2.

    That is W = sign(A) |A|^(p-1) / |A|_p^(p-2) with p = 4/3, and with B = A^(1/3) B |B|_4^2. The
    paper prints A / |A|_4^2, which is no such argmax.
    """
    duals, out = [], []
    for w in (w1, w2):
        b = w / np.sum(w**4) ** (1 / 6)
        duals.append(b * np.maximum(np.abs(b), eps ** (1 / 3)) ** 2)
    for t in range(len(v)):
        e = miras_read(w1, w2, k[t]) - v[t]
        grads = miras_gradients(w1, w2, k[t], np.sign(e) * e**2)
        duals = [alpha[t] * a - eta[t] * g for a, g in zip(duals, grads, strict=True)]
        roots = [cube_root(a, eps) for a in duals]
        w1, w2 = (b * np.sum(b**4) ** (1 / 2) for b in roots)
        out.append(miras_read(w1, w2, q[t]))
    return np.array(out), w1, w2


def titans(q, k, v, lr, retain, momentum, w1, w2, floor=0.01):
    """Titans' memory W_2 tanh(W_1 k) that forgets towards its start, with steps of lr (1 - momentum) over the floor and
    a bound of |J|^2: |h|^2 of the last layer, |k|^2 |W_2 diag(tanh')|_F^2 of the first."""
    start, (s1, s2), out = (w1, w2), (0 * w1, 0 * w2), []
    for t in range(len(v)):
        h = np.tanh(w1 @ k[t])
        e, slope = w2 @ h - v[t], 1 - h**2
        bound = (1 + 1e-6) * (h @ h) + (np.sum((w2 * slope) ** 2) + 1e-6) * (k[t] @ k[t])
        step = lr[t] * (1 - momentum[t]) / (floor + bound)
        s1 = momentum[t] * s1 - step * np.outer((w2.T @ e) * slope, k[t])
        s2 = momentum[t] * s2 - step * np.outer(e, h)
        w1, w2 = (w0 + retain[t] * (w - w0) + s for w0, w, s in zip(start, (w1, w2), (s1, s2), strict=True))
        out.append(w2 @ np.tanh(w1 @ q[t]))
    return np.array(out), w1, w2, s1, s2


def yaad(q, k, v, eta, alpha, w1, w2, delta, eps):
    """W = W_0 + alpha (W - W_0) - eta grad: of |e|^2 / 2 if |e| <= delta, of delta |e|_1 beyond.

    |x| is sqrt(x^2 + eps^2), as the paper smooths it; it forgets towards zero, where this one's start W_0 is.
    """
    start, out = (w1, w2), []
    for t in range(len(v)):
        e = miras_read(w1, w2, k[t]) - v[t]
        u = e if np.linalg.norm(e) <= delta else delta * e / np.sqrt(e * e + eps**2)
        g1, g2 = miras_gradients(w1, w2, k[t], u)
        pairs = zip(start, (w1, w2), (g1, g2), strict=True)
        w1, w2 = (w0 + alpha[t] * (w - w0) - eta[t] * g for w0, w, g in pairs)
        out.append(miras_read(w1, w2, q[t]))
    return np.array(out), w1, w2


def simplex(logits, scale):
    e = np.exp(logits - logits.max(1, keepdims=True))
    return scale * e / e.sum(1, keepdims=True)


def memora(q, k, v, eta, alpha, w1, w2, scale):
    """A = alpha A - eta grad |M(k) - v|^2 / 2 from A = W_0, W = c softmax(A) by rows.

    The paper prints W = c softmax(alpha log(W) - eta grad): log(W / c) is A but for a constant per
    row, which alpha and the softmax leave without effect.
    """
    duals, out = [w1, w2], []
    for t in range(len(v)):
        w1, w2 = (simplex(a, scale) for a in duals)
        grads = miras_gradients(w1, w2, k[t], miras_read(w1, w2, k[t]) - v[t])
        duals = [alpha[t] * a - eta[t] * g for a, g in zip(duals, grads, strict=True)]
        out.append(miras_read(*(simplex(a, scale) for a in duals), q[t]))
    return np.array(out), *(simplex(a, scale) for a in duals)


# Test-Time Training Done Right (Zhang et al. 2025, 2505.23884).


QUINTIC = [(3.4445, -4.7750, 2.0315)] * 5  # Muon's
LACT = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def newton_schulz(s, steps=QUINTIC, eps=1e-7):
    """A quintic a step, which acts on singular values alone."""
    u, sigma, w = np.linalg.svd(s, full_matrices=False)
    x = sigma / np.sqrt(np.sum(s * s) + eps**2)
    for a, b, c in steps:
        x = a * x + b * x**3 + c * x**5
    return (u * x) @ w


def swiglu(weights, x):
    w1, w2, w3 = weights
    a = w1 @ x
    return w2 @ (a / (1 + np.exp(-a)) * (w3 @ x))


def swiglu_gradients(weights, x, u):
    w1, w2, w3 = weights
    a, b = w1 @ x, w3 @ x
    s = 1 / (1 + np.exp(-a))
    e = w2.T @ u
    return [np.outer(e * b * (s + a * s * (1 - s)), x), np.outer(u, a * s * b), np.outer(e * a * s, x)]


def rows(w):
    return w / np.linalg.norm(w, axis=1, keepdims=True)


def large_chunk(q, k, v, eta, beta, weights, chunk):
    """Apply, then update: G = sum eta_i grad -<f(k_i), v_i>, S = beta S + G, W = W - NS(S).

    eta `[T, 3]`, one for each matrix; beta is the last token's. Rows are then divided by their length and multiplied by
    the one they started with.
    """
    lengths = [np.linalg.norm(w, axis=1, keepdims=True) for w in weights]
    slots, out = [0 * w for w in weights], []
    sums = [0 * w for w in weights]
    for t in range(len(v)):
        out.append(swiglu(weights, q[t]))
        grads = swiglu_gradients(weights, k[t], -v[t])
        sums = [a + e * g for a, e, g in zip(sums, eta[t], grads, strict=True)]
        if (t + 1) % chunk == 0:
            slots = [beta[t] * s + g for s, g in zip(slots, sums, strict=True)]
            steps = [-newton_schulz(s, LACT) for s in slots]
            weights = [n * rows(w + d) for n, w, d in zip(lengths, weights, steps, strict=True)]
            sums = [0 * w for w in weights]
    return np.array(out), weights, slots, sums
