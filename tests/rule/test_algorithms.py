"""Every algorithm as a whole scan against numpy, and what its docstring promises."""

import math

import numpy as np
import pytest
import torch

from hecate import Gates, MemoryConfig, algorithm, memory_scan
from hecate.errors import ConfigError
from hecate.testing import check_rule
from tests.reference import algorithms as reference

T, P, V = 50, 4, 3
START = algorithm.DeepMomentum(width=5)._start(torch.zeros(1, V, P, dtype=torch.float64)).numpy()
CASES = {
    "nesterov": (algorithm.Momentum(nesterov=True), lambda: reference.nesterov()),
    "newton_schulz": (algorithm.NewtonSchulz(), lambda: reference.newton_schulz("quintic", 5, False)),
    "newton_schulz-cubic": (
        algorithm.NewtonSchulz(polynomial="cubic", steps=8, rescale=True),
        lambda: reference.newton_schulz("cubic", 8, True),
    ),
    "newton_schulz-schedule": (
        algorithm.NewtonSchulz(polynomial="schedule"),
        lambda: reference.newton_schulz("schedule", 5, False),
    ),
    "adaptive": (algorithm.Adaptive(), lambda: reference.adaptive(0.99, 1e-3)),
    "delta_momentum": (algorithm.DeltaMomentum(erase=2.0), lambda: reference.delta_momentum("stable", 2.0)),
    "delta_momentum-paper": (algorithm.DeltaMomentum(form="paper"), lambda: reference.delta_momentum("paper", 1.0)),
    "ftrl": (algorithm.FTRL(l1=0.05, l2=0.1), lambda: reference.ftrl(0.05, 0.1)),
    "implicit": (algorithm.Implicit(), lambda: reference.implicit()),
    "rls": (algorithm.RLS(lr=1.0), lambda: reference.rls(1.0, 1.0)),
    "rls-discount": (algorithm.RLS(lr=1.0, ridge=0.5, discount=0.9), lambda: reference.rls(0.5, 0.9)),
    "omega": (algorithm.Omega(window=4), lambda: reference.omega(4, 1.0, False)),
    "omega-momentum": (
        algorithm.Omega(window=3, decay=0.7, inner=algorithm.Momentum()),
        lambda: reference.omega(3, 0.7, True),
    ),
    "deep_momentum": (algorithm.DeepMomentum(width=5), lambda: reference.deep_momentum(START, 0.1, "descent")),
    "deep_momentum-paper": (
        algorithm.DeepMomentum(width=5, objective="paper"),
        lambda: reference.deep_momentum(START, 0.1, "paper"),
    ),
}
EVERY = pytest.mark.parametrize("name", CASES)


def config_of(own: algorithm.Algorithm, **fields) -> MemoryConfig:
    return MemoryConfig(algorithm=own, state_dtype="float64", **fields)


def inputs(seed: int = 0) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(seed)
    k = generator.standard_normal((T, P)) / np.sqrt(P)
    v = generator.standard_normal((T, V))
    return k, v, 0.1 + 0.2 * generator.random(T), 0.3 + 0.4 * generator.random(T)


@pytest.mark.spec("ALG-NEST-D1", "ALG-NS-D1", "ALG-ADAPT-D1", "ALG-DMOM-D1", "ALG-FTRL-D1")
@pytest.mark.spec("ALG-IMPL-D1", "ALG-RLS-D1", "ALG-OMEGA-D1", "ALG-DEEP-D1", "RULE-LOSS-D1")
@EVERY
def test_a_scan_equals_the_paper_in_numpy(name):
    own, step = CASES[name]
    k, v, lr, momentum = inputs()
    if own.kind == "rls":
        lr = np.ones(T)
    if name == "delta_momentum-paper":
        v = 0.2 * v  # its form diverges where |G|^2 > 1 + momentum
    expected = reference.scan(step(), k, v, lr, momentum)

    def batched(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x)[None, :, None]

    gates = Gates(batched(lr), None, batched(momentum) if own.uses_momentum else None)
    probes = torch.eye(P, dtype=torch.float64)
    for column in range(P):  # reading with unit queries shows the whole state at every token
        q = probes[column].expand(1, T, 1, P)
        y, _ = memory_scan(config_of(own), q, batched(k), batched(v), gates)
        error = np.abs(y[0, :, 0].numpy() - expected[:, :, column]).max()
        assert error <= 1e-10 * np.abs(expected).max()


