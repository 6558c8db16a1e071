"""Learned maps against transcriptions in numpy, and what circulating programs have instead."""

import numpy as np
import pytest
import torch
from torch import Tensor

from hecate import phi
from tests.phi.random_common import EMPTY, EXACT, gaussian
from tests.reference import phi as reference


def _moved(feature_map: phi.FeatureMap, d: int, heads: int = 1) -> phi.Params:
    """Parameters away from their initial values."""
    params = feature_map.init(d, heads=heads, dtype=torch.float64)
    learned = {
        name: value + 0.3 * gaussian(*value.shape, seed=7 + i)
        for i, (name, value) in enumerate(params["learned"].items())
    }
    return {"learned": learned, "frozen": params["frozen"]}


CASES = [
    (phi.Hedgehog(), reference.hedgehog),
    (phi.Hedgehog(joint=True), reference.hedgehog_fused),
    (phi.GLU(d_hidden=6), reference.glu),
    (phi.T2R(d_phi=6), reference.t2r),
    (phi.Hadamard(d_phi=6), reference.hadamard),
    (phi.Rebased(), reference.rebased),
    (phi.Rebased(eps=0.5), lambda *given: reference.rebased(*given, eps=0.5)),
    (phi.Linear(d_phi=3), reference.linear),
    *(
        (
            phi.MLP(d_hidden=5, activation=name, residual=residual, d_phi=None if residual else 6),
            lambda *given, how=(name, residual): reference.mlp(*given, *how),
        )
        for name in ("gelu", "relu", "silu", "tanh")
        for residual in (True, False)
    ),
]
each = pytest.mark.parametrize(
    ("feature_map", "function"),
    CASES,
    ids=lambda value: str(value) if isinstance(value, phi.FeatureMap) else "reference",
)


@each
@pytest.mark.spec("PHI-HEDGEHOG-D1", "PHI-HEDGEHOG-D3", "PHI-GLU-D1", "PHI-T2R-D1", "PHI-HADA-D1", "PHI-REBASED-D1")
@pytest.mark.spec("PHI-LINEAR-D1", "PHI-MLP-D1")
def test_values_per_head(feature_map, function):
    params, x = _moved(feature_map, 4, heads=2), gaussian(5, 2, 4)
    features = feature_map(x, params)
    for head in range(2):
        given = [value[head].numpy() for value in params["learned"].values()]
        expected = np.stack([function(row, *given) for row in x[:, head].numpy()])
        assert expected.shape[-1] == feature_map.output_dim(4)
        torch.testing.assert_close(features[:, head], torch.from_numpy(expected), **EXACT)


@pytest.mark.spec("PHI-HEDGEHOG-D2", "PHI-REBASED-D1", "PHI-T2R-D1")
def test_initial_values():
    x = gaussian(5, 4)
    hedgehog = phi.Hedgehog()
    fresh = hedgehog.init(4, heads=3, dtype=torch.float64)
    half_space = phi.Softmax(half_space=True)(x)
    assert torch.equal(hedgehog(x, hedgehog.init(4, dtype=torch.float64)), half_space)
    assert [tuple(value.shape) for value in fresh["learned"].values()] == [(3, 4, 4), (3, 4)]
    rebased = phi.Rebased().init(4, heads=3)["learned"]
    assert bool((rebased["scale"] == 1).all()) and not bool(rebased["shift"].any())
    assert rebased["shift"].shape == (3, 4)
    assert not bool(phi.T2R(d_phi=6).init(4)["learned"]["bias"].any())


@pytest.mark.spec("PHI-HEDGEHOG-E1")
def test_one_softmax_over_both_halves_is_another_map():
    feature_map = phi.Hedgehog()
    params, x = _moved(feature_map, 4), gaussian(5, 4)
    given = [value[0].numpy() for value in params["learned"].values()]
    fused = np.stack([reference.hedgehog_fused(row, *given) for row in x.numpy()])
    features = feature_map(x, params)
    halves = features.unflatten(-1, (2, 4)).sum(-1)
    torch.testing.assert_close(halves, torch.ones(5, 2), **EXACT)
    assert np.allclose(fused.sum(-1), 1) and np.ptp(fused[:, :4].sum(-1)) > 0.1
    without_minus = torch.cat([features[:, :4], features[:, :4]], -1)  # as another program has it
    assert int(torch.linalg.matrix_rank(without_minus)) <= 4


@pytest.mark.spec("PHI-HEDGEHOG-D3", "PHI-HEDGEHOG-E1")
def test_the_joint_softmax_is_that_of_the_library():
    feature_map = phi.Hedgehog(joint=True)
    params, x = _moved(feature_map, 4), gaussian(5, 4)
    weight, bias = (value[0] for value in params["learned"].values())
    z = x @ weight + bias
    torch.testing.assert_close(feature_map(x, params), torch.cat([2 * z, -2 * z], -1).softmax(-1), **EXACT)
    torch.testing.assert_close(feature_map(x, params).sum(-1), torch.ones(5), **EXACT)
    assert feature_map.norm_bound == 1 and phi.Hedgehog().norm_bound == 2


