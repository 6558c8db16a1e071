"""Kernels that look at gradients and take a step of momentum in one pass: the bits of torch's operations one by one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from hecate.errors import NonFiniteError
from hecate.optim import PhiMomentum, tensors

pytest.importorskip("numba")

SHAPES = [(3, 5), (64, 129), (7,), (1,), (300, 301), (16,)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": True},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled": False, "nesterov": True},
    {"dampening": 0.3, "maximize": True},
    {"form": "hope", "nesterov": True, "weight_decay": 0.1},
    {"form": "hope", "dampening": 0.2},
    {"lr": torch.tensor(0.02)},
]


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draws, dtype=dtype).requires_grad_() for shape in SHAPES]


def stepped(params: list[Tensor], steps: int = 3, dtype: torch.dtype | None = None, **options: Any) -> list[Tensor]:
    """Weights and momenta after some steps, on gradients drawn in a dtype, that of weights if none is said."""
    draws, optimizer = torch.Generator().manual_seed(1), PhiMomentum(params, **{"lr": 0.02, **options})
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draws, dtype=dtype or p.dtype).to(p.dtype)
        params[1].grad[2] = 0
        optimizer.step()
    return [*params, *(x for p in params for x in optimizer.state[p].values() if isinstance(x, Tensor))]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of pieces of every step by a kernel."""
    found, own = [], tensors.Pieces.move
    monkeypatch.setattr(tensors.Pieces, "move", lambda self, *given: found.append(len(self.sizes)) or own(self, *given))
    return found


