"""Memory rules of 2025, and the gated ones before them, in the forms their papers print: one head, numpy float64.

q, k `[T, K]`, v `[T, V]`, gates `[T]` unless said otherwise, decays as factors and not as logarithms. Queries are read
as they are: the K^(-1/2) of most papers is the caller's. Matrix memories are returned `[V, K]`, whatever side of the
state a paper writes the keys on. Letters are each paper's own.
"""

import numpy as np


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


# Products of writes.


def gated_delta_product(q, k, v, beta, alpha):
    """Siems et al. 2025 (2502.10297): S = alpha S, then S = (I - beta_j k_j k_j^T) S + beta_j k_j v_j^T for j = 1..n.

    k `[T, n, K]`, v `[T, n, V]`, beta `[T, n]`; alpha = 1 is DeltaProduct without a gate.
    """
    (steps, n, d), s, out = k.shape, np.zeros((k.shape[2], v.shape[2])), []
    for t in range(steps):
        s = alpha[t] * s
        for j in range(n):
            s = (np.eye(d) - beta[t, j] * np.outer(k[t, j], k[t, j])) @ s + beta[t, j] * np.outer(k[t, j], v[t, j])
        out.append(s.T @ q[t])
    return np.array(out), s.T


def dplr(q, k, v, a, b, w):
    """The generalised delta rule: S = S diag(w) + (S a) b^T + v k^T; w of ones leaves I + a b^T. a, b, w `[T, K]`."""
    s, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        s = s @ np.diag(w[t]) + np.outer(s @ a[t], b[t]) + np.outer(v[t], k[t])
        out.append(s @ q[t])
    return np.array(out), s


def rwkv7_keys(k, a, xi, alpha):
    """Removal key kappa^ = normalize(k o xi) and replacement key k~ = k o (1 + (a - 1) o alpha) of RWKV-7.

    k and the in-context learning rate a `[T, K]`; the learned xi and alpha `[K]`.
    """
    return unit(k * xi), k * (1 + (a - 1) * alpha)


def rwkv7(r, w, k, v, a, xi, alpha):
    """Peng et al. 2025 (2503.14456): S = S (diag(w) - kappa^ (a o kappa^)^T) + v k~^T, y = S r. w `[T, K]`."""
    kappa, replacement = rwkv7_keys(k, a, xi, alpha)
    s, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        s = s @ (np.diag(w[t]) - np.outer(kappa[t], a[t] * kappa[t])) + np.outer(v[t], replacement[t])
        out.append(s @ r[t])
    return np.array(out), s


# The closed loop, and the flow.


def comba(q, k, v, alpha, beta, c=1.0, d=0.0):
    """Hu et al. 2025 (2506.02475): S = alpha S - beta (alpha S c k - v) k^T, y = S (q - d c k); c, d numbers."""
    s, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        s = alpha[t] * s
        p = c * k[t]
        s = s + beta[t] * np.outer(v[t] - s @ p, k[t])
        out.append(s @ (q[t] - d * p))
    return np.array(out), s


def efla(q, k, v, beta):
    """Lei et al. 2025 (2512.12602): S = (I - g k k^T) S + g k v^T, g = (1 - exp(-beta l)) / l, l = |k|^2."""
    s, out = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(v)):
        l = k[t] @ k[t]  # noqa: E741 - the paper's lambda
        g = -np.expm1(-beta[t] * l) / l if l > 0 else beta[t]
        s = (np.eye(len(s)) - g * np.outer(k[t], k[t])) @ s + g * np.outer(k[t], v[t])
        out.append(s.T @ q[t])
    return np.array(out), s.T


def exponential(a):
    """The exponential of a square matrix: its Taylor series after six halvings, squared back."""
    total = term = np.eye(len(a))
    for i in range(1, 26):
        term = term @ a / (64 * i)
        total = total + term
    for _ in range(6):
        total = total @ total
    return total


# Read-outs by a ridge regression.


def mesa(q, k, v, gamma, beta, ridge):
    """von Oswald et al. 2025 (2506.05233): G = gamma G + beta v k^T, H = gamma H + beta k k^T,
    y = G (H + diag(ridge))^(-1) q; ridge `[K]`."""
    g, h, out = np.zeros((v.shape[1], k.shape[1])), np.zeros((k.shape[1], k.shape[1])), []
    for t in range(len(v)):
        g = gamma[t] * g + beta[t] * np.outer(v[t], k[t])
        h = gamma[t] * h + beta[t] * np.outer(k[t], k[t])
        out.append(g @ np.linalg.solve(h + np.diag(ridge), q[t]))
    return np.array(out), g, h


