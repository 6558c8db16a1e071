"""Replay against autograd: what is recorded, and where each cotangent goes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hecate.errors import ShapeError
from hecate.tape import Block, Run, Tape, Tensors, checkpoint, execute
from tests.tape.tape_blocks import APPLY, MODES, TIMES, checkpointed, plain, relative, through


def test_fallback_leaves_integers_and_none_alone():
    pick = Block("pick", lambda x, index, bias: ((x[index], index + 1), None))
    tape = Tape()
    x, index = torch.arange(4.0), torch.tensor([1, 1])
    y, _ = tape(pick, x, index, None)
    gx, gindex, gbias = tape.backward([y], [torch.ones(2)], [x, index, None])
    assert gx.tolist() == [0, 2, 0, 0] and gindex is None and gbias is None


@pytest.mark.spec("TAPE-REPLAY-I1")
@pytest.mark.parametrize("program", [plain, checkpointed])
def test_replay_equals_autograd(program, point):
    g = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(program(execute, *point), point, [g])
    with torch.no_grad():
        tape = Tape()
        got = tape.backward(program(tape, *point), [g], point)
    for mine, theirs in zip(got, expected, strict=True):
        assert relative(mine, theirs) < 1e-12


def test_recording_under_no_grad_leaves_no_graph(point):
    with torch.no_grad():
        tape = Tape()
        (y,) = plain(tape, *point)
    assert not y.requires_grad and len(tape.calls) == 12


@pytest.mark.spec("TAPE-REPLAY-I2")
@pytest.mark.parametrize("mode", MODES)
def test_one_tensor_passed_as_two_inputs_stays_two_variables(mode, point):
    x = point[1]
    y = through(lambda run, a, b: run(TIMES, *run(TIMES, a, a), b), mode)(x, x)
    (gx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gx, 3 * x.square(), rtol=1e-14, atol=0)
    replayed = checkpoint("p", lambda run, a, b: run(TIMES, *run(TIMES, a, a), b))
    ga, gb = replayed.pullback((x, x), [torch.ones_like(x)])
    torch.testing.assert_close(ga, 2 * x.square(), rtol=1e-14, atol=0)
    torch.testing.assert_close(gb, x.square(), rtol=1e-14, atol=0)


@pytest.mark.spec("TAPE-REPLAY-I3")
def test_block_that_returns_its_input_keeps_its_own_cotangent(point):
    # As with gradient scaling: y is x, yet d/dy and d/dx of what follows must not be added up.
    triple = Block("triple", lambda x: ((x,), None), lambda r, g: (3 * g,))

    def program(run: Run, x: Tensor) -> Tensors:
        (y,) = run(triple, x)
        return run(TIMES, y, x)

    x = point[1]
    (gx,) = torch.autograd.grad(through(program)(x).sum(), x)
    torch.testing.assert_close(gx, 4 * x, rtol=1e-14, atol=0)


def test_block_that_returns_one_tensor_twice(point):
    twice = Block("twice", lambda x: ((s := x.sin(), s), x), lambda x, g, h: ((g + h) * x.cos(),))

    def program(run: Run, x: Tensor) -> Tensors:
        return run(TIMES, *run(twice, x))

    x = point[1]
    (gx,) = torch.autograd.grad(through(program)(x).sum(), x)
    torch.testing.assert_close(gx, 2 * x.sin() * x.cos(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.spec("TAPE-REPLAY-I3")
def test_program_that_returns_its_input(mode, point):
    x = point[1]
    f = through(lambda run, x: (x,), mode)
    g = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(f(x), x)
    assert torch.equal(torch.autograd.grad(f(x), x, g)[0], g)
    assert torch.equal(torch.func.grad(lambda x: (g * f(x)).sum())(x), g)
    per_row = torch.func.vmap(torch.func.grad(lambda x, g: (g * f(x)).sum()))(x, g)
    assert torch.equal(per_row, g)


@pytest.mark.spec("TAPE-REPLAY-I4")
def test_unused_outputs_pull_back_zeros_and_none_where_nothing_flows(point):
    matrix, x = (item.detach() for item in point)
    split = Block("split", lambda x: ((x.sin(), x.cos()), x), lambda x, gs, gc: (gs * x.cos() - gc * x.sin(),))
    tape = Tape()
    sine, cosine = tape(split, x)
    tape(APPLY, matrix, cosine)
    gmatrix, gx = tape.backward([sine], [torch.ones_like(sine)], [matrix, x])
    assert gmatrix is None
    torch.testing.assert_close(gx, x.cos(), rtol=1e-14, atol=0)


@pytest.mark.spec("TAPE-REPLAY-I5")
def test_wrong_cotangents_are_refused():
    add = Block("add", lambda a, b: ((a + b,), None), lambda r, g: (g, g))
    tape = Tape()
    a, b = torch.ones(3, 1), torch.ones(3, 4)
    outputs = tape(add, a, b)
    with pytest.raises(ShapeError, match=r"the VJP of 'add': cotangent 0 .* \[3, 1\], got \[3, 4\]"):
        tape.backward(outputs, [torch.ones(3, 4)], [a])
    with pytest.raises(ShapeError, match=r"backward: cotangent 0 .* \[3, 4\], got \[4\]"):
        tape.backward(outputs, [torch.ones(4)], [a])
    with pytest.raises(ShapeError, match="expected 1 cotangents, got 2"):
        tape.backward(outputs, [torch.ones(3, 4)] * 2, [a])
    few = Block("few", add.forward, lambda r, g: (g,))
    tape = Tape()
    with pytest.raises(ShapeError, match="VJP of 'few': expected 2 cotangents, got 1"):
        tape.backward(tape(few, a, b), [torch.ones(3, 4)], [a])


def test_outputs_must_be_a_tuple():
    with pytest.raises(ShapeError, match=r"block 'bare' must return .* got a Tensor"):
        Tape()(Block("bare", lambda x: (x * 2, x)), torch.ones(3))


@pytest.mark.spec("TAPE-REPLAY-I6")
def test_cotangents_take_the_dtype_of_their_tensor_as_in_autograd():
    received = []

    def low_vjp(dtype: torch.dtype, g: Tensor) -> Tensors:
        received.append(g.dtype)
        return (g.to(dtype),)

    low = Block("low", lambda x: ((x.bfloat16(),), x.dtype), low_vjp)
    up = Block(
        "up", lambda x: ((x.float().square(),), x), lambda x, g: (2 * g * x.float(),)
    )  # a float32 cotangent for a bfloat16 input
    x = torch.linspace(-1, 1, 7, dtype=torch.float32, requires_grad=True)

    def program(run: Run, x: Tensor) -> Tensors:
        return run(up, *run(low, x))

    got, expected = (torch.autograd.grad(through(program, mode)(x).sum(), x)[0] for mode in ("tape", "torch"))
    assert got.dtype == torch.float32 and torch.equal(got, expected)
    assert received == [torch.bfloat16]


def test_complex_tensors():
    turn = Block("turn", lambda z, w: ((z * w,), (z, w)), lambda r, g: (g * r[1].conj(), g * r[0].conj()))
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3, dtype=torch.complex128, generator=generator, requires_grad=True)
    w = torch.randn(3, generator=generator, requires_grad=True)
    g = torch.randn(3, dtype=torch.complex128, generator=generator)
    expected = torch.autograd.grad(z * w, (z, w), g)
    tape = Tape(observe=True)
    got = tape.backward(tape(turn, z, w), [g], [z, w])
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype and relative(mine, theirs) < 1e-14
    torch.testing.assert_close(tape.norms()["turn"], g.abs().square().sum().sqrt())
