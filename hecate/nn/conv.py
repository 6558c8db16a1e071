"""Stage between a layer's projections and phi: a short causal convolution, and normalised queries and keys."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._C._nn import silu

from hecate.checks import expect_choice
from hecate.nn.blocks import EPS, EXACT, convolution, normalised, units
from hecate.nn.parameters import draw_normal, source_of
from hecate.tape.ops import number
from hecate.variant import Config

QKNorm = Literal["none", "l2", "rms"]
QK_NORMS = get_args(QKNorm)
DEFAULT_QK_NORM: QKNorm = "l2"
DEFAULT_CONV_KERNEL = 4
_DEFAULTS = {"qk_norm": DEFAULT_QK_NORM, "conv_kernel": DEFAULT_CONV_KERNEL}
IN_ORDER = 4  # up to so many rows torch's sum on a CPU adds one after the other


class ShortConv(nn.Module):
    """Depthwise causal convolution: y_t = silu(sum_j w_j x_(t-j)), j = 0..kernel-1. [NN-CONV-D1]

    Without `activation` the sum as it is; with `bias` plus b, 0 at first.
    Shapes: x `[B, T, C]`, state `[B, kernel-1, C]` (the last inputs, zero at the start).
    `segment` `[B, kernel-1+T]`, if given, numbers the documents of state and inputs: a tap that would reach into
    another document reads zero. A token that is not `written` `[B, T]` sees itself and counts as zero for the tokens
    after it. If the convolution is `inert`, such a token sees only itself, and to the others it is not there at all.
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
        """`forward` for x `[B, 1, C]`: the same sum in the same order, its products by one multiplication."""
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
    conv: ShortConv | None, x: Tensor, state: Any, write: Tensor | None, reset: Tensor | None, context: Any = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A layer's convolution under its masks: the result, and `conv` and `conv_segment` of the layer's new state.

    A masked token counts as zero for the tokens after it and reads with its own input, or is left out where the
    convolution is `inert`; a reset hides earlier documents. Without a convolution (None) x stays as it is. Where the
    ranks of a `context` share a sequence, x is a piece of it, and `state` is that before the first piece.
    """
    if conv is None:
        return x, None, None
    past, past_segment = (None, None) if state is None else (state.conv, state.conv_segment)
    if context is not None:
        past, past_segment = context.halo(x, conv.kernel - 1, past, past_segment, write, reset)
    if write is not None and conv.inert:
        return _without_masked(conv, x, past, past_segment, write, reset)
    if past_segment is None and reset is None:
        return *conv(x, past, None, write), None
    segment = _documents(conv, x, past_segment, reset)
    mixed, after = conv(x, past, segment, write)
    tail = segment[:, x.shape[1] :]
    # Counted from the last document, which becomes 0, so that numbers do not grow from call to call.
    return mixed, after, tail - tail[:, -1:]


def _documents(conv: ShortConv, x: Tensor, past_segment: Tensor | None, reset_mask: Tensor | None) -> Tensor:
    """Numbers of the documents of the tokens before x and of x, `[B, kernel-1+T]`; the document that was going on when
    x began is 0."""
    batch, length, _ = x.shape
    if past_segment is None:
        past_segment = torch.zeros(batch, conv.kernel - 1, dtype=torch.int64, device=x.device)
    if reset_mask is None:
        reset_mask = torch.zeros(batch, length, dtype=torch.bool, device=x.device)
    return torch.cat([past_segment, reset_mask.cumsum(1)], 1)


def _without_masked(
    conv: ShortConv, x: Tensor, past: Tensor | None, past_segment: Tensor | None, write: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`convolved` for an inert convolution: the written tokens follow one another directly, and a masked token sees
    only itself, wherever the sequence is cut."""
    batch, length, channels = x.shape
    lag = conv.kernel - 1
    if past is None:
        past = x.new_zeros(batch, lag, channels)
    there = torch.cat([write.new_ones(batch, lag), write], 1)
    order = there.byte().argsort(dim=1, stable=True)  # masked tokens first, the others in their order
    both = torch.cat([past.to(x.dtype), torch.where(write.unsqueeze(-1), x, 0.0)], 1)
    both = both.take_along_dim(order.unsqueeze(-1), 1)
    segment = tail = None
    if past_segment is not None or reset is not None:
        every = _documents(conv, x, past_segment, reset)
        segment = every.take_along_dim(order, 1)
        tail = segment[:, length:] - every[:, -1:]  # a masked token may have opened the last document
    mixed, after = conv(both[:, lag:], both[:, :lag], segment)
    places = (order.argsort(dim=1)[:, lag:] - lag).clamp(min=0)
    alone = x * conv.weight[0] if conv.bias is None else x * conv.weight[0] + conv.bias
    alone = silu(alone) if conv.activation else alone
    return torch.where(write.unsqueeze(-1), mixed.take_along_dim(places.unsqueeze(-1), 1), alone), after, tail


class LayerConfig(Config):
    """Base of configs of a layer around a `memory`."""

    def settle(self) -> None:
        """Fills in the fields that the config `follows` and that were not set: with what its memory's rule says, or
        else the default. [NN-MEM-D3]

        They still count as unset, so that a copy with another memory takes that memory's."""
        layer: Any = self
        for name in set(self.follows) - self.model_fields_set:
            object.__setattr__(self, name, of_rule(layer.memory, name))


def of_rule(memory: Any, name: str) -> Any:
    """The `qk_norm` or `conv_kernel` of a layer around a memory that sets none itself."""
    setting = getattr(memory, f"layer_{name}")
    return _DEFAULTS[name] if setting is None else setting


def normalise_qk(x: Tensor, norm: QKNorm, eps: float = EPS) -> Tensor:
    """`"l2"`: unit length; `"rms"`: unit root mean square; evaluated in float32 or better. A zero vector stays zero,
    with slope 1. Rows of x `[B, T, ..., D]`; eps^2 is added to the squared length or the mean square."""
    if norm not in QK_NORMS:
        expect_choice(norm, "qk_norm", QK_NORMS)
    return x if norm == "none" else units(x, norm=norm, eps=eps)[0]


def token_unit(x: Tensor, norm: QKNorm, eps: float = EPS) -> Tensor:
    """`normalised` of few rows outside autograd: the same bits in fewer calls. On a CPU it reads values."""
    if not x.is_cpu or x.dtype not in EXACT:
        return normalised(x, norm, eps, looks=x.is_cpu)
    size = (x * x).sum(-1, keepdim=True)
    if norm == "rms":
        size.div_(number(x.shape[-1], x.dtype))
    if not math.isfinite(size.sum().item()):
        return normalised(x, norm, eps, looks=False)
    return x * size.add_(number(eps * eps, x.dtype)).rsqrt_()
