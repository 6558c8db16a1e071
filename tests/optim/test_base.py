"""What every optimiser promises: state, checkpoints, refusals, bad gradients."""

from __future__ import annotations

import inspect
import io

import pytest
import torch

from hecate import phi
from hecate.errors import ArgumentError, ConfigError, NonFiniteError, ShapeError
from hecate.optim import DGD, M3, DeepMomentum, DeltaMomentum, KernelMomentum, Muon, PhiMomentum
from tests.optim.test_edges import KINDS, RFF

SOME = "identity, phi space, learned, trained, diagonal, kronecker, kernel, delta, deep shared, m3 row"
OPTIONS = {name: KINDS[name] for name in SOME.split(", ")}
every = pytest.mark.parametrize("name", OPTIONS)


def model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=draws))
    return made.to(dtype)


def optimizer_of(name: str, module: torch.nn.Module, **more):
    cls, options = OPTIONS[name]
    return cls(module.named_parameters(), 1e-2, **{**options, **more})


def advance(module, optimizer, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        draws = torch.Generator().manual_seed(step)
        for p in module.parameters():
            p.grad = torch.randn(p.shape, generator=draws).to(p.dtype)
        optimizer.step()


def weights(module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("cls", [PhiMomentum, KernelMomentum, DeltaMomentum, DeepMomentum, M3, Muon, DGD])
def test_a_group_holds_the_arguments(cls):
    arguments = set(inspect.signature(cls).parameters)
    group = cls([torch.nn.Parameter(torch.zeros(2, 3))]).param_groups[0]
    apart = {"phi_params", "capturable", "fused"}
    assert arguments - group.keys() == apart & arguments
    assert group.keys() - arguments <= {"phi_checksums"}


@pytest.mark.spec("OPT-BASE-I2")
@every
def test_bf16_parameters_keep_float32_state_through_a_checkpoint(name):
    if name == "kronecker":
        pytest.skip("no eigenvalues of half precision to compare")
    one, two = model(torch.bfloat16), model(torch.bfloat16)
    a, b = optimizer_of(name, one), optimizer_of(name, two)
    advance(one, a)
    buffer = io.BytesIO()
    torch.save({"model": one.state_dict(), "optimizer": a.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    two.load_state_dict(saved["model"])
    b.load_state_dict(saved["optimizer"])
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        for key, value in a.state[p].items():
            assert value.dtype in (torch.float32, torch.float64, torch.int64)
            assert b.state[q][key].dtype == value.dtype and torch.equal(value, b.state[q][key])
    advance(one, a, 9, first=3)
    advance(two, b, 9, first=3)
    assert equal(weights(one), weights(two))


@pytest.mark.spec("OPT-BASE-I2")
@every
def test_state_in_half_precision_takes_steps(name):
    for dtype in (torch.bfloat16, torch.float16):
        module = model(dtype)
        optimizer = optimizer_of(name, module, state_dtype="parameter")
        before = weights(module)
        advance(module, optimizer)
        assert all(p.isfinite().all() for p in module.parameters()) and not equal(before, weights(module))


@pytest.mark.spec("OPT-BASE-D2")
@every
def test_raise_leaves_everything_as_it_was(name):
    module = model()
    optimizer = optimizer_of(name, module)
    advance(module, optimizer, 2)
    before, state = weights(module), str(optimizer.state_dict())
    for value in (float("nan"), float("inf")):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        module[2].bias.grad[1] = value
        with pytest.raises(NonFiniteError, match=r"'2\.bias'.*nothing was changed"):
            optimizer.step()
        assert equal(before, weights(module)) and state == str(optimizer.state_dict())


@pytest.mark.spec("OPT-BASE-D2")
def test_skip_leaves_that_parameter_alone_and_propagate_does_not():
    for policy in ("skip", "propagate"):
        module = model()
        optimizer = optimizer_of("identity", module, on_nonfinite=policy)
        before = weights(module)
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        module[2].bias.grad[1] = float("nan")
        optimizer.step()
        after = weights(module)
        assert equal(before[3:], after[3:]) == (policy == "skip")
        assert not any(torch.equal(a, b) for a, b in zip(before[:3], after[:3], strict=True))


@pytest.mark.spec("OPT-BASE-D2")
def test_a_sum_that_overflows_is_no_alarm():
    p = torch.nn.Parameter(torch.zeros(100, dtype=torch.float32))
    p.grad = torch.full_like(p, 3e38)
    PhiMomentum([p], 1e-38).step()
    assert torch.isfinite(p).all() and p.any()


@pytest.mark.spec("OPT-BASE-D3")
def test_load_errors_name_the_parameter_and_both_shapes():
    wide = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    saved = optimizer_of("identity", wide).state_dict()
    with pytest.raises(ShapeError, match=r"'momentum' of parameter '0\.weight' is \[5, 4\].*\[6, 4\]"):
        optimizer_of("identity", model()).load_state_dict(saved)
    saved = optimizer_of("diagonal", model()).state_dict()
    with pytest.raises(ConfigError, match="precondition = 'diagonal'.*None"):
        optimizer_of("identity", model()).load_state_dict(saved)
    saved = optimizer_of("identity", model()).state_dict()
    del saved["state"][2]
    with pytest.raises(ConfigError, match=r"state of parameter '2\.weight' holds \[\]"):
        optimizer_of("identity", model()).load_state_dict(saved)
    other = DeltaMomentum(model().parameters(), 0.1)  # of the same state: a momentum for each parameter
    with pytest.raises(ConfigError, match="center, dampening, .* which DeltaMomentum lacks: it is another optimiser's"):
        other.load_state_dict(optimizer_of("identity", model()).state_dict())


@pytest.mark.spec("OPT-PHI-I3")
def test_draws_are_made_again_from_the_seed_and_checked():
    module = model()
    optimizer = optimizer_of("phi space", module, seed=7)
    assert not any("w" in state for state in optimizer.state.values())
    saved = optimizer.state_dict()
    optimizer_of("phi space", model(), seed=7).load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"checksum .* seed 8 here, 7 there"):
        optimizer_of("phi space", model(), seed=8).load_state_dict(saved)
    drawn = optimizer_of("phi space", model(), seed=torch.Generator().manual_seed(1))
    again = optimizer_of("phi space", model(), seed=torch.Generator().manual_seed(1))
    assert drawn.param_groups[0]["phi_checksums"] == again.param_groups[0]["phi_checksums"]


@pytest.mark.spec("OPT-BASE-D4")
def test_what_is_not_offered_is_refused_by_name():
    p = torch.nn.Parameter(torch.zeros(3, 4))
    optimizer = PhiMomentum([("table", p)])
    p.grad = torch.zeros(3, 4).to_sparse()
    with pytest.raises(ConfigError, match=r"torch.sparse_coo for parameter 'table'.*SparseAdam"):
        optimizer.step()


REFUSED = {
    PhiMomentum: [
        ({"params": [torch.nn.Parameter(torch.zeros(2) * 1j)]}, r"torch.complex\d+ for parameter 0 \[2\]"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"lr": float("inf")}, "lr must be a finite number"),
        ({"momentum": 1.5}, "momentum .* at most 1"),
        ({"form": "paper"}, "form must be one of"),
        ({"foreach": True, "differentiable": True}, "exclude each other"),
        ({"nesterov": True, "dampening": 0.1}, "dampening 0"),
        ({"form": "hope", "orthogonalize": True}, "use form 'torch'"),
        ({"space": "phi", "guard": "skip"}, "guard judges"),
        ({"phi_lr": 0.1}, "'identity' has none"),
        ({"feature_map": "cosformer"}, "no position"),
        ({"feature_map": phi.Linear(d_phi=2), "lift": "identity"}, "makes 2 of 4"),
        ({"feature_map": "elu", "lift": "prefix"}, "features of degree 1"),
        ({"lift": "callable"}, "pass it as lift="),
        ({"feature_map": phi.RandomFourier(d_phi=8), "input_scale": "none"}, r"misses \d\.\d+ of a Gaussian row of 4"),
        ({"differentiable": True, "precondition": "kronecker"}, "does not reach through"),
        ({"feature_map": "eluu"}, "elu"),
        ({"decoupled": "no"}, "decoupled must be one of"),
        ({"maximize": "yes"}, "maximize must be one of"),
        ({"foreach": "fast"}, "foreach must be one of"),
        ({"odd": "auto"}, "odd must be one of"),
        ({"feature_map": phi.Linear(d_phi=8), "phi_params": {4: {}}}, "phi_params must map"),
        ({"phi_params": {"4": {"learned": {}, "frozen": {}}}}, "phi_params must map"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"seed": 1 << 70}, "seed must be an integer"),
        ({"orthogonalize": "quintic"}, "orthogonalize must be a bool or fields"),
        ({"orthogonalize": {"momentum": 0.5}}, "orthogonalize has no momentum, got 0.5"),
        ({"orthogonalize": {"stepz": 5}}, "Did you mean 'steps'"),
        ({"retain": 0.9}, "retain=0.9 acts with precondition 'diagonal' or 'kronecker' alone"),
        ({"eps": 1e-6}, "eps=1e-06 acts with precondition"),
        ({"eps": 0.0, "precondition": "diagonal"}, "eps must be above 0 with precondition 'diagonal'"),
        ({"forget": 0.5}, "forget=0.5 acts with lift 'learned' alone"),
        ({"ridge": 1e-3, "feature_map": "tanh"}, "ridge=0.001 acts with lift 'pinv' or 'learned'"),
        ({"max_decode_error": 0.1, "feature_map": "tanh"}, "max_decode_error=0.1 acts with lift 'pinv' alone"),
    ],
    DeltaMomentum: [
        ({"reading": "columns"}, "reading must be one of"),
        ({"form": "paper"}, "form must be one of"),
        ({"erase": -1.0}, "erase"),
        ({"erase": "momentum"}, "erase"),
        ({"beyond": "clip"}, "beyond"),
        ({"beyond": "warn"}, "beyond=warn acts with form 'hope' alone"),
    ],
    DeepMomentum: [
        ({"width": 0}, "width must be an integer"),
        ({"objective": "l2"}, "objective"),
        ({"rate": 0.0}, "rate"),
        ({"input_scale": "unit"}, "input_scale must be one of"),
    ],
    Muon: [
        ({"ns_steps": 0}, "ns_steps must be an integer of at least 1 and at most 99"),
        ({"ns_steps": 100}, "at most 99"),
        ({"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"ns_coefficients": 3.0}, "three numbers"),
        ({"ns_coefficients": ("a", "b", "c")}, "three numbers"),
        ({"ns_coefficients": "septic"}, "'quintic', 'cubic'"),
        ({"ns_coefficients": "schedule", "ns_steps": 6}, "ns_steps: polynomial 'schedule' is 5 steps, got 6"),
        ({"ns_dtype": "int8"}, "ns_dtype must be one of"),
        ({"adjust_lr_fn": "mean"}, "adjust_lr_fn"),
        ({"momentum": 1.5}, "at most 1"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"params": [torch.nn.Parameter(torch.zeros(3))]}, r"parameter 0 \[3\] is none"),
        ({"params": [("bias", torch.nn.Parameter(torch.zeros(3)))]}, "'bias' is none"),
    ],
    M3: [
        ({"slow_period": 0}, "slow_period must be an integer"),
        ({"slow_period": True}, "slow_period must be an integer"),
        ({"accumulate": "mean"}, "accumulate must be one of"),
        ({"second_moment": "after", "retain": 1.0}, "never writes the second moment"),
        ({"vectors": "sgd"}, "vectors"),
    ],
}


@pytest.mark.spec("OPT-BASE-D4", "OPT-LIFT-D3")
@pytest.mark.parametrize("cls", REFUSED)
def test_refused_options(cls):
    for options, message in REFUSED[cls]:
        with pytest.raises(ConfigError, match=message):
            cls(**{"params": [torch.nn.Parameter(torch.zeros(3, 4))], "lr": 0.1, **options})


CHOSEN = [  # a map, options, and the lift, odd and input_scale that are taken
    ("identity", {}, ("identity", False, "none")),
    ("tanh", {}, ("identity", False, "none")),
    ("relu", {}, ("identity", True, "none")),
    ("elu", {}, ("identity", False, "none")),
    ("crelu", {}, ("vjp", False, "none")),
    (phi.Linear(d_phi=7), {}, ("pinv", False, "none")),
    (RFF, {"odd": True, "max_decode_error": 9.0}, ("pinv", True, "restored")),
    (phi.Polynomial(degree=2), {}, ("vjp", False, "restored")),
    ("exp", {}, ("identity", False, "restored")),
    ("squared_relu", {}, ("identity", True, "restored")),
    ("softmax", {}, ("vjp", False, "restored")),
    ("tanh", {"lift": "vjp"}, ("vjp", False, "restored")),  # J vanishes far out
    ("exp", {"input_scale": "unit"}, ("identity", False, "unit")),
    ("exp", {"center": False}, ("identity", False, "none")),
]


@pytest.mark.spec("OPT-LIFT-D5", "OPT-PHI-D5")
@pytest.mark.filterwarnings("ignore:center=False")
@pytest.mark.parametrize(("made", "options", "taken"), CHOSEN, ids=str)
def test_what_is_chosen_for_a_map(made, options, taken):
    group = PhiMomentum([torch.nn.Parameter(torch.zeros(3, 4))], feature_map=made, **options).param_groups[0]
    assert (group["lift"], group["odd"], group["input_scale"]) == taken


@pytest.mark.spec("OPT-BASE-D4")
def test_arguments_without_a_place_are_refused_by_name():
    places = "by place it takes params, lr, momentum, erase$"
    with pytest.raises(ArgumentError, match=f"DeltaMomentum got too many positional arguments; {places}"):
        DeltaMomentum(model().parameters(), 0.1, 0.9, 1.0, "rows")
    with pytest.raises(ArgumentError, match=f"DeltaMomentum got multiple values for argument 'lr'; {places}"):
        DeltaMomentum(model().parameters(), 0.1, lr=0.1)
    said = "^DeltaMomentum got an unexpected keyword argument 'readin'. Did you mean 'reading'"
    with pytest.raises(ArgumentError, match=said):
        DeltaMomentum(model().parameters(), 0.1, readin="rows")


def test_an_option_that_one_group_has_a_use_for_is_taken():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))]} for _ in range(2)]
    groups[1]["precondition"] = "diagonal"
    assert PhiMomentum(groups, 0.1, retain=0.9).param_groups[0]["retain"] == 0.9


