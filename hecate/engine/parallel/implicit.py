"""The gradients of a block under any bias: u_t = g(base_t - sum_{i<t} L[t,i] u_i, v_t), exactly.

L is strictly lower triangular, so within a sub-block of b tokens the fixed-point iteration is exact after b steps,
whatever g is: step s settles row s. Convergence is usually reached earlier and then detected. Sub-blocks bound how far
the iterates can overshoot while they settle. [ENG-IMP-D1]
"""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.bias import Bias
from hecate.rule.rule import one
from hecate.tape import Block, Tensors, can_inspect, differentiate, is_traced

SUB_BLOCK = 16
LOOK = 4  # steps between looks at whether an iteration has settled, on devices


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
            # As a residual u is a constant; solved again here it is a function of the inputs.
            u = implicit_gradients(bias, base, lower, v)
        pred = base - lower @ u
        slope = adjoint(bias, pred, lower, v, g)
        _, gv = bias.grad_vjp(pred, v, g - lower.mT @ slope)
        return slope, -(slope @ u.mT).tril(-1), gv

    block = Block("implicit_gradients", forward, vjp)
    return one(differentiate(lambda run, *inputs: run(block, *inputs), (base, lower, v), "tape"))


def solve(bias: Bias, base: Tensor, lower: Tensor, v: Tensor) -> Tensor:
    """u alone, by operations whose derivative is not that of u."""
    pieces: list[Tensor] = []
    length = base.shape[-2]
    for start in range(0, length, SUB_BLOCK):
        stop = min(start + SUB_BLOCK, length)
        known = base[..., start:stop, :]
        if pieces:
            known = known - lower[..., start:stop, :start] @ torch.cat(pieces, -2)
        inside, target = lower[..., start:stop, start:stop], v[..., start:stop, :]
        u = bias.grad(known, target)
        for step in range(1, stop - start):
            # A row not yet settled may overflow: 0 * inf must not reach the other rows.
            tame = torch.nan_to_num(u, nan=0.0, posinf=0.0, neginf=0.0)
            before, u = u, bias.grad(known - inside @ tame, target)
            if _settled(before, u, step):
                break
        pieces.append(u)
    return torch.cat(pieces, -2)


def adjoint(bias: Bias, pred: Tensor, lower: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Cotangent e of `base`, from that of u and from the solution `pred = base - L u`."""
    pieces: list[Tensor] = []
    length = pred.shape[-2]
    for start in reversed(range(0, length, SUB_BLOCK)):
        stop = min(start + SUB_BLOCK, length)
        known = g.narrow(-2, start, stop - start)  # `...` has no rule for batched cotangents
        if pieces:
            known = known - lower[..., stop:, start:stop].mT @ torch.cat(pieces, -2)
        inside = lower[..., start:stop, start:stop].mT
        at, target = pred[..., start:stop, :], v[..., start:stop, :]
        slope = bias.grad_jvp(at, target, known)
        for step in range(1, stop - start):
            before, slope = slope, bias.grad_jvp(at, target, known - inside @ slope)
            if _settled(before, slope, step):
                break
        pieces.insert(0, slope)
    return torch.cat(pieces, -2)


def _settled(before: Tensor, after: Tensor, step: int) -> bool:
    """Whether a step changed rounding only. Values may not tell while autograd records: an iteration cut short has the
    right value, but not yet the right derivative.

    Off the CPU a look makes the host wait for the device, so only every few steps are looked at."""
    if after.requires_grad or (step % LOOK and after.device.type != "cpu"):
        return False
    if is_traced(before, after) or not can_inspect(before, after):
        return False
    change, size = (after - before).abs().amax(), after.abs().amax()
    return bool(change <= 4 * torch.finfo(after.dtype).eps * size)
