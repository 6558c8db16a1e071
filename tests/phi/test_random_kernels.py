"""Random feature maps: kernels in expectation, and errors by the papers' lemmas."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hecate.phi import (
    SLAY,
    ArcCosine,
    Favor,
    FeatureMap,
    PerformerReLU,
    Polysketch,
    RandomFourier,
    RandomMaclaurin,
    TensorProduct,
)
from tests.phi.random_common import F64, SIGMAS, deviation, estimates, gaussian, pair, seeded
from tests.reference import random_features as reference


def worst_error(feature_map: RandomFourier, params, *, pairs: int = 64, d: int = 6) -> float:
    way = torch.nn.functional.normalize(gaussian(pairs, d, seed=7), dim=-1)
    distance = feature_map.sigma * torch.linspace(0.1, 2.5, pairs, dtype=F64).unsqueeze(-1)
    x = gaussian(pairs, d, seed=8)
    y = x + distance * way
    estimate = (feature_map(x, params) * feature_map(y, params)).sum(-1)
    exact = [reference.gaussian_kernel(a, b, feature_map.sigma) for a, b in zip(x.numpy(), y.numpy(), strict=True)]
    np.testing.assert_allclose(feature_map.exact_kernel(x, y).numpy(), exact, rtol=1e-12)
    return float((estimate - torch.tensor(exact)).abs().max())


@pytest.mark.parametrize("form", ["phased", "paired"])
@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0])
@pytest.mark.spec("PHI-RFF-D1", "PHI-RFF-D2", "PHI-RFF-I2", "PHI-RFF-E1")
def test_fourier_kernel_has_bandwidth_sigma(sigma, form):
    width = 4096
    feature_map = RandomFourier(d_phi=width, sigma=sigma, form=form)
    params = feature_map.init(6, generator=seeded(11), dtype=F64)
    # Both forms have a variance of at most 1/d_phi, so this is five standard deviations.
    bound = SIGMAS / math.sqrt(width)
    assert worst_error(feature_map, params) < bound
    if sigma != 1.0:
        inverted = {"w": params["frozen"]["w"] * sigma**2}  # W ~ N(0, sigma^2)
        planted = {"learned": {}, "frozen": {**params["frozen"], **inverted}}
        assert worst_error(feature_map, planted) > 3 * bound


UNBIASED = [
    *(
        RandomFourier(d_phi=12, sigma=sigma, form=form, orthogonal=form == ("paired", "phased")[sigma > 1])
        for sigma in (0.5, 2.0)
        for form in ("phased", "paired")
    ),
    *(
        Favor(num_features=20, variant=variant, orthogonal=scale == "softmax", scale=scale)
        for variant in ("positive", "hyperbolic", "trigonometric")
        for scale in ("softmax", "none")
    ),
    *(
        PerformerReLU(num_features=10, kernel_epsilon=epsilon, orthogonal=norms == "chi", norms=norms)
        for epsilon in (0.0, 0.3)
        for norms in ("chi", "sqrt")
    ),
    *(ArcCosine(order=order, num_features=10, norms=norms) for order in (0, 1, 2) for norms in ("chi", "sqrt")),
    *(Polysketch(degree=4, sketch=8), Polysketch(degree=8, sketch=32), SLAY(m=16)),
    TensorProduct(maps=(RandomFourier(d_phi=8, sigma=1.0), RandomMaclaurin(d_phi=6, degree=2))),
]


def told(made: FeatureMap, x: Tensor, y: Tensor) -> float:
    """The kernel by a formula of its own, where there is one here."""
    z, d = float(x @ y), len(x)
    if made.kind == "favor":
        return math.exp(z / math.sqrt(d) if made.scale == "softmax" else z)
    if made.kind == "arc_cosine":
        shorter = d / (d + 2) if made.order == 2 and made.norms == "sqrt" else 1.0
        return shorter * reference.arc_cosine_of_order(x.numpy(), y.numpy(), made.order)
    if made.kind == "performer_relu" and made.kernel_epsilon == 0:
        return reference.arc_cosine(x.numpy(), y.numpy())
    if made.kind == "slay":
        cosine = z / float(x.norm() * y.norm())
        return cosine**2 / (3 - 2 * cosine)
    if made.kind == "tensor_product":
        return math.exp(-float((x - y) @ (x - y)) / 2) * (1 + z + z**2 / 2)
    return float(made.exact_kernel(x, y))


@pytest.mark.spec("PHI-RFF-D1", "PHI-RFF-D2", "PHI-RFF-I4", "PHI-FAVOR-D1", "PHI-FAVOR-D2", "PHI-FAVOR-I1")
@pytest.mark.spec("PHI-PRELU-D1", "PHI-PRELU-D2", "PHI-ARCCOS-I1", "PHI-PSKETCH-D1", "PHI-PSKETCH-I1")
@pytest.mark.spec("PHI-TENSOR-I2", "PHI-SLAY-D1", "PHI-SLAY-I1")
@pytest.mark.parametrize("feature_map", UNBIASED, ids=repr)
def test_features_are_unbiased_for_their_kernel(feature_map):
    for length, cosine in ((0.6, -0.5), (0.9, 0.3), (0.9, 0.7)):
        x, y = pair(length, cosine, 5)
        y = 1.2 * y
        exact = float(feature_map.exact_kernel(x, y))
        slack = 0.0083 if feature_map.kind == "slay" else 1e-7  # the error of its quadrature
        assert exact == pytest.approx(told(feature_map, x, y), rel=slack)
        samples = estimates(feature_map, x, y, 2000)
        assert deviation(samples, exact) < SIGMAS
        assert SIGMAS * float(samples.std()) / math.sqrt(2000) < exact, "0 would show"
        assert bool((samples >= 0).all()) or not feature_map.kernel_non_negative


def test_relu_exact_kernel_at_special_angles():
    feature_map = PerformerReLU(kernel_epsilon=0)
    x = gaussian(5, 7)
    square = x.square().sum(-1)
    torch.testing.assert_close(feature_map.exact_kernel(x, x), square / 2)
    assert float(feature_map.exact_kernel(x, -x).abs().max()) < 1e-15 * float(square.max())
    assert bool((feature_map.exact_kernel(x, torch.zeros_like(x)) == 0).all())


@pytest.mark.parametrize("distance", [0.3, 1.0, 2.0])
@pytest.mark.spec("PHI-RFF-I2", "PHI-RFF-I4")
def test_fourier_variances(distance):
    width, replicas = 16, 6000
    x, y = pair(1.0, 1 - distance**2 / 2)  # |x - y| = distance
    kernel = reference.gaussian_kernel(x.numpy(), y.numpy(), 1.0)
    errors = {}
    for form, formula in (("phased", reference.variance_phased), ("paired", reference.variance_paired)):
        samples = estimates(RandomFourier(d_phi=width, form=form, sigma=1.0), x, y, replicas)
        errors[form] = (samples - kernel) ** 2
        assert deviation(errors[form], formula(kernel, width)) < SIGMAS
        assert formula(kernel, width) <= 1 / width
    assert reference.variance_paired(kernel, width) < reference.variance_phased(kernel, width)
    blocks = RandomFourier(d_phi=width, form="paired", orthogonal=True, sigma=1.0)
    orthogonal = (estimates(blocks, x, y, replicas) - kernel) ** 2
    gap = errors["paired"].mean() - orthogonal.mean()
    assert gap > SIGMAS * (errors["paired"].var() + orthogonal.var()).sqrt() / math.sqrt(replicas)


@pytest.mark.spec("PHI-RFF-I1")
def test_fourier_norms():
    x = 3 * gaussian(200, 2, 5)
    paired = RandomFourier(d_phi=64, form="paired", sigma=0.3)
    features = paired(x, paired.init(5, heads=2, dtype=F64))
    torch.testing.assert_close(features.square().sum(-1), torch.ones(200, 2, dtype=F64))
    assert paired.norm_bound == 1.0
    assert RandomFourier().sigma == 0.4  # of those who name the kind alone
    phased = RandomFourier(d_phi=3)
    params = phased.init(5, dtype=F64)
    squares = phased(gaussian(5000, 5), params).square().sum(-1)
    assert phased.norm_bound == 2.0 and float(squares.max()) <= 2.0
    # No smaller bound holds: x can bring every phase to 0.
    aligned = -torch.linalg.lstsq(params["frozen"]["w"][0].mT, params["frozen"]["b"][0, :, None])[0]
    assert float(phased(aligned[:, 0], params).square().sum()) == pytest.approx(2.0)


@pytest.mark.spec("PHI-RFF-E3", "PHI-FAVOR-I2")
def test_trigonometric_kernels_can_be_negative_and_say_so():
    x, y = gaussian(200, 16, seed=1), gaussian(200, 16, seed=2)
    for feature_map in (
        RandomFourier(d_phi=64),
        RandomFourier(d_phi=64, form="paired"),
        Favor(num_features=64, variant="trigonometric"),
    ):
        params = feature_map.init(16, dtype=F64)
        kernel = feature_map(x, params) @ feature_map(y, params).mT
        assert float((kernel < 0).double().mean()) > 0.02
        assert not feature_map.non_negative and not feature_map.kernel_non_negative
    for variant in ("positive", "hyperbolic"):
        feature_map = Favor(num_features=64, variant=variant)
        assert feature_map.non_negative and feature_map.kernel_non_negative
        assert bool((feature_map(x, feature_map.init(16, dtype=F64)) > 0).all())


@pytest.mark.parametrize("variant", ["trigonometric", "positive", "hyperbolic"])
@pytest.mark.parametrize("length", [0.3, 0.6])
@pytest.mark.spec("PHI-FAVOR-I3")
def test_mean_squared_errors_follow_the_lemmas(length, variant):
    m, replicas = 8, 8000
    formula = getattr(reference, f"mse_{variant}")
    width = m if variant == "positive" else 2 * m
    for cosine in (0.7, -0.4):
        x, y = pair(length, cosine)
        kernel = math.exp(float(x @ y))
        feature_map = Favor(num_features=width, variant=variant, orthogonal=False, scale="none")
        errors = (estimates(feature_map, x, y, replicas) - kernel) ** 2
        expected = formula(x.numpy(), y.numpy(), m)
        assert deviation(errors, expected) < SIGMAS
        # Five standard errors are less than half: a factor of two in a formula would show.
        assert SIGMAS * errors.std() / math.sqrt(replicas) < 0.5 * expected


@pytest.mark.spec("PHI-FAVOR-I4")
def test_orthogonal_blocks_lower_the_error():
    d = 16
    x, y = pair(0.6, 0.7, d)
    kernel = math.exp(float(x @ y))
    # Positive features have the heaviest tails: more replicas for the same certainty.
    for variant, replicas in (("positive", 16000), ("hyperbolic", 2000), ("trigonometric", 2000)):
        errors = {}
        for orthogonal in (False, True):
            feature_map = Favor(
                num_features=d if variant == "positive" else 2 * d, variant=variant, orthogonal=orthogonal, scale="none"
            )
            errors[orthogonal] = (estimates(feature_map, x, y, replicas) - kernel) ** 2
        noise = (errors[False].var() + errors[True].var()).sqrt() / math.sqrt(replicas)
        assert errors[False].mean() - errors[True].mean() > SIGMAS * noise


@pytest.mark.spec("PHI-FAVOR-D4", "PHI-FAVOR-I5")
def test_sqrt_norms_estimate_the_regularised_kernel():
    for d in (2, 3, 64):
        feature_map = Favor(norms="sqrt", scale="none")
        for length, cosine in ((0.3, 0.5), (1.2, 0.9), (2.5, -0.2)):
            x, y = pair(length, cosine, d)
            exact = float(feature_map.exact_kernel(x, y))
            quadrature = reference.regularised_softmax(x.numpy(), y.numpy())
            assert exact == pytest.approx(quadrature, rel=2e-7)
            assert exact <= math.exp(float(x @ y)) * (1 + 1e-12), "never above softmax"
    x, y = pair(1.2, 0.9, 3)
    for variant in ("positive", "hyperbolic", "trigonometric"):
        feature_map = Favor(num_features=12, norms="sqrt", scale="none", variant=variant)
        samples = estimates(feature_map, x, y, 4000)
        assert deviation(samples, float(feature_map.exact_kernel(x, y))) < SIGMAS
        if variant != "positive":  # small enough an error to tell the two kernels apart
            assert deviation(samples, math.exp(float(x @ y))) > 2 * SIGMAS
    assert Favor(norms="sqrt", scale="none").exact_kernel(x[:0].new_zeros(0, 3), x).shape == (0,)


@pytest.mark.spec("PHI-PRELU-E6", "PHI-PRELU-I1")
def test_epsilon_keeps_features_off_zero():
    x = gaussian(50, 1, 8).expand(50, 1000, 8)
    for epsilon, share in ((0.0, 2**-4), (1e-3, 0.0)):
        feature_map = PerformerReLU(num_features=4, kernel_epsilon=epsilon)
        features = feature_map(x, feature_map.init(8, heads=1000, dtype=F64))
        # Rows of one draw share a direction set: 1000 independent draws count.
        dead = (features.sum(-1) == 0).double().mean(0)
        assert deviation(dead, share) < SIGMAS if share else float(dead.sum()) == 0
