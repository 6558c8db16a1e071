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


def erase_then_delta(q, k, v, e, alpha, beta, gamma):
    """Li et al. 2026 (2606.26560), Eq 8: S = (I - beta k k^T)(I - gamma e e^T) diag(alpha) S + beta k v^T.

    The erase address e `[T, K]` of unit length, alpha `[T, K]`.
    """
    s, out = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(v)):
        s = np.diag(alpha[t]) @ s
        s = (np.eye(len(s)) - gamma[t] * np.outer(e[t], e[t])) @ s
        s = (np.eye(len(s)) - beta[t] * np.outer(k[t], k[t])) @ s + beta[t] * np.outer(k[t], v[t])
        out.append(s.T @ q[t])
    return np.array(out), s.T


def q_delta(q, k, v, alpha, beta, lam):
    """Park et al. 2026 (2606.08804): x = k + lam q, S = alpha S (I - beta x k^T) + beta v k^T, y = S q."""
    s, out = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(v)):
        x = k[t] + lam[t] * q[t]
        s = alpha[t] * s @ (np.eye(k.shape[1]) - beta[t] * np.outer(x, k[t])) + beta[t] * np.outer(v[t], k[t])
        out.append(s @ q[t])
    return np.array(out), s


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


def kalman_gain(k, alpha, omega, r, start=1.0, info=None):
    """Gains of the diagonal Kalman Delta Network (2609.07816) `[T, K]`: with the precision c (at first `start`),

    z = alpha^2 / c + omega, gain = z o k / (r + z.(k o k)), c = 1 / z + info k o k / r; info is K if None.
    alpha, omega `[T, K]`, r `[T]`.
    """
    c, out = np.full(k.shape[1], start), []
    for t in range(len(k)):
        z = alpha[t] ** 2 / c + omega[t]
        out.append(z * k[t] / (r[t] + z @ k[t] ** 2))
        c = 1 / z + (k.shape[1] if info is None else info) * k[t] ** 2 / r[t]
    return np.array(out)


def kalman_gain_isotropic(k, alpha, omega, r, start=1.0, info=None):
    """The same with one precision for all channels, and so one step beta `[T]`; omega, r `[T]`, alpha `[T, K]`."""
    c, out, width = start, [], k.shape[1]
    for t in range(len(k)):
        z, square = (alpha[t] ** 2).mean() / c + omega[t], k[t] @ k[t]
        out.append(z / (r[t] + z * square))
        c = 1 / z + (width if info is None else info) * square / (width * r[t])
    return np.array(out)


def kalman_delta(q, k, v, gain, alpha):
    """S = diag(alpha) S, S = S + gain (v - S^T k)^T, y = S^T q; gain and alpha `[T, K]`."""
    s, out = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(v)):
        s = alpha[t][:, None] * s
        s = s + np.outer(gain[t], v[t] - s.T @ k[t])
        out.append(s.T @ q[t])
    return np.array(out), s.T


def kalman_attention(q, k, v, a, noise, g, start=1.0):
    """Shaj et al. 2026 (2602.10743), information form of one scalar filter per pair of channels:

    den = a^2 + noise L, L = L / den + k^2 g, h = a h / den + k g v, y_v = sum_s q_s h / L; a, noise `[V, K]`,
    g `[T, V]` the inverse observation variance.
    """
    h, info, out = np.zeros((v.shape[1], k.shape[1])), np.full((v.shape[1], k.shape[1]), start), []
    for t in range(len(v)):
        den = a**2 + noise * info
        info, h = info / den + np.outer(g[t], k[t] ** 2), a * h / den + np.outer(g[t] * v[t], k[t])
        out.append((h / info) @ q[t])
    return np.array(out), h / info


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


