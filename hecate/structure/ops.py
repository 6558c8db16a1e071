"""Operations between the layers of a graph, with their first and second derivatives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.tape.ops import Activation, activate


class Act(NamedTuple):
    """act(x), componentwise."""

    kind: Activation

    @property
    def name(self) -> str:
        return self.kind

    def forward(self, *inputs: Tensor) -> Tensor:
        return activate(self.kind, inputs[0], 0)

    def slopes(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs[0], activate(self.kind, inputs[0], 1)

    def vjp(self, slopes: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor]:
        return (g * slopes[1],)

    def vjp_vjp(
        self, slopes: tuple[Tensor, Tensor], g: Tensor, cotangents: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor], Tensor]:
        x, slope = slopes
        (c,) = cotangents
        return (c * g * activate(self.kind, x, 2),), c * slope


class Add(NamedTuple):
    """x + y."""

    name: str = "add"

    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0] + inputs[1]

    def slopes(self, *inputs: Tensor) -> None:
        return None

    def vjp(self, slopes: None, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, g

    def vjp_vjp(self, slopes: None, g: Tensor, cotangents: tuple[Tensor, ...]) -> tuple[tuple[None, None], Tensor]:
        return (None, None), cotangents[0] + cotangents[1]


class Multiply(NamedTuple):
    """x y, componentwise."""

    name: str = "multiply"

    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0] * inputs[1]

    def slopes(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    def vjp(self, slopes: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = slopes
        return g * y, g * x

    def vjp_vjp(
        self, slopes: tuple[Tensor, ...], g: Tensor, cotangents: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        (x, y), (cx, cy) = slopes, cotangents
        return (cy * g, cx * g), cx * y + cy * x


class Normalise(NamedTuple):
    """y = (x - mean) / s, s = sqrt(variance + eps), over the last axis of width n.

    With J v = (v - mean(v) - y <v, y>/n) / s, symmetric: the VJP is J g, and that of J g is, for the cotangent c, J c
    for g and -(<c, J g> y + <g, y> J c + <c, y> J g) / (n s) for x.
    """

    eps: float
    name: str = "norm"

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.slopes(*inputs)[0]

    def slopes(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        centred = inputs[0] - inputs[0].mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        return centred * scale, scale

    def vjp(self, slopes: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor]:
        y, scale = slopes
        return ((g - g.mean(-1, keepdim=True) - y * (g * y).mean(-1, keepdim=True)) * scale,)

    def vjp_vjp(
        self, slopes: tuple[Tensor, Tensor], g: Tensor, cotangents: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor], Tensor]:
        y, scale = slopes
        (c,) = cotangents
        (jc,), (jg,) = self.vjp(slopes, c), self.vjp(slopes, g)
        along, gy, cy = ((a * b).mean(-1, keepdim=True) for a, b in ((c, jg), (g, y), (c, y)))
        return (-(along * y + gy * jc + cy * jg) * scale,), jc
