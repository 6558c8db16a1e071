"""Quotients by sizes and sums of features: key_norm, step sizes, the sum normaliser.

A size is the root of squares and a step divides by squares, which leave a dtype's range long before the features do. So
where features are far from 1 they are first brought near it by a power of two, which rounds nothing and cancels in the
quotient. [RULE-RANGE-I1]
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.bias import L2, Dot
from hecate.engine.tokens import Carry, Tokens
from hecate.rule import MemoryConfig
from hecate.rule.rule import one
from hecate.structure import Memory
from hecate.tape import Block, ByHand, Run, Tensors, can_inspect, execute
from hecate.tape.ops import over

NORMALIZED_EPS = 1e-6


def reach(dtype: torch.dtype, share: float) -> float:
    """The power of two at a share of a dtype's exponents: at 1/2 its square is the largest."""
    return 2.0 ** int(share * math.log2(torch.finfo(dtype).max))


def near_one(size: Tensor, share: float = 0.25) -> bool:
    """Whether sizes are known to lie within `reach` of 1.

    They are looked at on a CPU only, where it costs no waiting, and where values may steer.
    """
    if not can_inspect(size, free=True):
        return False
    if not size.numel():
        return True
    (low, high), far = size.aminmax(), reach(size.dtype, share)
    return low.item() * far >= 1 and high.item() <= far


def levelling(largest: Tensor) -> Tensor:
    """Powers of two that bring sizes to [1, 2), constants to derivatives; 1 for 0."""
    bottom = math.log2(torch.finfo(largest.dtype).tiny)
    power = torch.exp2(-largest.detach().log2().floor().clamp(bottom, -bottom))
    return torch.where(largest > 0, power, 1.0)


def largest(x: Tensor) -> Tensor:
    """The largest absolute value along the last axis, kept as an axis of one."""
    return x.detach().abs().amax(-1, keepdim=True)


def scaled(x: Tensor, factor: Tensor, run: Run, label: str) -> Tensor:
    """x times a constant."""
    return one(run(_SCALED, x, factor, label=label))


def _scaled(x: Tensor, factor: Tensor) -> tuple[Tensors, Tensor]:
    return (x * factor,), factor


def _scaled_vjp(factor: Tensor, g: Tensor) -> tuple[Tensor, None]:
    return g * factor, None


_SCALED = Block("scaled", _scaled, _scaled_vjp)


# key_norm.


def _l2_norm(x: Tensor) -> tuple[Tensors, tuple[Tensor, Tensor]]:
    # A zero vector stays zero; the constant 1 keeps the root's derivative out of it.
    square, level = x.square().sum(-1, keepdim=True), None
    if not near_one(square, share=0.5):
        level = levelling(largest(x))
        x = x * level
        square = x.square().sum(-1, keepdim=True)
    norm = torch.where(square > 0, square, 1.0).sqrt()
    unit = x / norm
    return (unit,), (unit, norm if level is None else norm / level)


def _l2_norm_vjp(residuals: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor]:
    unit, norm = residuals
    product = unit * g
    along = product.sum(-1, keepdim=True)
    # Into the same tensor: pages of a long sequence's fresh tensors cost more than the arithmetic.
    return (torch.addcmul(g, unit, along, value=-1, out=product).div_(norm),)


def _sum_norm(x: Tensor) -> tuple[Tensors, tuple[Tensor, Tensor]]:
    total, level = x.sum(-1, keepdim=True), None
    if not near_one(total, share=0.5):
        level = levelling(largest(x))
        x = x * level
        total = x.sum(-1, keepdim=True)
    total = torch.where(total > 0, total, 1.0)
    share = x / total
    return (share,), (share, total if level is None else total / level)


def _sum_norm_vjp(residuals: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor]:
    share, total = residuals
    return ((g - (share * g).sum(-1, keepdim=True)) / total,)


L2_NORM = ByHand.of(Block("l2_norm", _l2_norm, _l2_norm_vjp))
SUM_NORM = ByHand.of(Block("sum_norm", _sum_norm, _sum_norm_vjp))


# Step sizes.


class Step(NamedTuple):
    """A key, its value and its step size."""

    phi: Tensor
    v: Tensor
    lr: Tensor


def stepped(config: MemoryConfig, given: Step, run: Run) -> Step:
    """A token's key, value and step size under `config.step`.

    The write of lr/|phi|^2 is (e/|phi|)(phi/|phi|)^T, which may be representable where |phi|^2 is not. Where the
    gradient is linear in prediction and value it is the write of (c phi, c v) with lr/|c phi|^2, and for dot that of c
    phi alone with c lr/|c phi|^2. Elsewhere a key too long to be squared is cut to a length that can be. [RULE-STEP-I2]
    """
    phi, v, lr = given
    rule = (_NORMALIZED if config.step == "normalized" else _IMPLICIT).block(keeps=run is not execute)
    floor = torch.full_like(lr, NORMALIZED_EPS if config.step == "normalized" else 1.0)
    dot, l2 = type(config.bias) is Dot, type(config.bias) is L2
    # The values of a sum normaliser are 1, whatever becomes of v.
    same = dot or (l2 and config.normalizer == "none")
    same = same and config.structure.linear and config.algorithm.linear
    # Its derivative has |phi|^4 in it.
    top = reach(phi.dtype, 0.2 if same else 0.4)
    if can_inspect(phi, free=True) and phi.numel() and largest(phi).amax().item() <= top:
        return Step(phi, v, one(run(rule, lr, phi, floor, label="step")))
    size = largest(phi)
    level = torch.where(size > top, levelling(size) * (1.0 if same else top), 1.0)
    factor = level.squeeze(-1)
    phi = scaled(phi, level, run, "step")
    lr = one(run(rule, lr, phi, floor * factor.square() if same else floor, label="step"))
    if same and dot:
        lr = scaled(lr, factor, run, "step")
    elif same:
        v = scaled(v, level, run, "step")
    return Step(phi, v, lr)


