"""Random feature maps: the evidence behind the errata of their specification, and reductions."""

import math

import numpy as np
import pytest
import torch

from hecate.phi import Favor, LeakyReLU, PerformerReLU, RandomFourier
from tests.phi.random_common import F64, gaussian, pair, seeded
from tests.reference import random_features as reference


@pytest.mark.spec("PHI-RFF-R1")
def test_unit_keys_turn_the_gaussian_kernel_into_softmax():
    sigma = 0.8
    x, y = pair(1.0, 0.3)
    kernel = float(RandomFourier(d_phi=2, sigma=sigma).exact_kernel(x, y))
    expected = math.exp(float(x @ y) / sigma**2)
    assert math.exp(1 / sigma**2) * kernel == pytest.approx(expected, rel=1e-12)


@pytest.mark.spec("PHI-RFF-E4")
def test_finitely_many_features_have_a_finite_rank():
    feature_map = RandomFourier(d_phi=16)
    x = gaussian(64, 4)
    features = feature_map(x, feature_map.init(4, dtype=F64))
    exact = feature_map.exact_kernel(x[:, None], x[None])
    assert int(torch.linalg.matrix_rank(features @ features.mT)) == 16
    assert int(torch.linalg.matrix_rank(exact)) == 64


@pytest.mark.spec("PHI-RFF-E3", "PHI-FAVOR-E4")
@pytest.mark.parametrize("scale,low,high", [(0.5, 0.02, 0.2), (1.0, 0.4, 0.6), (2.0, 0.4, 0.6)])
def test_share_of_negative_trigonometric_kernels(scale, low, high):
    feature_map = Favor(num_features=128, variant="trigonometric", orthogonal=False)
    params = feature_map.init(64, dtype=F64)
    q, k = scale * gaussian(200, 64, seed=1), scale * gaussian(200, 64, seed=2)
    negative = float((feature_map(q, params) @ feature_map(k, params).mT < 0).double().mean())
    assert low < negative < high


@pytest.mark.spec("PHI-FAVOR-E1")
def test_the_minus_sign_in_the_trigonometric_map_is_another_kernel():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((40000, 4))
    x, y = np.array([0.6, -0.3, 0.2, 0.5]), np.array([-0.4, 0.5, 0.7, 0.3])
    minus = math.exp(-(x @ x + y @ y) / 2)
    paired = reference.fourier_paired(x, w) @ reference.fourier_paired(y, w)
    error = 5 / math.sqrt(2 * len(w))  # five times the largest standard deviation of `paired`
    true, wrong = math.exp(x @ y), math.exp(x @ y - x @ x - y @ y)
    assert abs(paired / minus - true) < error / minus
    assert abs(paired * minus - wrong) < error * minus
    assert wrong < 0.3 * true
    feature_map = Favor(num_features=2, variant="trigonometric", scale="none")
    kernel = feature_map.exact_kernel(torch.tensor(x), torch.tensor(y))
    assert float(kernel) == pytest.approx(true, rel=1e-12)


@pytest.mark.spec("PHI-FAVOR-D3", "PHI-FAVOR-E3")
def test_the_scale_belongs_into_the_projection_and_the_norm():
    d = 16
    x, y = gaussian(d, seed=1), gaussian(d, seed=2)
    feature_map, plain = Favor(num_features=24), Favor(num_features=24, scale="none")
    params = feature_map.init(d, dtype=F64)
    assert float(feature_map.exact_kernel(x, y)) == pytest.approx(math.exp(float(x @ y) / math.sqrt(d)), rel=1e-12)
    torch.testing.assert_close(feature_map(x, params), plain(x * d**-0.25, params))
    # Scaled in the projection alone, the norm term survives: another kernel by this factor.
    half = float(x @ x + y @ y) / 2
    wrong = torch.exp(x * d**-0.25 @ params["frozen"]["w"][0] - x @ x / 2) / math.sqrt(24)
    factor = math.exp(-float(x @ x) / 2 * (1 - 1 / math.sqrt(d)))
    torch.testing.assert_close(wrong, feature_map(x, params) * factor)
    assert math.exp(-half * (1 - 1 / math.sqrt(d))) < 1e-3


@pytest.mark.spec("PHI-FAVOR-E4")
def test_features_without_the_norm_term_estimate_the_gaussian_kernel():
    x, y = gaussian(4, seed=1), gaussian(4, seed=2)
    w = gaussian(20000, 4, seed=3).numpy()
    paired = reference.fourier_paired(x.numpy(), w) @ reference.fourier_paired(y.numpy(), w)
    gaussian_kernel = reference.gaussian_kernel(x.numpy(), y.numpy(), 1.0)
    assert abs(paired - gaussian_kernel) < 5 / math.sqrt(2 * len(w))
    assert abs(paired - math.exp(float(x @ y))) > 0.1


@pytest.mark.spec("PHI-FAVOR-E5", "PHI-RAND-I5")
def test_a_maximum_per_key_changes_the_attention_weights():
    feature_map = Favor(num_features=32, scale="none")
    params = feature_map.init(4, dtype=F64)
    q, keys = gaussian(4, seed=1), gaussian(3, 4, seed=2)
    features = feature_map(keys, params)

    def weights(phi_k):
        scores = phi_k @ feature_map(q, params)
        return scores / scores.sum()

    stabilised = features / features.amax(-1, keepdim=True)
    assert float((weights(stabilised) - weights(features)).abs().max()) > 0.05
    torch.testing.assert_close(weights(features / features.amax()), weights(features))


@pytest.mark.spec("PHI-PRELU-E7")
def test_the_other_orientation_of_w_does_not_multiply():
    w = PerformerReLU(num_features=6).init(4)["frozen"]["w"][0]
    assert w.shape == (4, 6)
    with pytest.raises(RuntimeError, match="size mismatch"):
        w @ torch.zeros(4, dtype=w.dtype)


@pytest.mark.spec("PHI-PRELU-E4")
def test_a_leaky_relu_loses_the_sign_promise():
    leaky = LeakyReLU(slope=0.5)
    w = PerformerReLU(num_features=8).init(8, generator=seeded(1), dtype=F64)["frozen"]["w"][0]
    x, y = gaussian(200, 8, seed=1), gaussian(200, 8, seed=2)
    kernel = leaky(x @ w) @ leaky(y @ w).mT
    assert bool((kernel < 0).any())
    assert bool(((x @ w).relu() @ (y @ w).relu().mT >= 0).all())
