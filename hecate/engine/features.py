"""From q, k, v and gates to tokens in phi-space: one path for every engine and every read.

A size is the root of squares and a step divides by squares, which leave a dtype's range long before the features do. So
where features are far from 1 they are first brought near it by a power of two, which rounds nothing and cancels in the
quotient. [RULE-RANGE-I1]
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hecate.engine.call import Sequence
from hecate.engine.tokens import SELECT, Tokens, by_head, cast, form_of, linear_block
from hecate.phi import Params
from hecate.rule import MemoryConfig
from hecate.tape import Block, ByHand, Run, Tensors, can_inspect, execute, one
from hecate.tape.ops import largest, levelling, near_one, reach

NORMALIZED_EPS = 1e-6


def to_tokens(config: MemoryConfig, inputs: Sequence, params: Params, dtype: torch.dtype, run: Run) -> Tokens:
    """phi, key_norm, query_scale and the step rule: tokens `[B, T, H, *]`."""
    heads, keeps = inputs.lr.shape[2], run is not execute
    q, k, v, lr, retain, momentum = [
        tensor if tensor.dtype == dtype else one(run(cast(dtype), tensor, label="inputs")) for tensor in inputs[:6]
    ]
    if inputs.write is not None:
        # A masked token may carry garbage: it must not even be multiplied by zero.
        k, v, lr, retain, momentum = [
            one(run(SELECT, inputs.write, tensor, torch.zeros_like(tensor), label="write_mask"))
            for tensor in (k, v, lr, retain, momentum)
        ]
    if inputs.position is not None:
        params = {**params, "position": inputs.position.unsqueeze(-1)}
    block, tensors = config.feature_map.block(params)
    if block.vjp is not None and block.program is None:
        block = ByHand.of(block).block(keeps=keeps)
    phi_k = one(run(block, k, *tensors, label="phi(k)"))
    phi_q = one(run(block, q, *tensors, label="phi(q)"))
    if config.key_norm != "none":
        norm = (L2_NORM if config.key_norm == "l2" else SUM_NORM).block(keeps=keeps)
        phi_k = one(run(norm, phi_k, label="key_norm"))
        phi_q = one(run(norm, phi_q, label="key_norm"))
    if config.query_scale == "key_dim":
        phi_q = scaled(phi_q, 1 / math.sqrt(inputs.k.shape[-1]), run, "query_scale")
    if config.step != "raw":
        phi_k, v, lr = stepped(config, phi_k, v, lr, run)
    write, reset = inputs.write, inputs.reset
    return Tokens(
        phi_k,
        phi_q,
        v,
        lr,
        retain,
        momentum,
        None if write is None else by_head(write, heads),
        None if reset is None else by_head(reset, heads),
    )


def scaled(x: Tensor, factor: Tensor | float, run: Run, label: str) -> Tensor:
    """x times a constant."""
    return one(run(linear_block("scaled", lambda x: x * factor, lambda g: g * factor), x, label=label))


# key_norm.


def _norm(name: str, size_of: Callable[[Tensor], Tensor], root: bool, vjp: Callable[..., tuple[Tensor]]) -> ByHand:
    """x over its size, or the root of it; a zero vector stays zero. Residuals: the quotient and the divisor."""

    def forward(x: Tensor) -> tuple[Tensors, tuple[Tensor, Tensor]]:
        size, level = size_of(x), None
        if not near_one(size, share=0.5):
            level = levelling(largest(x))
            x = x * level
            size = size_of(x)
        size = torch.where(size > 0, size, 1.0)  # ahead of the root, whose derivative is infinite at 0
        size = size.sqrt() if root else size
        unit = x / size
        return (unit,), (unit, size if level is None else size / level)

    return ByHand.of(Block(name, forward, vjp))


def _l2_norm_vjp(residuals: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor]:
    unit, norm = residuals
    product = unit * g
    along = product.sum(-1, keepdim=True)
    # Into the same tensor: pages of a long sequence's fresh tensors cost more than the arithmetic.
    return (torch.addcmul(g, unit, along, value=-1, out=product).div_(norm),)


def _sum_norm_vjp(residuals: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor]:
    share, total = residuals
    return ((g - (share * g).sum(-1, keepdim=True)) / total,)


L2_NORM = _norm("l2_norm", lambda x: x.square().sum(-1, keepdim=True), True, _l2_norm_vjp)
SUM_NORM = _norm("sum_norm", lambda x: x.sum(-1, keepdim=True), False, _sum_norm_vjp)


# Step sizes.


def stepped(config: MemoryConfig, phi: Tensor, v: Tensor, lr: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """A token's key, value and step size under `config.step`.

    The write of lr/|phi|^2 is (e/|phi|)(phi/|phi|)^T, which may be representable where |phi|^2 is not. Where the
    gradient is linear in prediction and value it is the write of (c phi, c v) with lr/|c phi|^2, and for dot that of c
    phi alone with c lr/|c phi|^2. Elsewhere a key too long to be squared is cut to a length that can be. [RULE-STEP-I2]
    """
    rule = (_NORMALIZED if config.step == "normalized" else _IMPLICIT).block(keeps=run is not execute)
    floor = torch.full_like(lr, NORMALIZED_EPS if config.step == "normalized" else 1.0)
    form = form_of(config.bias)
    dot, l2 = form == "target", form == "error"
    # The values of a sum normaliser are 1, whatever becomes of v.
    same = dot or (l2 and config.normalizer == "none")
    same = same and config.structure.linear and config.algorithm.linear
    # Its derivative has |phi|^4 in it.
    top = reach(phi.dtype, 0.2 if same else 0.4)
    if can_inspect(phi, free=True) and phi.numel() and largest(phi).amax().item() <= top:
        return phi, v, one(run(rule, lr, phi, floor, label="step"))
    size = largest(phi)
    level = torch.where(size > top, levelling(size) * (1.0 if same else top), 1.0)
    factor = level.squeeze(-1)
    phi = scaled(phi, level, run, "step")
    lr = one(run(rule, lr, phi, floor * factor.square() if same else floor, label="step"))
    if same and dot:
        lr = scaled(lr, factor, run, "step")
    elif same:
        v = scaled(v, level, run, "step")
    return phi, v, lr


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
