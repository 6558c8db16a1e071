"""Three opinions on the derivative of a block."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.tape import Block, differentiable

SIGNAL_FLOOR = 1e-3


def check_vjp(
    block: Block,
    inputs: Sequence[Tensor | None],
    *,
    constants: Collection[int] = (),
    rtol: float = 1e-10,
    difference_rtol: float = 1e-6,
    second_order: bool = True,
    signal_floor: float = SIGNAL_FLOOR,
    generator: torch.Generator | None = None,
) -> None:
    """Checks a block's VJP in float64 against autograd through its forward and central differences.

    Errors are relative to the norm of the true gradient, which must exceed `signal_floor`: a gradient that is zero
    everywhere proves nothing. `second_order` compares the gradient of the VJP, by the inputs and by the cotangents,
    with autograd's. Inputs at the positions `constants`, such as frozen draws, are not varied, and the VJP must return
    None for them. Raises AssertionError with the input's index and both numbers.
    """
    generator = generator or torch.Generator().manual_seed(0)
    case = _case(block, inputs, constants, generator)
    hand = block.pullback(case.residuals, case.cotangents)
    require(len(hand) == len(inputs), f"{block.name}: the VJP returns {len(hand)} cotangents for {len(inputs)} inputs")
    leaking = [index for index in constants if hand[index] is not None]
    require(not leaking, f"{block.name}: the VJP gives cotangents to the constants {leaking}")
    flowing = [(o, g) for o, g in zip(case.outputs, case.cotangents, strict=True) if o.requires_grad]
    true = torch.autograd.grad(
        [out for out, _ in flowing], case.points, [g for _, g in flowing], create_graph=second_order, allow_unused=True
    )
    signal = max((float(g.detach().norm()) for g in true if g is not None), default=0.0)
    if signal < signal_floor:
        raise AssertionError(f"{block.name}: no gradient above {signal_floor}, the check would prove nothing")
    for index, point, expected in zip(case.varied, case.points, true, strict=True):
        what = f"{block.name}: VJP of input {index} against autograd"
        _close(what, _dense(hand[index], point), _dense(expected, point), rtol, signal)
    _check_differences(block, case, true, difference_rtol, signal, generator)
    if second_order:
        _check_second_order(block.name, case, hand, true, rtol * 100, generator)


class _Case(NamedTuple):
    """A block run once: what it was given, what it returned, and the cotangents to pull back."""

    tensors: list[Tensor | None]
    varied: list[int]  # positions of the inputs to differentiate by
    points: list[Tensor]  # those inputs
    outputs: list[Tensor]
    cotangents: list[Tensor]
    residuals: Any


def _case(
    block: Block, inputs: Sequence[Tensor | None], constants: Collection[int], generator: torch.Generator
) -> _Case:
    tensors = [None if item is None else item.detach().clone() for item in inputs]
    varied, points = [], []
    for index, item in enumerate(tensors):
        if item is None or index in constants or not differentiable(item):
            continue
        require(item.dtype == torch.float64, f"{block.name}: input {index} must be float64, got {item.dtype}")
        varied.append(index)
        points.append(item.requires_grad_())
    returned, residuals = block.apply(tuple(tensors))
    outputs = [out for out in returned if out is not None]
    cotangents = [
        torch.randn(out.shape, dtype=out.dtype, generator=generator).requires_grad_()
        if differentiable(out)
        else torch.zeros_like(out)
        for out in outputs
    ]
    return _Case(tensors, varied, points, outputs, cotangents, residuals)


def _check_differences(
    block: Block, case: _Case, true: Sequence[Tensor | None], rtol: float, signal: float, generator: torch.Generator
) -> None:
    def value(*args: Tensor) -> Tensor:
        filled = list(case.tensors)
        for index, arg in zip(case.varied, args, strict=True):
            filled[index] = arg
        outputs = [out for out in block.forward(*filled)[0] if out is not None]
        pairs = zip(outputs, case.cotangents, strict=True)
        return torch.stack([(out * g).sum() for out, g in pairs if differentiable(out)]).sum()

    step = 1e-6
    with torch.no_grad():
        for _ in range(3):
            ways = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in case.points]
            moves = list(zip(case.points, ways, strict=True))
            ahead = value(*(point + step * way for point, way in moves))
            behind = value(*(point - step * way for point, way in moves))
            slope = float((ahead - behind) / (2 * step))
            exact = sum(float((g * way).sum()) for g, way in zip(true, ways, strict=True) if g is not None)
            # Round-off of the two values, divided by the step, adds to the truncation error.
            noise = 1e-15 * float(ahead.abs() + behind.abs()) / step
            if not abs(slope - exact) <= rtol * max(signal, abs(exact)) + 10 * noise:
                raise AssertionError(
                    f"{block.name}: directional derivative {exact:.9g} from autograd, "
                    f"{slope:.9g} from central differences"
                )


def _check_second_order(
    name: str,
    case: _Case,
    hand: Sequence[Tensor | None],
    true: Sequence[Tensor | None],
    rtol: float,
    generator: torch.Generator,
) -> None:
    pairs = [
        (hand[index], expected, torch.randn(expected.shape, dtype=expected.dtype, generator=generator))
        for index, expected in zip(case.varied, true, strict=True)
        if expected is not None and expected.requires_grad
    ]
    if not pairs:
        return
    # A VJP is differentiated by its cotangents too: one that detaches them breaks the second order.
    by = case.points + [g for g in case.cotangents if g.requires_grad]
    labels = [f"input {index}" for index in case.varied]
    labels += [f"cotangent {i}" for i, g in enumerate(case.cotangents) if g.requires_grad]
    expected = _grad([(true_grad, way) for _, true_grad, way in pairs], by)
    got = _grad([(g, way) for g, _, way in pairs if g is not None and g.requires_grad], by)
    signal = max(float(g.norm()) for g in expected)
    # A map whose gradient is linear has a second derivative of pure round-off.
    signal = max(signal, 1e-3 * max(float(t.detach().norm()) for _, t, _ in pairs))
    for label, ours, theirs in zip(labels, got, expected, strict=True):
        _close(f"{name}: second derivative by {label}", ours, theirs, rtol, signal)


def _grad(pairs: Sequence[tuple[Tensor, Tensor]], by: Sequence[Tensor]) -> list[Tensor]:
    if not pairs:
        return [torch.zeros_like(item) for item in by]
    values, ways = [value for value, _ in pairs], [way for _, way in pairs]
    grads = torch.autograd.grad(values, by, ways, allow_unused=True, retain_graph=True)
    return [_dense(grad, item) for grad, item in zip(grads, by, strict=True)]


def _dense(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _close(what: str, got: Tensor, expected: Tensor, rtol: float, signal: float) -> None:
    require(got.shape == expected.shape, f"{what}: shape {list(got.shape)}, expected {list(expected.shape)}")
    got, expected = got.detach(), expected.detach()
    error = float((got - expected).norm())
    scale = max(float(expected.norm()), 1e-3 * signal)
    if not error <= rtol * scale:
        raise AssertionError(f"{what}: error {error:.3e} against a norm of {float(expected.norm()):.3e}")


def require(condition: bool, message: str) -> None:
    """Raises AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)
