"""PhiMomentum: the formulas, its reductions, fixed points, descent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hecate import phi
from hecate.optim import PhiMomentum
from tests.optim.test_muon_and_m3 import follow, parameter, side_by_side
from tests.reference import optim_phi as reference

C = 4  # columns
ZEROS = 0.2  # the share of gradients with a row of zeros


def linear(d_phi: int = 6) -> tuple[phi.Linear, dict, reference.Linear]:
    w = np.random.default_rng(3).normal(size=(C, d_phi)) / 2
    params = {"learned": {"weight": torch.tensor(w)[None]}, "frozen": {}}
    return phi.Linear(d_phi=d_phi), params, reference.Linear(w)


def fourier(d_phi: int = 24) -> tuple[phi.RandomFourier, dict, reference.Fourier]:
    rng = np.random.default_rng(4)
    w, b = rng.normal(size=(C, d_phi)) / 4, 2 * np.pi * rng.random(d_phi)
    frozen = {"w": torch.tensor(w)[None], "b": torch.tensor(b)[None]}
    made = phi.RandomFourier(d_phi=d_phi, sigma=4.0)
    return made, {"learned": {}, "frozen": frozen}, reference.Fourier(w, b)


NONE = {"learned": {}, "frozen": {}}
MAPS = {
    "identity": (phi.Identity(), NONE, reference.Linear(np.eye(C))),
    "tanh": (phi.Tanh(), NONE, reference.Tanh()),
    "elu": (phi.ELU(), NONE, reference.ELU()),
    "relu": (phi.ReLU(), NONE, reference.ReLU()),
    "linear": linear(),
    "random_fourier": fourier(),
    "polynomial": (phi.Polynomial(degree=2, form="raw"), NONE, reference.Quadratic()),
}
LEGAL = [
    *((name, "identity") for name in ("identity", "tanh", "elu", "relu")),
    *((name, "vjp") for name in MAPS),
    *((name, "pinv") for name in ("linear", "random_fourier", "polynomial")),
    *((name, "learned") for name in ("tanh", "linear", "random_fourier", "polynomial")),
    ("polynomial", "prefix"),
    ("random_fourier", "callable"),
]


def halves(features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A lift of a user: some features, and half of the gradient."""
    return features[:, : rows.shape[1]] + 0.5 * rows


def both(name: str, lift: str, **options):
    """The optimiser on one parameter, and the reference from the same start."""
    made, params, plain = MAPS[name]
    w = parameter(3, C)
    call = {"lift": halves} if lift == "callable" else {"lift": lift}
    call |= {"max_decode_error": 1.0} if lift == "pinv" else {}
    names = {"weight_decay": "decay", "input_scale": "scale"}
    theirs = {names.get(name, name): value for name, value in options.items()}
    options = {"odd": name == "relu", "input_scale": "none"} | options
    theirs.setdefault("odd", options["odd"])
    optimizer = PhiMomentum([w], lr=0.01, feature_map=made, phi_params={C: params}, **call, **options)
    ref = reference.PhiMomentum(plain, lift, call=halves, **theirs)
    if lift == "pinv":
        ref.decoder = (
            np.linalg.pinv(plain.w)
            if name == "linear"
            else optimizer.row_map(optimizer.param_groups[0], w.data).decoder.numpy()
        )
    if options["input_scale"] == "restored":
        ref.gain = ref.gauge(C)
    return w, optimizer, ref


@pytest.mark.spec("OPT-PHI-D1", "OPT-PHI-D2", "OPT-LIFT-D1", "OPT-LIFT-D2", "OPT-LIFT-D4")
@pytest.mark.parametrize("form", ["torch", "hope"])
@pytest.mark.parametrize("space", ["weight", "phi"])
@pytest.mark.parametrize(("name", "lift"), LEGAL)
def test_reference(name, lift, form, space):
    assert follow(*both(name, lift, form=form, space=space), ZEROS) <= 1e-12


