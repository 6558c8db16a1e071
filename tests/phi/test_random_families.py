"""Kernels, variances and limits of arc_cosine, random_maclaurin, polysketch, sorf and nystrom."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hecate.errors import ConfigError, ShapeError
from hecate.phi import SORF, ArcCosine, Compose, FeatureMap, Nystrom, PerformerReLU, Polysketch, RandomMaclaurin
from hecate.phi.random import walsh_hadamard
from tests.phi.random_common import F64, SIGMAS, deviation, estimates, gaussian, pair, seeded
from tests.reference import random_features as reference

WIDTH = 4096


def one_estimate(feature_map: FeatureMap, x: Tensor, y: Tensor, seed: int = 11) -> float:
    params = feature_map.init(x.shape[-1], generator=seeded(seed), dtype=F64)
    return float((feature_map(x, params) * feature_map(y, params)).sum(-1))


@pytest.mark.parametrize("length", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.spec("PHI-ARCCOS-D1", "PHI-ARCCOS-I1")
def test_rectified_powers_estimate_the_arc_cosine_kernels(order, length):
    for cosine in (-0.8, 0.1, 0.95):
        x, y = pair(length, cosine, 6)
        exact = reference.arc_cosine_of_order(x.numpy(), y.numpy(), order)
        feature_map = ArcCosine(
            order=order, num_features=WIDTH, orthogonal=False, norms="chi"
        )  # independent features: the variance is that of one over their number
        assert float(feature_map.exact_kernel(x, y)) == pytest.approx(exact, rel=1e-7)
        square = reference.arc_cosine_of_order(x.numpy(), y.numpy(), 2 * order)
        bound = SIGMAS * math.sqrt((square - exact**2) / WIDTH)
        assert abs(one_estimate(feature_map, x, y) - exact) < bound
        if order == 0:
            assert bound < SIGMAS / math.sqrt(WIDTH)  # bounded features: no more than that


@pytest.mark.spec("PHI-ARCCOS-R1")
def test_order_1_is_performer_relu_without_epsilon():
    ours, theirs = ArcCosine(num_features=9), PerformerReLU(num_features=9, kernel_epsilon=0)
    x = gaussian(20, 5)
    params = ours.init(5, dtype=F64)
    assert torch.equal(params["frozen"]["w"], theirs.init(5, dtype=F64)["frozen"]["w"])
    assert torch.equal(ours(x, params), theirs(x, params))
    assert torch.equal(ours.exact_kernel(x, x.flip(0)), theirs.exact_kernel(x, x.flip(0)))


@pytest.mark.spec("PHI-ARCCOS-I2", "PHI-ARCCOS-V1")
def test_steps_see_directions_only_and_pass_no_gradient():
    feature_map = ArcCosine(order=0, num_features=16)
    params = feature_map.init(5, heads=2, dtype=F64)
    x = gaussian(20, 2, 5).requires_grad_()
    features, residuals = feature_map.forward(x, params)
    assert torch.equal(features, feature_map(7 * x, params))
    assert bool(((features == 0) | (features == 0.25)).all())
    assert float(features.detach().square().sum(-1).max()) <= feature_map.norm_bound == 1.0
    g = torch.ones_like(features)
    assert not bool(feature_map.vjp(residuals, g)[0].any())
    (traced,) = torch.autograd.grad(features, x, g)
    assert not bool(traced.any())
    traits = feature_map.traits()
    assert traits.non_negative and traits.is_random and traits.degree == 0
    zero = feature_map(torch.zeros(1, 2, 5, dtype=F64), params)
    assert not bool(zero.any()) and float(feature_map.exact_kernel(x[0, 0].detach(), 0 * x[0, 0].detach())) == 0
    low = feature_map.init(5, heads=2)
    assert feature_map(x.detach().bfloat16(), low).dtype == torch.bfloat16


SERIES = [
    ({}, lambda z: sum(z**n / math.factorial(n) for n in range(9))),
    ({"degree": 3}, lambda z: 1 + z + z**2 / 2 + z**3 / 6),
    ({"series": "binomial", "degree": 3}, lambda z: (1 + z) ** 3),
    ({"coefficients": [0.5, 0.0, 2.0]}, lambda z: 0.5 + 2 * z**2),
]


@pytest.mark.parametrize("length", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("case", range(len(SERIES)))
@pytest.mark.spec("PHI-MACL-D1", "PHI-MACL-D2", "PHI-MACL-I1")
def test_maclaurin_features_estimate_their_series(case, length):
    fields, series = SERIES[case]
    x, y = gaussian(6, seed=1), gaussian(6, seed=2)
    x, y = length * x / x.norm(), length * y / y.norm()
    wide = RandomMaclaurin(d_phi=WIDTH, **fields)
    exact = series(float(x @ y))
    assert float(wide.exact_kernel(x, y)) == pytest.approx(exact, rel=1e-12)
    p, a = wide.probabilities, wide.terms
    assert sum(p) == pytest.approx(1) and all((q > 0) == (c > 0) for q, c in zip(p, a, strict=True))
    variance = reference.maclaurin_variance(x.numpy(), y.numpy(), p, a, WIDTH)
    assert abs(one_estimate(wide, x, y) - exact) < SIGMAS * math.sqrt(variance)
    narrow = RandomMaclaurin(d_phi=8, **fields)
    errors = (estimates(narrow, x, y, 2000) - exact) ** 2
    assert deviation(errors, variance * WIDTH / 8) < SIGMAS


@pytest.mark.spec("PHI-MACL-D1")
def test_the_number_of_factors_halves_from_power_to_power():
    for fields, shares in (
        ({"degree": 2}, [4 / 7, 2 / 7, 1 / 7]),
        ({"coefficients": (0.0, 3.0, 0.0, 0.5)}, [0, 4 / 5, 0, 1 / 5]),
    ):
        feature_map = RandomMaclaurin(d_phi=8000, **fields)
        assert feature_map.probabilities == pytest.approx(shares, rel=1e-12)
        offset = feature_map.init(1, dtype=F64)["frozen"]["offset"][0].unflatten(-1, (-1, 8000))
        factors = (1 - offset).sum(0)
        for n, share in enumerate(shares):
            got = float((factors == n).double().mean())
            assert abs(got - share) <= SIGMAS * math.sqrt(share * (1 - share) / 8000)


@pytest.mark.spec("PHI-PSKETCH-I1", "PHI-PSKETCH-E1")
def test_the_square_of_a_sketch_is_biased_and_its_formula_right():
    x, y = pair(1.0, 0.8, 5)
    feature_map = Polysketch(sketch=4)
    exact = float(feature_map.exact_kernel(x, y))
    rng = np.random.default_rng(0)
    draws = reference.polysketch_draws(x.numpy(), y.numpy(), 4, 4, 20_000, rng)
    assert deviation(torch.tensor(draws), exact) < SIGMAS
    assert deviation(torch.tensor(draws), 0.8**4) > SIGMAS, "not (x.y)^4"
    m = 1 + 2 * 0.64
    assert exact == pytest.approx(0.8**4 + (m**2 - 0.8**4) / 4, rel=1e-12)
    wide = float(Polysketch(sketch=100_000).exact_kernel(x, y))
    assert wide == pytest.approx(0.8**4, rel=2e-4)
    # The upper triangle of s s^T without the root of 2 is another kernel.
    s, t = gaussian(4, seed=1), gaussian(4, seed=2)
    upper = torch.triu_indices(4, 4)
    plain = (torch.outer(s, s) * torch.outer(t, t))[upper[0], upper[1]].sum()
    half = ((s @ t) ** 2 + (s**2) @ (t**2)) / 2
    assert float(plain) == pytest.approx(float(half), rel=1e-12)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
@pytest.mark.spec("PHI-SORF-D1", "PHI-SORF-I1")
def test_structured_projections_approximate_the_gaussian_kernel(sigma):
    feature_map = SORF(d_phi=WIDTH, sigma=sigma)
    params = feature_map.init(64, generator=seeded(11), dtype=F64)
    distance = torch.linspace(0.1, 2.5, 64, dtype=F64)
    x, way = (gaussian(64, 64, seed=8), torch.nn.functional.normalize(gaussian(64, 64, seed=7), dim=-1))
    y = x + sigma * distance.unsqueeze(-1) * way
    got = (feature_map(x, params) * feature_map(y, params)).sum(-1)
    error = (got - (-(distance**2) / 2).exp()).abs().max()
    # Cosines have a variance of at most 1; what is left of the bias at D = 64 is below 0.01.
    assert float(error) < SIGMAS / math.sqrt(WIDTH) + 0.01
    torch.testing.assert_close((feature_map(x, params) ** 2).sum(-1), torch.ones(64, dtype=F64))
    assert feature_map.exact_kernel(x, y) is None


@pytest.mark.spec("PHI-SORF-I1")
def test_structured_projections_are_biased():
    for d, low, high in ((1, 0.06, 0.07), (8, 0.015, 0.025), (64, 0.001, 0.004)):
        x = torch.zeros(d, dtype=F64)
        x[0] = 1.0
        samples = estimates(SORF(d_phi=2 * max(d, 2)), x, 0 * x, 2000)
        bias = math.exp(-0.5) - float(samples.mean())
        assert low < bias < high
    one = gaussian(7, 1)
    params = SORF(d_phi=2).init(1, dtype=F64)
    features = SORF(d_phi=2)(one, params)
    kernel = features @ features.mT
    torch.testing.assert_close(kernel, (one - one.T).cos(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 8, 16, 64, 512])
@pytest.mark.spec("PHI-SORF-D2")
def test_walsh_hadamard(size):
    x = gaussian(3, size)
    expected = x @ torch.from_numpy(reference.hadamard_matrix(size))
    torch.testing.assert_close(walsh_hadamard(x), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(walsh_hadamard(walsh_hadamard(x)), x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("d", [1, 5, 8])
@pytest.mark.spec("PHI-SORF-D2")
def test_rows_of_a_structured_block_are_orthogonal(d):
    feature_map = SORF(d_phi=64, sigma=2.0)
    frozen = {k: v[0].numpy() for k, v in feature_map.init(d, dtype=F64)["frozen"].items()}
    padded = 1 << (d - 1).bit_length()
    assert frozen["signs"].shape == (-(-32 // padded), 2, padded)
    rows = reference.sorf_projections(d, frozen["w"].T, frozen["signs"], 2.0, 32)
    assert np.allclose(rows[:padded].T @ rows[:padded], padded / 4 * np.eye(d))
    with pytest.raises(ShapeError, match=f"of width {d}"):
        feature_map(gaussian(2, d + 1), feature_map.init(d))


@pytest.mark.parametrize("sigma", [0.7, 1.5, 3.0])
@pytest.mark.spec("PHI-NYSTROM-D1", "PHI-NYSTROM-I1", "PHI-NYSTROM-I2")
def test_nystrom_kernel(sigma):
    eps = 1e-8
    feature_map = Nystrom(num_centres=12, sigma=sigma, eps=eps)
    params = feature_map.init(3, dtype=F64)
    centres = params["frozen"]["w"][0].mT
    x, y = gaussian(20, 3, seed=1), gaussian(20, 3, seed=2)
    fx, fy = feature_map(x, params), feature_map(y, params)
    expected = [
        reference.nystrom_kernel(a, b, centres.numpy(), sigma, eps) for a, b in zip(x.numpy(), y.numpy(), strict=True)
    ]
    # Round-off is amplified by at most 1 / eps.
    torch.testing.assert_close((fx * fy).sum(-1), torch.tensor(expected), rtol=0, atol=1e-15 / eps)
    beside = fx @ feature_map(centres, params).mT
    exact = (-(x[:, None] - centres).square().sum(-1) / (2 * sigma**2)).exp()
    assert float((beside - exact).abs().max()) < math.sqrt(eps) / 2 + 1e-15 / eps
    short = 1 - fx.square().sum(-1)
    assert bool((short >= -1e-12).all()), "never above the kernel"
    far = feature_map(torch.full((1, 3), 100.0, dtype=F64), params)
    assert not bool(far.any())


@pytest.mark.spec("PHI-NYSTROM-I1")
def test_more_centres_bring_the_kernel_closer():
    x = gaussian(50, 2, seed=1)
    all_centres = Nystrom(num_centres=32).init(2, dtype=F64)["frozen"]["w"]
    exact = (-torch.cdist(x, x).square() / 2).exp()
    missing = []
    for count in (2, 8, 32):
        feature_map = Nystrom(num_centres=count, eps=1e-10)
        params = {"learned": {}, "frozen": {"w": all_centres[..., :count]}}
        gap = exact - feature_map(x, params) @ feature_map(x, params).mT
        assert float(torch.linalg.eigvalsh(gap).min()) > -1e-6, "from below"
        missing.append(float(gap.trace()) / 50)
    assert 1 > missing[0] > missing[1] > missing[2] and missing[2] < 0.05


@pytest.mark.spec("PHI-NYSTROM-D2")
def test_learned_centres_are_parameters_and_drawn_ones_are_not():
    drawn, learned = (Nystrom(num_centres=4, centres=c) for c in ("drawn", "learned"))
    first, second = drawn.init(3, dtype=F64), learned.init(3, dtype=F64)
    assert torch.equal(first["frozen"]["w"], second["learned"]["w"])
    assert not first["learned"] and not second["frozen"]
    assert drawn.is_random and not learned.is_random
    with pytest.raises(ConfigError, match="nothing to redraw"):
        learned.redraw(second, seeded())
    spread = Nystrom(num_centres=4, spread=3.0).init(3, dtype=F64)["frozen"]["w"]
    torch.testing.assert_close(spread, 3 * first["frozen"]["w"])
    twice = {"w": second["learned"]["w"][:, :, [0, 0, 1, 1]]}  # equal centres: K_CC is singular
    features = learned(gaussian(5, 3), {"learned": twice, "frozen": {}})
    assert bool(features.isfinite().all())


def test_a_composition_before_a_random_map_keeps_its_kernel():
    chain = Compose(maps=("tanh", RandomMaclaurin(d_phi=6)))
    x, y = pair(0.6, 0.3, 4)
    exact = RandomMaclaurin(d_phi=6).exact_kernel(x.tanh(), y.tanh())
    assert float(chain.exact_kernel(x, y)) == pytest.approx(float(exact), rel=1e-12)
