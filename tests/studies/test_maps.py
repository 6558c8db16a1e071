"""The study of feature maps: that none is missing, and its measures against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hecate import phi
from studies import map_measures as lab
from studies import maps
from studies.map_claims import CLAIMS, cancelled
from tests.reference import phi as reference

TITLES = [lab.title(map_) for map_ in lab.MAPS]
ELEMENTWISE = {
    "elu": (phi.ELU(), reference.elu),
    "squared_relu": (phi.SquaredReLU(), reference.squared_relu),
    "leaky": (phi.LeakyReLUSquared(), reference.leaky_relu_squared),
    "gelu": (phi.GELUShifted(), reference.gelu_shifted),
    "exp": (phi.Exp(), reference.exp),
    "sigmoid": (phi.Sigmoid(), reference.sigmoid),
    "softplus": (phi.Softplus(), reference.softplus),
}


def test_every_map_of_the_library_is_measured_and_has_a_name_of_its_own():
    known = {kind for kind, variant in phi.FeatureMap.variants().items() if variant.__module__.startswith("hecate.")}
    measured = {map_.kind for map_ in lab.MAPS}
    parts = {inner.kind for map_ in lab.MAPS for inner in getattr(map_, "maps", ())}
    assert measured | parts == known and measured == known
    assert len(set(TITLES)) == len(TITLES)
    assert set(CLAIMS) <= set(TITLES)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_curves(name):
    map_, formula = ELEMENTWISE[name]
    x = np.linspace(-4, 4, 160)  # not at 0, where some have a kink
    value, slope = maps.value_and_slope(map_, torch.tensor(x))
    np.testing.assert_allclose(value, formula(x), rtol=1e-10, atol=1e-12)
    step = 1e-6
    by_difference = (formula(x + step) - formula(x - step)) / (2 * step)
    # Central differences err by step^2 |phi'''| / 6 < 1e-10 and by rounding, 1e-16 exp(4) / step.
    np.testing.assert_allclose(slope, by_difference, rtol=0, atol=1e-8)


def test_the_slope_is_the_largest_singular_value_of_the_jacobian():
    g = torch.Generator().manual_seed(5)
    x = torch.randn(3, lab.WIDTH, generator=g, dtype=torch.float64)
    step = 1e-6
    for map_ in (phi.ELU(), phi.Taylor(), phi.Favor(num_features=12)):
        params = lab.parameters(map_, lab.WIDTH, 5)
        found = lab.slope(map_, x, 5)
        for row, ours in zip(x, found.tolist(), strict=True):
            units = torch.eye(lab.WIDTH, dtype=torch.float64) * step
            jacobian = (map_(row + units, params) - map_(row - units, params)) / (2 * step)
            expected = np.linalg.svd(jacobian.numpy(), compute_uv=False)[0]
            assert ours == pytest.approx(expected, rel=1e-6)


def test_slopes_and_sizes_survive_squares_that_overflow():
    x = torch.full((1, lab.WIDTH), 400.0, dtype=torch.float64)
    assert lab.slope(phi.Exp(), x, 0)[0] == pytest.approx(math.exp(400), rel=1e-9)
    rows = torch.tensor([[3e200, 4e200], [0.0, 1.0]], dtype=torch.float64)
    assert lab.log_norm(rows) == pytest.approx(200 + math.log10(5))


@pytest.mark.parametrize(
    ("map_", "rank"),
    [
        (phi.Identity(), 16),
        (phi.CReLU(), 32),
        (phi.DPFP(nu=3), 96),  # nu 2 d: products of neighbours differ
        (phi.Polynomial(degree=2), math.comb(18, 2)),
        (phi.Linear(d_phi=64), 16),  # wider, not richer
        (phi.TensorProduct(maps=(phi.ELU(), phi.ELU())), math.comb(17, 2)),  # symmetric
    ],
)
def test_rank_and_floor(map_, rank):
    facts = lab.facts(map_, 0)
    assert facts.rank == rank and facts.floor == (1 - rank / lab.KEYS) / 2
    # No memory beats the floor, and least squares over one-hot values reaches it.
    g = torch.Generator().manual_seed(0)
    x = torch.randn(lab.KEYS, lab.WIDTH, generator=g, dtype=torch.float64)
    keys = lab.features(map_, lab.parameters(map_, lab.WIDTH, 0), x).numpy()
    u, s, _ = np.linalg.svd(keys, full_matrices=False)
    u = u[:, s > 1e-6 * s[0]]
    loss = ((np.eye(lab.KEYS) - u @ u.T) ** 2).sum() / (2 * lab.KEYS)
    assert loss == pytest.approx(facts.floor, abs=1e-9)


def test_signs_are_counted():
    facts = lab.facts(phi.Identity(), 0)
    # 4,096 features and 16,384 pairs: shares of 1/2 to within five standard errors, pairs of the
    # same vectors being dependent (2 * 128 independent ones at least).
    assert facts.negative == pytest.approx(0.5, abs=5 / math.sqrt(4 * 4096))
    assert facts.negative_kernel == pytest.approx(0.5, abs=5 / math.sqrt(4 * 256))
    relu = lab.facts(phi.ReLU(), 0)
    assert relu.negative == relu.negative_kernel == 0 and 0 < relu.zero_kernel < 0.05
    taylor = lab.facts(phi.Taylor(), 0)
    assert taylor.negative > 0.3 and taylor.negative_kernel == 0


def test_lost_features_are_those_that_a_narrow_type_cannot_hold():
    x = torch.tensor([[-200.0, -50.0, 0.0, 100.0]], dtype=torch.float64)
    # exp of them: 1e-87 and 3e43 leave float32, 2e-22 stays; bfloat16 has the same exponents.
    assert lab.lost(phi.Exp(), x, torch.float32, 0) == 0.5
    assert lab.lost(phi.Exp(), x, torch.bfloat16, 0) == 0.5
    assert lab.lost(phi.ReLU(), x, torch.float32, 0) == 0  # a zero that is meant is not lost


def test_elu_as_often_written_cancels():
    g = torch.Generator().manual_seed(0)
    x = 10 * torch.randn(lab.KEYS, lab.WIDTH, generator=g, dtype=torch.float64)
    gone = reference.elu_cancelling(x.numpy().astype(np.float32)) == 0
    # expm1 rounds to -1 below -17.33, where exp is 2^-25; one that errs by a bit, from -16.63 on.
    assert 0.03 < gone.mean() <= cancelled(torch.float32) <= float((x < -16.63).double().mean())
    # 7 bits of fraction: all below -6.25 is gone, a quarter of these inputs.
    assert cancelled(torch.bfloat16) == pytest.approx(float((x < -6.25).double().mean()), abs=0.02)


def test_the_best_scale_is_the_one_with_the_least_error():
    scales, seeds = [1.0, 0.25, 0.5], [7, 8]
    map_ = phi.RandomFourier(d_phi=64)
    errors = [sum(lab.quality(map_, seed, s, 1.0).error for seed in seeds) for s in scales]
    assert lab.best_scale(map_, seeds, scales, 1.0) == scales[int(np.argmin(errors))]


def test_more_terms_of_the_series_read_more_like_softmax():
    errors = [lab.quality(phi.Taylor(order=order), 0, 1.0, 0.5).error for order in (2, 3, 4)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_a_broken_promise_is_seen():
    facts = lab.facts(phi.ReLU(), 0)
    row = lab.Measured(phi.ReLU(), facts, [], (1.0, 1.0), [], [])
    assert row.kept
    assert not row._replace(facts=facts._replace(negative=0.01)).kept
    assert not row._replace(facts=facts._replace(negative_kernel=0.01)).kept
    assert row._replace(map_=phi.Identity(), facts=facts._replace(negative=0.01)).kept


def test_costs_are_relative_to_identity():
    cheap, dear = lab.costs([phi.ReLU(), phi.Polynomial(degree=2)], vectors=512, rounds=1)
    assert 0 < cheap and 0 < dear
