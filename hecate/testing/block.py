"""Checks: of a block's derivative against two others, and of a model's outputs whole, in pieces and token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hecate.errors import ConfigError
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
    case = _Case(block, inputs, constants, generator)
    hand = block.pullback(case.residuals, case.cotangents)
    require(len(hand) == len(inputs), f"{block.name}: the VJP returns {len(hand)} cotangents for {len(inputs)} inputs")
    leaking = [index for index in constants if hand[index] is not None]
    require(not leaking, f"{block.name}: the VJP gives cotangents to the constants {leaking}")
    ours = [torch.zeros_like(p) if (g := hand[index]) is None else g for index, p in case.points.items()]
    pairs = list(zip(case.outputs, case.cotangents, strict=True))
    true = _grads(pairs, list(case.points.values()), create_graph=second_order)
    signal = max((float(g.detach().norm()) for g in true), default=0.0)
    require(signal >= signal_floor, f"{block.name}: no gradient above {signal_floor}, the check would prove nothing")
    for index, got, expected in zip(case.points, ours, true, strict=True):
        close(f"{block.name}: VJP of input {index} against autograd", got, expected, signal, rtol)
    case.check_differences(true, difference_rtol, signal)
    if second_order:
        case.check_second_order(ours, true, rtol * 100)


class _Case:
    """One run of a block: its inputs, its outputs, and cotangents to pull back."""

    def __init__(
        self, block: Block, inputs: Sequence[Tensor | None], constants: Collection[int], generator: torch.Generator
    ) -> None:
        self.block, self.generator = block, generator
        self.tensors = [None if item is None else item.detach().clone() for item in inputs]
        self.points: dict[int, Tensor] = {}  # the inputs to differentiate by, by position
        for index, item in enumerate(self.tensors):
            if item is None or index in constants or not differentiable(item):
                continue
            require(item.dtype == torch.float64, f"{block.name}: input {index} must be float64, got {item.dtype}")
            self.points[index] = item.requires_grad_()
        returned, self.residuals = block.apply(tuple(self.tensors))
        self.outputs = [out for out in returned if out is not None]
        self.cotangents = [
            torch.randn(out.shape, dtype=out.dtype, generator=generator).requires_grad_()
            if differentiable(out)
            else torch.zeros_like(out)
            for out in self.outputs
        ]

    def check_differences(self, true: Sequence[Tensor], rtol: float, signal: float) -> None:
        """Checks gradients against central differences in three random directions."""

        def value(*args: Tensor) -> Tensor:
            filled = list(self.tensors)
            for index, arg in zip(self.points, args, strict=True):
                filled[index] = arg
            outputs = [out for out in self.block.forward(*filled)[0] if out is not None]
            pairs = zip(outputs, self.cotangents, strict=True)
            return torch.stack([(out * g).sum() for out, g in pairs if differentiable(out)]).sum()

        step = 1e-6
        with torch.no_grad():
            for _ in range(3):
                ways = [torch.randn(p.shape, dtype=p.dtype, generator=self.generator) for p in self.points.values()]
                moves = list(zip(self.points.values(), ways, strict=True))
                ahead = value(*(point + step * way for point, way in moves))
                behind = value(*(point - step * way for point, way in moves))
                slope = float((ahead - behind) / (2 * step))
                exact = sum(float((g * way).sum()) for g, way in zip(true, ways, strict=True))
                # Round-off of the two values, divided by the step, adds to the truncation error.
                noise = 1e-15 * float(ahead.abs() + behind.abs()) / step
                both = f"{exact:.9g} from autograd, {slope:.9g} from central differences"
                near = abs(slope - exact) <= rtol * max(signal, abs(exact)) + 10 * noise
                require(near, f"{self.block.name}: directional derivative {both}")

    def check_second_order(self, ours: Sequence[Tensor], true: Sequence[Tensor], rtol: float) -> None:
        """Checks the gradients of cotangents against those of the true ones."""
        triples = [
            (got, expected, torch.randn(expected.shape, dtype=expected.dtype, generator=self.generator))
            for got, expected in zip(ours, true, strict=True)
            if expected.requires_grad
        ]
        if not triples:
            return
        # A VJP is differentiated by its cotangents too: one that detaches them breaks the second order.
        by = {f"input {index}": point for index, point in self.points.items()}
        by |= {f"cotangent {index}": g for index, g in enumerate(self.cotangents) if g.requires_grad}
        expected = _grads([(g, way) for _, g, way in triples], list(by.values()), retain_graph=True)
        got = _grads([(g, way) for g, _, way in triples], list(by.values()), retain_graph=True)
        # A map whose gradient is linear has a second derivative of pure round-off.
        first = max(float(g.detach().norm()) for _, g, _ in triples)
        signal = max(1e-3 * first, *(float(g.norm()) for g in expected))
        for label, mine, theirs in zip(by, got, expected, strict=True):
            close(f"{self.block.name}: second derivative by {label}", mine, theirs, signal, rtol)


def _grads(pairs: Sequence[tuple[Tensor, Tensor]], by: Sequence[Tensor], **how: bool) -> list[Tensor]:
    """Gradients of values pulled back from cotangents, zeros where nothing flows."""
    flowing = [pair for pair in pairs if pair[0].requires_grad]
    if not flowing:
        return [torch.zeros_like(item) for item in by]
    values, ways = zip(*flowing, strict=True)
    grads = torch.autograd.grad(values, by, ways, allow_unused=True, **how)
    return [torch.zeros_like(item) if grad is None else grad for grad, item in zip(grads, by, strict=True)]


def close(what: str, got: Tensor, expected: Tensor, signal: float = 1.0, rtol: float = 1e-10) -> None:
    """Raises AssertionError unless the error is within `rtol` of the expected norm, or of 1e-3 `signal`."""
    require(got.shape == expected.shape, f"{what}: shape {list(got.shape)}, expected {list(expected.shape)}")
    error, norm = float((got - expected).detach().norm()), float(expected.detach().norm())
    require(error <= rtol * max(norm, 1e-3 * signal), f"{what}: error {error:.3e} against a norm of {norm:.3e}")


def require(condition: bool, message: str) -> None:
    """Raises AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


