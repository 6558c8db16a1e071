"""Blocks and programs that the tests of the tape share."""

from __future__ import annotations

from torch import Tensor

from hecate.tape import Block, Run, Tensors, checkpoint, differentiate

MODES = ("tape", "torch", "auto")


def apply_forward(matrix: Tensor, x: Tensor) -> tuple[Tensors, tuple[Tensor, Tensor]]:
    return ((matrix @ x.unsqueeze(-1)).squeeze(-1),), (matrix, x)


def apply_vjp(residuals: tuple[Tensor, Tensor], g: Tensor) -> Tensors:
    matrix, x = residuals
    return g.unsqueeze(-1) * x.unsqueeze(-2), (matrix.mT @ g.unsqueeze(-1)).squeeze(-1)


def tanh_forward(x: Tensor) -> tuple[Tensors, Tensor]:
    y = x.tanh()
    return (y,), y


APPLY = Block("apply", apply_forward, apply_vjp)
TANH = Block("tanh", tanh_forward, lambda y, g: (g * (1 - y.square()),))
SINE = Block("sine", lambda x: ((x.sin(),), None))
TIMES = Block("times", lambda a, b: ((a * b,), (a, b)), lambda r, g: (g * r[1], g * r[0]))


def layer(run: Run, matrix: Tensor, x: Tensor) -> Tensors:
    return run(SINE, *run(TANH, *run(APPLY, matrix, x)))


def plain(run: Run, matrix: Tensor, x: Tensor) -> Tensors:
    for _ in range(4):
        (x,) = layer(run, matrix, x)
    return (x,)


def checkpointed(run: Run, matrix: Tensor, x: Tensor) -> Tensors:
    for step in range(4):
        (x,) = run(checkpoint("layer", layer), matrix, x, label=f"step {step}")
    return (x,)


def through(program, mode="tape"):
    return lambda *inputs: differentiate(program, inputs, mode)[0]


def relative(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach(), expected.detach()
    assert expected.norm() > 1e-3, "a gradient of zero proves nothing"
    return float((got - expected).norm() / expected.norm())
