"""Gradients of a block's tokens that depend on predictions which they change themselves.

Under a bias that is neither linear nor blind to the memory they solve
u_t = g(base_t - sum_{i<t} L[t,i] u_i, v_t). L is strictly lower triangular, so within a sub-block of b tokens the
fixed-point iteration is exact after b steps, whatever g is: step s settles row s. Convergence is usually reached
earlier and then detected. Sub-blocks bound how far the iterates can overshoot while they settle. [ENG-IMP-D1]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hecate.bias import Bias
from hecate.formula import formula_of
from hecate.tape import Block, Tensors, can_inspect, differentiate, is_recorded, is_traced, one, waits

SUB_BLOCK = 16


def implicit_gradients(bias: Bias, base: Tensor, lower: Tensor, v: Tensor) -> Tensor:
    """u `[N, C, V]` from base, v `[N, C, V]` and the strictly lower triangular `[N, C, C]`.

    The derivative comes from the implicit function theorem, not from the iteration: with J the Jacobian of g by its
    first argument, the cotangent e of the errors' arguments obeys e = J (g_u - L^T e), an upper triangular system
    solved the same way from the last token back. [ENG-IMP-V1]"""

    def forward(base: Tensor, lower: Tensor, v: Tensor) -> tuple[Tensors, Tensors]:
        u = solve(bias, base, lower, v)
        return (u,), (base, lower, v, u)

    def vjp(residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        base, lower, v, u = residuals
        if torch.is_grad_enabled():
            # The residual u is a constant; solving again here makes u a function of the inputs.
            u = implicit_gradients(bias, base, lower, v)
        pred = base - lower @ u
        slope = adjoint(bias, pred, lower, v, g)
        _, gv = bias.grad_vjp(pred, v, g - lower.mT @ slope)
        return slope, -(slope @ u.mT).tril(-1), gv

    block = Block("implicit_gradients", forward, vjp)
    return one(differentiate(lambda run, *inputs: run(block, *inputs), (base, lower, v), "tape"))


def solve(bias: Bias, base: Tensor, lower: Tensor, v: Tensor) -> Tensor:
    """u alone; the derivative of these operations is not that of u."""
    # A row that has not settled may overflow, and 0 * inf must not reach other rows.
    tame = partial(torch.nan_to_num, nan=0.0, posinf=0.0, neginf=0.0)
    return _substituted(bias.grad, lower, base, (v,), tame)


def adjoint(bias: Bias, pred: Tensor, lower: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Cotangent e of `base`, from that of u and from the solution `pred = base - L u`."""
    formula = formula_of(bias) if waits(g) else ""
    if not isinstance(formula, str) and formula.coordinatewise:  # a slope for each, the same for every row's x
        slope = bias.grad_jvp(pred, v, torch.ones_like(pred))
        return _substituted(torch.mul, lower.mT, g, (slope,), backwards=True)
    return _substituted(lambda x, pred, v: bias.grad_jvp(pred, v, x), lower.mT, g, (pred, v), backwards=True)


def _substituted(
    f: Callable[..., Tensor],
    coupling: Tensor,
    right: Tensor,
    fixed: tuple[Tensor, ...],
    tame: Callable[[Tensor], Tensor] | None = None,
    *,
    backwards: bool = False,
) -> Tensor:
    """x of x_t = f(right_t - sum_i coupling[t, i] x_i, *given_t), from the first row down or from the last one up.

    Where values can be read without waiting, all rows of a sub-block are iterated at once until they have settled; else
    row by row, which reads no values."""
    length, late = right.shape[-2], waits(right) and not is_recorded((right, coupling, *fixed))
    late = late and can_inspect(right) and not is_traced(right, coupling, *fixed)
    solutions: list[Tensor] = []
    starts = range(0, length, SUB_BLOCK)
    for start in reversed(starts) if backwards else starts:
        stop = min(start + SUB_BLOCK, length)
        known = right.narrow(-2, start, stop - start)  # `...` has no rule for batched cotangents
        if solutions:
            solved = slice(stop, None) if backwards else slice(None, start)
            known = known - coupling[..., start:stop, solved] @ torch.cat(solutions, -2)
        inside, args = coupling[..., start:stop, start:stop], [item[..., start:stop, :] for item in fixed]
        x = f(known, *args) if not late else _by_row(f, inside, known, args, backwards)
        for _ in range(1, 1 if late else stop - start):
            before, x = x, f(known - inside @ (x if tame is None else tame(x)), *args)
            if _settled(before, x):
                break
        solutions.insert(0 if backwards else len(solutions), x)
    return torch.cat(solutions, -2)


def _by_row(
    f: Callable[..., Tensor], coupling: Tensor, right: Tensor, fixed: Sequence[Tensor], backwards: bool
) -> Tensor:
    """The same for one sub-block: each row, once solved, is subtracted from the rows that depend on it."""
    size = right.shape[-2]
    residual, rows = right.clone(), []
    for t in reversed(range(size)) if backwards else range(size):
        row, rest = slice(t, t + 1), slice(0, t) if backwards else slice(t + 1, size)
        x = f(residual[..., row, :], *(item[..., row, :] for item in fixed))
        rows.append(x)
        if rest.start < rest.stop:
            residual[..., rest, :].addcmul_(coupling[..., rest, row], x, value=-1)
    return torch.cat(rows[::-1] if backwards else rows, -2)


def _settled(before: Tensor, after: Tensor) -> bool:
    """True if in every memory a step changed no more than rounding. False while autograd records, as an iteration that
    stops early has the right value, but not yet the right derivative."""
    if after.requires_grad or not can_inspect(before, after, free=True):
        return False
    change, size = (after - before).abs().amax((-2, -1)), after.abs().amax((-2, -1))
    # A row may pass through infinity before it settles; a change by infinity is not rounding.
    return bool(((change <= 4 * torch.finfo(after.dtype).eps * size) & (size < math.inf)).all())
