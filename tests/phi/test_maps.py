"""What each deterministic map is, against transcriptions in numpy, and what it is not."""

from math import factorial

import numpy as np
import pytest
import torch
from torch import Tensor

from hecate import MemoryConfig, phi
from tests.phi.random_common import EMPTY, EXACT, drawn_params, gaussian
from tests.reference import phi as reference
from tests.registries import shipped_kinds


def _rows(function, x: Tensor) -> Tensor:
    return torch.from_numpy(np.stack([function(row) for row in x.numpy()]))


@pytest.mark.spec(
    "PHI-ELU-D1", "PHI-RELU-D1", "PHI-SQRELU-D1", "PHI-LEAKY-D1", "PHI-LEAKY2-D1", "PHI-GELU-D1",
    "PHI-SOFTPLUS-D1", "PHI-EXP-D1", "PHI-DPFP-D1", "PHI-TAYLOR-D1", "PHI-POLY-D1", "PHI-POLY-D2",
    "PHI-TANH-D1", "PHI-SIGMOID-D1", "PHI-CRELU-D1", "PHI-SOFTMAX-D1", "PHI-FAMILY-D5",
)  # fmt: skip
@pytest.mark.parametrize(
    ("feature_map", "function"),
    [
        (phi.Identity(), lambda x: x),
        (phi.ELU(), reference.elu),
        (phi.ReLU(), reference.relu),
        (phi.ReLU(shift=0.25), lambda x: reference.relu(x, 0.25)),
        (phi.SquaredReLU(), reference.squared_relu),
        (phi.LeakyReLU(), reference.leaky_relu),
        (phi.LeakyReLU(slope=0.3), lambda x: reference.leaky_relu(x, 0.3)),
        (phi.LeakyReLU(slope=0.0), reference.relu),
        (phi.LeakyReLUSquared(), reference.leaky_relu_squared),
        (phi.LeakyReLUSquared(slope=0.3, shift=0.5), lambda x: reference.leaky_relu_squared(x, 0.3, 0.5)),
        (phi.GELUShifted(), reference.gelu_shifted),
        (phi.GELUShifted(shift=-1.0), lambda x: reference.gelu_shifted(x, -1.0)),
        (phi.Softplus(), reference.softplus),
        (phi.Softplus(beta=3.0), lambda x: reference.softplus(x, 3.0)),
        (phi.Exp(shift=0.5), lambda x: reference.exp(x, 0.5)),
        (phi.DPFP(), lambda x: reference.dpfp(x, 1)),
        (phi.DPFP(nu=7), lambda x: reference.dpfp(x, 7)),
        (phi.Taylor(), lambda x: reference.taylor(x, 2, True)),
        (phi.Taylor(order=3, compact=False), lambda x: reference.taylor(x, 3, False)),
        (phi.Polynomial(), lambda x: reference.polynomial(x, [1, 1, 1 / 2])),
        (phi.Polynomial(degree=4, coefficients="ones"), lambda x: reference.polynomial(x, [1] * 5)),
        (phi.Polynomial(degree=2, form="raw"), reference.polynomial_raw),
        (phi.Tanh(), np.tanh),
        (phi.Sigmoid(), reference.sigmoid),
        (phi.CReLU(), reference.crelu),
        (phi.Softmax(), reference.softmax),
        (phi.Softmax(temperature=0.3), lambda x: reference.softmax(x, 0.3)),
        (
            phi.Softmax(temperature=2.0, half_space=True),
            lambda x: np.concatenate([reference.softmax(x, 2.0), reference.softmax(-x, 2.0)]),
        ),
    ],
    # The address in a function's name differs between workers.
    ids=lambda value: str(value) if isinstance(value, phi.FeatureMap) else "reference",
)
def test_values(feature_map, function):
    x = 1.5 * gaussian(6, 4)
    expected = _rows(function, x)
    assert expected.shape[-1] == feature_map.output_dim(4)
    torch.testing.assert_close(feature_map(x, EMPTY), expected, **EXACT)


@pytest.mark.spec("PHI-LINEAR-D1", "PHI-MLP-D1")
def test_initial_projections_keep_the_variance_of_their_inputs():
    feature_map = phi.Linear(d_phi=200)
    weight = drawn_params(feature_map, 100, heads=2)["learned"]["weight"]
    # 40,000 draws: the sample variance of a Gaussian has a relative standard error sqrt(2 / n).
    assert abs(float(weight.var()) * 100 - 1) < 5 * (2 / 40_000) ** 0.5
    assert not torch.equal(weight[0], weight[1])
    again = feature_map.init(100, heads=2, dtype=torch.float32)["learned"]["weight"]
    once = feature_map.init(100, heads=2, dtype=torch.float64)["learned"]["weight"]
    assert torch.equal(again, once.float())


