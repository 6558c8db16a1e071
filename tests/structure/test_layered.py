"""Structures of linear layers: graphs, operations, and a user's own."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from hecate import MemoryConfig, structure
from hecate.engine import Plan, explain
from hecate.errors import ConfigError
from hecate.structure.graph import INPUT, ONE, Act, Add, Apply, Graph, Linear, Multiply, Normalise, trace
from hecate.testing import check_rule
from tests.memories import close

GENERATOR = torch.Generator()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR.manual_seed(sum(shape)), dtype=torch.float64)


class Bilinear(structure.Layered):
    """bilinear_of_a_user: pred = W_1 p * tanh(W_2 p) + W_2 p + b, one value used twice."""

    kind: Literal["bilinear_of_a_user"] = "bilinear_of_a_user"

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"w1": (d_v, d_phi), "w2": (d_v, d_phi), "b": (d_v, 1)}

    def graph(self) -> Graph:
        return Graph(
            (
                Linear(0, INPUT),
                Linear(1, INPUT),
                Apply(Act("tanh"), (2,)),
                Apply(Multiply(), (1, 3)),
                Apply(Add(), (4, 2)),
                Linear(2, ONE),
                Apply(Add(), (5, 6)),
            )
        )


@pytest.mark.spec("STR-GRAPH-D1", "STR-GRAPH-V1")
@pytest.mark.parametrize(
    "fields",
    [
        {"retention": "decay", "algorithm": "momentum"},
        {"retention": "decay", "algorithm": "momentum", "chunk": 3},
        {"chunk": 3, "commit": "chunk"},
    ],
    ids=["token", "frozen", "chunk"],
)
def test_a_users_layers_take_part_in_everything(fields):
    config = MemoryConfig(structure="bilinear_of_a_user", **fields)
    check_rule(config)
    expected = "chunk" if config.chunk > 1 else "compiled_layers"
    assert explain(Plan.sketch(config, length=40))[0] == expected


@pytest.mark.spec("STR-GRAPH-D1")
def test_a_weight_used_twice_is_refused():
    tied, weight, p = Graph((Linear(0, INPUT), Linear(0, 1))), draw(1, 3, 3), draw(1, 2, 3)
    past = trace(tied, [weight], p)
    close(past.values[-1], p @ weight.mT @ weight.mT, 1e-12)
    with pytest.raises(ConfigError, match=r"each of its 1 weights in one layer.*\[0, 0\].*Structure"):
        past.factors(p)


@pytest.mark.spec("STR-GRAPH-V1")
@pytest.mark.parametrize("op", [Act("gelu"), Act("silu"), Act("tanh"), Add(), Multiply(), Normalise(1e-6)], ids=str)
def test_operations_against_autograd(op):
    """First and second derivatives of each operation by itself."""
    count = 2 if isinstance(op, Add | Multiply) else 1
    inputs = [draw(2, 3, 5 + i).narrow(-1, 0, 5).clone().requires_grad_() for i in range(count)]
    g = draw(2, 3, 5).requires_grad_()
    y = op.forward(*inputs)
    true = torch.autograd.grad(y, inputs, g, create_graph=True)
    slopes = op.slopes(y, *inputs)
    pulled = op.vjp(slopes, g)
    cotangents = tuple(draw(2 + i, 3, 5)[:2] for i in range(count))
    shares, gg = op.vjp_vjp(slopes, g, cotangents)
    expected = torch.autograd.grad(true, [*inputs, g], cotangents, allow_unused=True, materialize_grads=True)
    for mine, theirs in zip(pulled, true, strict=True):
        close(mine, theirs, 1e-12)
    for mine, theirs in zip([*shares, gg], expected, strict=True):
        close(torch.zeros_like(theirs) if mine is None else mine, theirs, 1e-10)


DEEP = [
    structure.MLP(layers=1),
    structure.MLP(layers=1, residual=True, norm="layer", bias=True),
    structure.MLP(layers=4, expansion=1, activation="tanh", residual=True, norm="layer", bias=True),
    structure.GatedMLP(),
    Bilinear(),
]


@pytest.mark.spec("STR-GRAPH-V1", "STR-MLP-V1", "STR-GATED-V1")
@pytest.mark.parametrize("knob", DEEP, ids=repr)
def test_second_order_against_autograd(knob):
    memory = tuple(draw(4, *shape, 1).squeeze(-1).requires_grad_() for shape in knob.shapes(3, 3).values())
    p, u = draw(4, 3).requires_grad_(), draw(4, 3).flip(0).requires_grad_()
    true = torch.autograd.grad(knob.predict(memory, p), memory, u, create_graph=True)
    grads = knob.pullback(memory, p, u)
    for mine, theirs in zip(grads, true, strict=True):
        close(mine, theirs, 1e-12)
    cotangents = tuple(draw(*grad.shape) for grad in grads)
    points = [*memory, p, u]
    expected = torch.autograd.grad(true, points, cotangents, allow_unused=True, materialize_grads=True)
    gmemory, gp, gu = knob.pullback_vjp(memory, p, u, cotangents)
    for mine, theirs in zip([*gmemory, gp, gu], expected, strict=True):
        close(mine, theirs, 1e-10)


@pytest.mark.spec("STR-MLP-I3")
@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_the_norm_does_not_see_scale_and_shift_of_what_it_gets(shift):
    plain = structure.MLP(layers=1, norm="layer", bias=True, norm_eps=1e-12)
    weight, p = draw(1, 4, 4), draw(1, 4)
    column = torch.full((1, 4, 1), shift, dtype=torch.float64)
    y = plain.predict((weight, 0 * column), p)
    close(plain.predict((3 * weight, column), p), y, 1e-10)
    close(y.mean(-1), torch.zeros(1), 1e-10)
    close(y.square().mean(-1), torch.ones(1), 1e-10)
    weights = plain.init(4, 4, dtype=torch.float64)
    assert float(weights["b1"].norm()) == 0 and tuple(weights["b1"].shape) == (1, 4, 1)