def mesa_least_squares(q, k, v, gamma, beta, ridge):
    """The same as the regression it stands for: min over W of sum_i c_i |W k_i - v_i|^2 + sum_p ridge_p |W e_p|^2."""
    out = []
    for t in range(len(v)):
        weight = np.sqrt([beta[i] * np.prod(gamma[i + 1 : t + 1]) for i in range(t + 1)])[:, None]
        rows = np.vstack([weight * k[: t + 1], np.diag(np.sqrt(ridge))])
        targets = np.vstack([weight * v[: t + 1], np.zeros((len(ridge), v.shape[1]))])
        out.append(np.linalg.lstsq(rows, targets, rcond=None)[0].T @ q[t])
    return np.array(out)


def gated_kalmanet(q, k, v, gamma, beta, mix, ratio=0.02):
    """Peng et al. 2025 (2511.21016): x = (H + ratio |H|_F I)^(-1) q, y = U (mix x + (1 - mix) q).

    H and U gather k k^T and v k^T of keys and values that are both scaled by beta: a token weighs beta^2.
    """
    u, h, out = np.zeros((v.shape[1], k.shape[1])), np.zeros((k.shape[1], k.shape[1])), []
    for t in range(len(v)):
        key, value = beta[t] * k[t], beta[t] * v[t]
        u, h = gamma[t] * u + np.outer(value, key), gamma[t] * h + np.outer(key, key)
        x = np.linalg.solve(h + ratio * np.linalg.norm(h) * np.eye(len(h)), q[t])
        out.append(u @ (mix[t] * x + (1 - mix[t]) * q[t]))
    return np.array(out), u, h


def chebyshev(h, ridge, q, steps):
    """(H + ridge I)^(-1) q by the iteration of Gated KalmaNet, the spectrum in [ridge, ridge + |H|_F]."""
    size = np.linalg.norm(h)
    scale, rho = 2 / (2 * ridge + size), (size / (2 * ridge + size)) ** 2 / 4
    x, before, omega = scale * q, np.zeros_like(q), 2.0
    for _ in range(steps):
        omega = 1 / (1 - rho * omega)
        residual = h @ x + ridge * x - q
        x, before = omega * x - scale * omega * residual - (omega - 1) * before, x
    return x


# Gated linear attention.


def retention(q, k, v, gamma):
    """Sun et al. 2023 (2307.08621), all heads, recurrently: S = gamma S + v k^T, y = S q / sqrt(K).

    q, k `[H, T, K]`, v `[H, T, V]`, gamma `[H]`.
    """
    out, states = [], []
    for head in range(len(gamma)):
        s, rows = np.zeros((v.shape[2], k.shape[2])), []
        for t in range(v.shape[1]):
            s = gamma[head] * s + np.outer(v[head, t], k[head, t])
            rows.append(s @ q[head, t] / np.sqrt(k.shape[2]))
        out.append(rows)
        states.append(s)
    return np.array(out), np.array(states)


def hgrn2(o, f, i):
    """Qin et al. 2024 (2404.07904): h = diag(f) h + (1 - f) i^T, y = h^T o; o, f `[T, K]`, i `[T, V]`."""
    h, out = np.zeros((f.shape[1], i.shape[1])), []
    for t in range(len(i)):
        h = np.diag(f[t]) @ h + np.outer(1 - f[t], i[t])
        out.append(h.T @ o[t])
    return np.array(out), h.T


def mlstm(q, k, v, i, f):
    """Beck et al. 2024 (2405.04517): C = f C + exp(i) v k^T, n = f n + exp(i) k, y = C q / max(|n.q|, 1).

    The input gate's logit i and the factor f `[T]`.
    """
    c, n, out = np.zeros((v.shape[1], k.shape[1])), np.zeros(k.shape[1]), []
    for t in range(len(v)):
        c, n = f[t] * c + np.exp(i[t]) * np.outer(v[t], k[t]), f[t] * n + np.exp(i[t]) * k[t]
        out.append(c @ q[t] / max(abs(n @ q[t]), 1.0))
    return np.array(out), c, n


# Memories of two passes, and of keys predicted from values.


def gated_oja(q, k, v, beta, gate):
    """The gated Oja rule of flash-linear-attention: S = diag(gate) S, S = S + beta v (k - S^T v)^T, y = S q.

    The key is predicted from the value; gate `[T, V]`, v of unit length for stability.
    """
    s, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        s = np.diag(gate[t]) @ s
        s = s + beta[t] * np.outer(v[t], k[t] - s.T @ v[t])
        out.append(s @ q[t])
    return np.array(out), s


