"""Each retention and link by itself: what it minimises, keeps and forgets, and its kinks."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from hecate import ConfigError, Gates, MemoryConfig, memory_scan, retention
from hecate.retention.mirror import power_vjp
from hecate.testing import check_rule
from tests.memories import case_of, close, config_of
from tests.reference import knobs as reference
from tests.reference import mirror
from tests.retention.examples import draw, stepped

LINKS = [
    retention.IdentityLink(),
    retention.SoftmaxLink(scale=2.0),
    retention.SignedSoftmaxLink(scale=2.0),
    retention.SigmoidLink(low=-1.0, high=2.0),
    retention.LqLink(),
    retention.LqLink(q=1.5),
    retention.LqLink(q=2.0),
    retention.LqLink(form="paper"),
    retention.LqLink(q=2.5, form="paper"),
]


@pytest.mark.spec("RET-LINK-D1", "RET-LINK-D2", "RET-LINK-D3", "RET-LINK-D4", "RET-LINK-D5")
@pytest.mark.parametrize("link", LINKS, ids=repr)
def test_links_against_numpy(link, generator):
    dual = draw(generator, 6, 4, 5)
    true = {
        "identity": lambda a: a,
        "softmax": mirror.Softmax(2.0).memory,
        "signed_softmax": mirror.SignedSoftmax(2.0).memory,
        "sigmoid": reference.Sigmoid(-1.0, 2.0).memory,
        "lq": reference.Lq(*((link.q, link.form) if link.kind == "lq" else ())).memory,
    }[link.kind]
    expected = np.stack([true(row) for row in dual.numpy()])
    np.testing.assert_allclose(link.memory(dual), expected, rtol=1e-12, atol=1e-15)
    shifted = link.memory(dual + torch.tensor([[3.0]]))
    assert link.row_invariant == torch.allclose(shifted, link.memory(dual), rtol=1e-12)


@pytest.mark.spec("RET-LINK-V1")
@pytest.mark.parametrize("link", LINKS, ids=repr)
def test_links_are_differentiated_as_computed(link, generator):
    """Also where a root's chord has the last word, and far out."""
    edge = draw(generator, 6, 4, 5)
    edge[0], edge[1], edge[2, 0] = 0.0, 1e-7 * edge[1], 60.0 * edge[2, 0]
    edge[3, 0, 0], edge[4, :, 1] = 0.0, 1e-6
    point = edge.clone().requires_grad_()
    out = link.memory(point)
    g = draw(generator, *out.shape)
    (true,) = torch.autograd.grad(out, point, g)
    assert torch.isfinite(true).all()
    atol = 1e-12 * float(true.norm())
    torch.testing.assert_close(link.memory_vjp(edge, g), true, rtol=1e-9, atol=atol)


@pytest.mark.spec("RET-L2-R1")
def test_l2_is_decay_decoupled_and_a_minimiser_coupled(generator):
    memory, direction, retain, moved = stepped(retention.L2(), generator)
    penalty = (1 / retain - 1).reshape(-1, 1, 1)
    # Stationary point of -<D, W> + 1/2 |W - M|^2 + penalty/2 |W|^2.
    residual = -direction + (moved - memory) + penalty * moved
    assert float(residual.abs().max()) < 1e-12
    assert retention.L2(penalty=0.25).default_retain == 0.8
    one, other = retention.L2(decoupled=True), retention.Decay()
    assert torch.equal(one.step(memory, direction, retain), other.step(memory, direction, retain))


@pytest.mark.spec("RET-ELASTIC-I1", "RET-ELASTIC-R1")
def test_elastic_net_minimises_forgets_in_finite_time_and_at_its_kink(generator):
    knob = retention.ElasticNet(threshold=0.4)
    memory, direction, retain, moved = stepped(knob, generator)
    free = retain.reshape(-1, 1, 1) * memory + direction
    residual = moved - free  # minus a subgradient of threshold |W|_1
    assert torch.allclose(residual[moved != 0], -0.4 * moved[moved != 0].sign())
    assert bool((residual[moved == 0].abs() <= 0.4).all()) and bool((moved == 0).any())
    at = torch.tensor([[0.4, -0.4, 0.4 + 1e-9]])
    zero, ones = torch.zeros(1, 3), torch.ones(1, 3)
    assert knob.step(zero, at, torch.ones(1))[0, :2].tolist() == [0.0, 0.0]
    point = at.clone().requires_grad_()
    (auto,) = torch.autograd.grad(knob.step(zero, point, torch.ones(1)).sum(), point)
    hand = knob.step_vjp(zero, at, torch.ones(1), ones)[1]
    assert auto.tolist() == hand.tolist() == [[0.0, 0.0, 1.0]]
    left = torch.ones(1, 1)
    for _ in range(10):
        left = retention.ElasticNet(threshold=0.2).step(left, 0 * left, 0.9 * torch.ones(1))
    assert left.item() == 0.0
    plain = retention.ElasticNet(threshold=0.0).step(memory, direction, retain)
    assert torch.equal(plain, retention.Decay().step(memory, direction, retain))


