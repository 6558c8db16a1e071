"""Linear memories whose papers are about the step, one head, numpy float64.

k, q `[T, P]` are already features; v `[T, V]`; gates `[T]`. Letters are each paper's own.
"""

import numpy as np

from tests.reference.papers_deep import newton_schulz


def window_gradient(m, k, v, t, window, gamma):
    """ATLAS (Behrouz et al. 2025, 2505.23735): the gradient of the last tokens' weighted loss."""
    total = np.zeros_like(m)
    for i in range(max(0, t - window + 1), t + 1):
        total = total + gamma ** (t - i) * np.outer(m @ k[i] - v[i], k[i])
    return total


def omeganet(q, k, v, eta, alpha, window, gamma):
    """M = M (alpha I - eta sum gamma_i k_i k_i^T) + eta sum gamma_i v_i k_i^T.

    The last sum is added: descent. Some texts print it with a minus.
    """
    m, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        ages = range(min(window, t + 1))
        erase = sum(gamma**a * np.outer(k[t - a], k[t - a]) for a in ages)
        write = sum(gamma**a * np.outer(v[t - a], k[t - a]) for a in ages)
        m = m @ (alpha[t] * np.eye(k.shape[1]) - eta[t] * erase) + eta[t] * write
        out.append(m @ q[t])
    return np.array(out), m


def atlas(q, k, v, eta, alpha, theta, window, gamma):
    """S = theta S + grad, M = alpha M - eta NS(S).

    With S = theta S - grad, as some texts have it, the same line would ascend.
    """
    m = s = np.zeros((v.shape[1], k.shape[1]))
    out = []
    for t in range(len(v)):
        s = theta[t] * s + window_gradient(m, k, v, t, window, gamma)
        m = alpha[t] * m - eta[t] * newton_schulz(s)
        out.append(m @ q[t])
    return np.array(out), m, s


def delta_momentum(q, k, v, eta, alpha, beta, erase):
    """Behrouz et al. 2025 (2512.24695), Eq 49: m = m (beta I - c g^T g) - eta g, W = alpha W + m.

    c is missing in print; c = b / (1 + b |g|^2) contracts.
    """
    w = m = np.zeros((v.shape[1], k.shape[1]))
    out = []
    for t in range(len(v)):
        g = np.outer(w @ k[t] - v[t], k[t])
        c = erase / (1 + erase * np.sum(g * g))
        m = m @ (beta[t] * np.eye(k.shape[1]) - c * g.T @ g) - eta[t] * g
        w = alpha[t] * w + m
        out.append(w @ q[t])
    return np.array(out), w, m


def deep_momentum(q, k, v, eta, alpha, beta, start, rate):
    """Eq 50: W = alpha W + eta m(g), m = beta m - c grad of |m(g) + g|^2 / 2, by rows of g.

    m(x) = W2 tanh(W1 x); beta pulls W1 back to its start. The printed objective is <m(g), 1>,
    which does not know the sign of g. The paper leaves the step c open: here rate over 1 + rate
    times a bound of the objective's curvature, beyond which a step would not contract.
    """
    w, w1, w2 = np.zeros((v.shape[1], k.shape[1])), start, 0 * start.T
    out = []
    for t in range(len(v)):
        g = np.outer(w @ k[t] - v[t], k[t])
        d1, d2, bound = 0 * w1, 0 * w2, 0.0
        for row in g:
            h = np.tanh(w1 @ row)
            e = w2 @ h + row
            bound += np.sum(h**2) + np.sum(w2**2) * np.sum(row**2)
            d1, d2 = d1 + np.outer((w2.T @ e) * (1 - h * h), row), d2 + np.outer(e, h)
        c = rate / (1 + rate * bound)
        w1, w2 = start + beta[t] * (w1 - start) - c * d1, beta[t] * w2 - c * d2
        w = alpha[t] * w + eta[t] * np.array([w2 @ np.tanh(w1 @ row) for row in g])
        out.append(w @ q[t])
    return np.array(out), w, w1 - start, w2
