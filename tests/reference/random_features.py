"""Random features, their kernels and their errors in plain numpy: an independent transcription.

Rows of `w` are projection vectors here, as the papers print them. Sources: Rahimi and Recht (2007);
Choromanski et al. (2021), lemmas 1 and 2 and their mean squared errors; Cho and Saul (2009).
"""

import math

import numpy as np


def fourier_phased(x, w, b):
    return math.sqrt(2.0 / len(w)) * np.cos(w @ x + b)


def fourier_paired(x, w):
    return np.concatenate([np.cos(w @ x), np.sin(w @ x)]) / math.sqrt(len(w))


def favor_positive(x, w):
    return math.exp(-x @ x / 2) * np.exp(w @ x) / math.sqrt(len(w))


def favor_hyperbolic(x, w):
    both = np.concatenate([np.exp(w @ x), np.exp(-(w @ x))])
    return math.exp(-x @ x / 2) * both / math.sqrt(2 * len(w))


def favor_trigonometric(x, w):
    return math.exp(x @ x / 2) * fourier_paired(x, w)


def relu_features(x, w, epsilon):
    return (np.maximum(w @ x, 0.0) + epsilon) / math.sqrt(len(w))


def gaussian_kernel(x, y, sigma):
    return math.exp(-((x - y) @ (x - y)) / (2 * sigma**2))


