"""The study of random features: its formulas against numpy, quadrature and draws by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hecate.phi.random import haar
from studies import performer
from studies import random_kernels as lab
from studies.against_softmax import Tokens
from tests.reference import random_features as reference

FORMULAS = {
    "positive": lambda x, y, features: reference.mse_positive(x, y, features),
    "hyperbolic": lambda x, y, features: reference.mse_hyperbolic(x, y, features // 2),
    "trigonometric": lambda x, y, features: reference.mse_trigonometric(x, y, features // 2),
}


@pytest.mark.parametrize("variant", lab.VARIANTS)
def test_formulas(variant):
    for norm, degrees in performer.PAIRS:
        x, y = lab.pair(norm, degrees)
        assert float(x.norm()) == pytest.approx(norm) == float(y.norm())
        assert float(x @ y) == pytest.approx(norm**2 * math.cos(math.radians(degrees)))
        expected = FORMULAS[variant](x.numpy(), y.numpy(), 16)
        assert lab.formula(variant, x, y, 16) == pytest.approx(expected, rel=1e-9)


def one_draw(variant, x, y):
    """Moments of a single draw's estimate, by quadrature over the one number it depends on."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()
    squares = (x @ x + y @ y) / 2
    if variant == "trigonometric":
        values = np.exp(squares) * np.cos(np.linalg.norm(x - y) * nodes)
    else:
        exponent = np.linalg.norm(x + y) * nodes
        values = np.exp(-squares) * (np.exp if variant == "positive" else np.cosh)(exponent)
    mean = weights @ values
    return mean, weights @ (values - mean) ** 2, weights @ (values - mean) ** 4


@pytest.mark.parametrize("variant", lab.VARIANTS)
def test_error_and_its_uncertainty_from_the_moments_of_one_draw(variant):
    x, y = lab.pair(0.5, 70)
    mean, second, fourth = one_draw(variant, x.numpy(), y.numpy())
    assert mean == pytest.approx(math.exp(float(x @ y)), rel=1e-9)
    draws = 12 if variant == "positive" else 6  # of which 12 features consist
    assert lab.formula(variant, x, y, 12) == pytest.approx(second / draws, rel=1e-9)
    # Kurtosis of a mean of n: 3 + (kurtosis - 3) / n; variance of a mean of squares from it.
    kurtosis = 3 + (fourth / second**2 - 3) / draws
    expected = math.sqrt((kurtosis - 1) / 500)
    assert lab.uncertainty(variant, x, y, 12, 500) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("variant", lab.VARIANTS)
def test_sampling_agrees_with_the_formula(variant):
    pairs = [lab.pair(0.3, 60), lab.pair(0.6, 150)]
    for (x, y), found in zip(pairs, lab.sampled(variant, pairs, 8, 4000, 1), strict=True):
        error = lab.uncertainty(variant, x, y, 8, 4000)
        assert error < 0.2
        assert abs(found / lab.formula(variant, x, y, 8) - 1) < 4 * error


def test_estimates_are_those_of_their_draws():
    map_ = lab.favor("hyperbolic", 6)
    params = map_.init(16, heads=5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x, y = lab.pair(0.7, 40)
    for head, found in enumerate(lab.estimate(map_, params, x, y).tolist()):
        w = params["frozen"]["w"][head].numpy().T
        a, b = (np.concatenate([np.exp(w @ z), np.exp(-(w @ z))]) for z in (x.numpy(), y.numpy()))
        expected = a @ b * math.exp(-0.49) / 6  # |x|^2 / 2 + |y|^2 / 2 = 0.49
        assert found == pytest.approx(expected, rel=1e-12)


def test_fixed_signs_are_the_librarys_and_raw_ones_lapacks():
    g = torch.Generator().manual_seed(4)
    fixed = lab.blocks(1, 4, signs_fixed=True)[0]
    torch.testing.assert_close(fixed / fixed.norm(dim=0), haar(lab.BLOCK, g))
    raw = lab.blocks(3000, 4, signs_fixed=False)
    diagonal = raw.diagonal(dim1=-2, dim2=-1).div(raw.norm(dim=1)).mean(0)
    # d = 8: about -0.29, -0.28, ... and, the last, +0.23; a Haar matrix has 0, to 0.35 / 3000^.5.
    assert diagonal[:7].max() < -0.2 and diagonal[7] > 0.2
    good = lab.blocks(3000, 4, signs_fixed=True)
    assert good.diagonal(dim1=-2, dim2=-1).div(good.norm(dim=1)).mean(0).abs().max() < 0.03


def test_sign_bias_of_one_sided_maps():
    x, y = (z.numpy() for z in lab.sign_pair())
    assert lab.exact("positive") == pytest.approx(math.exp(0.3), rel=1e-12)
    assert lab.exact("ReLU") == pytest.approx(reference.arc_cosine(x, y), rel=1e-9)
    assert lab.exact("ReLU") == pytest.approx(0.1545, abs=5e-4)
    for name, published in (("positive", 1.166), ("ReLU", 0.1251)):
        raw = lab.sign_bias(name, 20000, 0, signs_fixed=False)
        fixed = lab.sign_bias(name, 20000, 0, signs_fixed=True)
        assert raw == pytest.approx(published, rel=0.02)
        assert fixed == pytest.approx(lab.exact(name), rel=0.015)
        assert raw < 0.9 * lab.exact(name)


def test_error_of_reads():
    tokens = Tokens.drawn(3, lab.WIDTH, 7, 9, 0.5)
    map_ = lab.favor("positive", 4, scale="softmax")
    w = map_.init(16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    w = w["frozen"]["w"][0].numpy()
    a, b = (
        np.exp(z / 2 @ w - (z**2).sum(1, keepdims=True) / 8)  # 16^(-1/4) = 1/2
        for z in (tokens.q.numpy(), tokens.k.numpy())
    )
    kernel = a @ b.T
    scores = np.exp(tokens.q.numpy() @ tokens.k.numpy().T / 4)
    weights, target = (m / m.sum(1, keepdims=True) for m in (kernel, scores))
    off = ((weights - target) @ tokens.v.numpy()) ** 2
    assert lab.read_error(map_, tokens, 3) == pytest.approx(math.log10(off.mean()), rel=1e-9)


def test_both_statements_about_the_sign_of_features():
    """Positive features win where norms are large and lose where they are small."""
    found = {
        (size, kind): [performer._errors(kind, performer.SCALES[size], 128, s) for s in range(4)]
        for size in ("small", "large")
        for kind in ("positive, orthogonal", "trigonometric, orthogonal")
    }
    everything = performer.Found({}, found, {})
    names = "positive, orthogonal", "trigonometric, orthogonal"
    small, large = (performer.gap(everything, size, *names, 64) for size in ("small", "large"))
    assert small.mean - 3 * small.error > 0 > large.mean + 3 * large.error
