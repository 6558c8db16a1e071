"""What holds for every retention: numpy over fifty tokens, starts, masks, guards, copies."""

from __future__ import annotations

import pytest
import torch

from hecate import ConfigError, Gates, MemoryConfig, memory_scan, retention
from hecate.testing import check_rule
from tests.knob_scans import worst_error
from tests.memories import case_of, config_of
from tests.reference import knobs as reference
from tests.retention.examples import KNOBS, PAIRS, draw, every_knob


@pytest.mark.spec("RET-L2-D1", "RET-ELASTIC-D1", "RET-KL-D1", "RET-BOUNDED-D1", "RET-LQ-D1")
@pytest.mark.spec("RET-SPHERE-D1", "RET-BREGMAN-D1", "RET-CAP-D1", "RET-MIRROR-D1")
@pytest.mark.parametrize("structure", ["matrix", "mlp"])
@pytest.mark.parametrize(("knob", "kept"), PAIRS, ids=map(repr, KNOBS))
def test_fifty_tokens_against_numpy(knob, kept, structure):
    """The reference carries dual states, or banks."""
    lr = 0.3 if structure == "matrix" else 0.03  # exact lq lengthens steps by sqrt(weights)
    assert worst_error(structure, "l2", knob, reference.l2, kept, lr=lr) <= 1e-12


@pytest.mark.spec("RET-ANY-V1", "RULE-ORDER-D1")
@pytest.mark.parametrize(
    ("at", "chunk"), [(1, 1), (2, 3), (4, 3), (5, 1), (8, 3), (10, 1), (11, 3), (13, 3), (15, 1), (23, 3)]
)
def test_every_retention_before_the_gradient(at, chunk):
    """In chunks or token by token, by turns: of every form of a step or link one."""
    assert KNOBS[at].uses_retain
    fields = {"decay_order": "before_gradient", "algorithm": "momentum", "chunk": chunk}
    check_rule(MemoryConfig(retention=KNOBS[at], **fields))


@pytest.mark.spec("RET-START-D1")
@pytest.mark.parametrize("structure", ["matrix", {"kind": "mlp", "layers": 2}], ids=["m", "mlp"])
@every_knob
def test_gradients_flow_from_the_start(knob, structure):
    """From the structure's own start, the zero matrix included, to weights, values and keys."""
    config = config_of(retention=knob, structure=structure)
    case = case_of(config, d=3, width=3, length=3)
    own = config.structure.init(3, 3, heads=2, dtype=torch.float64)
    case = case._replace(initial=own).fresh()
    y, _ = case.scan(autodiff="torch")
    grads = torch.autograd.grad(y.square().sum(), [*case.initial.values(), case.v, case.k])
    for grad in grads:
        assert torch.isfinite(grad).all() and 1e-6 < float(grad.norm()) < 1e6


@pytest.mark.spec("RET-START-D1", "RET-START-I1")
@every_knob
def test_starts_are_mapped_once_and_states_go_on_as_they_are(knob):
    case = case_of(config_of(retention=knob), d=3, width=3, masks=True)
    silent = case._replace(write=torch.zeros_like(case.write))
    _, start = silent.scan()
    expected = knob.start(case.initial["weight"])
    assert torch.equal(start.memory["weight"][1], expected)
    _, again = silent._replace(reset=None).scan(start)
    assert torch.equal(again.memory["weight"], start.memory["weight"])  # a mask is a no-op
    _, moved = case._replace(write=None, reset=None).scan()
    restart = torch.ones_like(case.reset)
    _, back = silent._replace(reset=restart).scan(moved)
    assert torch.equal(back.memory["weight"], start.memory["weight"])


def begun(knob, weights):
    """The memory that starts from initial weights."""
    return knob.weights(knob.start(weights))


@pytest.mark.spec("RET-START-D1", "RET-LQ-D1")
@pytest.mark.parametrize("q", [1.5, 4.0])
def test_a_memory_of_lq_starts_at_its_weights(q, generator):
    weights = torch.randn(3, 4, 5, generator=generator)
    weights[0, 0], weights[1] = 0.0, 1e-9 * weights[1]  # the chord included
    knob = retention.Lq(q=q)
    torch.testing.assert_close(begun(knob, weights), weights, rtol=1e-12, atol=0)
    shifted = weights + 20 ** (-1 / 4)
    paper = begun(retention.Lq(form="paper"), weights)
    torch.testing.assert_close(paper, shifted, rtol=1e-12, atol=1e-15)


