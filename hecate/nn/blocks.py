"""The blocks around a memory: convolution with SiLU, unit queries and keys, RMS norms, norm and gate behind it, SwiGLU.

Each is written once, in plain torch, and beside it a forward and a derivative that keep its inputs alone: on a CPU two
kernels that pass over a tensor once (the extra `cpu`; float32, float64, and bfloat16 as it lies). Plain torch runs
where torch has to see every operation, for second derivatives, on other devices and dtypes, where a tensor is too small
for a kernel to pay, and for a token alone, which has the same bits by every way in torch, and
kernels of its own (`hecate.nn.token`). [NN-BLOCK-D1]

RMS norms are torch's, with a slope at 0 that does not grow from layer to layer: that of x / sqrt(mean(x^2) + 1e-6) is
a thousand there, and a token whose embedding is zero, as that of padding, is zero in front of every norm of a model
without biases. A zero has no direction that a norm could keep, so its slope is that of the weight alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._nn import silu

from hecate.engine import load_kernels, padded, share_out
from hecate.tape import STEADY, ByHand, can_inspect
from hecate.tape.ops import largest, levelling, reach

EXACT = (torch.float32, torch.float64)  # dtypes in which torch sums as it adds
EPS = 1e-6  # beside lengths, squared; beside mean squares, as it is
LEAST = 1 << 16  # numbers from which a kernel pays for its call
SHARE = 1 << 18  # numbers that are worth a thread of their own
_LOW = (torch.float32, torch.bfloat16), torch.float32, 16
# Of a dtype: those that kernels take beside it, that in which they compute, and the numbers of a vector.
_DTYPES = {torch.float64: ((torch.float64,), torch.float64, 8), torch.float32: _LOW, torch.bfloat16: _LOW}
_kernels: Callable[[], Any] = partial(load_kernels, "fused")


def _fused(
    passes: Callable[..., Any], fits: Callable[..., bool] | None = None, *, several: bool = False
) -> Callable[[Any], Any]:
    """Gives a function of tensors in plain torch its passes by kernels: `passes(inputs, keeps, **form) -> (outputs,
    record)`, and `passes(inputs, record, cotangents, **form) -> cotangents`. `fits(*inputs)`: whether they can run."""

    def made(plain: Callable[..., Any]) -> Any:
        @cache
        def by_hand(**form: Any) -> Callable[..., Any]:
            own = partial(passes, **form)
            whole = partial(plain, **form) if several else lambda *inputs: (plain(*inputs, **form),)
            return ByHand(f"nn.{plain.__name__}", own, own, whole).block().forward

        @wraps(plain)
        def block(*inputs: Any, **form: Any) -> Any:
            x = inputs[0]
            if torch.compiler.is_compiling() or STEADY.get() or x.numel() < LEAST or (x.dim() > 2 and x.shape[1] == 1):
                return plain(*inputs, **form)
            dtypes = _DTYPES.get(x.dtype, ((),))[0]
            for item in inputs:
                if item is not None and not (item.is_cpu and (item.dtype in dtypes or not item.is_floating_point())):
                    return plain(*inputs, **form)
            if (fits is not None and not fits(*inputs)) or _kernels() is None:
                return plain(*inputs, **form)
            found = by_hand(**form)(*inputs)[0]
            return found if several else found[0]

        return block

    return made


def _arrays(width: int, x: Tensor, *others: Tensor | None) -> tuple[int, list[Any]]:
    """Tensors `[tokens.., rows, D]` as the flat arrays of kernels, rows filled up to a width unless that is 0, bfloat16
    as integers; and how far tokens of x lie apart, those of the others being side by side."""
    found: list[Any] = []
    apart = 0
    item: Any
    for item in (x, *others):  # one loop, not a call for each
        if item is not None:
            item = padded(item, width) if width and item.dim() > 1 and item.shape[-1] != width else item.detach()
            if found:
                item = item.contiguous().view(-1)
            else:
                item = item.reshape(-1, item.shape[-2] * item.shape[-1])
                item = item if item.stride(1) == 1 else item.contiguous()
                apart = item.stride(0)
                item = item.as_strided(((len(item) - 1) * apart + item.shape[1],), (1,))
            item = (item.view(torch.int16) if item.dtype == torch.bfloat16 else item).numpy()
        found.append(item)
    return apart, found


def _convolve(inputs: Any, _: Any, cotangents: Any = None, *, active: bool) -> Any:
    x, past, weight, *masks = inputs
    (batch, length, channels), kept, kernels = x.shape, len(weight) - 1, _kernels()
    _, wide, step = _DTYPES[x.dtype]
    width, block = -(-channels // step) * step, kernels.BLOCK * step
    count, size = -(-width // block), batch * length * width
    head = x.new_zeros(batch, kept, channels) if past is None else past.to(x.dtype)
    own = x.contiguous(), torch.cat([head, x[:, :kept]], 1), weight.to(wide)
    given = (batch, length, width, kept + 1, kept + min(kept, length), active)
    seen = [None if mask is None else mask.contiguous().view(-1).numpy() for mask in masks]
    if cotangents is None:
        y = x.new_empty(batch, length, width, dtype=torch.promote_types(x.dtype, weight.dtype))
        _, rows = _arrays(width, *own, y)
        share_out(partial(kernels.convolve, *given, *seen, *rows), count, size, SHARE)
        return (y[..., :channels],), ()
    gx, gw, ring = x.new_empty(batch, length, width), weight.new_zeros(kept + 1, width, dtype=wide), kept.bit_length()
    gpast = None if past is None else x.new_empty(batch, kept, width)
    slopes, sums = gw.new_empty((count << ring) * block), gw.new_zeros(count * (kept + 1) * block)
    marks = gw.new_empty(count << ring, dtype=torch.int64)
    _, rows = _arrays(width, *own, cotangents[0], gx, gpast, gw, slopes, sums, marks)
    share_out(partial(kernels.convolve_back, *given, *seen, 1 << ring, *rows), count, 2 * size, SHARE)
    gpast = None if gpast is None else gpast[..., :channels].to(past.dtype)
    return gx[..., :channels], gpast, gw[:, :channels].to(weight.dtype), None, None


@_fused(_convolve, lambda x, past, weight, *masks: len(weight) < 63)  # taps of a token are bits of an integer
def convolution(
    x: Tensor, past: Tensor | None, weight: Tensor, segment: Tensor | None, written: Tensor | None, *, active: bool
) -> Tensor:
    """y_t = silu(sum_j w_j x_(t-j)), or without SiLU; `ShortConv` tells of past, documents and masks. [NN-CONV-D1]

    Shapes: x, y `[B, T, C]`, past `[B, K-1, C]`, weight `[K, C]`, segment `[B, K-1+T]` int64, written `[B, T]` bool.
    """
    kept, length = len(weight) - 1, x.shape[1]
    past = x.new_zeros(x.shape[0], kept, x.shape[2]) if past is None else past.to(x.dtype)
    left = x if written is None else torch.where(written.unsqueeze(-1), x, 0.0)
    ahead, total = torch.cat([past, left], 1), weight[0] * x
    for j in range(1, kept + 1):
        tap = ahead[:, kept - j : kept - j + length]
        if segment is not None:
            same = segment[:, kept - j : kept - j + length] == segment[:, kept:]
            tap = torch.where(same.unsqueeze(-1), tap, 0.0)
        total = total + weight[j] * tap
    return silu(total) if active else total


def _norm(size: float, eps: float, x: Tensor, weight: Any, gate: Any, dtype: Any, g: Any = None) -> tuple[Any, ...]:
    """w x / sqrt(|x|^2 / size + eps) silu(gate) of x, gate `[tokens.., rows, D]`, weight `[rows, D]`, by a kernel, and
    whether a square was no finite number; with g, the cotangents of x, weight and gate."""
    (*shape, heads, own), kernels, (_, wide, step) = x.shape, _kernels(), _DTYPES[x.dtype]
    width = -(-own // step) * step
    parts, whole = -(-(count := math.prod(shape)) // kernels.PART), (*shape, heads, width)
    weight = weight if weight is None or weight.dtype in EXACT else weight.float()
    form, odd = np.array((size, eps), np.float32 if step == 16 else np.float64), np.zeros(1, np.int64)
    if g is None:
        y = x.new_empty(whole, dtype=dtype)
        apart, (rows, *rest) = _arrays(width, x, weight, gate, y)
        share_out(partial(kernels.norm, count, heads, width, form, rows, apart, odd, *rest), parts, y.numel(), SHARE)
        return y[..., :own], odd
    gx, ggate = x.new_empty(whole), None if gate is None else gate.new_empty(whole)
    gw = None if weight is None else weight.new_zeros(parts, heads, width)
    apart, (rows, *rest) = _arrays(width, x, weight, gate, g, gx, gw, ggate, gx.new_empty(parts, width, dtype=wide))
    run = partial(kernels.norm_back, count, heads, width, form, rows, apart, odd, *rest)
    share_out(run, parts, 2 * gx.numel(), SHARE)
    return gx[..., :own], None if gw is None else gw.sum(0)[:, :own], None if ggate is None else ggate[..., :own]


def normalised(x: Tensor, norm: str, eps: float | Tensor = EPS, *, looks: bool) -> Tensor:
    """A tensor of `units`; `looks`: whether a look at values costs nothing."""
    wide = x if x.dtype in EXACT else x.to(torch.float32)
    mean = torch.sum if norm == "l2" else torch.mean
    size = mean(wide.square(), -1, keepdim=True)
    if not (looks and math.isfinite(size.sum().item())):
        # Too long to be squared: brought near 1, and eps with it.
        longest = largest(wide)
        level = torch.where(longest > reach(wide.dtype, 0.4), levelling(longest), 1.0)
        wide, eps = wide * level, eps * level
        size = mean(wide.square(), -1, keepdim=True)
    unit = wide * torch.where(size == 0, 1.0, size + eps * eps).rsqrt()
    return unit if unit.dtype == x.dtype else unit.to(x.dtype)


def _units(tensors: Any, odd: Any, cotangents: Any = None, *, norm: str, eps: float = EPS) -> Any:
    plain: Any = partial(units.__wrapped__, norm=norm, eps=eps)
    if cotangents is not None and odd:  # too long to be squared, or no number
        return ByHand("nn.units", plain, plain, plain).by_autograd(tensors, cotangents)
    found = []
    for at, x in enumerate(tensors):
        rows = x.flatten(2, -2) if x.dim() > 3 else x.unsqueeze(-2)  # no copy where tokens alone lie apart
        form = 1.0 if norm == "l2" else x.shape[-1], eps * eps, rows, None, None, x.dtype
        y, odd, *_ = _norm(*form) if cotangents is None else _norm(*form, cotangents[at])
        if cotangents is None and odd:
            return plain(*tensors), (True,)
        found.append(y.view(x.shape))
    return (tuple(found), ()) if cotangents is None else tuple(found)


@_fused(_units, several=True)
def units(*tensors: Tensor, norm: str, eps: float = EPS) -> tuple[Tensor, ...]:
    """Rows `[B, T, ..., D]` at length 1, "l2", or at root mean square 1, "rms", in float32 or better. Zeros stay zeros,
    with slope 1. [NN-MEM-D2]"""
    looks, found = can_inspect(*tensors, free=True), []
    for x in tensors:
        found.append(normalised(x, norm, eps, looks=looks))
    return tuple(found)


def _rms(inputs: Any, _: Any, cotangents: Any = None) -> Any:
    x, weight = inputs
    form = x.shape[-1], EPS, x.unsqueeze(-2), None if weight is None else weight.unsqueeze(0), None, x.dtype
    if cotangents is None:
        return (_norm(*form)[0].squeeze(-2),), ()
    gx, gw, _ = _norm(*form, cotangents[0])
    return gx.squeeze(-2), None if gw is None else gw.squeeze(0).to(weight.dtype)


@_fused(_rms)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float = EPS) -> Tensor:
    """`torch.rms_norm` of rows `[..., D]` with eps = 1e-6; where one is 0 its derivative is the weight. [NN-MEM-D2]"""
    y = torch.rms_norm(x, x.shape[-1:], weight, eps)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return y
    with torch.no_grad():
        empty = x.square().sum(-1, keepdim=True) == 0
        if can_inspect(empty, free=True) and not empty.any():
            return y
    return torch.where(empty, (x if weight is None else x * weight).to(y.dtype), y)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over one axis, by `rms_norm`."""

    def __init__(self, width: int, **place: Any) -> None:
        super().__init__(width, eps=EPS, **place)

    def forward(self, x: Tensor) -> Tensor:
        """The rows, at root mean square 1, times the weight."""
        return rms_norm(x, self.weight)