@pytest.mark.spec("RET-KL-I1", "RET-KL-I2", "RET-KL-E1")
def test_kl_keeps_distributions_and_minimises_the_divergence(generator):
    knob = retention.KL(scale=3.0)
    carried, direction, _, _ = stepped(knob, generator)
    one, memory = torch.ones(8), knob.weights(carried)

    def after(direction, retain):
        return knob.weights(knob.step(carried, direction, retain))

    moved = after(direction, one)
    assert bool((moved > 0).all()) and torch.allclose(moved.sum(-1), torch.tensor(3.0))
    # First-order condition of -<D, W> + KL(W || M) on the simplex: constant along a row.
    slope = -direction + (moved / memory).log()
    assert float((slope - slope.mean(-1, True)).abs().max()) < 1e-12
    assert torch.equal(after(0 * direction, one), memory)
    assert torch.allclose(after(direction + 7, one), moved)
    uniform = after(0 * direction, 0 * one)
    assert torch.allclose(uniform, torch.tensor(3.0 / 5))
    # A non-negative row cannot answer a negative value to a positive key; two banks can.
    k, v = torch.ones(1, 300, 1, 2), torch.full((1, 300, 1, 1), -0.5)
    plain, _ = memory_scan(config_of(retention="kl"), k, k, v, Gates(0.3, 1.0))
    assert float(plain.min()) > 0.99
    signed = {"kind": "kl", "signed": True}
    both, _ = memory_scan(config_of(retention=signed), k, k, v, Gates(0.3, 1.0))
    assert both[0, -1].item() == pytest.approx(-0.5, abs=1e-6)


@pytest.mark.spec("RET-KL-I3")
def test_signed_rows_stay_within_the_scale(generator):
    knob = retention.KL(scale=3.0, signed=True)
    carried, direction, retain, stepped_on = stepped(knob, generator)
    moved = knob.weights(stepped_on)
    assert bool((moved.abs().sum(-1) < 3.0).all()) and bool((moved < 0).any())
    assert torch.equal(knob.step(carried, 0 * direction, torch.ones(8)), carried)
    mirrored = knob.weights(knob.step(-carried, -direction, retain))
    assert torch.allclose(mirrored, -moved, rtol=1e-13)
    far = knob.weights(knob.step(carried, 1e3 * direction, retain))  # beyond what a row can hold
    assert bool((far.abs().sum(-1) <= 3.0 + 1e-12).all())


@pytest.mark.spec("RET-BOUNDED-I1")
def test_bounded_never_leaves(generator):
    knob = retention.Bounded(low=-1.0, high=2.0)
    carried, direction, retain, _ = stepped(knob, generator)
    for size in (1.0, 20.0, 1e6):
        moved = knob.weights(knob.step(carried, size * direction, retain))
        assert bool((moved >= -1).all()) and bool((moved <= 2).all())
    middle = knob.weights(knob.step(carried, 0 * direction, torch.zeros(8)))
    assert torch.equal(middle, torch.full_like(middle, 0.5))
    with pytest.raises(ConfigError, match="high.*low=1"):
        retention.Bounded(low=1.0, high=1.0)


@pytest.mark.spec("RET-LQ-I1", "RET-LQ-E1", "RET-LQ-E2", "RET-LQ-E3", "RET-LQ-R1")
def test_the_exact_lq_map_is_optimal_and_the_printed_one_is_not(generator):
    """Optimality of 1/2 |W|_q^2 - <A, W>: the gradient of the first term is A."""
    dual = draw(generator, 1, 4, 4)
    for q in (1.5, 4.0):
        p, link = q / (q - 1), retention.LqLink(q=q)
        exact = link.memory(dual).requires_grad_()
        printed = (dual / dual.abs().pow(p).sum().pow((p - 2) / p)).requires_grad_()
        residuals = []
        for w in (exact, printed):
            half = 0.5 * w.abs().pow(q).sum().pow(2 / q)
            (slope,) = torch.autograd.grad(half, w)
            residuals.append(float((slope - dual).norm() / dual.norm()))
        assert residuals[0] < 1e-13 and residuals[1] > 0.1, residuals
        assert torch.allclose(link.memory(3 * dual), 3 * exact)  # degree 1
    paper = retention.LqLink(form="paper")
    assert torch.allclose(paper.memory(3 * dual), paper.memory(dual) / 3)  # degree 3 - q = -1
    near = [float(paper.memory(dual * s).norm()) for s in (1e-2, 1e-4)]
    assert near[1] == pytest.approx(100 * near[0])  # a pole at A = 0
    with pytest.raises(ConfigError, match=r"q.*form='paper'"):
        retention.Lq(q=3.0, form="paper")
    memory, direction, retain, _ = stepped(retention.Decay(), generator)
    for form in ("exact", "paper"):
        two = retention.Lq(q=2.0, form=form)
        moved = two.step(memory, direction, retain)
        torch.testing.assert_close(moved, retention.Decay().step(memory, direction, retain))
        torch.testing.assert_close(two.weights(moved), moved)