@pytest.mark.spec("PHI-LINEAR-E1")
def test_a_wide_linear_map_has_no_more_rank_than_its_input():
    feature_map = phi.Linear(d_phi=96)
    features = feature_map(gaussian(200, 16), drawn_params(feature_map, 16))
    assert features.shape == (200, 96)
    assert int(torch.linalg.matrix_rank(features)) == 16
    assert int(torch.linalg.matrix_rank(phi.Polynomial(degree=2)(gaussian(200, 16), EMPTY))) == 153


@pytest.mark.spec("PHI-POLY-I1", "PHI-TAYLOR-I1", "PHI-EXP-I1")
@pytest.mark.parametrize(
    ("feature_map", "kernel"),
    [
        (phi.Identity(), lambda z: z),
        *[
            (phi.Polynomial(degree=p), lambda z, p=p: sum(z**i / factorial(i) for i in range(p + 1)))
            for p in (1, 2, 3, 5)
        ],
        (phi.Polynomial(degree=3, coefficients="ones"), lambda z: 1 + z + z**2 + z**3),
        (phi.Polynomial(degree=2, form="raw"), lambda z: z + z**2),
        (phi.Taylor(), lambda z: 1 + z / 2 + z**2 / 8),  # d = 4, so z / sqrt(d) = z / 2
        (phi.Taylor(compact=False), lambda z: 1 + z / 2 + z**2 / 8),
    ],
    ids=lambda value: str(value) if isinstance(value, phi.FeatureMap) else "kernel",
)
def test_kernel_is_exact(feature_map, kernel):
    x, y = gaussian(20, 4, seed=1), gaussian(20, 4, seed=2)
    gram = (feature_map(x, EMPTY) * feature_map(y, EMPTY)).sum(-1)
    expected = kernel((x * y).sum(-1))
    torch.testing.assert_close(gram, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(feature_map.exact_kernel(x, y), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.spec("PHI-EXP-I1")
def test_kernel_of_exp():
    x, y, feature_map = gaussian(20, 4, seed=1), gaussian(20, 4, seed=2), phi.Exp(shift=0.5)
    gram = (feature_map(x, EMPTY) * feature_map(y, EMPTY)).sum(-1)
    expected = torch.from_numpy(np.exp(x.numpy() + y.numpy() - 1).sum(-1))
    torch.testing.assert_close(gram, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(feature_map.exact_kernel(x, y), expected, rtol=1e-13, atol=0)


@pytest.mark.spec("PHI-POLY-D3")
def test_learned_coefficients_start_at_the_exponential_and_stay_positive():
    learned = phi.Polynomial(degree=3, coefficients="learned")
    params, x = drawn_params(learned, 4), gaussian(5, 4)
    torch.testing.assert_close(learned(x, params), phi.Polynomial(degree=3)(x, EMPTY), **EXACT)
    assert learned.exact_kernel(x, x) is None
    raw = torch.tensor([[0.3, -2.0, 1.0, -8.0]])
    moved: phi.Params = {"learned": {"coefficients": raw}, "frozen": {}}
    coefficients = np.logaddexp(0, raw[0].numpy())
    expected = _rows(lambda row: reference.polynomial(row, coefficients), x)
    torch.testing.assert_close(learned(x, moved), expected, **EXACT)


@pytest.mark.spec("PHI-POLY-E1", "PHI-POLY-E2")
def test_what_a_polynomial_map_is_not():
    x, y = gaussian(50, 4, seed=1), gaussian(50, 4, seed=2)
    left, right = (x.unsqueeze(-1) * x.unsqueeze(-2)), (y.unsqueeze(-1) * y.unsqueeze(-2))
    upper = torch.triu_indices(4, 4)
    unscaled = (left[:, upper[0], upper[1]] * right[:, upper[0], upper[1]]).sum(-1)
    wanted = (x * y).sum(-1).square()
    assert float((unscaled - wanted).abs().max()) > 0.5
    many = gaussian(500, 4)
    powers_only = torch.cat([many, many**2, many**3], -1)
    assert int(torch.linalg.matrix_rank(powers_only)) == 12
    assert int(torch.linalg.matrix_rank(phi.Polynomial(degree=3)(many, EMPTY))) == 35


@pytest.mark.spec("PHI-ELU-I1", "PHI-ELU-E2")
@pytest.mark.parametrize(
    ("dtype", "lowest"), [(torch.float32, -87.0), (torch.bfloat16, -87.0), (torch.float64, -708.0)]
)
def test_elu_is_positive_down_to_the_underflow_of_the_dtype(dtype, lowest):
    # exp(-87.3) and exp(-708.4) are the smallest normal numbers of float32 (and bfloat16), float64.
    x = torch.linspace(lowest, 0, 4001, dtype=torch.float64).to(dtype)
    features = phi.ELU()(x, EMPTY)
    assert features.dtype == dtype
    assert bool((features > 0).all())
    assert bool((features[1:] >= features[:-1]).all())
    tiny = float(phi.ELU()(torch.tensor([lowest], dtype=dtype), EMPTY))
    assert tiny == pytest.approx(np.exp(lowest), rel=2.0**-8)


@pytest.mark.spec("PHI-ELU-E2")
def test_elu_plus_one_cancels():
    for dtype, zero_from in ((torch.float32, -17.4), (torch.bfloat16, -6.25)):
        x = torch.tensor([zero_from], dtype=dtype)
        assert float(torch.nn.functional.elu(x) + 1) == 0
        assert float(phi.ELU()(x, EMPTY)) > 0
    assert reference.elu_cancelling(np.float32([-17.4]))[0] == 0


@pytest.mark.spec("PHI-LEAKY2-E1")
def test_leaky_relu_squared_is_not_monotone():
    feature_map = phi.LeakyReLUSquared()
    x = torch.linspace(-20, 5, 2501)
    features = feature_map(x, EMPTY)
    assert float(x[features.argmin()]) == pytest.approx(-5.0, abs=1e-12)
    assert float(features.min()) < 1e-30
    ends = feature_map(torch.tensor([-8.0, -4.0]), EMPTY)
    torch.testing.assert_close(ends, torch.tensor([9e-4, 1e-4]), **EXACT)


@pytest.mark.spec("PHI-GELU-I1")
def test_gelu_shifted_declares_a_sign_exactly_where_it_has_one():
    x = torch.tensor([-0.75179, -0.75180])
    assert float(phi.GELUShifted(shift=0.1699713)(x, EMPTY).min()) > 0
    assert phi.GELUShifted(shift=0.1699713).non_negative
    assert float(phi.GELUShifted(shift=0.16997)(x, EMPTY).min()) < 0
    assert not phi.GELUShifted(shift=0.16997).non_negative


@pytest.mark.spec("PHI-SOFTPLUS-I1", "PHI-EXP-I2")
def test_softplus_and_exp_at_the_ends_of_the_range():
    softplus = phi.Softplus()
    ends = softplus(torch.tensor([-700.0, 30.0, 800.0]), EMPTY)
    expected = torch.tensor([np.exp(-700.0), 30 + np.log1p(np.exp(-30.0)), 800.0])
    torch.testing.assert_close(ends, expected, rtol=1e-15, atol=0)
    for dtype, reach in ((torch.float32, 88.7), (torch.bfloat16, 88.5), (torch.float16, 11.0)):
        top = torch.tensor([reach, reach + 2], dtype=dtype)
        inside, outside = phi.Exp()(top, EMPTY)
        assert bool(inside.isfinite()) and bool(outside.isinf())
        assert bool(phi.Exp(shift=4.0)(top, EMPTY).isfinite().all())


@pytest.mark.spec("PHI-EXP-I2")
def test_the_shift_of_exp_leaves_normalised_weights_alone():
    q, k = gaussian(1, 4, seed=1), gaussian(7, 4, seed=2)

    def weights(feature_map):
        scores = feature_map(k, EMPTY) @ feature_map(q, EMPTY)[0]
        return scores / scores.sum()

    torch.testing.assert_close(weights(phi.Exp(shift=3.0)), weights(phi.Exp()), **EXACT)


@pytest.mark.spec("PHI-EXP-E1", "PHI-EXP-E2")
def test_exp_is_no_softmax_kernel_and_a_clamp_stops_its_gradient():
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    kernel = (phi.Exp()(x, EMPTY) * phi.Exp()(y, EMPTY)).sum()
    assert float(kernel) == pytest.approx(2 * np.e)  # exp(x.y) = 1
    far = torch.tensor([12.0], requires_grad=True)
    (clamped,) = torch.autograd.grad(far.clamp(max=10).exp().sum(), far)
    (ours,) = torch.autograd.grad(phi.Exp()(far, EMPTY).sum(), far)
    assert float(clamped) == 0
    assert float(ours) == pytest.approx(np.exp(12.0))


@pytest.mark.spec("PHI-DPFP-E1", "PHI-DPFP-I1")
def test_dpfp_with_the_wrong_negative_half_loses_half_its_rank():
    x = gaussian(600, 16)
    right = phi.DPFP(nu=3)(x, EMPTY)
    wrong = _rows(lambda row: reference.dpfp_wrong(row, 3), x)
    assert int(torch.linalg.matrix_rank(right)) == right.shape[-1] == 96
    assert int(torch.linalg.matrix_rank(wrong)) == 48
    assert bool((right >= 0).all()) and bool((wrong < 0).any())
    assert not bool(phi.DPFP()(gaussian(100, 1), EMPTY).any())


@pytest.mark.spec("PHI-TAYLOR-I1")
def test_taylor_has_a_positive_kernel_from_signed_features():
    x, y = 3.0 * gaussian(2000, 4, seed=1), 3.0 * gaussian(2000, 4, seed=2)
    features = phi.Taylor()(x, EMPTY)
    kernel = (features * phi.Taylor()(y, EMPTY)).sum(-1)
    assert bool((features < 0).any())
    assert 0.5 - 1e-12 <= float(kernel.min()) < 0.51
    odd = phi.Taylor(order=3)
    assert float((odd(x, EMPTY) * odd(y, EMPTY)).sum(-1).min()) < 0


@pytest.mark.spec("PHI-FAMILY-I3")
@pytest.mark.parametrize(
    ("feature_map", "absent"),
    [
        (phi.Identity(), ("non_negative", "kernel_non_negative", "norm_bound")),
        (phi.Linear(d_phi=3), ("non_negative", "kernel_non_negative", "norm_bound", "is_random")),
        (phi.ELU(), ("degree", "norm_bound")),
        (phi.ReLU(shift=0.1), ("degree", "norm_bound")),
        (phi.LeakyReLU(), ("non_negative", "kernel_non_negative", "norm_bound")),
        (phi.LeakyReLUSquared(), ("degree", "norm_bound")),
        (phi.Softplus(), ("degree", "norm_bound")),
        (phi.Exp(), ("degree", "norm_bound")),
        (phi.GELUShifted(shift=0.0), ("non_negative", "kernel_non_negative", "norm_bound")),
        (phi.DPFP(), ("norm_bound", "is_random", "needs_position")),
        (phi.Polynomial(degree=1), ("non_negative", "kernel_non_negative", "degree")),
        (phi.Polynomial(degree=3), ("non_negative", "kernel_non_negative", "degree")),
        (phi.Polynomial(degree=2, form="raw"), ("kernel_non_negative", "degree")),
        (phi.Polynomial(degree=2, coefficients="learned"), ("kernel_non_negative",)),
        (phi.Taylor(), ("non_negative", "degree", "norm_bound")),
        (phi.Taylor(order=3), ("kernel_non_negative",)),
        (phi.MLP(d_hidden=3), ("non_negative", "kernel_non_negative", "degree", "norm_bound")),
    ],
    ids=str,
)
def test_traits_that_a_map_must_not_declare(feature_map, absent):
    traits = feature_map.traits()._asdict()
    assert all(traits[name] in (False, None) for name in absent)
    if not isinstance(feature_map, (phi.Identity, phi.Linear)):
        assert feature_map.parity == "none"


@pytest.mark.spec(
    "PHI-ELU-V1", "PHI-RELU-V1", "PHI-SQRELU-V1", "PHI-LEAKY-V1", "PHI-LEAKY2-V1", "PHI-DPFP-V1", "PHI-MLP-V1"
)
@pytest.mark.parametrize(
    ("feature_map", "at_zero"),
    [
        (phi.ELU(), 1.0),
        (phi.ReLU(), 0.0),
        (phi.ReLU(shift=0.5), 0.0),
        (phi.SquaredReLU(), 0.0),
        (phi.LeakyReLU(slope=0.25), 0.25),
        (phi.LeakyReLUSquared(), 2 * 0.01 * 0.05),
        (phi.LeakyReLUSquared(slope=0.5, shift=1.0), 1.0),
        (phi.DPFP(nu=2), 0.0),
        (phi.Softplus(), 0.5),
        (phi.GELUShifted(), 0.5),
        (phi.Exp(), 1.0),
    ],
    ids=str,
)
def test_the_derivative_at_zero_by_hand_and_by_autograd(feature_map, at_zero):
    x = torch.zeros(3, requires_grad=True)
    features, residuals = feature_map.forward(x, EMPTY)
    g = torch.ones_like(features)
    by_hand = feature_map.vjp(residuals, g)[0]
    (by_autograd,) = torch.autograd.grad(features, x, g)
    torch.testing.assert_close(by_hand, torch.full((3,), at_zero), **EXACT)
    torch.testing.assert_close(by_autograd, by_hand.detach(), **EXACT)


@pytest.mark.spec("PHI-MLP-V1")
def test_relu_inside_mlp_has_derivative_zero_at_its_kink():
    feature_map = phi.MLP(d_hidden=3, activation="relu", residual=False)
    params = drawn_params(feature_map, 4)
    x = torch.zeros(2, 4)
    features, residuals = feature_map.forward(x, params)
    gx, glearned = feature_map.vjp(residuals, torch.ones_like(features))
    assert not bool(gx.any()) and not bool(glearned["w_in"].any())


@pytest.mark.spec("PHI-RELU-E1", "PHI-RELU-E2")
def test_what_relu_features_guarantee():
    x, y = gaussian(500, 8, seed=1), gaussian(500, 8, seed=2)
    assert float((phi.ReLU()(x, EMPTY) * phi.ReLU()(y, EMPTY)).sum(-1).min()) >= 0
    leaky = phi.LeakyReLU()
    share = float(((leaky(x, EMPTY) * leaky(y, EMPTY)).sum(-1) < 0).double().mean())
    assert 0.05 < share < 0.2  # a leaky relu gives no such guarantee
    opposite = phi.ReLU()(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), EMPTY)
    assert float(opposite[0] @ opposite[1]) == 0  # non-negative is not positive
    _, residuals = phi.ReLU(shift=0.1).forward(torch.tensor([-1.0]), EMPTY)
    assert float(phi.ReLU(shift=0.1).vjp(residuals, torch.ones(1))[0]) == 0


@pytest.mark.spec("PHI-FAMILY-D5")
@pytest.mark.parametrize(
    "kind, given",
    [
        ("random_fourier", {"d_phi": 24}),
        ("sorf", {"d_phi": 24}),
        ("t2r", {"d_phi": 24}),
        ("hadamard", {"d_phi": 24}),
        ("random_maclaurin", {"d_phi": 24}),
        ("nystrom", {"num_centres": 24}),
        ("glu", {"d_hidden": 24}),
        ("mlp", {"d_hidden": 24}),
        ("linear", {"d_phi": 6}),
        ("polysketch", {"sketch": 7}),  # 28 features; 6 would make 21
        ("slay", {"m": 1}),  # 168 of them, of which no fewer are possible
    ],
)
def test_a_width_left_out_is_four_times_that_of_keys(kind, given):
    variant, width = phi.FeatureMap.variants()[kind], 6
    plain, told = variant(), variant(**given)
    assert plain.output_dim(width) == told.output_dim(width) >= (4 * width if kind not in ("linear", "mlp") else width)
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    params = plain.init(width, dtype=torch.float64)
    features, residuals = plain.forward(x, params)
    same, kept = told.forward(x, told.init(width, dtype=torch.float64))
    assert torch.equal(features, same) and features.shape[-1] == plain.output_dim(width)
    g = torch.randn(features.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(plain.vjp(residuals, g)[0], told.vjp(kept, g)[0])
    kernels = plain.exact_kernel(x[:1], x[1:2]), told.exact_kernel(x[:1], x[1:2])
    assert kernels == (None, None) or torch.equal(*kernels)


@pytest.mark.spec("PHI-FAMILY-D5")
@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind, variant in shipped_kinds(phi.FeatureMap).items()
        if not {"maps", "inner"} & variant.model_fields.keys()
    ],
)
def test_every_map_that_is_not_made_of_maps_is_made_from_its_name_alone(kind):
    named = phi.FeatureMap.model_validate(kind)
    assert named == phi.FeatureMap.variants()[kind]() and named.output_dim(8) >= 8
    assert MemoryConfig(feature_map=kind, bias="l2").feature_map == named
