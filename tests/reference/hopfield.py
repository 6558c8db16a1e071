"""A modern Hopfield memory in plain numpy, one query at a time (Ramsauer et al., 2020)."""

import numpy as np


def weights(query, patterns, sharpness):
    scores = np.array([sharpness * (x @ query) for x in patterns])
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def update(query, patterns, sharpness):
    return sum(p * x for p, x in zip(weights(query, patterns, sharpness), patterns, strict=True))


def energy(query, patterns, sharpness):
    """Equation 1, as printed."""
    powers = np.exp(sharpness * np.array([x @ query for x in patterns]))
    lse = np.log(powers.sum()) / sharpness
    longest = max(float(np.linalg.norm(x)) for x in patterns)
    return -lse + query @ query / 2 + np.log(len(patterns)) / sharpness + longest**2 / 2


def separation(patterns, i):
    others = [patterns[i] @ x for j, x in enumerate(patterns) if j != i]
    return patterns[i] @ patterns[i] - max(others)


def error_bound(query, patterns, i, sharpness, fixed_point=None):
    """Theorem 5; without a fixed point, its maximum is the query's distance alone."""
    longest = max(float(np.linalg.norm(x)) for x in patterns)
    far = float(np.linalg.norm(query - patterns[i]))
    if fixed_point is not None:
        far = max(far, float(np.linalg.norm(fixed_point - patterns[i])))
    margin = separation(patterns, i) - 2 * far * longest
    with np.errstate(over="ignore"):  # of patterns closer than that the bound is infinite
        return 2 * (len(patterns) - 1) * np.exp(-sharpness * margin) * longest


def positive_feature_moment(query, keys, targets, answer):
    """E |sum_j z(q) z(k_j) (v_j - y)|^2 of one positive random feature z, in closed form.

    z(x) = exp(w.x - |x|^2 / 2), w normal; E exp(w.u) = exp(|u|^2 / 2). m independent features have
    a mean with 1/m of it, for sum_j exp(q.k_j) (v_j - y) = 0.
    """
    total = 0.0
    for j, a in enumerate(keys):
        for k, b in enumerate(keys):
            u = 2 * query + a + b
            moment = np.exp(u @ u / 2 - query @ query - a @ a / 2 - b @ b / 2)
            total += moment * (targets[j] - answer) @ (targets[k] - answer)
    return total