def mamba3_complex(q, k, v, a, dt, trapezoid, angle, d=0.0):
    """The same as what it discretises, a complex state that turns: z = x_{2i} + i x_{2i + 1}, angle `[T, K / 2]`,

    h = a exp(-i angle) (h + (1 - trapezoid) dt v_{t-1} k_{t-1}^T) + trapezoid dt v k^T, y = Re(h conj(q)) + d v.
    """
    q, k = (x[:, 0::2] + 1j * x[:, 1::2] for x in (q, k))
    h, key, value, out = np.zeros((v.shape[1], k.shape[1]), complex), np.zeros(k.shape[1]), np.zeros(v.shape[1]), []
    for t in range(len(v)):
        turn = a[t] * np.exp(-1j * angle[t])
        h = turn * (h + (1 - trapezoid[t]) * dt[t] * np.outer(value, key)) + trapezoid[t] * dt[t] * np.outer(v[t], k[t])
        out.append((h @ np.conj(q[t])).real + d * v[t])
        key, value = k[t], v[t]
    return np.array(out)


def mamba3_quadratic(q, k, v, a, dt, trapezoid, angle, d=0.0):
    """The same by weights of all pairs: token s counts trapezoid_s dt_s + (1 - trapezoid_{s+1}) dt_{s+1}, at its own
    read without the second term, which belongs to the next token."""
    theta = np.cumsum(angle, 0)
    q, k = rotate(q, theta), rotate(k, theta)
    own = trapezoid * dt
    later = np.append((1 - trapezoid[1:]) * dt[1:], 0.0)
    g = np.cumsum(np.log(a))
    decay = np.tril(np.exp(np.minimum(g[:, None] - g[None, :], 0)))
    weights = q @ k.T * decay * (own + later) - np.diag((q * k).sum(1) * later)
    return weights @ v + d * v


def mamba3_mimo(q, k, x, m_in, m_out, a, dt, trapezoid, angle, d=0.0, gate=None, *, halves=True):
    """The same of rank r: q, k `[T, r, K]`, one x `[T, V]`, v_j = m_in_j o x, m_in and m_out `[r, V]`,

    y = sum_j m_out_j o (S q_j + d v_j) o gate_j, gate `[T, r, V]`. The released kernel turns (i, i + K / 2).
    """
    theta = np.cumsum(angle, 0)[:, None]
    q, k = (rotate(item, np.repeat(theta, q.shape[1], 1), halves=halves) for item in (q, k))
    v = x[:, None] * m_in
    s, out = np.zeros((x.shape[1], k.shape[2])), []
    before = np.zeros_like(s)
    for t in range(len(x)):
        now = v[t].T @ k[t]
        s = a[t] * s + (1 - trapezoid[t]) * dt[t] * a[t] * before + trapezoid[t] * dt[t] * now
        y = q[t] @ s.T + d * v[t]
        out.append((m_out * (y if gate is None else y * gate[t])).sum(0))
        before = now
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


def product_key_code(q, first, second, top, eps=1e-3):
    """Slots that a query of Fast-weight Product Key Memory reads, and with what weight: q `[2 d]`, codebooks `[n, d]`.

    Scores -log(eps + |half - code|^2) of both halves are summed, and a softmax taken of the `top` largest: `[n^2]`.
    """
    d = first.shape[1]
    scores = [-np.log(eps + ((q[cut] - c) ** 2).sum(1)) for cut, c in ((slice(0, d), first), (slice(d, None), second))]
    total = (scores[0][:, None] + scores[1][None, :]).ravel()
    chosen, code = np.argsort(-total)[:top], np.zeros(total.size)
    e = np.exp(total[chosen] - total[chosen].max())
    code[chosen] = e / e.sum()
    return code


def product_key_memory(codes, v, g, table, chunk, lr=1.0):
    """Zhao and Jones 2026 (2601.00671), the values: y_t = table^T s_t by the rows of the chunk's start, then each row
    steps by 1/N_i of its gradient of sum_t g_t |v_t - y_t|^2 / 2, N_i how many tokens of the chunk read it.

    codes `[T, S]`, targets v `[T, V]`, in the paper of the next token, g `[T]`, table `[S, V]`. A chunk that is not
    full does not step. The released code steps by top C / (C - 1) times as much in chunks of C, the last token of which
    has no target.
    """
    out = []
    for at in range(0, len(v), chunk):
        rows = slice(at, at + chunk)
        y = codes[rows] @ table
        out.append(y)
        if len(y) < chunk:
            break
        reads = np.maximum((codes[rows] > 0).sum(0), 1)
        gradient = codes[rows].T @ (g[rows, None] * (y - v[rows]))
        table = table - lr * gradient / reads[:, None]
    return np.concatenate(out), table
