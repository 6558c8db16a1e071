"""Maps made of maps: values, parameters, traits and kernels follow from the parts."""

from functools import partial
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from hecate import phi
from hecate.errors import ConfigError
from tests.phi.random_common import EMPTY, EXACT, drawn_params, gaussian
from tests.reference import phi as reference


@pytest.mark.spec("PHI-CONCAT-D1", "PHI-CONCAT-D2")
def test_concat_places_features_and_parameters_side_by_side():
    feature_map = phi.Concat(maps=[phi.Linear(d_phi=2), "elu", phi.Linear(d_phi=2)])
    assert isinstance(feature_map.maps, tuple)
    params, x = drawn_params(feature_map, 4), gaussian(3, 4)
    assert list(params["learned"]) == ["0.weight", "2.weight"]
    first, last = params["learned"]["0.weight"], params["learned"]["2.weight"]
    assert not torch.equal(first, last)
    expected = torch.cat([x @ first[0], phi.ELU()(x), x @ last[0]], -1)
    torch.testing.assert_close(feature_map(x, params), expected, **EXACT)
    assert feature_map.output_dim(4) == 8


@pytest.mark.spec("PHI-CONCAT-D2", "PHI-COMPOSE-D2")
def test_nested_parameters_carry_their_path_and_never_share_draws():
    inner = phi.Compose(maps=(phi.Linear(d_phi=4), phi.RandomFourier(d_phi=6)))
    feature_map = phi.Concat(maps=(inner, inner, phi.Normalise(inner=phi.Linear(d_phi=2))))
    for params in (feature_map.init(4), drawn_params(feature_map, 4)):
        assert sorted(params["learned"]) == ["0.0.weight", "1.0.weight", "2.weight"]
        assert sorted(params["frozen"]) == ["0.1.b", "0.1.w", "1.1.b", "1.1.w"]
        assert not torch.equal(params["learned"]["0.0.weight"], params["learned"]["1.0.weight"])
        assert not torch.equal(params["frozen"]["0.1.w"], params["frozen"]["1.1.w"])


@pytest.mark.spec("PHI-FAMILY-D3")
@pytest.mark.parametrize("wrap", ["concat", "compose", "tensor_product", "normalise", "odd_lift"])
def test_redraw_reaches_the_random_maps_inside(wrap):
    random, fixed = phi.RandomFourier(d_phi=6), phi.Linear(d_phi=4)
    made = {
        "concat": phi.Concat(maps=(fixed, random)),
        "compose": phi.Compose(maps=(fixed, random)),
        "tensor_product": phi.TensorProduct(maps=(fixed, random)),
        "normalise": phi.Normalise(inner=random),
        "odd_lift": phi.OddLift(inner=random),
    }[wrap]
    params = drawn_params(made, 4)
    fresh = made.redraw(params, torch.Generator().manual_seed(9))
    assert fresh["learned"].keys() == params["learned"].keys()
    for name, tensor in params["learned"].items():
        assert fresh["learned"][name] is tensor
    assert fresh["frozen"].keys() == params["frozen"].keys()
    assert all(not torch.equal(t, fresh["frozen"][name]) for name, t in params["frozen"].items())
    with pytest.raises(ConfigError, match="nothing to redraw"):
        phi.Concat(maps=(fixed,)).redraw(drawn_params(phi.Concat(maps=(fixed,)), 4), torch.Generator())


@pytest.mark.spec("PHI-COMPOSE-D1")
def test_compose_goes_from_left_to_right():
    feature_map = phi.Compose(maps=["relu", "exp"])
    x = gaussian(3, 4)
    expected = torch.from_numpy(np.exp(np.maximum(x.numpy(), 0)))
    torch.testing.assert_close(feature_map(x), expected, **EXACT)
    narrowing = phi.Compose(maps=(phi.Linear(d_phi=3), phi.Taylor()))
    assert narrowing.output_dim(64) == 10
    assert drawn_params(narrowing, 64)["learned"]["0.weight"].shape == (1, 64, 3)


class Square(phi.FeatureMap):
    """square_of_these_tests: phi(x) = x^2, the even map that the library itself does not need."""

    kind: Literal["square_of_these_tests"] = "square_of_these_tests"

    def traits(self) -> phi.Traits:
        return phi.Traits(non_negative=True, kernel_non_negative=True, parity="even", degree=2)

    def features(self, x: Tensor, params: phi.Params) -> Tensor:
        return x.square()