@pytest.mark.spec("OPT-FUSED-D1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_has_the_bits_of_operations_one_by_one(options: dict[str, Any], dtype: torch.dtype, moves: list[int]):
    found = stepped(weights(dtype), **options)
    assert moves == [len(SHAPES)] * 3
    assert all(map(torch.equal, found, stepped(weights(dtype), foreach=False, **options)))
    assert len(moves) == 3


DIAGONAL = {"precondition": "diagonal", "form": "hope", "retain": 0.9, "eps": 1e-3}
ODD = {"odd": True, "weight_decay": 0.1, "decoupled": False}
VJP = {"lift": "vjp", "nesterov": True}
MAPS = [  # the derivatives of some and others themselves: texts of all are held equal to torch in tests/formula
    {"feature_map": kind, "input_scale": "none", **options}
    for kind, options in (
        ("tanh", {}), ("tanh", VJP), ("elu", DIAGONAL), ("exp", ODD), ("softplus", VJP), ("gelu_shifted", VJP),
        ("sigmoid", DIAGONAL), ("relu", {}), ("squared_relu", VJP), ("leaky_relu", ODD),
    )
]  # fmt: skip


def near(found: list[Tensor], loop: list[Tensor], true: list[Tensor]) -> None:
    """No further from float64 than twice what operations one by one are, but for the last two digits."""
    for mine, theirs, exact in zip(found, loop, true, strict=True):
        off = (theirs.double() - exact).abs().max()
        assert (mine.double() - exact).abs().max() <= 2 * off + 4 * torch.finfo(torch.float32).eps * exact.abs().max()


SCALED = [
    {"input_scale": "rms", "feature_map": "tanh", "nesterov": True},
    {"input_scale": "rms", "feature_map": "identity", "precondition": "diagonal"},
    {"input_scale": "unit", "feature_map": "elu", "matrix": "last"},
    {"input_scale": "restored", "feature_map": "softplus", "form": "hope"},
    {"input_scale": "restored", "feature_map": "sigmoid", "lift": "vjp", "weight_decay": 0.1},
]


@pytest.mark.spec("OPT-FUSED-D1")
@pytest.mark.parametrize("options", SCALED, ids=str)
def test_rows_are_scaled_in_the_same_pass(options: dict[str, Any], moves: list[int]):
    """No further from float64 than operations one by one, at any size of a row; one of zeros among them."""

    def found(size: float, dtype: torch.dtype, **more: Any) -> list[Tensor]:
        draws = torch.Generator().manual_seed(0)
        params = [torch.randn(n, generator=draws).to(dtype).requires_grad_() for n in (*SHAPES, (3, 4, 18))]
        optimizer = PhiMomentum(params, 0.02, **options, **more)
        for _ in range(3):
            for p in params:
                p.grad = (size * torch.randn(p.shape, generator=draws, dtype=torch.float32)).to(dtype)
            params[1].grad[2] = 0
            optimizer.step()
        return [*params, *(optimizer.state[p]["momentum"] for p in params)]

    for size in (1.0, 1e30, 1e-30):
        near(
            found(size, torch.float32), *(found(size, dtype, foreach=False) for dtype in (torch.float32, torch.float64))
        )
    rows = 3 + 64 + 1 + 1 + 300 + 1 + (12 if options.get("matrix") == "last" else 3)
    assert moves == [rows] * 9


@pytest.mark.spec("OPT-FUSED-D1")
@pytest.mark.parametrize("options", MAPS, ids=str)
def test_a_map_of_numbers_is_made_in_the_same_pass(options: dict[str, Any], moves: list[int]):
    """Bits where the map is made of operations that round alike everywhere, else (torch's root is one of MKL's) no
    further from float64 than torch's own functions are, but for the last two digits: those of `lanes` are within 1.5
    of them."""
    found, loop = stepped(weights(), **options), stepped(weights(), foreach=False, **options)
    assert moves == [len(SHAPES)] * 3
    if options["feature_map"] in ("relu", "squared_relu", "leaky_relu") and "precondition" not in options:
        assert all(map(torch.equal, found, loop))
        return
    wide = [p.detach().double().requires_grad_() for p in weights()]
    near(found, loop, stepped(wide, foreach=False, dtype=torch.float32, **options))


@pytest.mark.spec("OPT-FUSED-D1")
def test_threads_share_pieces_out_and_change_no_bit(monkeypatch: pytest.MonkeyPatch, moves: list[int]):
    options = {"nesterov": True, "feature_map": "tanh", "input_scale": "none"}
    alone = stepped(weights(), **options)
    monkeypatch.setattr(tensors, "PIECE", 1000)
    monkeypatch.setattr(tensors, "SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(map(torch.equal, stepped(weights(), **options), alone))
    assert moves == [len(SHAPES)] * 3 + [4 + 9 + 91] * 3


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_place_of_a_gradient_is_looked_at(value: float, threads: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(tensors, "PIECE", 1000)
    params = weights()
    optimizer = PhiMomentum(params, 0.02)
    for at, p in enumerate(params):
        for place in {0, p.numel() // 2, p.numel() - 1}:
            for q in params:
                q.grad = torch.full_like(q, 3e38)  # whose sums are infinite
            p.grad.view(-1)[place] = value
            before = [q.detach().clone() for q in params]
            with pytest.raises(NonFiniteError, match="nothing was changed"):
                optimizer.step()
            assert all(map(torch.equal, params, before)), at


@pytest.mark.spec("OPT-FUSED-D1")
def test_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch, moves: list[int]):
    """Gradients that lie otherwise, other maps, half precision, and no numba."""
    params = weights()[:2]
    params[0].grad, params[1].grad = torch.ones_like(params[0]), torch.ones(129, 64, dtype=torch.float32).mT
    PhiMomentum(params, 0.02).step()
    stepped(weights(), feature_map="softmax", input_scale="none")
    stepped(weights(), feature_map="tanh", input_scale="none", precondition="kronecker")
    stepped(weights(), feature_map="tanh", input_scale="rms", guard="flip")
    stepped(weights(), feature_map="tanh", input_scale="rms", weight_decay=0.1, decoupled=False)
    stepped(weights(torch.bfloat16))
    assert moves == []
    whole = stepped(weights())
    assert moves == [len(SHAPES)] * 3
    monkeypatch.setattr(tensors, "load_kernels", lambda name: None)
    assert all(map(torch.equal, stepped(weights()), whole))
    assert len(moves) == 3


def test_numbers_that_lie_elsewhere_are_not_read(moves: list[int]):
    """Momenta on another device, and what is negated once it is read."""
    (p,) = params = weights()[1:2]
    optimizer = PhiMomentum(params, 0.02)
    p.grad, momentum = torch.ones_like(p), optimizer.state[p]["momentum"]
    optimizer.state[p]["momentum"] = momentum.to("meta")
    with suppress(RuntimeError):  # which not every operation of torch has to say
        optimizer.step()
    optimizer.state[p]["momentum"] = momentum
    before = p.detach().clone()
    p.grad = torch._neg_view(torch.ones_like(p))
    optimizer.step()
    assert torch.equal(p, before + 0.02)
    assert moves == []


@pytest.mark.parametrize("sharing", ["weights", "a gradient and a momentum"])
def test_tensors_that_share_memory_go_one_operation_after_another(sharing: str, moves: list[int]):
    def stepped(foreach: bool | None) -> list[Tensor]:
        numbers = torch.randn(100, generator=torch.Generator().manual_seed(0))
        parts = (numbers[:64], numbers[36:]) if sharing == "weights" else (numbers[:40], numbers[60:])
        params = [part.requires_grad_() for part in parts]
        optimizer = PhiMomentum(params, 0.02, weight_decay=0.1, foreach=foreach)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            if sharing != "weights":
                params[0].grad = optimizer.state[params[0]]["momentum"].fill_(2.0)
            optimizer.step()
        return params

    assert all(map(torch.equal, stepped(None), stepped(False)))
    assert moves == []


def test_a_graph_that_needs_the_weights_before_a_step_is_told():
    params = weights()[:1]
    loss = (params[0] ** 2).sum()
    params[0].grad = torch.ones_like(params[0])
    PhiMomentum(params, 0.02).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