@pytest.mark.spec("OPT-PRE-D1", "OPT-PRE-D2", "OPT-PHI-D3")
@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": True},
        {"nesterov": True, "form": "hope"},
        {"dampening": 0.3},
        {"dampening": 0.3, "form": "hope"},
        {"weight_decay": 0.1},
        {"input_scale": "unit"},
        {"input_scale": "rms"},
        {"input_scale": "restored"},
        {"input_scale": "restored", "space": "phi"},
        {"guard": "skip"},
        {"guard": "flip"},
        {"odd": True},
        {"precondition": "diagonal"},
        {"precondition": "kronecker"},
        {"precondition": "diagonal", "space": "phi"},
        {"precondition": "kronecker", "space": "phi", "nesterov": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("name", "lift"), [("random_fourier", "vjp"), ("elu", "identity")])
def test_reference_of_options(name, lift, options):
    w, optimizer, ref = both(name, lift, **options)
    # A root of statistics that are almost singular divides rounding errors by it.
    assert follow(w, optimizer, ref, ZEROS) <= (1e-9 if options.get("precondition") == "kronecker" else 1e-12)
    if options.get("guard") and name == "random_fourier":
        assert optimizer.stats["guarded"] >= 0


GUARDS = {"none": lambda w, g: w + 0.01 * g, "skip": lambda w, g: w, "flip": lambda w, g: w - 0.01 * g}


@pytest.mark.spec("OPT-PHI-D3")
@pytest.mark.parametrize("guard", GUARDS)
def test_guard_on_a_lift_that_climbs(guard):
    w = parameter(3, C)
    start, g = w.detach().clone(), torch.randn(3, C, generator=torch.Generator().manual_seed(1))
    optimizer = PhiMomentum([w], 0.01, lift=lambda features, rows: -rows, guard=guard)
    w.grad = g
    optimizer.step()
    torch.testing.assert_close(w.detach(), GUARDS[guard](start, g), rtol=0, atol=1e-15)
    assert optimizer.stats["guarded"] == (0 if guard == "none" else 3)


SHAPES = [(7, 5), (13,), (3, 2, 3, 3), (), (40, 500)]
SGD_OPTIONS = [{}, {"nesterov": True}, {"maximize": True}, {"weight_decay": 0.01}]


def pair(dtype: torch.dtype) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    return tuple([parameter(*s, seed=i, dtype=dtype) for i, s in enumerate(SHAPES)] for _ in "ab")