Model = Callable[..., tuple[Tensor, Any]]


def check_streaming(model: Model, x: Tensor, *, tolerance: float | None = None) -> None:
    """Checks a model's training, prefill and decoding against one another: `model(x, state) -> (y, state)`, state None
    at the start. [STATE-STREAM-I1]

        check_streaming(layer, torch.randn(2, 12, 64, dtype=torch.float64))

    y of the whole x is what training computes. It must equal the outputs of x in two pieces, cut at any place, the
    second from the state of the first, and those token by token; a call must not change the state that it gets, and the
    same call twice must return the same. This finds whatever is missing from the state: all of it, the inputs of a
    convolution, a position.

    Args:
        model: a module or function; without dropout, such as in `eval()`.
        x: `[B, T, ...]`, numbers or tokens, T at least 3; longer than any window, chunk or convolution to be tested.
        tolerance: largest difference of a token's outputs, relative to the norm of the largest token's; None for
            eps^(2/3) of y's dtype: 4e-11 in float64, 2e-5 in float32.

    Raises:
        AssertionError: names the first way of cutting x that gives other outputs, the token and the difference.
        ConfigError: x too short to be cut.
    """
    if x.dim() < 2 or x.shape[1] < 3:
        raise ConfigError(f"x must be [B, T, ...] with T at least 3, to be cut in pieces, got {list(x.shape)}")
    length = x.shape[1]
    with torch.no_grad():
        whole, _ = model(x, None)
        if not isinstance(whole, Tensor) or whole.shape[:2] != x.shape[:2]:
            shape = list(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
            raise AssertionError(f"y of x {list(x.shape)} must be [B, T, ...] = {list(x.shape[:2])} first, got {shape}")
        limit = torch.finfo(whole.dtype).eps ** (2 / 3) if tolerance is None else tolerance
        _compare("the same call, once more", model(x, None)[0], whole, limit)
        for cut in range(1, length):
            _compare(f"tokens 0..{cut - 1}, then the rest", _joined(model, x, [0, cut, length]), whole, limit)
        _compare("token by token", _joined(model, x, [*range(length + 1)]), whole, limit)
        _, state = model(x[:, : length // 2], None)
        first, second = (model(x[:, length // 2 :], state)[0] for _ in range(2))
        _compare("twice from one state, which the first call has written to", second, first, limit)


def _joined(model: Model, x: Tensor, borders: Sequence[int]) -> Tensor:
    """y of x in pieces, each from the state of the last."""

    def pieces() -> Iterator[Tensor]:
        state = None
        for at, end in pairwise(borders):
            y, state = model(x[:, at:end], state)
            yield y

    return torch.cat([*pieces()], 1)


def _compare(how: str, got: Tensor, whole: Tensor, limit: float) -> None:
    """AssertionError with the first token whose outputs differ."""
    if got.shape != whole.shape:
        raise AssertionError(f"{how}: y is {list(got.shape)}, of the whole sequence {list(whole.shape)}")
    size = whole.reshape(*whole.shape[:2], -1).norm(dim=-1).max().clamp(min=torch.finfo(whole.dtype).tiny)
    error = (got - whole).reshape(*whole.shape[:2], -1).norm(dim=-1) / size
    wrong = ~(error <= limit)  # NaN is wrong, too
    if bool(wrong.any()):
        row, token = wrong.nonzero()[wrong.nonzero()[:, 1].argmin()].tolist()
        raise AssertionError(
            f"{how}: token {token} of row {row} differs from the whole sequence by {float(error[row, token]):.2g} of "
            f"the largest output, beyond {limit:.2g}; what it needs of the tokens before is not in the state"
        )