def test_a_refused_group_is_not_added():
    module = model()
    optimizer = optimizer_of("identity", module)
    extra = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": [("extra", extra)], "lift": "prefix"})
    assert len(optimizer.param_groups) == 1 and extra not in optimizer.state


@pytest.mark.spec("OPT-LIFT-D3")
def test_decode_error_is_reported():
    p = torch.nn.Parameter(torch.zeros(3, 4))
    exact = PhiMomentum([p], feature_map=phi.Linear(d_phi=6)).decode_errors()
    assert set(exact) == {4} and exact[4] < 1e-12
    half = PhiMomentum([p], feature_map=phi.Linear(d_phi=2)).decode_errors()[4]
    assert 0.55 < half < 0.8  # sqrt(1 - 2/4)


@pytest.mark.spec("OPT-PHI-I1")
def test_literal_phi_warns_and_drifts():
    p = torch.nn.Parameter(torch.zeros(3, 4))
    with pytest.warns(UserWarning, match="a gradient of zero moves weights"):
        optimizer = PhiMomentum([p], 0.1, feature_map="elu", center=False, lift="identity")
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((3, 4), -0.1))


def test_a_lift_of_the_wrong_shape_is_refused():
    p = torch.nn.Parameter(torch.zeros(3, 4))
    optimizer = PhiMomentum([p], feature_map=phi.Linear(d_phi=6), lift=lambda features, rows: features)
    p.grad = torch.ones_like(p)
    with pytest.raises(ShapeError, match=r"must return \[3, 4\] .* got \[3, 6\]"):
        optimizer.step()