EVEN, SERIES = Square(), partial(phi.RandomMaclaurin, d_phi=4)
# A map of others, its parity and its degree.
TRAITS = [
    (phi.Compose(maps=("identity", "identity")), "odd", 1.0),
    (phi.Compose(maps=(phi.Linear(d_phi=2), "squared_relu")), "none", 2.0),
    (phi.Compose(maps=("squared_relu", phi.DPFP())), "none", 4.0),
    (phi.Compose(maps=("identity", phi.OddLift(inner="elu"))), "odd", None),
    (phi.Compose(maps=("elu", "identity")), "none", None),
    (phi.Compose(maps=("identity", EVEN, "elu")), "even", None),
    (phi.Compose(maps=("elu", EVEN)), "none", None),
    (phi.Concat(maps=(EVEN, EVEN)), "even", 2.0),
    (phi.Concat(maps=(EVEN, "identity")), "none", None),
    (phi.Normalise(inner=EVEN), "even", None),
    (phi.TensorProduct(maps=("identity", "identity")), "even", 2.0),
    (phi.TensorProduct(maps=("identity", "identity", "tanh")), "odd", None),
    (phi.TensorProduct(maps=(phi.Hadamard(d_phi=2), "identity")), "odd", 3.0),
    (phi.TensorProduct(maps=("identity", "relu")), "none", 2.0),
    (SERIES(coefficients=(0.0, 0.0, 1.0)), "even", 2.0),
    (SERIES(coefficients=(1.0, 0.0, 1.0)), "even", None),
    (SERIES(coefficients=(0.0, 2.0)), "odd", 1.0),
    (SERIES(coefficients=(0.0, 1.0, 0.0, 1.0)), "odd", None),
    (SERIES(coefficients=(1.0, 1.0)), "none", None),
]


@pytest.mark.spec("PHI-COMPOSE-I1", "PHI-CONCAT-I1", "PHI-ODD-D2", "PHI-TENSOR-I1", "PHI-MACL-D2")
@pytest.mark.parametrize(("made", "parity", "degree"), TRAITS, ids=str)
def test_parity_and_degree_of_maps_of_maps_and_of_series(made, parity, degree):
    traits = made.traits()
    assert (traits.parity, traits.degree) == (parity, degree)
    if made.kind in ("tensor_product", "random_maclaurin"):
        assert not traits.non_negative and not traits.kernel_non_negative and traits.norm_bound is None


@pytest.mark.spec("PHI-CONCAT-I1", "PHI-TENSOR-I1")
def test_other_traits_follow_from_the_parts():
    mixed = phi.Concat(maps=("elu", "identity")).traits()
    assert not mixed.non_negative and not mixed.kernel_non_negative
    assert mixed.parity == "none" and mixed.degree is None and mixed.norm_bound is None
    alike = phi.Concat(maps=("squared_relu", phi.DPFP())).traits()
    assert alike.non_negative and alike.kernel_non_negative and alike.degree == 2
    bounded = phi.Concat(maps=(phi.RandomFourier(d_phi=4), phi.Normalise(inner="elu"))).traits()
    assert bounded.norm_bound == 3.0 and bounded.is_random
    bounds = (phi.Softmax(), phi.Hedgehog(), phi.Softmax(half_space=True))  # 1, 2, 2
    product = phi.TensorProduct(maps=bounds).traits()
    assert product.norm_bound == 4.0 and product.non_negative and product.kernel_non_negative


@pytest.mark.spec("PHI-TENSOR-D1")
def test_tensor_product_multiplies_every_feature_with_every_other():
    feature_map = phi.TensorProduct(maps=["identity", "crelu", phi.Linear(d_phi=2)])
    params, x = drawn_params(feature_map, 3), gaussian(5, 3)
    assert list(params["learned"]) == ["2.weight"] and feature_map.output_dim(3) == 3 * 6 * 2
    weight = params["learned"]["2.weight"][0].numpy()
    rows = [reference.tensor_product(row, reference.crelu(row), reference.linear(row, weight)) for row in x.numpy()]
    torch.testing.assert_close(feature_map(x, params), torch.tensor(np.stack(rows)), **EXACT)


