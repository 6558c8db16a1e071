"""The blocks around a memory: convolution with SiLU, unit queries and keys, RMS norms, norm and gate behind it, SwiGLU,
and the MLPs of models; a token alone between the products with weights.

Each is written once, in plain torch, and beside it a forward and a derivative that keep its inputs alone: on a CPU two
kernels that pass over a tensor once (the extra `cpu`; float32, float64, and bfloat16 as it lies). Plain torch runs
where torch has to see every operation, for second derivatives, on other devices and dtypes, where a tensor is too small
for a kernel to pay, and for a single token: it has the same bits however torch computes it, and kernels of its own.
[NN-BLOCK-D1, NN-TOKEN-D1]

RMS norms are torch's, with a slope at 0 that does not grow from layer to layer: that of x / sqrt(mean(x^2) + 1e-6) is
a thousand there, and a token whose embedding is zero, as that of padding, is zero in front of every norm of a model
without biases. A zero has no direction that a norm could keep, so its slope is that of the weight alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._nn import silu

from hecate.engine import TokenForm, lies, load_kernels, padded, share_out, token_form
from hecate.errors import ConfigError
from hecate.nn.parameters import blank, redraw
from hecate.rule import LAYER, MemoryState
from hecate.tape import STEADY, ByHand, can_inspect, is_traced
from hecate.tape.ops import largest, levelling, reach

EXACT = (torch.float32, torch.float64)  # dtypes in which torch sums as it adds
EPS = 1e-6  # RMS norms add it to mean squares, `units` adds its square
LEAST = 1 << 16  # the least size of a tensor at which a kernel pays for its call
SHARE = 1 << 18  # numbers, those of memories included, that are worth another thread
_LOW = (torch.float32, torch.bfloat16), torch.float32, 16
# By the dtype of x: dtypes that kernels take for the other tensors, the one they compute in, numbers in a vector.
_DTYPES = {torch.float64: ((torch.float64,), torch.float64, 8), torch.float32: _LOW, torch.bfloat16: _LOW}
_kernels: Callable[[], Any] = partial(load_kernels, "fused")


def _fused(
    passes: Callable[..., Any], fits: Callable[..., bool] | None = None, *, several: bool = False
) -> Callable[[Any], Any]:
    """Decorator of a function in plain torch: where kernels can run, they replace its forward and backward pass.

    `passes(inputs, keeps, **form) -> (outputs, record)` runs them forward, and `passes(inputs, record, cotangents,
    **form) -> cotangents` backward; `fits(*inputs)` may rule out inputs. `several`: the function returns a tuple."""

    def decorate(plain: Callable[..., Any]) -> Any:
        @cache
        def by_hand(**form: Any) -> Callable[..., Any]:
            by_kernel = partial(passes, **form)
            whole = partial(plain, **form) if several else lambda *inputs: (plain(*inputs, **form),)
            return ByHand(f"nn.{plain.__name__}", by_kernel, by_kernel, whole).block().forward

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
            outputs = by_hand(**form)(*inputs)[0]
            return outputs if several else outputs[0]

        return block

    return decorate


def _arrays(width: int, x: Tensor, *others: Tensor | None) -> tuple[int, list[Any]]:
    """The stride between tokens of x, which may lie apart, and x and the others, `[tokens.., rows, D]`, as flat arrays
    for kernels: rows padded to `width` (0: as they are), bfloat16 read as integers, the others contiguous."""
    arrays: list[Any] = []
    apart = 0
    item: Any
    for item in (x, *others):  # one loop, not a call for each
        if item is not None:
            item = padded(item, width) if width and item.dim() > 1 and item.shape[-1] != width else item.detach()
            if arrays:
                item = item.contiguous().view(-1)
            else:
                item = item.reshape(-1, item.shape[-2] * item.shape[-1])
                item = item if item.stride(1) == 1 else item.contiguous()
                apart = item.stride(0)
                item = item.as_strided(((len(item) - 1) * apart + item.shape[1],), (1,))
            item = (item.view(torch.int16) if item.dtype == torch.bfloat16 else item).numpy()
        arrays.append(item)
    return apart, arrays


def _convolve(inputs: Any, _: Any, cotangents: Any = None, *, active: bool) -> Any:
    x, past, weight, *masks = inputs
    (batch, length, channels), lag, kernels = x.shape, len(weight) - 1, _kernels()
    _, wide, step = _DTYPES[x.dtype]
    width, block = -(-channels // step) * step, kernels.BLOCK * step
    count, size = -(-width // block), batch * length * width
    head = x.new_zeros(batch, lag, channels) if past is None else past.to(x.dtype)
    tensors = x.contiguous(), torch.cat([head, x[:, :lag]], 1), weight.to(wide)
    dims = (batch, length, width, lag + 1, lag + min(lag, length), active)
    masks = [None if mask is None else mask.contiguous().view(-1).numpy() for mask in masks]
    if cotangents is None:
        y = x.new_empty(batch, length, width, dtype=torch.promote_types(x.dtype, weight.dtype))
        _, rows = _arrays(width, *tensors, y)
        share_out(partial(kernels.convolve, *dims, *masks, *rows), count, size, SHARE)
        return (y[..., :channels],), ()
    gx, gw, ring = x.new_empty(batch, length, width), weight.new_zeros(lag + 1, width, dtype=wide), lag.bit_length()
    gpast = None if past is None else x.new_empty(batch, lag, width)
    slopes, sums = gw.new_empty((count << ring) * block), gw.new_zeros(count * (lag + 1) * block)
    marks = gw.new_empty(count << ring, dtype=torch.int64)
    _, rows = _arrays(width, *tensors, cotangents[0], gx, gpast, gw, slopes, sums, marks)
    share_out(partial(kernels.convolve_back, *dims, *masks, 1 << ring, *rows), count, 2 * size, SHARE)
    gpast = None if gpast is None else gpast[..., :channels].to(past.dtype)
    return gx[..., :channels], gpast, gw[:, :channels].to(weight.dtype), None, None


@_fused(_convolve, lambda x, past, weight, *masks: len(weight) < 63)  # taps of a token are bits of an integer
def convolution(
    x: Tensor, past: Tensor | None, weight: Tensor, segment: Tensor | None, written: Tensor | None, *, active: bool
) -> Tensor:
    """y_t = silu(sum_j w_j x_(t-j)), or without SiLU; `ShortConv` explains past, documents and masks. [NN-CONV-D1]

    Shapes: x, y `[B, T, C]`, past `[B, K-1, C]`, weight `[K, C]`, segment `[B, K-1+T]` int64, written `[B, T]` bool.
    """
    lag, length = len(weight) - 1, x.shape[1]
    past = x.new_zeros(x.shape[0], lag, x.shape[2]) if past is None else past.to(x.dtype)
    inputs = x if written is None else torch.where(written.unsqueeze(-1), x, 0.0)
    ahead, total = torch.cat([past, inputs], 1), weight[0] * x
    for j in range(1, lag + 1):
        tap = ahead[:, lag - j : lag - j + length]
        if segment is not None:
            same = segment[:, lag - j : lag - j + length] == segment[:, lag:]
            tap = torch.where(same.unsqueeze(-1), tap, 0.0)
        total = total + weight[j] * tap
    return silu(total) if active else total


def _norm(size: float, eps: float, x: Tensor, weight: Any, gate: Any, dtype: Any, g: Any = None) -> tuple[Any, ...]:
    """w x / sqrt(|x|^2 / size + eps) silu(gate) of x, gate `[tokens.., rows, D]`, weight `[rows, D]`, by a kernel, and
    a flag that is set if a square was not finite; with g, the cotangents of x, weight and gate."""
    (*shape, heads, channels), kernels, (_, wide, step) = x.shape, _kernels(), _DTYPES[x.dtype]
    width = -(-channels // step) * step
    parts, whole = -(-(count := math.prod(shape)) // kernels.PART), (*shape, heads, width)
    weight = weight if weight is None or weight.dtype in EXACT else weight.float()
    form, odd = np.array((size, eps), np.float32 if step == 16 else np.float64), np.zeros(1, np.int64)
    if g is None:
        y = x.new_empty(whole, dtype=dtype)
        apart, (rows, *rest) = _arrays(width, x, weight, gate, y)
        share_out(partial(kernels.norm, count, heads, width, form, rows, apart, odd, *rest), parts, y.numel(), SHARE)
        return y[..., :channels], odd
    gx, ggate = x.new_empty(whole), None if gate is None else gate.new_empty(whole)
    gw = None if weight is None else weight.new_zeros(parts, heads, width)
    apart, (rows, *rest) = _arrays(width, x, weight, gate, g, gx, gw, ggate, gx.new_empty(parts, width, dtype=wide))
    run = partial(kernels.norm_back, count, heads, width, form, rows, apart, odd, *rest)
    share_out(run, parts, 2 * gx.numel(), SHARE)
    gw = None if gw is None else gw.sum(0)[:, :channels]
    return gx[..., :channels], gw, None if ggate is None else ggate[..., :channels]


def normalised(x: Tensor, norm: str, eps: float | Tensor = EPS, *, looks: bool) -> Tensor:
    """One of the tensors of `units`; `looks`: whether values can be read without waiting for a device."""
    wide = x if x.dtype in EXACT else x.to(torch.float32)
    mean = torch.sum if norm == "l2" else torch.mean
    size = mean(wide.square(), -1, keepdim=True)
    if not (looks and math.isfinite(size.sum().item())):
        # Some may be too long to be squared: those are scaled to about 1, and eps with them.
        longest = largest(wide)
        level = torch.where(longest > reach(wide.dtype, 0.4), levelling(longest), 1.0)
        wide, eps = wide * level, eps * level
        size = mean(wide.square(), -1, keepdim=True)
    unit = wide * torch.where(size == 0, 1.0, size + eps * eps).rsqrt()
    return unit if unit.dtype == x.dtype else unit.to(x.dtype)


def _units(tensors: Any, odd: Any, cotangents: Any = None, *, norm: str, eps: float = EPS) -> Any:
    plain: Any = partial(units.__wrapped__, norm=norm, eps=eps)
    if cotangents is not None and odd:  # too long to be squared, or not finite
        return ByHand("nn.units", plain, plain, plain).by_autograd(tensors, cotangents)
    outputs = []
    for at, x in enumerate(tensors):
        rows = x.flatten(2, -2) if x.dim() > 3 else x.unsqueeze(-2)  # a view, not a copy, if only tokens lie apart
        form = 1.0 if norm == "l2" else x.shape[-1], eps * eps, rows, None, None, x.dtype
        y, odd, *_ = _norm(*form) if cotangents is None else _norm(*form, cotangents[at])
        if cotangents is None and odd:
            return plain(*tensors), (True,)
        outputs.append(y.view(x.shape))
    return (tuple(outputs), ()) if cotangents is None else tuple(outputs)


@_fused(_units, several=True)
def units(*tensors: Tensor, norm: str, eps: float = EPS) -> tuple[Tensor, ...]:
    """Rows `[B, T, ..., D]` scaled to length 1 ("l2") or root mean square 1 ("rms"), in float32 or better. A zero row
    stays zero, with slope 1. [NN-MEM-D2]"""
    looks, outputs = can_inspect(*tensors, free=True), []
    for x in tensors:
        outputs.append(normalised(x, norm, eps, looks=looks))
    return tuple(outputs)


def _rms(inputs: Any, _: Any, cotangents: Any = None) -> Any:
    x, weight = inputs
    form = x.shape[-1], EPS, x.unsqueeze(-2), None if weight is None else weight.unsqueeze(0), None, x.dtype
    if cotangents is None:
        return (_norm(*form)[0].squeeze(-2),), ()
    gx, gw, _ = _norm(*form, cotangents[0])
    return gx.squeeze(-2), None if gw is None else gw.squeeze(0).to(weight.dtype)


@_fused(_rms)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float = EPS) -> Tensor:
    """`torch.rms_norm` of rows `[..., D]` with eps = 1e-6, but a zero row's derivative is the weight. [NN-MEM-D2]"""
    y = torch.rms_norm(x, x.shape[-1:], weight, eps)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return y
    with torch.no_grad():
        empty = (x == 0).all(-1, keepdim=True)  # squares of float16 vanish below 2e-4
        if can_inspect(empty, free=True) and not empty.any():
            return y
    return torch.where(empty, (x if weight is None else x * weight).to(y.dtype), y)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over one axis, by `rms_norm`."""

    def __init__(self, width: int, **place: Any) -> None:
        super().__init__(width, eps=EPS, **place)

    def forward(self, x: Tensor) -> Tensor:
        """Rows scaled to root mean square 1, times the weight."""
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
    """rms(y) weight silu(gate), the heads concatenated; without a gate the norm alone.

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