def gsa(q, k, v, s, alpha):
    """Zhang et al. 2024 (2409.07146): K~ = diag(alpha) K~ + s k^T, V~ = diag(alpha) V~ + s v^T over m slots,
    y = V~^T softmax(K~ q); what a token writes s and what a slot keeps alpha `[T, m]`."""
    keys, values, out = np.zeros((s.shape[1], k.shape[1])), np.zeros((s.shape[1], v.shape[1])), []
    for t in range(len(v)):
        keys = np.diag(alpha[t]) @ keys + np.outer(s[t], k[t])
        values = np.diag(alpha[t]) @ values + np.outer(s[t], v[t])
        out.append(values.T @ softmax(keys @ q[t]))
    return np.array(out), keys, values


def abc(q, k, v, s):
    """Peng et al. 2021 (2110.02488): slot i holds the mean of keys and of values, weighed by exp(s_i); s `[T, m]`."""
    out = []
    for t in range(len(v)):
        weight = np.exp(s[: t + 1] - s.max(0))
        weight = weight / weight.sum(0)
        out.append((weight.T @ v[: t + 1]).T @ softmax(weight.T @ k[: t + 1] @ q[t]))
    return np.array(out)


def abc_gates(s):
    """What ABC writes and keeps as gates of `gsa`: Z = logcumsumexp(s), s' = exp(s - Z), alpha = exp(Z_{t-1} - Z_t),
    and alpha = 1 at the first token, which has nothing to keep."""
    z = np.logaddexp.accumulate(s)
    return np.exp(s - z), np.exp(np.concatenate([z[:1], z[:-1]]) - z)


# Many memories.


def log_linear(q, k, v, alpha, scale, beta=None):
    """Guo et al. 2025 (2506.04761), a Fenwick tree of memories: before token t > 0 the levels 0..l, l the trailing
    zeros of t, are summed into level l + 1 and emptied; then all decay, level 0 takes the token, y = sum_l scale S_l q.

    scale `[T, L]` with L > log2(T - 1) + 1. With beta the gated delta rule: every level goes through
    alpha (I - beta k k^T), and level 0 alone takes beta v k^T.
    """
    levels, out = np.zeros((scale.shape[1], v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        if t:
            low = (t & -t).bit_length() - 1
            levels[low + 1] += levels[: low + 1].sum(0)
            levels[: low + 1] = 0
        rate = 1.0 if beta is None else beta[t]
        levels = alpha[t] * levels
        if beta is not None:
            levels = levels - rate * np.einsum("lvk,k,c->lvc", levels, k[t], k[t])
        levels[0] += rate * np.outer(v[t], k[t])
        out.append(np.einsum("l,lvk,k->v", scale[t], levels, q[t]))
    return np.array(out), levels


def log_linear_masks(q, k, v, alpha, scale, beta=None):
    """The same as weights of all pairs: token s is at t in level bit_length(t xor s)."""
    out = np.zeros_like(v)
    for t in range(len(v)):
        x = q[t]
        for s in range(t, -1, -1):
            rate = 1.0 if beta is None else beta[s]
            out[t] += scale[t, (t ^ s).bit_length()] * rate * (k[s] @ x) * v[s]
            x = alpha[s] * (x if beta is None else x - rate * k[s] * (k[s] @ x))
    return out


def tnt(q, k, v, eta_global, eta_local, chunk, local, restart, v0, w0):
    """Li et al. 2025 (2511.07343) for linear memories, gradients (W k - v) k^T:

    y_t = V q_t + W_t P_t q_t; V takes one step after each `chunk` from all its tokens; W steps from the weights at the
    start of each `local` chunk, and starts again at w0 every `restart` tokens; P sums k k^T / |k|^2 over the local
    chunk, token t among it. v0, w0 `[V, K]`, eta `[T]`; `restart` is a multiple of `local`.
    """
    weight, w, out = v0, w0, []
    for t in range(len(v)):
        if t % chunk == 0:
            step = np.zeros_like(v0)
        if t % restart == 0:
            w = w0
        if t % local == 0:
            anchor, p = w, np.zeros((k.shape[1], k.shape[1]))
        w = w - eta_local[t] * np.outer(anchor @ k[t] - v[t], k[t])
        p = p + np.outer(k[t], k[t]) / (k[t] @ k[t])
        out.append(weight @ q[t] + w @ p @ q[t])
        step = step + eta_global[t] * np.outer(weight @ k[t] - v[t], k[t])
        if t % chunk == chunk - 1:
            weight = weight - step
    return np.array(out), weight, w