@pytest.mark.spec("PHI-CONCAT-I2", "PHI-NORM-I2", "PHI-ODD-I1", "PHI-COMPOSE-I2", "PHI-TENSOR-I2")
@pytest.mark.parametrize(
    "feature_map",
    [
        phi.Concat(maps=("identity", phi.Polynomial(degree=2), phi.Taylor())),
        phi.TensorProduct(maps=("identity", "exp", phi.Taylor())),
        phi.Normalise(inner=phi.Polynomial(degree=2)),
        phi.Normalise(inner="identity", eps=0.5),
        phi.OddLift(inner=phi.Polynomial(degree=3)),
        phi.OddLift(inner="exp"),
        phi.Compose(maps=(phi.Normalise(inner="identity"), phi.Taylor())),
    ],
    ids=str,
)
def test_kernels_of_combinations_are_exact(feature_map):
    x, y = gaussian(20, 4, seed=1), gaussian(20, 4, seed=2)
    gram = (feature_map(x) * feature_map(y)).sum(-1)
    torch.testing.assert_close(feature_map.exact_kernel(x, y), gram, rtol=1e-12, atol=1e-12)


@pytest.mark.spec("PHI-COMPOSE-I2", "PHI-NORM-I2")
def test_kernels_that_do_not_exist_are_none():
    x = gaussian(2, 4)
    without = [
        phi.Concat(maps=("identity", "elu")),
        phi.TensorProduct(maps=("identity", "elu")),
        phi.Compose(maps=(phi.Linear(d_phi=2), "identity")),
        phi.Compose(maps=("identity", "elu")),
        phi.Normalise(inner="exp", norm="sum"),
        phi.Normalise(inner="elu"),
        phi.OddLift(inner="elu"),
    ]
    assert all(feature_map.exact_kernel(x, x) is None for feature_map in without)


@pytest.mark.spec("PHI-ODD-D1", "PHI-ODD-R1")
def test_odd_lift():
    x = gaussian(5, 4)
    lifted = phi.OddLift(inner="elu")
    mirror = (reference.elu(x.numpy().ravel()) - reference.elu(-x.numpy().ravel())) / 2
    torch.testing.assert_close(lifted(x), torch.from_numpy(mirror.reshape(5, 4)), **EXACT)
    torch.testing.assert_close(phi.OddLift(inner="relu")(x), x / 2, **EXACT)
    torch.testing.assert_close(phi.OddLift(inner="exp")(x), x.sinh(), **EXACT)
    torch.testing.assert_close(phi.OddLift(inner="identity")(x), x, **EXACT)


@pytest.mark.spec("PHI-NORM-D1", "PHI-NORM-I1")
def test_normalise():
    x = gaussian(5, 4)
    expected = np.stack([reference.normalise_l2(row, 0.1) for row in x.numpy()])
    by_length = phi.Normalise(inner="identity", eps=0.1)
    torch.testing.assert_close(by_length(x), torch.from_numpy(expected), **EXACT)
    summed = np.stack([reference.normalise_sum(reference.elu(row), 0.1) for row in x.numpy()])
    by_sum = phi.Normalise(inner="elu", norm="sum", eps=0.1)
    torch.testing.assert_close(by_sum(x), torch.from_numpy(summed), **EXACT)
    assert by_length.parity == "odd"
    assert by_length.norm_bound == by_sum.norm_bound == 1.0
    assert by_sum.non_negative and not by_length.non_negative
    assert by_length.degree is None  # eps shows near zero


@pytest.mark.spec("PHI-NORM-I1")
def test_normalise_near_zero_and_far_away():
    unit = phi.Normalise(inner="identity")
    for dtype in (torch.float32, torch.float64):
        far = torch.tensor([3e30, 4e30], dtype=dtype)  # its square is infinite in float32
        torch.testing.assert_close(unit(far), torch.tensor([0.6, 0.8], dtype=dtype))
        assert not bool(unit(torch.zeros(2, dtype=dtype)).any())
    assert not bool(phi.Normalise(inner="relu", norm="sum")(torch.full((3,), -1.0)).any())
    zero = torch.zeros(3, requires_grad=True)
    features, residuals = unit.forward(zero, EMPTY)
    by_hand = unit.vjp(residuals, torch.ones(3))[0]
    (by_autograd,) = torch.autograd.grad(features, zero, torch.ones(3))
    torch.testing.assert_close(by_hand.detach(), torch.ones(3), **EXACT)
    torch.testing.assert_close(by_autograd, by_hand.detach(), **EXACT)


@pytest.mark.spec("PHI-NORM-E1")
def test_unit_keys_do_not_stay_unit_under_a_map():
    keys = phi.Normalise(inner="identity")(gaussian(100, 8))
    lengths = phi.ELU()(keys).square().sum(-1)
    assert float(lengths.min()) > 4
    assert float(phi.Normalise(inner="elu")(keys).square().sum(-1).max()) <= 1
