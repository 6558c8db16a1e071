"""The parallel engine's own walk: groups of blocks, what it keeps, its limits and its rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig
from hecate.engine import parallel
from hecate.tape import bridge as by_hand
from tests.engine.test_properties import Result, in_pieces, whole
from tests.memories import Case, case_of, close, config_of, flat_state

TITANS = {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}
GATED = {"retention": "decay", "decay_order": "before_gradient", "key_norm": "l2"}
RULES = {
    "hebbian": {"bias": "dot", "key_norm": "l2"},
    "read before": {"bias": "dot", "read": "before"},
    "retnet": {"bias": "dot", "retention": "decay"},
    "delta": {"key_norm": "l2"},
    "gated delta": GATED,
    "titans": TITANS,
    "titans, decayed first": {**TITANS, **GATED},
    "huber": {**TITANS, "bias": {"kind": "huber", "delta": 0.4}},
    "huber of the norm": {**GATED, "bias": {"kind": "huber", "delta": 0.4, "norm": True}},
    "vector": {"structure": "vector", **TITANS},
}
EVERY = pytest.mark.parametrize("fields", RULES.values(), ids=RULES)


@pytest.fixture
def small_groups(monkeypatch):
    """One block per group, so that a few blocks are a long sequence."""
    monkeypatch.setattr(parallel, "GROUP", 1)


def channels_of(fields: dict) -> list[bool]:
    return [False, True] if fields.get("retention") == "decay" else [False]


@pytest.mark.spec("ENG-PAR-D3", "ENG-PAR-I1", "ENG-PAR-I2")
@EVERY
def test_groups_of_blocks_walk_to_the_token_loop(fields, small_groups):
    """Three blocks and a part of one: masks, resets, gates at 0 and 1; the state's gradient."""
    for channels in channels_of(fields):
        length = 55 if channels else 210
        sizes = {"batch": 1, "length": length, "d": 3, "width": 3, "channels": channels}
        for more in ({"ends": 0.05}, {"masks": True}):
            own = case_of(config_of(**fields), **sizes, **more)
            expected = whole(own, engine="sequential")
            for autodiff in ("tape", "torch"):
                whole(own, engine="parallel", autodiff=autodiff).equals(expected)
            in_pieces(own, [1, 17, length - 1], engine="parallel").equals(expected)


@pytest.mark.spec("ENG-PAR-D3")
def test_the_backward_pass_is_the_one_by_hand(monkeypatch):
    """A fault planted in it must show, in both modes, but not where the backward is recorded."""
    real = parallel.walk_vjp

    def wrong(*arguments):
        cotangents, gv, states = real(*arguments)
        return cotangents, 2 * gv, states

    case = case_of(config_of(**TITANS), length=9)
    expected = whole(case, engine="sequential")
    monkeypatch.setattr(parallel, "walk_vjp", wrong)
    for autodiff in ("tape", "torch"):
        with pytest.raises(AssertionError, match="gradient 2"):
            whole(case, engine="parallel", autodiff=autodiff).equals(expected)
    fresh = case.fresh()
    y, _ = fresh.scan(engine="parallel")
    (grad,) = torch.autograd.grad(y.square().sum(), fresh.v, create_graph=True)
    other = case.fresh()
    y, _ = other.scan(engine="sequential", autodiff="torch")
    (true,) = torch.autograd.grad(y.square().sum(), other.v, create_graph=True)
    close(grad, true, 1e-11)
    monkeypatch.undo()
    for mine, theirs in zip(
        torch.autograd.grad(grad.square().sum(), fresh.leaves),
        torch.autograd.grad(true.square().sum(), other.leaves),
        strict=True,
    ):
        close(mine, theirs, 1e-10)


@pytest.mark.spec("ENG-PAR-D3")
@EVERY
def test_what_is_kept_for_the_backward(fields, small_groups):
    """Inputs, a state per block and one write per token; no matrix of a block, no graph."""
    case = case_of(config_of(**fields), length=256, d=8, width=8).fresh()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y, _ = case.scan(engine="parallel")
    assert y.requires_grad
    # 256 tokens of 4 memories: k, q, v in phi-space and as given, normed and not, and the writes;
    # gates as given and folded (a vector's once more for each coordinate); per block of 64 (a
    # vector: of 8) a state with its slot.
    diagonal = case.config.structure.diagonal
    vectors, gates = (12 if diagonal else 9) * 4 * 256 * 8, 8 * 4 * 256
    cells = 8 * 32 if diagonal else 64 * 4
    assert sum(kept.values()) <= 8 * (vectors + gates + 2 * 4 * cells + 4 * 4 * 64)


