"""Memory rules in the forms their papers print, one head, numpy float64.

k, q `[T, P]` are already features; v `[T, V]`; gates `[T]`. Letters are each paper's own.
"""

import numpy as np


def linear_attention(q, k, v, eps=0.0):
    """Katharopoulos et al. 2020: S += phi(k) v^T, z += phi(k), y = S^T phi(q) / (z.phi(q)+eps)."""
    s, z, out = np.zeros((k.shape[1], v.shape[1])), np.zeros(k.shape[1]), []
    for t in range(len(v)):
        s = s + np.outer(k[t], v[t])
        z = z + k[t]
        out.append(s.T @ q[t] / (z @ q[t] + eps))
    return np.array(out)


def fast_weights(q, k, v, beta):
    """Schlag et al. 2021: W += v_new phi(k)^T - vbar phi(k)^T, v_new = beta v + (1 - beta) vbar."""
    w, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        vbar = w @ k[t]
        new = beta[t] * v[t] + (1 - beta[t]) * vbar
        w = w + np.outer(new, k[t]) - np.outer(vbar, k[t])
        out.append(w @ q[t])
    return np.array(out), w


def gated_delta(q, k, v, alpha, beta):
    """Yang et al. 2024 (2412.06464): M = alpha M (I - beta k k^T) + beta v k^T."""
    m, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        m = alpha[t] * m @ (np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t]))
        m = m + beta[t] * np.outer(v[t], k[t])
        out.append(m @ q[t])
    return np.array(out), m


def gla(q, k, v, a):
    """Yang et al. 2023 (2312.06635): M = M Diag(a) + v k^T, a `[T, P]`."""
    m, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        m = m @ np.diag(a[t]) + np.outer(v[t], k[t])
        out.append(m @ q[t])
    return np.array(out), m


def titans_linear(q, k, v, theta, alpha, eta):
    """Behrouz et al. 2025 (2501.00663): S = eta S - theta (M k - v) k^T, M = (1 - alpha) M + S."""
    m = s = np.zeros((v.shape[1], k.shape[1]))
    out = []
    for t in range(len(v)):
        s = eta[t] * s - theta[t] * np.outer(m @ k[t] - v[t], k[t])
        m = (1 - alpha[t]) * m + s
        out.append(m @ q[t])
    return np.array(out), m, s


def longhorn(q, k, v, b):
    """Liu et al. 2024 (2407.14207), one rate for all channels: the proximal step solved exactly."""
    m, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        # argmin over X of b |X k - v|^2 / 2 + |X - M|^2 / 2, by its normal equations.
        normal = np.eye(k.shape[1]) + b[t] * np.outer(k[t], k[t])
        m = np.linalg.solve(normal.T, (m + b[t] * np.outer(v[t], k[t])).T).T
        out.append(m @ q[t])
    return np.array(out), m


def ttt_linear(q, k, v, eta, b):
    """Sun et al. 2024 (2407.04620) without LayerNorm: gradients at the mini-batch's first W."""
    w, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        if t % b == 0:
            w0 = w
        w = w - eta[t] * np.outer(w0 @ k[t] - v[t], k[t])
        out.append(w @ q[t])
    return np.array(out), w


def ttt(q, k, v, eta, b, params, gelu=None, eps=1e-6):
    """Sun et al. 2024: f(x) = x + LN(f_res(x)), the mini-batch form of its released code.

    params W1, b1 for f_res = W1 x + b1, or W1, b1, W2, b2 with gelu (value, slope) between. The
    code trains LN(z) towards v - k and differentiates the norm in closed form.
    """
    params, out = [np.array(item) for item in params], []
    for t in range(len(v)):
        if t % b == 0:
            w = [item.copy() for item in params]
        z1 = w[0] @ k[t] + w[1]
        x2 = gelu[0](z1) if gelu else None
        z2 = w[2] @ x2 + w[3] if gelu else z1
        width, std = len(z2), np.sqrt(z2.var() + eps)
        hat = (z2 - z2.mean()) / std
        e = hat - (v[t] - k[t])
        gz2 = (width * e - e.sum() - hat * (e * hat).sum()) / (width * std)
        grads = [np.outer(gz2, k[t]), gz2]
        if gelu:
            gz1 = (w[2].T @ gz2) * gelu[1](z1)
            grads = [np.outer(gz1, k[t]), gz1, np.outer(gz2, x2), gz2]
        params = [item - eta[t] * grad for item, grad in zip(params, grads, strict=True)]
        z = params[0] @ q[t] + params[1]
        if gelu:
            z = params[2] @ gelu[0](z) + params[3]
        out.append(q[t] + (z - z.mean()) / np.sqrt(z.var() + eps))
    return np.array(out), params


def sum_rule(q, k, v):
    """Schlag et al. 2021: W += v phi(k)^T, y = W phi(q)."""
    w, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        w = w + np.outer(v[t], k[t])
        out.append(w @ q[t])
    return np.array(out), w


def retnet(q, k, v, gamma):
    """Sun et al. 2023 (2307.08621), the parallel form of one head: (Q K^T / sqrt(d) * D) V."""
    steps = np.arange(len(v))
    decay = np.tril(gamma ** np.maximum(steps[:, None] - steps[None, :], 0))
    out = (q @ k.T / np.sqrt(k.shape[1]) * decay) @ v
    return out, (v * gamma ** (len(v) - 1 - steps)[:, None]).T @ k


def mamba2(x, b, c, dt, a):
    """Dao and Gu 2024 (2405.21060), one head: h = exp(-a dt) h + dt x B^T, y = h C."""
    h, out = np.zeros((x.shape[1], b.shape[1])), []
    for t in range(len(x)):
        h = np.exp(-a * dt[t]) * h + dt[t] * np.outer(x[t], b[t])
        out.append(h @ c[t])
    return np.array(out), h


def kda(q, k, v, alpha, beta):
    """Kimi Team 2025 (2510.26692): S = (I - beta k k^T) Diag(alpha) S + beta k v^T, y = S^T q."""
    s, out = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(v)):
        s = (np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t])) @ np.diag(alpha[t]) @ s
        s = s + beta[t] * np.outer(k[t], v[t])
        out.append(s.T @ q[t])
    return np.array(out), s.T


def dgd(q, k, v, eta, alpha):
    """Behrouz et al. 2025 (2512.24695), Eq 57: W = W (alpha I - c x x^T) - c grad_y L x^T.

    L = -<W x, v>. Printed c = eta / (1 + eta) holds for |x| = 1; in general |x|^2 joins eta.
    """
    w, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        c = eta[t] / (1 + eta[t] * k[t] @ k[t])
        surprise = -v[t]
        w = w @ (alpha[t] * np.eye(k.shape[1]) - c * np.outer(k[t], k[t]))
        w = w - c * np.outer(surprise, k[t])
        out.append(w @ q[t])
    return np.array(out), w


def mesa(q, k, v, ridge, beta):
    """von Oswald et al. 2025 (2506.05233) with gamma = 1: y = G (H + Lambda)^-1 q, a token weighs beta in both sums."""
    g, h = np.zeros((v.shape[1], k.shape[1])), np.zeros((k.shape[1], k.shape[1]))
    out, penalty = [], ridge * np.eye(k.shape[1])
    for t in range(len(v)):
        g, h = g + beta[t] * np.outer(v[t], k[t]), h + beta[t] * np.outer(k[t], k[t])
        out.append(g @ np.linalg.solve(h + penalty, q[t]))
    inverse = np.linalg.inv(h + penalty)
    return np.array(out), g @ inverse, inverse