@pytest.mark.spec("RET-START-D1")
def test_constants_of_the_start():
    zero = torch.zeros(1, 2, 3)
    assert torch.allclose(begun(retention.KL(scale=3.0), zero), torch.ones(1, 2, 3))
    assert torch.equal(begun(retention.KL(signed=True), zero), zero)
    assert torch.equal(begun(retention.Bounded(low=-1.0, high=2.0), zero), zero + 0.5)
    assert torch.equal(begun(retention.Lq(), zero), zero)
    assert torch.allclose(begun(retention.Lq(form="paper"), zero), zero + 6**-0.25)
    columns = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
    assert torch.equal(retention.Sphere().start(zero), columns)
    rows = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    assert torch.equal(retention.Sphere(slot="row").start(zero), rows)
    assert torch.equal(retention.Sphere().start(zero[:, 0]), rows[:, 0])  # one axis, one slot
    for knob in (retention.L2(), retention.ElasticNet(), retention.NormCap()):
        assert torch.equal(knob.start(zero), zero)
    capped = retention.NormCap(norm=0.5).start(zero + 1).flatten(1)
    assert torch.allclose(capped, torch.tensor(0.5 / 6**0.5))


@pytest.mark.spec("RET-FLOAT-I1")
@pytest.mark.parametrize("knob", [KNOBS[at] for at in (3, 5, 8, 9, 11, 13, 16)], ids=repr)
def test_float32_survives_violent_writes(knob):
    """Steps of hundreds drive links against their borders: still finite, backwards too. Of a link, one retention."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 60, 1, 4, generator=generator).float() for _ in range(3))
    v = v.mul(300).requires_grad_()
    config = MemoryConfig(retention=knob, bias={"kind": "huber", "delta": 300.0})
    retain = torch.rand(2, 60, 1, generator=generator).float() if knob.uses_retain else None
    if retain is not None:
        retain[:, ::7] = 0.0
    y, state = memory_scan(config, q, k, v, Gates(0.2, retain))
    (grad,) = torch.autograd.grad(y.square().mean(), v)
    assert torch.isfinite(y).all() and torch.isfinite(state.memory["weight"]).all()
    assert torch.isfinite(grad).all()


@pytest.mark.spec("RET-NORMALIZER-I1")
@every_knob
def test_sum_normaliser_is_exact_or_refused(knob):
    fields = {"retention": knob, "normalizer": "sum", "feature_map": "elu", "bias": "dot"}
    accepted = knob.kind == "l2" or (knob.kind == "bregman" and knob.link.kind == "identity")
    assert knob.weighted_sum == accepted
    if not accepted:
        with pytest.raises(ConfigError, match=f"'sum': retention '{knob.kind}' is not linear"):
            config_of(**fields)
        return
    # The definition, token by token: numerator and sum of weights under the same steps.
    case = case_of(config_of(**fields), batch=1, heads=1)
    case = case._replace(initial={"weight": 0 * case.initial["weight"]})
    phi = case.config.feature_map
    memory, weights = torch.zeros(1, 2, 3), torch.zeros(1, 1, 3)
    y, _ = case.scan()
    for t in range(7):
        p, v, lr, retain = (x[0, t, 0] for x in (phi(case.k), case.v, *case.gates[:2]))
        memory = knob.step(memory, lr * torch.outer(v, p)[None], retain[None])
        weights = knob.step(weights, lr * p[None, None], retain[None])
        read = phi(case.q)[0, t, 0]
        torch.testing.assert_close(y[0, t, 0], (memory[0] @ read) / (weights[0] @ read))


@pytest.mark.spec("RET-STEP-I1")
@every_knob
def test_the_guard_on_steps_judges_linear_retentions_only(knob):
    """lr = 5 on unit keys is too long for a delta rule; a bounded memory cannot diverge."""
    fields = {"retention": knob, "key_norm": "l2", "algorithm": {"kind": "gd", "lr": 5.0}}
    if knob.linear:
        with pytest.raises(ConfigError, match="diverges beyond 2"):
            config_of(**fields)
    else:
        assert config_of(**fields).algorithm.lr == 5.0


@pytest.mark.spec("RET-START-I1")
@every_knob
def test_infeasible_states_find_back(knob, generator):
    """Weights of +-5 everywhere, and zeros, belong to no simplex, sphere, box or small ball."""
    direction, retain = draw(generator, 2, 4, 4), torch.full((2,), 0.9)
    for memory in (5 * draw(generator, 2, 4, 4).sign(), torch.zeros(2, 4, 4)):
        moved = knob.step(memory, direction, retain)
        assert torch.isfinite(moved).all()
        if "elastic" in repr(knob).lower():
            continue  # shrinks whatever it keeps
        again = knob.step(moved, 0 * direction, torch.ones(2))
        atol = 1e-5 if "eps=1e-06" in repr(knob) else 1e-12
        torch.testing.assert_close(again, moved, rtol=1e-9, atol=atol)


@every_knob
def test_nothing_to_do(knob):
    for batch, length, width in ((0, 2, 2), (2, 0, 2), (2, 2, 0)):
        q, v = torch.zeros(batch, length, 2, 3), torch.zeros(batch, length, 2, width)
        y, _ = memory_scan(MemoryConfig(retention=knob), q, q, v)
        assert y.shape == v.shape