@EVERY
def test_engines_tape_pieces_and_masks_agree(name):
    """Every kind token by token and in chunks that commit: see test_knobs."""
    own = CASES[name][0].model_copy(update={"lr": 0.1})
    check_rule(config_of(own, retention="decay", chunk=3), smooth=own.kind != "ftrl")


@pytest.mark.spec("ALG-NS-I1")
def test_newton_schulz_brings_singular_values_near_one():
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(20, 6, 9, generator=generator, dtype=torch.float64)
    one = torch.ones(20, dtype=torch.float64)
    direction, _ = algorithm.NewtonSchulz().direction(s, one, 0 * one, 0 * s)
    sigma = torch.linalg.svdvals(direction)
    assert float(sigma.max()) < 1.21 and float(sigma.median()) > 0.68
    cubic = algorithm.NewtonSchulz(polynomial="cubic", steps=40)
    direction, _ = cubic.direction(s, one, 0 * one, 0 * s)
    u, _, w = torch.linalg.svd(s, full_matrices=False)
    assert float((direction + u @ w).norm()) < 1e-9
    tall = algorithm.NewtonSchulz().direction(s.mT, one, 0 * one, 0 * s.mT)[0]
    torch.testing.assert_close(tall.mT, algorithm.NewtonSchulz().direction(s, one, 0 * one, 0 * s)[0])


@pytest.mark.spec("ALG-NS-I1")
def test_the_schedule_brings_all_but_small_singular_values_to_one():
    small = torch.logspace(-2, math.log10(0.7), 300, dtype=torch.float64)
    s = torch.diag_embed(torch.stack((small, (1 - small.square()).sqrt()), -1))  # of length 1
    one = torch.ones(len(s), dtype=torch.float64)
    own = algorithm.NewtonSchulz(polynomial="schedule")
    sigma = torch.linalg.svdvals(own.direction(s, one, 0 * one, 0 * s)[0])
    assert 0.97 < float(sigma.min()) and float(sigma.max()) < 1.04
    assert own.model_copy(update={"steps": 2})._steps == own._steps[:2]
    with pytest.raises(ConfigError, match="'schedule' is 5 steps, got 6; use at most 5, or 'quintic'"):
        algorithm.NewtonSchulz(polynomial="schedule", steps=6)


@pytest.mark.spec("ALG-NS-I2")
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("deep_momentum-paper",)])
def test_one_repeated_item_is_learned(name):
    """The inner loss falls: no variant ascends."""
    own, _ = CASES[name]
    k = torch.tensor([0.6, 0.8, 0.0, 0.0], dtype=torch.float64).expand(1, 60, 1, P)
    v = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64).expand(1, 60, 1, V)
    y, _ = memory_scan(config_of(own), k, k, v, Gates(lr=1.0 if own.kind == "rls" else 0.05))
    errors = (y - v).norm(dim=-1).flatten()
    assert float(errors[-1]) < 0.6 * float(v[0, 0, 0].norm())


@pytest.mark.spec("ALG-RLS-D1")
@pytest.mark.parametrize("engine", ["sequential", "compiled"])
def test_an_inverse_takes_what_is_small_beside_its_start(engine):
    """C - I/ridge after one key is -k k^T / (1 + k.k), by hand, however short the key."""
    k = torch.tensor([3e-9, 4e-9], dtype=torch.float64).view(1, 1, 1, 2)
    _, state = memory_scan(config_of(algorithm.RLS()), k, k, k, Gates(lr=1.0), engine=engine)
    wanted = torch.tensor([[-9e-18, -12e-18], [-12e-18, -16e-18]], dtype=torch.float64)
    torch.testing.assert_close(state.slots["inverse"][0, 0], wanted, rtol=1e-14, atol=0)