@pytest.mark.spec("OPT-BASE-D1")
def test_matrix_views():
    draws = torch.Generator().manual_seed(0)
    stack = torch.randn(2, 3, 4, generator=draws)
    grad = torch.randn(2, 3, 4, generator=draws)
    options = {"feature_map": phi.Softmax(), "lift": "vjp"}

    def moved(value, gradient, **more):
        p = torch.nn.Parameter(value.clone())
        p.grad = gradient
        PhiMomentum([p], 0.1, **options, **more).step()
        return p.detach()

    last = moved(stack.reshape(6, 4), grad.reshape(6, 4))
    assert torch.equal(moved(stack, grad, matrix="last").reshape(6, 4), last)
    flat = moved(stack.reshape(2, 12), grad.reshape(2, 12))
    assert torch.equal(moved(stack, grad).reshape(2, 12), flat)
    row = moved(stack[0, :1], grad[0, :1])
    assert torch.equal(moved(stack[0, 0], grad[0, 0]), row[0])
    # An image's memory order is not that of its matrix; its numbers are.
    image, slope = stack.reshape(2, 3, 2, 2), grad.reshape(2, 3, 2, 2)
    apart = moved(image.to(memory_format=torch.channels_last), slope)
    torch.testing.assert_close(apart, moved(image, slope), rtol=0, atol=0)