@pytest.mark.spec("ENG-PAR-D3")
@EVERY
def test_batched_cotangents(fields):
    case = case_of(config_of(**fields), length=9, d=3, width=3).fresh()
    y, _ = case.scan(engine="parallel")
    ways = torch.randn(3, *y.shape)
    rows = torch.autograd.grad(y, case.leaves, ways, is_grads_batched=True, retain_graph=True)
    for index, way in enumerate(ways):
        single = torch.autograd.grad(y, case.leaves, way, retain_graph=True)
        for mine, true in zip(rows, single, strict=True):
            close(mine[index], true, 1e-11)


@pytest.mark.spec("ENG-PAR-V1")
@pytest.mark.parametrize("engine", ["parallel", "sequential"])
def test_products_that_underflow_within_a_block(engine):
    """Retain 1e-12: in float32 its products are subnormal after three tokens, then zero."""
    config = MemoryConfig(**TITANS)
    case = case_of(config, length=70, dtype=torch.float32)
    gates = case.gates._replace(retain=torch.full_like(case.gates.retain, 1e-12))
    got = whole(case._replace(gates=gates), engine=engine)
    double = case._replace(gates=gates, config=config_of(**TITANS))
    exact = whole(double.with_leaves([leaf.double() for leaf in double.leaves]))
    for mine, true in zip((got.y, *got.grads), (exact.y, *exact.grads), strict=True):
        assert bool(mine.isfinite().all())
        close(mine, true, 1e-5)


def _double(case: Case) -> Case:
    fields = {**case.config.model_dump(), "state_dtype": "float64"}
    wide = case.with_leaves([leaf.double() for leaf in case.leaves])
    return wide._replace(config=MemoryConfig.model_validate(fields))


def _floats(result: Result) -> list[Tensor]:
    states = [item for item in flat_state(result.state).values() if item.is_floating_point()]
    return [result.y, *states, *result.grads]


@pytest.mark.spec("ENG-PAR-I5")
@EVERY
def test_rounding_in_single_precision(fields, small_groups):
    """float32 against the token loop in float64: outputs, states, gradients of all inputs."""
    for channels in channels_of(fields):
        length, width = 300, 8
        case = case_of(
            MemoryConfig(**fields),
            batch=1, length=length, d=width, width=width, channels=channels, dtype=torch.float32,
        )  # fmt: skip
        if fields.get("key_norm") != "l2":
            case = case._replace(k=torch.nn.functional.normalize(case.k, dim=-1))
        exact = _floats(whole(_double(case), engine="sequential"))
        got = _floats(whole(case, engine="parallel"))
        unit = torch.finfo(torch.float32).eps / 2
        # A token's prediction, read and write are 2 P + 2 V + 3 operations, with their adjoints
        # three times that; a contraction carries each rounding to the end at most once.
        bound = 3 * length * (4 * width + 3) * unit
        assert bound < 5e-3
        for mine, true in zip(got, exact, strict=True):
            error = mine.detach().double() - true.detach()
            assert float(error.abs().max()) <= bound * float(true.detach().abs().max())
            assert float(error.norm()) <= 1e-5 * float(true.detach().norm())


@pytest.mark.spec("ENG-FUNC-I3")
def test_what_must_see_every_operation_gets_plain_torch():
    x = torch.ones(2, requires_grad=True)
    assert not by_hand.is_traced(x) and by_hand.is_recorded((x, None))
    with torch.no_grad():
        assert not by_hand.is_recorded((x,))
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(by_hand.is_traced(torch.ones(1)))
        return x.sum()

    torch.func.grad(look)(x.detach())
    torch.func.vmap(look)(x.detach().unsqueeze(0))
    assert seen == [True, True]


@pytest.mark.spec("ENG-PAR-D3")
def test_gates_that_are_numbers_get_no_gradient_tensor():
    case = case_of(config_of(key_norm="l2"), length=70)
    case = case._replace(gates=Gates(0.3))
    whole(case, engine="parallel").equals(whole(case, engine="sequential"))
