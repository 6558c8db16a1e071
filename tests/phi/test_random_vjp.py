"""Random feature maps: derivatives, precision, transforms."""

import math

import pytest
import torch

from hecate import phi
from hecate.phi import PerformerReLU, RandomFourier
from hecate.phi.base import project_precisely
from hecate.testing import check_vjp
from tests.phi.random_common import F64, MAPS, bound_block, each_map, gaussian


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.spec("PHI-RFF-I3")
def test_phases_are_as_good_as_float32(size):
    d, width = 16, 64
    feature_map = RandomFourier(d_phi=width, sigma=0.5)
    params = feature_map.init(d)
    double = {"learned": {}, "frozen": {k: v.double() for k, v in params["frozen"].items()}}
    x = size * torch.nn.functional.normalize(gaussian(200, d), dim=-1).float()
    w = double["frozen"]["w"][0]
    # Round-off of a dot product of d terms, of adding b and of the cosine's argument: unit 2^-24.
    magnitude = x.double().abs() @ w.abs() + 2 * math.pi
    allowed = math.sqrt(2 / width) * 2**-24 * ((d + 2) * magnitude + 4)
    exact = feature_map(x.double(), double)
    error = (feature_map(x, params).double() - exact).abs()
    assert bool((error <= allowed).all())
    low = x.bfloat16()
    exact = feature_map(low.double(), double)
    error = (feature_map(low, params).double() - exact).abs()
    # On top of that the rounding of the result to bfloat16: 2^-8 relative.
    assert bool((error <= 2 * allowed + 2**-8 * (exact.abs() + 2 * allowed)).all())
    if size > 1:
        naive = (low @ params["frozen"]["w"][0].bfloat16()).double()
        assert float((naive - low.double() @ w).abs().max()) > 0.1, "a bfloat16 phase is lost"
    better = feature_map(x, double)
    assert better.dtype == torch.float32
    error = (better.double() - feature_map(x.double(), double)).abs()
    assert bool((error <= 2**-24 * math.sqrt(2 / width)).all()), "float64 draws: float64 phases"


@each_map
@pytest.mark.spec("PHI-RAND-I5")
def test_a_token_does_not_change_the_features_of_another(feature_map):
    params = feature_map.init(6, dtype=F64)
    x = gaussian(9, 6)
    later = x.clone()
    later[5:] *= 4.0  # a per-sequence maximum would move with these
    torch.testing.assert_close(feature_map(x, params)[:5], feature_map(later, params)[:5], rtol=1e-13, atol=1e-15)
    for t in range(9):
        torch.testing.assert_close(feature_map(x[t], params), feature_map(x, params)[t], rtol=1e-13, atol=1e-15)


@pytest.mark.spec("PHI-PRELU-V1", "PHI-PRELU-E4")
def test_relu_derivative_at_and_below_the_kink():
    feature_map = PerformerReLU(num_features=2, kernel_epsilon=0.5)
    params = {"learned": {}, "frozen": {"w": torch.eye(2, dtype=F64).unsqueeze(0)}}
    x = torch.tensor([[0.0, -1.0]], dtype=F64)
    features, residuals = feature_map.forward(x, params)
    assert bool((features > 0).all()), "epsilon makes features positive"
    gx = feature_map.vjp(residuals, torch.ones_like(features))[0]
    assert torch.equal(gx, torch.zeros_like(x)), "but gives no gradient"


# Maps without draws beside those with them.
ROUNDED = [
    *MAPS, phi.ReLU(shift=0.1), phi.SquaredReLU(), phi.LeakyReLUSquared(), phi.GELUShifted(), phi.Softplus(beta=3.0),
    phi.Exp(shift=0.3), phi.DPFP(nu=2), phi.Taylor(order=3), phi.Polynomial(degree=3), phi.Linear(d_phi=5),
    phi.MLP(d_hidden=5), phi.Tanh(), phi.Sigmoid(), phi.CReLU(), phi.Softmax(temperature=0.3, half_space=True),
    phi.Hedgehog(), phi.T2R(d_phi=5), phi.Hadamard(d_phi=5), phi.Rebased(),
]  # fmt: skip


@pytest.mark.parametrize("feature_map", ROUNDED, ids=repr)
@pytest.mark.spec("PHI-RAND-I4", "PHI-FAMILY-I1")
def test_low_precision_inputs_lose_only_the_last_rounding(feature_map):
    params = feature_map.init(16, heads=2)
    x = (2 * gaussian(50, 2, 16)).bfloat16()
    full, residuals = feature_map.forward(x.float(), params)
    g = gaussian(*full.shape, seed=5).bfloat16()
    gx = feature_map.vjp(residuals, g.float())[0].bfloat16()
    assert torch.equal(feature_map(x, params), full.bfloat16())
    assert torch.equal(feature_map.vjp(feature_map.forward(x, params)[1], g)[0], gx)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(feature_map(x.float(), params), full)
        again = feature_map.vjp(feature_map.forward(x.float(), params)[1], g.float())[0]
    assert torch.equal(again.bfloat16(), gx)


@pytest.mark.spec("PHI-RFF-E2")
def test_the_derivative_that_circulates_lacks_its_sine():
    feature_map = RandomFourier(d_phi=8)
    sound = bound_block(feature_map, feature_map.init(5, dtype=F64))
    broken = sound._replace(vjp=lambda residuals, g: (project_precisely(g, residuals[0].mT),))
    with pytest.raises(AssertionError, match="VJP of input 0"):
        check_vjp(broken, [gaussian(4, 5)])