@pytest.mark.spec("ALG-DEEP-I1")
def test_a_deep_momentum_does_not_overshoot_however_large_the_gradient(generator):
    """c J J^T has its eigenvalues below 1, J the network's Jacobian by its own weights, and a long
    stream of large values stays of their size."""
    rows, w_in, w_out = (
        scale * torch.randn(*shape, generator=generator)
        for scale, shape in ((30.0, (V, P)), (1.0, (5, P)), (2.0, (P, 5)))
    )

    def network(w_in, w_out):
        return torch.tanh(rows @ w_in.mT) @ w_out.mT

    jacobians = torch.func.jacrev(network, argnums=(0, 1))(w_in, w_out)
    jacobian = torch.cat([item.reshape(V * P, -1) for item in jacobians], 1)
    own = algorithm.DeepMomentum(width=5)
    start, none = own._start(rows[None]), torch.zeros(1)
    # momentum 1 keeps the old network, so the move of W_2 is -c (m(G) + G)^T H.
    _, _, moved = own.direction(rows[None], none, none + 1, (w_in - start)[None], w_out[None])
    pushed = (network(w_in, w_out) + rows).mT @ torch.tanh(rows @ w_in.mT)
    c = float((w_out - moved[0]).norm() / pushed.norm())
    assert c * float(torch.linalg.matrix_norm(jacobian, 2)) ** 2 < 1

    q, k, v = (torch.randn(1, 300, 1, 6, generator=generator) for _ in range(3))
    config = config_of(own, retention="decay", key_norm="l2")
    y, _ = memory_scan(config, q, k, 100 * v, Gates(1.0, 0.99, 0.9))
    assert float(y.norm(dim=-1).max()) < 2 * float(100 * v.norm(dim=-1).max())


@pytest.mark.spec("ALG-FTRL-I1")
def test_lazy_thresholds_add_up_small_steps_and_eager_ones_lose_them():
    grad = torch.full((1, 1, 1), -0.02, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    lazy, total = torch.zeros_like(grad), torch.zeros_like(grad)
    for _ in range(10):
        direction, total = algorithm.FTRL(l1=0.05).direction(grad, one, one, total)
        lazy = lazy + direction
    assert float(lazy) == pytest.approx(10 * 0.02 - 0.05)


@pytest.mark.parametrize("own", [algorithm.Implicit(), algorithm.RLS()])
def test_linear_algorithms_refuse_deep_memories(own):
    with pytest.raises(ConfigError, match=f"algorithm '{own.kind}' with structure 'mlp'"):
        MemoryConfig(algorithm=own, structure="mlp")


def test_omega_refuses_what_it_would_ignore():
    with pytest.raises(ConfigError, match=r"inner.lr=0.5 would not be used"):
        algorithm.Omega(inner=algorithm.GD(lr=0.5))
    with pytest.raises(ConfigError, match="inner algorithm 'rls'"):
        algorithm.Omega(inner=algorithm.RLS())


def test_marks_of_a_window_have_no_gradient_by_tape_or_autograd(generator):
    k, v = (torch.randn(1, 3, 1, width, generator=generator) for width in (P, V))
    config = config_of(algorithm.Omega(window=2, lr=0.1))
    _, state = memory_scan(config, k, k, v)
    marks = state.slots["filled"].requires_grad_()
    for autodiff in ("tape", "torch"):
        y, _ = memory_scan(config, k, k, v.requires_grad_(), state=state, autodiff=autodiff)
        (grad,) = torch.autograd.grad(y.sum(), marks, materialize_grads=True)
        assert not grad.any()