@pytest.mark.spec("PHI-HADA-I1")
def test_products_have_the_rank_of_quadratic_forms():
    feature_map, x = phi.Hadamard(d_phi=12), gaussian(100, 4)
    features = feature_map(x, _moved(feature_map, 4))
    assert int(torch.linalg.matrix_rank(features)) == 10  # D (D + 1) / 2
    assert torch.equal(feature_map(-x, _moved(feature_map, 4)), features)


@pytest.mark.spec("PHI-HADA-E1")
def test_the_triangle_of_an_outer_product_that_is_not_symmetric():
    w_1, w_2, q, k = (gaussian(4, 4, seed=seed) for seed in range(4))
    a, b = torch.triu_indices(4, 4)

    def triangle(x: Tensor, w_1: Tensor, w_2: Tensor) -> Tensor:
        return (x @ w_1)[:, a] * (x @ w_2)[:, b]

    found, exchanged = (
        (triangle(q, *pair) * triangle(k, *pair)).sum(-1) for pair in ((w_1, w_2), (w_2, w_1))
    )  # fmt: skip
    maps = phi.TensorProduct(maps=(phi.Linear(d_phi=4), phi.Linear(d_phi=4)))
    params = {"learned": {"0.weight": w_1[None], "1.weight": w_2[None]}, "frozen": {}}
    full = (maps(q, params) * maps(k, params)).sum(-1)
    ours = ((q @ w_1) * (k @ w_1)).sum(-1) * ((q @ w_2) * (k @ w_2)).sum(-1)
    torch.testing.assert_close(full, ours, **EXACT)
    both = (q @ w_1) * (k @ w_1) * (q @ w_2) * (k @ w_2)
    torch.testing.assert_close(found + exchanged, full + both.sum(-1), rtol=1e-12, atol=1e-12)
    assert float((found - exchanged).abs().min()) > 0.1 and float((found - full).abs().min()) > 0.1


@pytest.mark.spec("PHI-REBASED-I1", "PHI-REBASED-E1")
def test_the_kernel_of_rebased_is_a_square():
    feature_map = phi.Rebased()
    params = _moved(feature_map, 4)
    x, y = gaussian(40, 4, seed=1), gaussian(40, 4, seed=2)
    scale, shift = (value[0].numpy() for value in params["learned"].values())
    z = [scale * reference.layer_norm(row, 1e-5) + shift for row in x.numpy()]
    w = [scale * reference.layer_norm(row, 1e-5) + shift for row in y.numpy()]
    expected = torch.tensor([(a @ b) ** 2 / 4 for a, b in zip(z, w, strict=True)])
    fx, fy = feature_map(x, params), feature_map(y, params)
    torch.testing.assert_close((fx * fy).sum(-1), expected, rtol=1e-12, atol=1e-13)
    # Without the root of 2 on products of different components it is another function.
    upper = torch.triu_indices(4, 4)
    plain = [torch.tensor(np.stack(v))[:, upper[0]] * torch.tensor(np.stack(v))[:, upper[1]]
             for v in (z, w)]  # fmt: skip
    unscaled = (plain[0] * plain[1]).sum(-1) / 4
    diagonal = torch.tensor([(a**2 @ b**2) / 4 for a, b in zip(z, w, strict=True)])
    torch.testing.assert_close(unscaled, (expected + diagonal) / 2, rtol=1e-12, atol=1e-13)
    assert float((unscaled - expected).abs().max()) > 0.1


@pytest.mark.spec("PHI-SOFTMAX-I1")
@pytest.mark.parametrize("half_space", [False, True])
def test_softmax_does_not_see_a_constant(half_space):
    feature_map, x = phi.Softmax(half_space=half_space), gaussian(5, 4)
    torch.testing.assert_close(feature_map(x + 3.0), feature_map(x), rtol=1e-13, atol=0)
    assert float(feature_map(1e3 * x).sum(-1).max()) <= 2.0 + 1e-12
    low = feature_map((x * 4).bfloat16())
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, feature_map((x * 4).bfloat16().float()).bfloat16())


@pytest.mark.spec("PHI-CRELU-D1")
def test_crelu_keeps_lengths_and_loses_nothing():
    x = gaussian(50, 4)
    features = phi.CReLU()(x)
    up, down = features.chunk(2, -1)
    assert torch.equal(up - down, x)
    torch.testing.assert_close(features.square().sum(-1), x.square().sum(-1), **EXACT)
    assert not bool((phi.CReLU()(x) * phi.CReLU()(-x)).any())
    _, at_zero = phi.CReLU().forward(torch.zeros(3), EMPTY)
    assert not bool(phi.CReLU().vjp(at_zero, torch.ones(6))[0].any())


@pytest.mark.spec("PHI-TANH-D1", "PHI-SIGMOID-I1")
def test_bounded_activations():
    x = torch.tensor([-100.0, -40.0, 0.0, 40.0], dtype=torch.float64)
    assert float(phi.Sigmoid()(x)[0]) == pytest.approx(3.720075976020836e-44, rel=1e-13)
    assert bool((phi.Tanh()(x).abs() <= 1).all())
    _, residuals = phi.Sigmoid().forward(x, EMPTY)
    slope = phi.Sigmoid().vjp(residuals, torch.ones(4))[0]
    assert float(slope[3]) == pytest.approx(float(slope[1]), rel=1e-13)  # not 0 by cancellation