@pytest.mark.spec("OPT-PHI-R1")
@pytest.mark.parametrize("number", range(12))
def test_identity_is_sgd_bit_for_bit(number):
    """Every dtype with every option, and each of them with every way over the parameters."""
    dtype, options = (torch.float64, torch.float32, torch.bfloat16)[number % 3], SGD_OPTIONS[number // 3]
    foreach = (None, False, True)[(number + number // 3) % 3]
    theirs, ours = pair(dtype)
    sgd = torch.optim.SGD(theirs, 1e-2, momentum=0.9, foreach=foreach, **options)
    mine = PhiMomentum(ours, 1e-2, 0.9, state_dtype="parameter", decoupled=False, foreach=foreach, **options)
    usual = PhiMomentum(pair(dtype)[0], 1e-2, 0.9, foreach=foreach, **options)  # whose decay and state are others
    side_by_side(10, (theirs, sgd), (ours, mine), (usual.param_groups[0]["params"], usual))
    for a, b in zip(theirs, ours, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(sgd.state[a]["momentum_buffer"], mine.state[b]["momentum"])
    alike = all(map(torch.equal, theirs, usual.param_groups[0]["params"]))
    assert alike == (dtype != torch.bfloat16 and "weight_decay" not in options)


@pytest.mark.spec("OPT-PRE-R1")
def test_identity_with_a_diagonal_is_rmsprop():
    theirs, ours = pair(torch.float64)
    rms = torch.optim.RMSprop(theirs, 1e-3, alpha=0.95, eps=1e-6, momentum=0.8)
    mine = PhiMomentum(ours, 1e-3, 0.8, precondition="diagonal", retain=0.95, eps=1e-6)
    side_by_side(30, (theirs, rms), (ours, mine))
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def plain_momentum(steps: int, **options) -> float:
    """How far an optimiser ends from SGD with momentum, on the same gradients."""
    a, b = parameter(5, C), parameter(5, C)
    sgd = torch.optim.SGD([a], 0.1, momentum=0.9)
    mine = PhiMomentum([b], 0.1, **options)
    side_by_side(steps, ([a], sgd), ([b], mine))
    return float((a - b).detach().abs().max())


@pytest.mark.spec("OPT-LIFT-R1")
def test_lifts_that_are_plain_momentum():
    for options in (
        {"feature_map": phi.Linear(d_phi=6), "lift": "pinv"},
        {"feature_map": phi.Linear(d_phi=C), "lift": "pinv"},
        {"feature_map": phi.Polynomial(degree=2, form="raw"), "lift": "prefix"},
        {"feature_map": phi.Polynomial(degree=3), "lift": "prefix"},
    ):
        for space in ("weight", "phi"):
            assert plain_momentum(20, space=space, **options) < 1e-12, (space, options)
    # In phi space the Jacobian at the present gradient makes it another rule.
    assert plain_momentum(20, feature_map=phi.CReLU(), lift="vjp", space="weight") < 1e-12


@pytest.mark.spec("OPT-LIFT-R2")
def test_vjp_of_a_polynomial_is_a_positive_multiple_of_the_gradient():
    w = parameter(5, C)
    g = parameter(5, C, seed=1).detach()
    optimizer = PhiMomentum([w], feature_map=phi.Polynomial(degree=3), lift="vjp", input_scale="none")
    u = optimizer.row_map(optimizer.param_groups[0], g)(g)
    power = g.square().sum(-1, keepdim=True)
    # 1/2 sum_i |g|^(2i) / i!, differentiated.
    torch.testing.assert_close(u, g * (1 + power + power**2 / 2), rtol=1e-12, atol=1e-12)


@pytest.mark.spec("OPT-LIFT-R3")
def test_learned_lift_approaches_the_calibrated_one():
    made, params, _ = MAPS["random_fourier"]
    options = {"feature_map": made, "phi_params": {C: params}, "ridge": 1e-6}
    fixed = PhiMomentum([parameter(1, C)], lift="pinv", **options)
    rows = parameter(200_000, C)
    learned = PhiMomentum([rows], lift="learned", forget=1.0, **options)
    rows.grad = parameter(200_000, C, seed=8).detach()
    learned.step()
    state, size = learned.state[rows], 24
    damping = 1e-6 * state["lift_gram"].trace() / size * torch.eye(size)
    decoder = torch.linalg.solve(state["lift_gram"] + damping, state["lift_cross"])
    like = torch.randn(4096, C, generator=torch.Generator().manual_seed(9))
    calibrated = fixed.row_map(fixed.param_groups[0], like)
    features = calibrated.features(like)[0]
    difference = (features @ decoder - calibrated.back(features, like, None)).norm() / like.norm()
    assert difference < 0.05, difference  # the calibration's own sample is 256 rows


@pytest.mark.spec("OPT-ORTH-D1")
@pytest.mark.parametrize("shape", [(3, 5), (6, 2), (4,)])
def test_orthogonalized_steps_are_the_polar_factor(shape):
    w, g = parameter(*shape), parameter(*shape, seed=1).detach()
    start = w.detach().clone()
    exact = {"polynomial": "cubic", "steps": 40}
    optimizer = PhiMomentum([w], 0.1, 0.0, orthogonalize=exact)
    w.grad = torch.zeros_like(g)
    optimizer.step()
    assert torch.equal(start, w)
    w.grad = g
    optimizer.step()
    u, _, vh = np.linalg.svd(g.numpy().reshape(shape[0] if len(shape) > 1 else 1, -1))
    k = min(len(u), len(vh))
    polar = (u[:, :k] @ vh[:k]).reshape(shape)
    np.testing.assert_allclose((start - w.detach()).numpy() / 0.1, polar, rtol=0, atol=1e-9)
