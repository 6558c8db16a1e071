"""Heads: linear maps of a token to its gates, with the starting values of their parameters; and the gating that has one
for each of the gates that few rules have: erase, write, retain_value, and a gate on the value."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear, softplus

from hecate.checks import Size
from hecate.gating.base import Gated, Gating, Masks, Named, Parts, Sizes, Start, Written
from hecate.tape.ops import unit
from hecate.variant import Config


class Head(Config):
    """top sigmoid(W x + b), per head or per channel.

    Fields:
        channels: a gate per channel instead of per head.
        rank: W = W_2 W_1 with this many rows in W_1, which all heads share.
        start: share of `top` where x is 0, b = log(start / (1 - start)).
        top: the ceiling, never reached.
        bias: whether b is learned; without it `start` is 1/2.
    """

    channels: bool = False
    rank: Annotated[Size, Field(ge=1)] | None = None
    start: float = Field(0.5, gt=0, lt=1)
    top: float = Field(1.0, gt=0)
    bias: bool = True


class Heads(Gating):
    r"""heads: a head each for erase, write, retain_value and the value: v becomes value * v.

    With n writes per token, each write has its own gates, except for retain_value, which acts once. Weights start at
    N(0, 0.02^2). With lr or retain off, that gate is the rule's number at every token, as in linear attention and
    RetNet.

    Formula: $\mathrm{gate}_t = \mathrm{top}\; \mathrm{sigmoid}(W x_t + b)$
    $v_t \leftarrow \mathrm{value}_t \odot v_t$
    Shapes: per head `[B, T, (n,) H]`, per channel `[B, T, (n,) H, D or V]`; retain_value is per channel always.
    References: `erase` and `value` per channel are the gates b and w of Gated DeltaNet-2 (2026, arXiv 2605.22791),
    `erase` up to 2 its reflections; `unit_values` is for memories that learn keys from values. [GATE-HEADS-D1]
    """

    kind: Literal["heads"] = "heads"
    erase: Head | None = None
    write: Head | None = None
    retain_value: Head | None = None
    value: Head | None = None
    lr: bool = Field(True, description="whether lr has its head; else it is the algorithm's lr")
    retain: bool = Field(True, description="whether retain has its head; else it is the retention's")
    unit_values: bool = Field(False, description="whether values are then brought to unit length")

    @property
    def _heads(self) -> dict[str, Head]:
        """The heads that it has, by name."""
        heads = {"erase": self.erase, "write": self.write, "retain_value": self.retain_value, "value": self.value}
        return {name: head for name, head in heads.items() if head is not None}

    @property
    def plain(self) -> bool:  # type: ignore[override]
        """True if it has no heads and leaves values as they are; gates without a head keep a scan's defaults."""
        return not self._heads and not self.unit_values

    @property
    def replaces(self) -> tuple[str, ...]:
        return tuple([name for name in ("lr", "retain") if not getattr(self, name)])

    @property
    def channels(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for name, head in self._heads.items() if name in ("erase", "write") and head.channels)

    @property
    def gates(self) -> tuple[str, ...]:
        return tuple(name for name in self._heads if name != "value")

    @property
    def erases(self) -> float:
        return math.prod(head.top for head in (self.erase, self.write) if head is not None)

    def refusal(self, config: Any) -> str | None:
        if self.retain_value is not None and not self.retain_value.channels:
            return "retain_value is one gate per value channel; set retain_value.channels, or use retain"
        return None

    def parts(self, sizes: Sizes) -> Parts:
        parts, draw = Parts(), partial(normal, std=0.02)
        for name, head in self._heads.items():
            times = (sizes.writes,) if sizes.writes > 1 and name != "retain_value" else ()
            width = sizes.d_key if name in ("erase", "write") else sizes.d_value
            rows = (*times, sizes.heads, *((width,) if head.channels else ()))  # the shape of a token's gates
            if head.rank is not None:
                parts[f"{name}.down"] = (head.rank, sizes.d_model), draw
            parts[f"{name}.weight"] = (*rows, sizes.d_model if head.rank is None else head.rank), draw
            if head.bias:
                parts[f"{name}.bias"] = rows, inverse_sigmoid(head.start)
        return parts

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        wide, gates = x.to(torch.promote_types(x.dtype, torch.float32)), dict(inputs.gates)
        v = inputs.v
        for name, head in self._heads.items():
            weight = params[f"{name}.weight"]
            inner = linear(wide, params[f"{name}.down"].to(wide.dtype)) if f"{name}.down" in params else wide
            logits = linear(inner, weight.flatten(0, -2).to(wide.dtype)).unflatten(-1, weight.shape[:-1])
            if f"{name}.bias" in params:
                logits = logits + params[f"{name}.bias"].to(wide.dtype)
            gate = head.top * torch.sigmoid(logits)
            if name == "value":
                v = v * (gate if head.channels else gate.unsqueeze(-1)).to(v.dtype)
            else:
                gates[name] = gate
        if self.unit_values:
            v = unit(v.to(wide.dtype), 1e-6).to(v.dtype)
        return inputs._replace(v=v, gates=gates), {}


# For other gatings.


def normal(shape: tuple[int, ...], source: torch.Generator, std: float) -> Tensor:
    """N(0, std^2), drawn on the CPU whatever the default device is."""
    return std * torch.randn(shape, generator=source, dtype=torch.float64, device="cpu")


def inverse_sigmoid(share: float) -> float:
    """The number whose sigmoid is a share."""
    return math.log(share / (1 - share))


def inverse_softplus(value: float) -> float:
    """The number whose softplus is a positive one."""
    return value + math.log(-math.expm1(-value))


def head(params: Named, name: str, x: Tensor) -> Tensor:
    """W x + b in float32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    bias = params.get(f"{name}.bias")
    return linear(x.to(wide), params[f"{name}.weight"].to(wide), None if bias is None else bias.to(wide))


def rate_start(shape: tuple[int, ...], source: torch.Generator, low: float = 1e-3, high: float = 1e-1) -> Tensor:
    """b with softplus(b) log-uniform in [low, high], as Mamba starts its step."""
    draw = torch.rand(shape, generator=source, dtype=torch.float64, device="cpu")
    return torch.exp(math.log(low) + (math.log(high) - math.log(low)) * draw).expm1().log()


def spread(shape: tuple[int, ...], source: torch.Generator, low: float, high: float) -> Tensor:
    """log A with A uniform in [low, high], kept off zero."""
    draw = torch.rand(shape, generator=source, dtype=torch.float64, device="cpu")
    return (low + (high - low) * draw).clamp(min=1e-4).log()


def weights(sizes: Sizes, *rows: int) -> tuple[tuple[int, ...], Start]:
    """A linear map of x for each head, or for each of its rows, from N(0, 1/d_model), as `Gating.parts` gives it."""
    return (sizes.heads, *rows, sizes.d_model), partial(normal, std=sizes.d_model**-0.5)


rates = partial(spread, low=1.0, high=16.0)


def shrink(params: Named, name: str, x: Tensor) -> Tensor:
    """-A softplus(W x + b): the logarithm of a decay, A = exp of the parameter `name`.rate per head."""
    logits = head(params, name, x)
    return -params[f"{name}.rate"].to(logits.dtype).exp() * softplus(logits)