def _normalized(lr: Tensor, phi: Tensor, floor: Tensor) -> tuple[Tensors, Tensors]:
    total = floor + phi.square().sum(-1)
    return (lr / total,), (lr, phi, total)


def _normalized_vjp(kept: tuple[Tensor, Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor, None]:
    lr, phi, total = kept
    g = g / total
    return g, (-2 * g * (lr / total)).unsqueeze(-1) * phi, None


def _implicit(lr: Tensor, phi: Tensor, floor: Tensor) -> tuple[Tensors, Tensors]:
    total = floor + lr * phi.square().sum(-1)
    return (lr / total,), (lr / total, phi, floor / total / total)


def _implicit_vjp(kept: tuple[Tensor, Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor, None]:
    step, phi, slope = kept
    return g * slope, (-2 * g * step * step).unsqueeze(-1) * phi, None


# By hand under autograd too: the derivative by lr is a difference of nearly equal terms to it.
_NORMALIZED = ByHand.of(Block("step.normalized", _normalized, _normalized_vjp))
_IMPLICIT = ByHand.of(Block("step.implicit", _implicit, _implicit_vjp))


# The sum normaliser.


def _divide(numerator: Tensor, denominator: Tensor, *units: Tensor) -> tuple[Tensors, Any]:
    # The sum of weights is 0 for an empty memory; one that is no normal number would have a derivative that is no
    # number. What is divided by 1 then is divided by what 1 has become.
    filled = denominator >= torch.finfo(denominator.dtype).tiny
    divisors = [torch.where(filled, denominator, 1.0)]
    divisors += [torch.where(filled, 1.0, unit) for unit in units]
    mean = _over(numerator, divisors)
    return (mean,), (mean, divisors, filled)


def _divide_vjp(kept: tuple[Tensor, list[Tensor], Tensor], g: Tensor) -> Tensors:
    mean, divisors, filled = kept
    g = _over(g, divisors)
    gz = torch.where(filled, -(g * mean).sum(-1, keepdim=True), 0.0)
    return g, gz, *(None for _ in divisors[1:])


def _over(x: Tensor, divisors: list[Tensor]) -> Tensor:
    for divisor in divisors:
        x = x / divisor
    return x


DIVIDE = ByHand.of(Block("normalizer", _divide, _divide_vjp))


class Levelled(NamedTuple):
    """A scan with a sum normaliser whose features are near 1: the factors `[B, 1 or T, H, 1]` by which they came there,
    and what its states are to be multiplied by at the end `[N]`."""

    tokens: Tokens
    carries: list[Carry]
    initials: list[Memory]
    units: tuple[Tensor, ...] = ()
    back: Tensor | None = None


def levelled(config: MemoryConfig, given: Levelled, run: Run) -> Levelled:
    """The same quotients from features near 1, so that a cotangent over a small sum of weights stays representable:
    those of a query cancel, and so do those of all keys with the states."""
    tokens, carries, initials, units, _ = given
    size = largest(tokens.phi_q)
    if not near_one(size):
        units = (levelling(size),)
        tokens = tokens._replace(phi_q=scaled(tokens.phi_q, *units, run, "normalizer"))
        given = given._replace(tokens=tokens, units=units)
    if type(config.bias) is not Dot or config.algorithm.kind not in ("gd", "momentum"):
        return given
    batch, _, heads = tokens.lr.shape
    size = (largest(tokens.phi_k).squeeze(-1) * tokens.lr.detach().abs()).amax(1)
    held = carries[1].memory[0].detach().abs().amax((1, 2)).unflatten(0, (batch, heads))
    size = torch.maximum(size, held)
    if near_one(size):
        return given
    level = levelling(size)
    wide = level[:, None, :, None]
    phi_k = scaled(tokens.phi_k, wide, run, "normalizer")
    level = level.flatten()
    return Levelled(
        tokens._replace(phi_k=phi_k),
        [times(carry, level, run) for carry in carries],
        [_times(initial, level, run) for initial in initials],
        (*units, wide),
        1 / level,
    )


def times(carry: Carry, factor: Tensor, run: Run) -> Carry:
    """A state with everything that is linear in the writes times a constant `[N]`."""
    linear = (_times(item, factor, run) for item in carry[:4])
    return Carry(*linear, *carry[4:])  # type: ignore[arg-type, call-arg]


def _times(tensors: Memory, factor: Tensor, run: Run) -> Memory:
    return tuple(scaled(item, over(factor, item), run, "normalizer") for item in tensors)