def arc_cosine(x, y):
    """Order 1: E relu(w.x) relu(w.y) for w ~ N(0, I)."""
    lengths = math.sqrt(x @ x) * math.sqrt(y @ y)
    angle = math.acos(max(-1.0, min(1.0, x @ y / lengths)))
    return lengths * (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / (2 * math.pi)


def sphere_average(function, d, radius, points=20001):
    """E function(w.e) for a unit vector e and w uniform on a sphere, by quadrature."""
    angle = np.linspace(0.0, math.pi, points)
    weight = np.sin(angle) ** (d - 2)
    return np.trapezoid(function(radius * np.cos(angle)) * weight, angle) / np.trapezoid(weight, angle)


def regularised_softmax(x, y):
    """The kernel of the positive map with |w| = sqrt(d)."""
    z = x + y
    moment = sphere_average(np.exp, len(x), math.sqrt(len(x)) * math.sqrt(z @ z))
    return math.exp(-(x @ x + y @ y) / 2) * moment


def slay(u, w, eps, nodes, products=None):
    """sqrt(w_r) exp(sqrt(2 s_r) w u - s_r) / sqrt(m) (x) products, by default all D^2 of a unit u."""
    products = np.outer(u, u).ravel() if products is None else products
    s = np.exp(np.linspace(math.log(0.01 / (4 + eps)), math.log(12 / eps), nodes))
    weight = s * np.exp(-(2 + eps) * s) * math.log(s[1] / s[0])
    parts = [
        math.sqrt(b) * np.outer(np.exp(math.sqrt(2 * a) * (w @ u) - a) / math.sqrt(len(w)), products)
        for a, b in zip(s, weight, strict=True)
    ]
    return np.concatenate([part.ravel() for part in parts])


def mse_trigonometric(x, y, m):
    s, d, kernel = (x + y) @ (x + y), (x - y) @ (x - y), math.exp(x @ y)
    return math.exp(s) * kernel**-2 * (1 - math.exp(-d)) ** 2 / (2 * m)


def mse_positive(x, y, m):
    s = (x + y) @ (x + y)
    return math.exp(s) * math.exp(x @ y) ** 2 * (1 - math.exp(-s)) / m


def mse_hyperbolic(x, y, m):
    s = (x + y) @ (x + y)
    return (1 - math.exp(-s)) / 2 * mse_positive(x, y, m)


def variance_phased(kernel, width):
    return ((1 - kernel**2) ** 2 + 1) / (2 * width)


def variance_paired(kernel, width):
    return (1 - kernel**2) ** 2 / width


def raw_qr_projections(d, rng):
    """The mistake: rows of Q as LAPACK returns it, with independent chi norms."""
    q = np.linalg.qr(rng.standard_normal((d, d)))[0]
    return q.T * np.linalg.norm(rng.standard_normal((d, d)), axis=1, keepdims=True)


def rectified_powers(x, w, order):
    active = [float(row @ x > 0) * (row @ x) ** order for row in w]
    return np.array(active) / math.sqrt(len(w))


def arc_cosine_of_order(x, y, order, points=20001):
    """E of the product of two rectified powers, by quadrature in the plane of x and y.

    A Gaussian vector has a uniform angle and E radius^(2 order) = 2^order order! in a plane.
    """
    lengths = math.sqrt(x @ x) * math.sqrt(y @ y)
    between = math.acos(max(-1.0, min(1.0, x @ y / lengths)))
    # Both are active on an arc of width pi - between, where the cosines are positive.
    angle = np.linspace(between - math.pi / 2, math.pi / 2, points)
    values = (np.cos(angle) * np.cos(angle - between)) ** order
    mean = np.trapezoid(values, angle) / (2 * math.pi)
    return lengths**order * 2**order * math.factorial(order) * mean


def maclaurin(x, signs, probabilities, coefficients):
    """`signs` holds a list of rows per feature: as many as its power."""
    out = []
    for rows in signs:
        n = len(rows)
        weight = math.sqrt(coefficients[n] / probabilities[n])
        out.append(weight * math.prod(row @ x for row in rows))
    return np.array(out) / math.sqrt(len(signs))


def maclaurin_variance(x, y, probabilities, coefficients, width):
    m = (x @ x) * (y @ y) + 2 * (x @ y) ** 2 - 2 * (x**2) @ (y**2)
    terms = [a**2 / probabilities[n] * m**n for n, a in enumerate(coefficients) if a > 0]
    kernel = sum(a * (x @ y) ** n for n, a in enumerate(coefficients))
    return (sum(terms) - kernel**2) / width


def sketch(x, degree, matrices):
    """The recursion of the paper: a sketch of degree n multiplies two of degree n / 2.

    `matrices` yields the pairs of mixing matrices in the order of a walk from left to right: for a
    node, its children first.
    """
    if degree == 1:
        return x
    left, right = sketch(x, degree // 2, matrices), sketch(x, degree // 2, matrices)
    a, b = next(matrices)
    return (left @ a) * (right @ b) / math.sqrt(a.shape[1])


def polysketch(x, degree, matrices):
    s = sketch(x, degree // 2, iter(matrices))
    return np.array([s[i] * s[j] * (1 if i == j else math.sqrt(2)) for j in range(len(s)) for i in range(j + 1)])


def polysketch_draws(x, y, degree, width, replicas, rng):
    """Draws of (s(x).s(y))^2."""
    values = []
    for _ in range(replicas):
        rows = [len(x) if is_leaf else width for is_leaf in _walk(degree // 2)]
        drawn = [tuple(rng.standard_normal((n, width)) for _ in range(2)) for n in rows]
        sx, sy = (sketch(v, degree // 2, iter(drawn)) for v in (x, y))
        values.append((sx @ sy) ** 2)
    return np.array(values)


def _walk(degree):
    """Whether each pair of matrices of `sketch` meets x itself, in the order it takes them."""
    if degree == 1:
        return []
    half = _walk(degree // 2)
    return [*half, *half, degree == 2]


def hadamard_matrix(size):
    """Sylvester's, orthonormal: entry (i, j) is (-1)^(number of common bits of i and j)."""
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
    return np.array(signs) / math.sqrt(size)


def sorf_projections(d, first, signs, sigma, count):
    """Rows of sqrt(P) / sigma H S3 H S2 H S1, block under block, cut to the width of x."""
    rows = []
    for one, (two, three) in zip(first, signs, strict=True):
        size = len(two)
        h = hadamard_matrix(size)
        padded = np.zeros(size)
        padded[:d] = one
        rows.append(h @ np.diag(three) @ h @ np.diag(two) @ h @ np.diag(padded))
    return math.sqrt(len(signs[0][0])) / sigma * np.concatenate(rows)[:count, :d]


def nystrom_kernel(x, y, centres, sigma, eps):
    """k(x, C) (K_CC + eps I)^-1 k(C, y), with the inverse and no root."""

    def gram(a, b):
        return np.array([[gaussian_kernel(u, v, sigma) for v in b] for u in a])

    middle = np.linalg.inv(gram(centres, centres) + eps * np.eye(len(centres)))
    return float((gram([x], centres) @ middle @ gram(centres, [y]))[0, 0])


def nystrom(x, centres, sigma, eps):
    """Features by the Cholesky root: forward substitution of k(C, x)."""
    middle = np.array([[gaussian_kernel(u, v, sigma) for v in centres] for u in centres])
    lower = np.linalg.cholesky(middle + eps * np.eye(len(centres)))
    return np.linalg.solve(lower, np.array([gaussian_kernel(u, x, sigma) for u in centres]))
