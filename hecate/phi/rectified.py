"""Positive and negative parts side by side, their products, and both turned by the token's position."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Count, Size
from hecate.errors import ConfigError
from hecate.late import put_off
from hecate.phi.base import FeatureMap, Params, Traits, compute_dtype, position_of
from hecate.tape.bridge import can_inspect, is_traced, waits


class CReLU(FeatureMap):
    r"""crelu: phi(x) = [max(x, 0), max(-x, 0)].

    Non-negative without losing anything: x is the difference of the halves, and unit keys stay unit keys.

    Formula: $\phi(x) = [\max(x, 0),\ \max(-x, 0)]$
    Shapes: x `[..., D]` -> `[..., 2 D]`.
    VJP: gx = g_up for x > 0, -g_down for x < 0, 0 at x = 0.
    Traits: non_negative, kernel_non_negative, degree 1.
    Cost: O(D).
    Warning: keys of opposite orthants have a kernel of exactly 0: a sum normaliser may divide by 0.
    References: Understanding and Improving Convolutional Neural Networks via Concatenated Rectified Linear Units (Shang
    et al., 2016, arXiv 1603.05201) for the activation. [PHI-CRELU-D1]
    """

    kind: Literal["crelu"] = "crelu"
    widening: ClassVar[int] = 2
    promises = Traits(non_negative=True, kernel_non_negative=True, degree=1)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        features = halves(x)
        return features, features

    def vjp(self, residuals: Tensor, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return halves_vjp(residuals, g), {}


def halves(x: Tensor) -> Tensor:
    """The positive and the negative part, side by side: `[..., 2 D]`."""
    return torch.cat([torch.relu(x), torch.relu(-x)], -1)


def halves_vjp(y: Tensor, g: Tensor) -> Tensor:
    """Cotangent of x from that of `y = halves(x)`; 0 at the kink."""
    up, down = torch.ops.aten.threshold_backward(g, y, 0).chunk(2, -1)
    return up - down


class DPFP(FeatureMap):
    r"""dpfp: phi(x) = [y * roll(y, 1), ..., y * roll(y, nu)], y = [relu(x), relu(-x)].

    Sparse products of rectified components: orthants of key space get features of their own, without any parameter.

    Formula: $\phi(x) = [y \odot \mathrm{roll}(y, 1),\, \ldots,\, y \odot \mathrm{roll}(y, \nu)]$
    $y = [\max(x, 0),\ \max(-x, 0)],\quad \mathrm{roll}(y, j)_i = y_{i-j}$
    Shapes: x `[..., D]` -> `[..., 2 D nu]`; `roll(y, j)[i] = y[i - j]`.
    VJP: gy = sum_j (g_j roll(y, j) + roll(g_j y, -j)), gx = gy[:D] for x > 0, -gy[D:] for x < 0, 0 at x = 0.
    Traits: non_negative, kernel_non_negative, degree 2.
    Cost: O(D nu).
    Warning: |phi(x)|^2 grows with the fourth power of x, so normalise features for delta-type rules. For small D all
    features may be 0 (always for D = 1). The negative half is relu(-x): an implementation with -relu(x) loses the sign
    of x and half the rank. nu above D repeats products in other places.
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021, arXiv 2102.11174).
    [PHI-DPFP-D1]
    """

    kind: Literal["dpfp"] = "dpfp"
    nu: Size = Field(default=1, ge=1)
    promises = Traits(non_negative=True, kernel_non_negative=True, degree=2)

    def output_dim(self, d: int) -> int:
        if self.nu > 2 * d - 1:
            raise ConfigError(
                f"must be at most 2 d - 1 = {2 * d - 1} for inputs of width {d}, got {self.nu}; "
                "a roll by 2 d is none, and larger ones repeat the first",
                ("nu",),
            )
        return 2 * d * self.nu

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        self.output_dim(x.shape[-1])
        y = halves(x.to(compute_dtype(x)))
        rolled = [y.roll(j, -1) for j in range(1, self.nu + 1)]
        products = [y * other for other in rolled]
        return torch.cat(products, -1).to(x.dtype), (y, rolled)

    def vjp(self, residuals: tuple[Tensor, list[Tensor]], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y, rolled = residuals
        parts = g.to(y.dtype).chunk(self.nu, -1)
        gy = (parts[0] * y).roll(-1, -1)
        for j, gj in enumerate(parts[1:], start=2):
            gy = gy + (gj * y).roll(-j, -1)
        for gj, other in zip(parts, rolled, strict=True):
            gy = torch.addcmul(gy, gj, other)
        return halves_vjp(y, gy).to(g.dtype), {}


class CosFormer(FeatureMap):
    r"""cosformer: phi(x, i) = [max(x, 0) cos(pi i / 2M), max(x, 0) sin(pi i / 2M)], M = max_length.

    The kernel relu(q).relu(k) cos(pi (i - j) / 2M) prefers recent keys: it falls from 1 to 0 as the distance i - j goes
    from 0 to M. Positions 0..M are taken, beyond it the kernel would turn negative; every reset starts again from 0.

    Formula: $\phi(x, i) = \left[\max(x, 0) \cos\frac{\pi i}{2 L},\ \max(x, 0) \sin\frac{\pi i}{2 L}\right],\quad L =
    \mathrm{max\_length}$
    Shapes: x `[..., D]` -> `[..., 2 D]`; position `[...]` or what broadcasts to it.
    VJP: gx = g_cos cos(pi i / 2M) + g_sin sin(pi i / 2M) for x > 0, else 0.
    Traits: non_negative, kernel_non_negative, degree 1, needs_position.
    Cost: O(D).
    Warning: a position beyond M is a ConfigError, and NaN where values cannot be looked at, as while compiling. Keys at
    distance M, and keys without a common positive entry, have a kernel of exactly 0.
    References: cosFormer: Rethinking Softmax in Attention (Qin et al., 2022, arXiv 2202.08791). [PHI-COSFORMER-D1]
    """

    kind: Literal["cosformer"] = "cosformer"
    max_length: Count = Field(default=2048, gt=0, description="M, the largest position")
    widening: ClassVar[int] = 2
    promises = Traits(non_negative=True, kernel_non_negative=True, degree=1, needs_position=True)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        cos, sin = self._turn(position_of(self.kind, x, params), compute_dtype(x))
        rectified = torch.relu(x).to(cos.dtype)
        features = torch.cat([rectified * cos, rectified * sin], -1)
        return features.to(x.dtype), (x, cos, sin)

    def vjp(self, residuals: tuple[Tensor, Tensor, Tensor], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, cos, sin = residuals
        g_cos, g_sin = g.to(cos.dtype).chunk(2, -1)
        rectified = torch.addcmul(g_cos * cos, g_sin, sin).to(x.dtype)
        return torch.ops.aten.threshold_backward(rectified, x, 0), {}

    def _refuse(self, ends: Tensor) -> None:
        low, high = ends.tolist()
        if low < 0 or high > self.max_length:
            raise ConfigError(
                f"feature map 'cosformer' has max_length={self.max_length} and takes the positions "
                f"0..{self.max_length}, got {int(low)}..{int(high)}; raise max_length or reset the memory earlier"
            )

    def _turn(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inside = (position >= 0) & (position <= self.max_length)
        if can_inspect(inside) and inside.numel():
            if waits(inside) and not is_traced(inside):
                put_off(torch.stack(position.aminmax()), self._refuse)
            elif not bool(inside.all()):
                self._refuse(torch.stack(position.aminmax()))
        step = 0.5 * math.pi / self.max_length
        ahead, behind = (
            torch.where(inside, steps.to(dtype) * step, math.nan).unsqueeze(-1)
            for steps in (position, self.max_length - position)
        )
        # cos(a) as sin(pi/2 - a): no rounding makes it negative at the end of the quarter turn.
        return behind.sin(), ahead.sin()