@pytest.mark.spec("RET-LQ-I2")
@pytest.mark.parametrize("q", [1.5, 4.0])
def test_lq_at_zero_and_at_the_edge_of_its_chord(q):
    link = retention.LqLink(q=q, eps=1e-3)
    zero = torch.zeros(1, 2, 2)
    g = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    torch.testing.assert_close(link.memory_vjp(zero, g), g)  # slope 1 at zero
    start = zero.clone().requires_grad_()
    (back,) = torch.autograd.grad(link.start(start), start, g)
    torch.testing.assert_close(back, g)
    one = torch.full((1, 1, 1), 1e-3)
    r = 1 / (q - 1)
    # At the edge of a single number: the power's own slope, r eps^(r-1), times the length's.
    point = one.clone().requires_grad_()
    (auto,) = torch.autograd.grad(link.memory(point), point, torch.ones_like(point))
    assert float(link.memory_vjp(one, torch.ones_like(one))) == pytest.approx(float(auto))
    assert float(power_vjp(one, r - 1, 1e-3, one / one)) == pytest.approx(r * 1e-3 ** (r - 1))


@pytest.mark.spec("RET-SPHERE-I1", "RET-SPHERE-R1")
def test_sphere_turns_unit_slots_as_lattice_does(generator):
    for slot, axis in (("column", -2), ("row", -1)):
        memory, _, _, moved = stepped(retention.Sphere(slot=slot), generator)
        assert torch.allclose(moved.square().sum(axis), torch.tensor(1.0), rtol=1e-14)
        radial = retention.Sphere(slot=slot).step(memory, 5 * memory, torch.ones(8))
        assert torch.allclose(radial, memory, rtol=1e-13)  # no tangent part, no turn
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(50, n)) for n in (3, 3, 4))
    lr, mu = rng.uniform(0.05, 0.5, 50), rng.uniform(0.5, 1.0, 50)
    shifted = rng.normal(size=(4, 3))
    start = (shifted + np.eye(4, 3)) / np.linalg.norm(shifted + np.eye(4, 3), axis=0)
    expected, slots = reference.lattice(q, k, v, lr, mu, start.T)
    y, state = memory_scan(
        config_of(retention="sphere"),
        *(torch.tensor(item)[None, :, None] for item in (q, k, v)),
        Gates(*(torch.tensor(g)[None, :, None] for g in (lr, mu))),
        initial={"weight": torch.tensor(shifted)[None]},
    )
    np.testing.assert_allclose(y[0, :, 0], expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state.memory["weight"][0, 0], slots.T, rtol=0, atol=1e-12)


@pytest.mark.spec("RET-SPHERE-D2", "RET-SPHERE-I1")
def test_slots_keep_the_length_they_start_with(generator):
    for slot, axis in (("column", -2), ("row", -1)):
        knob = retention.Sphere(slot=slot, form="divide")
        memory, direction, retain, moved = stepped(knob, generator)
        lengths = memory.norm(dim=axis)
        assert float((lengths - 1).abs().max()) > 0.1  # the initial weights' own
        assert torch.allclose(moved.norm(dim=axis), lengths, rtol=1e-14)
        free = retain[:, None, None] * memory + direction
        cosine = (moved * free).sum(axis) / lengths / free.norm(dim=axis)
        assert torch.allclose(cosine, torch.ones(()), rtol=1e-14)


