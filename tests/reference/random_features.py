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
    return np.trapezoid(function(radius * np.cos(angle)) * weight, angle) / np.trapezoid(
        weight, angle
    )


def regularised_softmax(x, y):
    """The kernel of the positive map with |w| = sqrt(d)."""
    z = x + y
    moment = sphere_average(np.exp, len(x), math.sqrt(len(x)) * math.sqrt(z @ z))
    return math.exp(-(x @ x + y @ y) / 2) * moment


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
