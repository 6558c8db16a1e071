"""`check_vjp` finds what is wrong by hand and accepts what is right."""

from __future__ import annotations

import pytest
import torch

from hecate.tape import Block, checkpoint
from hecate.testing import check_vjp
from tests.tape.tape_blocks import APPLY, SINE, TANH, apply_vjp, plain

FAULTS = {
    "wrong sign": (Block("f", TANH.forward, lambda y, g: (-g * (1 - y.square()),)), "VJP of input 0"),
    "one per cent off": (Block("f", TANH.forward, lambda y, g: (1.01 * g * (1 - y.square()),)), "VJP of input 0"),
    "no second derivative": (
        Block("f", TANH.forward, lambda y, g: (g * (1 - y.detach().square()),)),
        "second derivative by input 0",
    ),
    "cotangent detached": (
        Block("f", TANH.forward, lambda y, g: (g.detach() * (1 - y.square()),)),
        "second derivative by cotangent 0",
    ),
    "gradient not declared": (Block("f", TANH.forward, lambda y, g: (None,)), "VJP of input 0"),
    "too many cotangents": (Block("f", TANH.forward, lambda y, g: (g, g)), "2 cotangents for 1"),
    "no signal": (Block("f", lambda x: ((1e-4 * x,), None), lambda r, g: (0 * g,)), "would prove nothing"),
    "forward hides a dependence from autograd": (
        Block("f", lambda x: ((x * x.detach(),), x), lambda x, g: (g * x.detach(),)),
        "central differences",
    ),
}


@pytest.mark.spec("TAPE-CHECK-I1")
@pytest.mark.parametrize("fault", FAULTS)
def test_check_vjp_finds(fault, generator):
    block, message = FAULTS[fault]
    # Autograd is blind to the last fault; only differences see it at first order.
    x = torch.randn(5, generator=generator) * (1e-3 if fault == "no signal" else 1)
    with pytest.raises(AssertionError, match=message):
        check_vjp(block, [x], second_order=fault != "forward hides a dependence from autograd")


@pytest.mark.spec("TAPE-CHECK-I1")
def test_check_vjp_accepts_what_is_right(point):
    inputs = [item.detach() for item in point]
    check_vjp(APPLY, inputs)
    check_vjp(TANH, inputs[1:])
    check_vjp(SINE, inputs[1:])
    check_vjp(checkpoint("plain", plain), inputs)
    mixed = Block("mixed", lambda x: ((x.sin(), x.argmax(-1), None), None))
    check_vjp(mixed, inputs[1:])


def test_check_vjp_wants_float64_and_no_cotangent_for_constants(point):
    inputs = [item.detach() for item in point]
    with pytest.raises(AssertionError, match=r"input 1 must be float64, got torch\.float32"):
        check_vjp(APPLY, [inputs[0], inputs[1].float()])
    with pytest.raises(AssertionError, match=r"cotangents to the constants \[0\]"):
        check_vjp(APPLY, inputs, constants=[0])
    frozen = Block("frozen", APPLY.forward, lambda r, g: (None, apply_vjp(r, g)[1]))
    check_vjp(frozen, inputs, constants=[0])