@pytest.mark.spec("RET-SPHERE-D2")
def test_a_sphere_without_its_pattern_starts_at_its_weights():
    weights = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(retention.Sphere(form="divide", pattern=False).start(weights), weights)
    close(retention.Sphere(pattern=False).start(weights), weights / weights.norm(dim=-2, keepdim=True), 1e-14)
    for knob in (retention.Sphere(pattern=False), retention.NormCap(retention=retention.Sphere(pattern=False))):
        with pytest.raises(ConfigError, match="retention.pattern: False: structure 'matrix' starts at zero"):
            MemoryConfig(retention=knob)
        MemoryConfig(retention=knob, structure="mlp")


@pytest.mark.spec("RET-SPHERE-I2")
@pytest.mark.parametrize("form", ["tangent", "divide"])
def test_a_slot_of_zero_length_has_a_derivative(form):
    knob = retention.Sphere(form=form)
    nothing = torch.zeros(1, 2, 2)
    for vjp in knob.step_vjp(nothing, nothing, torch.zeros(1), torch.ones(1, 2, 2)):
        assert torch.isfinite(vjp).all()


@pytest.mark.spec("RET-CAP-I1", "RET-CAP-R1")
def test_norm_cap_projects_each_weight(generator):
    inner = retention.Decay()
    knob = retention.NormCap(norm=2.0, retention=inner)
    memory, direction, retain, moved = stepped(knob, generator)
    free = inner.step(memory, direction, retain)
    sizes = free.flatten(1).norm(dim=1)
    assert bool((sizes > 2).any()) and torch.allclose(moved.flatten(1).norm(dim=1), sizes.clamp(max=2.0))
    assert torch.allclose(moved * (sizes / sizes.clamp(max=2)).reshape(-1, 1, 1), free)
    wide = retention.NormCap(norm=1e6, retention=inner).step(memory, direction, retain)
    assert torch.equal(wide, free)
    assert knob.uses_retain and not retention.NormCap().uses_retain
    assert retention.NormCap(retention="l2").default_retain == retention.L2().default_retain
    # Exactly on the border: inside, so nothing is taken off the derivative.
    at = torch.tensor([[1.2, 1.6]])
    cap, zero, g = retention.NormCap(norm=2.0), torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
    assert cap.step_vjp(zero, at, torch.ones(1), g)[1].tolist() == g.tolist()
    with pytest.raises(ConfigError, match="retention 'norm_cap' takes no retain gate"):
        case = case_of(config_of(retention="norm_cap"))
        case._replace(gates=Gates(0.1, 0.5)).scan()


def test_a_link_of_a_user(generator):
    class Sinh(retention.Link):
        """sinh_of_a_user: M = sinh(A)."""

        kind: Literal["sinh_of_a_user"] = "sinh_of_a_user"

        def memory(self, dual: torch.Tensor) -> torch.Tensor:
            return dual.sinh()

    try:
        config = MemoryConfig(retention={"kind": "bregman", "link": "sinh_of_a_user"})
        check_rule(config)
    finally:
        del retention.Link._registry["sinh_of_a_user"]


@pytest.mark.spec("RET-KL-R1", "RET-BREGMAN-R1")
def test_bregman_is_the_retention_of_its_link(generator):
    memory, direction, retain, _ = stepped(retention.Bounded(), generator)
    for knob, link in (
        (retention.Decay(), "identity"),
        (retention.KL(scale=2.0), {"kind": "softmax", "scale": 2.0}),
        (retention.KL(signed=True, scale=0.5), {"kind": "signed_softmax", "scale": 0.5}),
        (retention.Bounded(), "sigmoid"),
        (retention.Lq(q=3.0), {"kind": "lq", "q": 3.0}),
    ):
        same = retention.Bregman(link=link)
        assert same.linear == knob.linear
        got, expected = (item.step(memory, direction, retain) for item in (same, knob))
        assert torch.equal(got, expected) and same.dual == knob.dual
        assert torch.equal(same.weights(got), knob.weights(got))


@pytest.mark.spec("RET-MIRROR-I2")
def test_per_channel_gates_act_on_the_dual_state(generator):
    gate = torch.rand(8, 5, generator=generator)
    knob = retention.Bounded()
    memory, direction, _, _ = stepped(knob, generator)
    moved = knob.step(memory, direction, gate)
    for column in range(5):
        alone = knob.step(memory, direction, gate[:, column])[..., column]
        torch.testing.assert_close(moved[..., column], alone, rtol=1e-14, atol=0)
    # Gates that differ along a row tell its constant: there it is part of what is carried.
    for scale in (1.0, 3.0):
        knob = retention.KL(scale=scale)
        moved = knob.weights(knob.step(memory, direction, gate))
        expected = scale * (gate.unsqueeze(1) * memory + direction).softmax(-1)
        torch.testing.assert_close(moved, expected, rtol=1e-13, atol=0)