# MLPs of models, and what their layers have in common.


class Layers(nn.Module):
    """A module whose parameters are those of its layers."""

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        redraw(generator, *self.children())


def hidden_width(width: int, ratio: float, name: str) -> int:
    """Number of hidden units for a `mlp_ratio` and a width, which errors call `name`: 0, or at least one."""
    if 0 < ratio * width < 1:
        cure = f"set it to 0 or to at least {1 / width:g}"
        raise ConfigError(f"gives no hidden unit at {name}={width}, got {ratio:g}; {cure}", path=("mlp_ratio",))
    return int(ratio * width)


Norm = Literal["rms", "layer"]


def norm_of(norm: Norm, width: int, **place: Any) -> nn.RMSNorm | nn.LayerNorm:
    """A norm over `width` channels: by root mean square, or by mean and variance with a learned shift."""
    return RMSNorm(width, **place) if norm == "rms" else nn.LayerNorm(width, eps=1e-5, **place)


class GatedMLP(Layers):
    """W_down(silu(W_gate x) * W_up x) of the normalised input."""

    parts: ClassVar[int] = 2  # matrices `[hidden, width]` that multiply the input

    def __init__(
        self,
        width: int,
        hidden: int,
        generator: torch.Generator | None = None,
        *,
        norm: Norm = "rms",
        bias: bool = False,
        **place: Any,
    ) -> None:
        super().__init__()
        self.norm = norm_of(norm, width, **place)
        self.up = blank(nn.Linear, width, self.parts * hidden, bias=bias, **place)
        self.down = blank(nn.Linear, hidden, width, bias=bias, **place)
        redraw(generator, self.up, self.down)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., width]`."""
        return self.down(swiglu(self.up(self.norm(x))))


class PlainMLP(GatedMLP):
    """W_down gelu(W_up x) of the normalised input."""

    parts = 1

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., width]`."""
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


MLPS = {"gated": GatedMLP, "plain": PlainMLP}


# A single token: a `Memory` between its projections, norms, SwiGLU.

STEP = {torch.float32: 16, torch.float64: 8}  # numbers of a vector
_AROUND = LAYER.key_heads, LAYER.conv, LAYER.output
_COUNTS = np.zeros(1, np.int64)


def token_kernels(x: Tensor, *widths: int) -> Any:
    """The module of kernels for a single token, if they take tensors like x with rows of these widths; else None, as
    also where torch has to see every operation, and under `exact`, whose bits must not depend on them."""
    step = STEP.get(x.dtype)
    if step is None or not x.is_cpu or STEADY.get() or torch.is_autocast_enabled("cpu") or is_traced():
        return None
    for width in widths:
        if width % step:
            return None
    return load_kernels("token")


@cache
def _numbers(dtype: torch.dtype, *numbers: float) -> Any:
    return np.array(numbers, np.float32 if dtype == torch.float32 else np.float64)


@cache
def _norms(dtype: torch.dtype, P: int, qk_norm: str, qk_eps: float, key_norm: str, scale: str, *rest: float) -> Any:
    size, longest = {"none": 0, "l2": 1, "rms": P}[qk_norm], reach(dtype, 0.5)
    query = 1 / math.sqrt(P) if scale == "key_dim" else 1
    return _numbers(dtype, size, qk_eps**2, key_norm == "l2", longest, query, *rest)


def _addresses(dtype: torch.dtype, tensors: Iterable[tuple[Tensor | None, int]]) -> list[int] | None:
    """Addresses of tensors, each given with its size, 0 for None; None if kernels cannot take one of them."""
    addresses = []
    for tensor, size in tensors:
        if tensor is None:
            addresses.append(0)
            continue
        if tensor.dtype != dtype or tensor.numel() != size or not lies(tensor):
            return None
        addresses.append(place := tensor.data_ptr())
        if not place and size:
            return None  # zeros that have no storage yet
    return addresses


def add_norm(kernels: Any, x: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x + more (x where that is None), and its RMS norm times the weight: for a single token, by kernels if given."""
    width, size = x.shape[-1], x.numel()
    addresses = kernels and _addresses(x.dtype, ((x, size), (more, size), (weight, width)))
    if not addresses:
        total = x if more is None else x + more
        return total, torch.rms_norm(total, (width,), weight, EPS)
    total, y = x if more is None else torch.empty_like(x), torch.empty_like(x)
    kernels.add_norm(size // width, width, _numbers(x.dtype, EPS), *addresses, total.data_ptr(), y.data_ptr())
    return total, y


def gated_product(kernels: Any, x: Tensor) -> Tensor:
    """silu(a) b of rows [a, b] of a single token, by kernels if given."""
    width, rest = divmod(x.shape[-1], 2)
    whole = kernels and not rest and not width % STEP[x.dtype]  # as wide as the weight after it, without padding
    if not (addresses := whole and _addresses(x.dtype, ((x, x.numel()),))):
        return swiglu.__wrapped__(x)
    y = x.new_empty(*x.shape[:-1], width)
    kernels.swiglu(y.numel() // width, width, _numbers(x.dtype, EPS), *addresses, y.data_ptr())
    return y


def form_of(layer: Any, conv: Any) -> TokenForm | None:
    """The form in which the kernel of a single token runs a `Memory`; None if it computes something else."""
    config, options = layer.config, layer.config.layer_options
    if options is not None and (options.key_heads, options.conv, options.output) != _AROUND:
        return None
    return token_form(config) if conv is not None and config.layer_v_norm == "none" else None


StateTensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""A memory, its momentum or the sum of a chunk's gradients, and of a chunk the product of its retain gates and its
tokens so far."""
_NONE, _WEIGHT, _GATHERED = set[str](), {"weight"}, {"weight", "retain"}
_NAMED = [dict] * 4


def _tensors_of(form: TokenForm, config: Any, state: Any) -> StateTensors | None:
    """Tensors of a state; None if it has other fields than this config uses, for `forward` to refuse."""
    if type(state) is not MemoryState or [*map(type, state[:4])] != _NAMED:
        return None
    memory, slots, anchor, pending, position, normalizer, count, readout = state
    names, summed = config.algorithm.slots, _GATHERED if form.chunk > 1 else _NONE
    if memory.keys() != _WEIGHT or len(slots) != len(names) or anchor or pending.keys() != summed:
        return None
    if normalizer is not None or count is not None or readout is not None:
        return None
    if form.chunk > 1:
        return memory["weight"], pending["weight"], pending["retain"], position
    return memory["weight"], slots.get(f"{names[0]}.weight") if names else None, None, None


def _state_of(form: TokenForm, state: MemoryState, tensors: list[Any]) -> MemoryState:
    memory, moved, retain, position = tensors
    weights = dict.fromkeys(state.memory, memory)
    if form.chunk > 1:
        return MemoryState(weights, {}, {}, {**dict.fromkeys(weights, moved), "retain": retain}, position)
    return MemoryState(weights, dict.fromkeys(state.slots, moved), {}, {}, state.position)


def layer_token(
    kernels: Any, layer: Any, form: TokenForm, gates: Any, conv: Any, x: Tensor, mixed: Tensor, opened: Tensor | None,
    past: Tensor, state: MemoryState,
) -> tuple[Tensor, MemoryState, Tensor] | None:  # fmt: skip
    """The normalised and gated answers `[B, 1, H V]` to a single token x, and the memory's state and the convolution's
    past after it; None if the kernel cannot take these tensors, or its results are not finite.

    mixed `[B, 1, H (2 P + V)]` is x projected to q, k and v, opened `[B, 1, H V]` the output gate's logits, past
    `[B, K-1, H (2 P + V)]` the convolution's last inputs.
    """
    config, dtype, heads, P, V = layer.config, mixed.dtype, layer.heads, layer.d_key, layer.d_value
    taps, norm = conv._parameters.get("weight"), layer._parameters.get("norm")
    x = x.contiguous()  # a token of a longer sequence
    batch, X = mixed.shape[0], x.shape[-1]
    count, cells, wide = batch * heads, batch * heads * V * P, heads * (2 * P + V)
    tensors = _tensors_of(form, config, state)
    if tensors is None or config.dtype == torch.float64 != dtype:
        return None  # a state of another config, or one that `forward` casts to float64
    memory, moved, gathered, _ = tensors
    channels, weights = False, gates.plain()
    if weights is None:
        values, X = gates.forward(x), 0
        weights = [values.lr, None, values.retain, None, values.momentum, None]
        channels = form.decays and form.chunk == 1 and values.retain is not None and values.retain.dim() == 4
    lr, lr_bias, retain, retain_bias, momentum, momentum_bias = weights
    size = heads * X or count
    decay = retain if form.decays else None
    inputs = (
        *((x, x.numel()), (lr, size), (lr_bias, heads), (decay, size * P if channels else size), (retain_bias, heads)),
        *((momentum, size), (momentum_bias, heads), (mixed, batch * wide), (past, batch * (conv.kernel - 1) * wide)),
        *((taps, conv.kernel * wide), (memory, cells), (moved, cells), (gathered, count)),
    )
    read, at = _addresses(dtype, inputs), _addresses(torch.int64, ((state.position, count),))
    behind = _addresses(dtype, ((norm, heads * V), (opened, count * V)))
    if not (read and at and behind) or 0 in (*at, read[1], *read[9:11], behind[0]) or (form.decays and not read[3]):
        return None  # a gate or a weight is missing
    moves = bool(config.algorithm.slots)
    if (moved is None) == (moves or form.chunk > 1) or (moves and not read[5]) or (form.chunk > 1 and not read[12]):
        return None
    if not memory.shape == (batch, heads, V, P) == (memory if moved is None else moved).shape:
        return None
    if not state.position.shape == (batch, heads) == (state.position if gathered is None else gathered).shape:
        return None
    new, after = [None if item is None else torch.empty_like(item) for item in tensors], torch.empty_like(past)
    y, rows = mixed.new_empty(batch, 1, heads * V), mixed.new_empty(count * (3 * P + 2 * V))
    into = [0 if item is None else item.data_ptr() for item in (after, *new, y)]
    flags = conv.activation, form.blind, form.early, form.after, channels, form.dampens
    about = layer.qk_norm, layer.qk_eps, config.key_norm, config.query_scale, layer.output_options.norm.eps
    numbers, totals = _norms(dtype, P, *about, gates.lr_max), []

    def work(lo: int, hi: int) -> None:
        sizes = lo, hi, heads, P, V, conv.kernel, X, form.chunk
        totals.append(kernels.token(*sizes, *flags, numbers, _COUNTS, rows.data_ptr(), *read, *at, *behind, *into))

    share_out(work, count, cells, SHARE)
    if not math.isfinite(sum(totals)):  # the kernel stopped there, and its results are not complete
        return None
    return y, _state_of(form, state, new), after
