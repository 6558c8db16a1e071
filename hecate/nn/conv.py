"""Stage between a layer's projections and phi: a short causal convolution, and normalised queries and keys."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch._C._nn import silu

from hecate.checks import expect_choice
from hecate.nn.blocks import EPS, EXACT, convolution, normalised, units
from hecate.nn.parameters import draw_normal, source_of
from hecate.tape import can_inspect
from hecate.tape.ops import number

QKNorm = Literal["none", "l2", "rms"]
QK_NORMS = get_args(QKNorm)
DEFAULT_QK_NORM: QKNorm = "l2"
DEFAULT_CONV_KERNEL = 4
_DEFAULTS = {"qk_norm": DEFAULT_QK_NORM, "conv_kernel": DEFAULT_CONV_KERNEL}
IN_ORDER = 4  # rows that its sum on a CPU adds one by one


class ShortConv(nn.Module):
    """Depthwise causal convolution: y_t = silu(sum_j w_j x_(t-j)), j = 0..kernel-1. [NN-CONV-D1]

    Without `activation` the sum as it is; with `bias` plus b, 0 at first.
    Shapes: x `[B, T, C]`, state `[B, kernel-1, C]` (the last inputs, zero at the start).
    `segment` `[B, kernel-1+T]`, if given, numbers the documents of state and inputs: a tap that would reach into
    another document reads zero. A token that is not `written` `[B, T]` sees itself and is zero to the tokens after it;
    in a layer whose convolution is `inert` it takes no place at all, as if it were not there, and sees itself alone.
    [NN-CONV-I4]
    """

    inert = False

    def __init__(
        self,
        channels: int,
        kernel: int,
        *,
        activation: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kernel, self.activation = kernel, activation
        self.weight = nn.Parameter(torch.empty(kernel, channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Starts as the identity plus a small draw, so that a fresh layer sees its own token."""
        mean = torch.zeros(self.kernel, 1, dtype=torch.float64, device="cpu")
        mean[0] = 1.0
        draw_normal(self.weight, 0.02, source_of(generator), mean)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """The sizes."""
        sizes = f"{self.weight.shape[1]}, kernel={self.kernel}" + ("" if self.activation else ", activation=False")
        return sizes if self.bias is None else f"{sizes}, bias=True"

    def forward(
        self, x: Tensor, state: Tensor | None = None, segment: Tensor | None = None, written: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The convolved sequence and the state after it."""
        batch, length, channels = x.shape
        lag = self.kernel - 1
        if length == 1 and segment is written is None:
            return self.token(x, x.new_zeros(batch, lag, channels) if state is None else state)
        y = convolution(x, state, self.weight, segment, written, active=self.activation and self.bias is None)
        if self.bias is not None:
            y = y + self.bias
            y = silu(y) if self.activation else y
        known = type(length) is int  # not to torch.export, which then takes no least of it
        last = x[:, (old := max(length - lag, 0) if known else 0) :]
        if written is not None:
            last = torch.where(written[:, old:].unsqueeze(-1), last, 0.0)
        before = x.new_zeros(batch, lag, channels) if state is None else state.to(x.dtype)
        if not known:
            return y, torch.cat([before, last], 1).narrow(1, length, lag)
        return y, torch.cat([before[:, length - old :], last], 1)

    def token(self, x: Tensor, past: Tensor, split: Any = torch.split_with_sizes) -> tuple[Tensor, Tensor]:
        """`forward` for x `[B, 1, C]`: the same sum in the same order, of products that are taken at once."""
        past = past if past.dtype == x.dtype else past.to(x.dtype)
        # The state is [B, K - 1, C], the oldest first; weights begin with the token's own.
        taps = split(past, (1,) * (self.kernel - 1), 1)
        terms = self.weight * torch.cat((x, *taps[::-1]), 1)
        if self.kernel <= IN_ORDER and terms.is_cpu and terms.dtype in EXACT:
            total = terms.sum(1, keepdim=True)
        else:
            total, *earlier = terms.split(1, 1)
            for term in earlier:
                total = total + term
        total = total if self.bias is None else total + self.bias
        return silu(total) if self.activation else total, torch.cat((*taps[1:], x), 1) if taps else past


def convolved(
    conv: ShortConv | None, x: Tensor, state: Any, write_mask: Tensor | None, reset_mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A layer's convolution under its masks: the result, and `conv` and `conv_segment` of the layer's new state.

    A masked token is zero to the tokens after it and reads with its own input, or takes no place where the convolution
    is `inert`; a reset hides earlier documents. None leaves x as it is.
    """
    if conv is None:
        return x, None, None
    past, past_segment = inputs = Past(None, None) if state is None else Past(state.conv, state.conv_segment)
    if write_mask is not None and conv.inert:
        return _without_masked(conv, x, inputs, write_mask, reset_mask)
    if past_segment is None and reset_mask is None:
        return *conv(x, past, None, write_mask), None
    segment = _documents(conv, x, past_segment, reset_mask)
    mixed, after = conv(x, past, segment, write_mask)
    tail = segment[:, x.shape[1] :]
    # Documents are numbered from the last one's, so that numbers do not grow from call to call.
    return mixed, after, tail - tail[:, -1:]


class Past(NamedTuple):
    """The inputs of a convolution before a piece, in the form that a layer's state has."""

    conv: Tensor | None
    conv_segment: Tensor | None


def past_inputs(
    context: Any, conv: ShortConv, x: Tensor, state: Any, write_mask: Tensor | None, reset_mask: Tensor | None
) -> Past:
    """The inputs before this rank's piece of a sequence that the ranks of a context share; `state` is that before the
    first piece."""
    past, segment = (None, None) if state is None else (state.conv, state.conv_segment)
    return Past(*context.halo(x, conv.kernel - 1, past, segment, write_mask, reset_mask))


def _documents(conv: ShortConv, x: Tensor, past_segment: Tensor | None, reset_mask: Tensor | None) -> Tensor:
    """The documents of the tokens before x and of its own, numbered from the last one seen, which is 0 again in the
    next call's state: `[B, kernel-1+T]`."""
    batch, length, _ = x.shape
    if past_segment is None:
        past_segment = torch.zeros(batch, conv.kernel - 1, dtype=torch.int64, device=x.device)
    if reset_mask is None:
        reset_mask = torch.zeros(batch, length, dtype=torch.bool, device=x.device)
    return torch.cat([past_segment, reset_mask.cumsum(1)], 1)


def _without_masked(
    conv: ShortConv, x: Tensor, inputs: Past, write_mask: Tensor, reset_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`convolved` of the written tokens, which stand together behind what came before them; a masked token sees itself
    alone, wherever a sequence is cut."""
    batch, length, channels = x.shape
    (past, past_segment), lag = inputs, conv.kernel - 1
    if past is None:
        past = x.new_zeros(batch, lag, channels)
    there = torch.cat([write_mask.new_ones(batch, lag), write_mask], 1)
    order = there.byte().argsort(dim=1, stable=True)  # masked ones first, the others as they come
    both = torch.cat([past.to(x.dtype), torch.where(write_mask.unsqueeze(-1), x, 0.0)], 1)
    both = both.take_along_dim(order.unsqueeze(-1), 1)
    segment = tail = None
    if past_segment is not None or reset_mask is not None:
        every = _documents(conv, x, past_segment, reset_mask)
        segment = every.take_along_dim(order, 1)
        tail = segment[:, length:] - every[:, -1:]  # a masked token may have opened the last one
    mixed, after = conv(both[:, lag:], both[:, :lag], segment)
    places = (order.argsort(dim=1)[:, lag:] - lag).clamp(min=0)
    alone = x * conv.weight[0] if conv.bias is None else x * conv.weight[0] + conv.bias
    alone = silu(alone) if conv.activation else alone
    return torch.where(write_mask.unsqueeze(-1), mixed.take_along_dim(places.unsqueeze(-1), 1), alone), after, tail


def settle_layer(config: Any) -> None:
    """Gives the config of a layer what it `follows` and was not told: what its memory names, if it does. [NN-MEM-D3]

    These fields stay unset: a copy with another memory is asked anew."""
    for name in set(config.follows) - config.model_fields_set:
        object.__setattr__(config, name, of_rule(config.memory, name))


def of_rule(memory: Any, name: str) -> Any:
    """The `qk_norm` or `conv_kernel` of a layer around a memory where the layer is not told one."""
    setting = getattr(memory, f"layer_{name}")
    return _DEFAULTS[name] if setting is None else setting


def normalise_qk(x: Tensor, norm: QKNorm, eps: float | Tensor = EPS) -> Tensor:
    """`"l2"`: unit length; `"rms"`: unit root mean square; evaluated in float32 or better. A zero vector stays zero,
    with slope 1. Rows of x `[B, T, ..., D]`; eps stands beside the length."""
    if norm not in QK_NORMS:
        expect_choice(norm, "qk_norm", QK_NORMS)
    if norm == "none":
        return x
    if isinstance(eps, float):
        return units(x, norm=norm, eps=eps)[0]
    return normalised(x, norm, eps, looks=can_inspect(x, free=True))


def token_unit(x: Tensor, norm: QKNorm, eps: float = EPS) -> Tensor:
    """`normalised` of few rows outside autograd, with the same bits in fewer calls; values are looked at on a CPU."""
    if not x.is_cpu or x.dtype not in EXACT:
        return normalised(x, norm, eps, looks=x.is_cpu)
    size = (x * x).sum(-1, keepdim=True)
    if norm == "rms":
        size.div_(number(x.shape[-1], x.dtype))
    if not math.isfinite(size.sum().item()):
        return normalised(x, norm, eps, looks=False)
    return x * size.add_(number(eps * eps, x.dtype)).rsqrt_()