def _readout(inputs: Any, _: Any, cotangents: Any = None, *, eps: float = EPS) -> Any:
    y, weight, gate = inputs
    dtype = torch.promote_types(torch.promote_types(y.dtype, weight.dtype), y.dtype if gate is None else gate.dtype)
    form = y.shape[-1], eps, y, weight, None if gate is None else gate.view(y.shape), dtype
    if cotangents is None:
        return (_norm(*form)[0].flatten(-2),), ()
    gy, gw, ggate = _norm(*form, cotangents[0].view(y.shape))
    return gy, gw.to(weight.dtype), None if ggate is None else ggate.flatten(-2)


@_fused(_readout)
def readout(y: Tensor, weight: Tensor, gate: Tensor | None, *, eps: float = EPS) -> Tensor:
    """rms(y) weight silu(gate), heads side by side; without a gate the norm alone.

    Shapes: y `[B, T, H, V]`, weight `[H, V]`, gate and result `[B, T, H V]`.
    """
    unit = (rms_norm.__wrapped__(y, None, eps) * weight).flatten(-2)
    return unit if gate is None else unit * silu(gate)


def _swiglu(inputs: Any, _: Any, cotangents: Any = ()) -> Any:
    (x,), half, kernels = inputs, inputs[0].shape[-1] // 2, _kernels()
    y = x.new_empty(*x.shape[:-1], 2 * half if cotangents else half)
    apart, (rows, *rest) = _arrays(0, x.unsqueeze(-2), x.new_empty(0, dtype=_DTYPES[x.dtype][1]), *cotangents, y)
    kernel, count = kernels.swiglu_back if cotangents else kernels.swiglu, x.numel() // (2 * half)
    share_out(partial(kernel, count, half, rows, apart, *rest), -(-count // kernels.PART), y.numel(), SHARE)
    return (y,) if cotangents else ((y,), ())


@_fused(_swiglu, lambda x: x.shape[-1] >= 2 * 16)
def swiglu(x: Tensor) -> Tensor:
    """silu(a) b of rows [a, b]: `[..., 2 D] -> [..., D]`."""
    gate, value = x.chunk(2, -1)
    return silu(gate) * value
