"""The kernel of slay, its quadrature against Gauss and Laguerre's, and what its random features reach."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hecate.phi import SLAY
from tests.phi.random_common import F64, SIGMAS, deviation, estimates, gaussian, pair, seeded
from tests.reference import random_features as reference

COSINES = np.linspace(-1, 1, 401)


def worst(nodes, eps: float) -> float:
    """Largest relative error of sum_r w_r exp(2 s_r c) as 1 / (2 + eps - 2 c)."""
    s, logarithm = np.array(nodes).T
    found = np.exp(2 * np.outer(COSINES, s) + logarithm).sum(1)
    return float(np.abs(found * (2 + eps - 2 * COSINES) - 1).max())


def laguerre(eps: float, nodes: int):
    t, weight = np.polynomial.laguerre.laggauss(nodes)
    return list(zip(t / (2 + eps), np.log(weight / (2 + eps)), strict=True))


@pytest.mark.spec("PHI-SLAY-D1")
def test_kernel_of_the_formula():
    feature_map = SLAY(eps=0.5, nodes=5, m=3)
    params, x, y = feature_map.init(4, generator=seeded(), dtype=F64), gaussian(6, 4, seed=1), gaussian(6, 4, seed=2)
    w = params["frozen"]["w"][0].T.numpy()
    x, y = (torch.nn.functional.normalize(item, dim=-1) for item in (x, y))
    found = (feature_map(2 * x, params) * feature_map(y, params)).sum(-1)
    for at in range(6):
        a, b = (reference.slay(item[at].numpy(), w, 0.5, 5) for item in (x, y))
        assert float(found[at]) == pytest.approx(a @ b, rel=1e-10)
    assert feature_map.output_dim(4) == 5 * 3 * 10


@pytest.mark.spec("PHI-SLAY-I1", "PHI-SLAY-E1")
@pytest.mark.parametrize(("eps", "ours", "plain"), [(1.0, 0.0082, 4.0e-5), (0.1, 0.0203, 0.264), (0.01, 0.0478, 0.871)])
def test_the_quadrature_holds_where_gauss_laguerre_fails(eps, ours, plain):
    assert worst(SLAY(eps=eps, m=1).quadrature(), eps) == pytest.approx(ours, rel=0.01)
    assert worst(laguerre(eps, 8), eps) == pytest.approx(plain, rel=0.01)


@pytest.mark.spec("PHI-SLAY-E2")
def test_squares_of_isotropic_projections_are_offset():
    x, y = pair(1.0, 0.3, 4)
    anchors = gaussian(4, 200_000, seed=3)
    samples = (x @ anchors).square() * (y @ anchors).square()
    assert deviation(samples, 1 + 2 * 0.3**2) < SIGMAS and float(samples.mean()) > 10 * 0.3**2


@pytest.mark.spec("PHI-SLAY-E3")
@pytest.mark.parametrize(("eps", "share"), [(1.0, 0.65), (0.1, 0.12)])
def test_a_small_eps_is_out_of_reach_of_random_features(eps, share):
    feature_map, x = SLAY(eps=eps, m=128), torch.eye(8, dtype=F64)[0]
    median = float(estimates(feature_map, x, x, 401).median() / feature_map.exact_kernel(x, x))
    # The standard error of the median of 401 is about 0.03 of it.
    assert median == pytest.approx(share, abs=0.1)
