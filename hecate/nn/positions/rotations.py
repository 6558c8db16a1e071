"""Rotations by a token's position: of channels in pairs, and by the exponential of a circulant matrix."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.nn.positions.base import Params, Position

BASE = 10_000.0


def turn_pairs(x: Tensor, position: Tensor, pairs: int, base: float) -> Tensor:
    """Channels (c, c + pairs) of x `[..., D]` turned by position * base^(-c / pairs).

    position: whole numbers that broadcast to `[...]`. Channels from 2 * pairs on stay.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = torch.arange(pairs, dtype=torch.float64, device=x.device)
    angle = position.unsqueeze(-1) * base ** (-steps / pairs)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    a, b, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """The first half of the channels turned in pairs by position * 10000^(-pair / pairs).

    The product of two rotated vectors depends on their positions by the difference alone; the second half of the
    channels carries no position. [ATT-ROT-D1]

    Shapes: x `[..., D]`, D divisible by 4; position int64 that broadcasts to `[...]`.
    """
    return turn_pairs(x, position, x.shape[-1] // 4, BASE)


class Rotation(Position):
    """A rotation of vectors by their token's position: (R_i x).(R_j y) depends on i - j alone.

    where: "before" turns q and k ahead of phi, so that the weight phi(R_i q).phi(R_j k) is still positive, but for a
    nonlinear phi no function of the distance; "numerator" turns phi(q) and phi(k) in the sum of values and leaves the
    sum of weights as it is, so that the weight is a function of the distance, but not always positive, and weights do
    not add up to 1.
    """

    where: Literal["before", "numerator"] = "before"

    @property
    def turns_features(self) -> bool:
        return self.where == "numerator"

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} defines no turned")


class Rotary(Rotation):
    """rotary: R_i turns channels (c, c + P) of P = floor(width / 2) pairs by i base^(-c / P).

    (R_i x).(R_j y) depends on i - j alone; of an odd width the last channel stays. With `where` = "numerator" this is
    the rotary form of the linear transformer: y_t = sum_s (R_t phi(q_t)).(R_s phi(k_s)) v_s / sum_s phi(q_t).phi(k_s).

    Shapes: x `[B, T, G, width]`, positions `[B, T]`.
    Cost: O(width) per token; angles in float64.
    Warning: "before" a nonlinear phi the weight is no function of i - j; on the "numerator" it may be negative, and a
    small sum of weights makes y large.
    References: RoFormer: Enhanced Transformer with Rotary Position Embedding (Su et al., 2021, arXiv 2104.09864).
    [ATT-ROT-D2]
    """

    kind: Literal["rotary"] = "rotary"
    base: float = Field(default=BASE, gt=0, description="the slowest pair turns by about 1 / base")

    def refusal(self, width: int) -> str | None:
        return None if width > 1 else f"a width of {width} has no pair of channels to turn"

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        return turn_pairs(x, position.unsqueeze(-1), x.shape[-1] // 2, self.base)


class CirculantString(Rotation):
    """circulant_string: R_i = exp(i (C - C^T)), C the circulant matrix of a learned column c.

    Circulant matrices share their eigenvectors, those of the Fourier transform, so R_i x = irfft(e^(j i s) rfft(x))
    with the speeds s = 2 Im rfft(c), and (R_i x).(R_j y) depends on i - j alone. The speeds of every head are learned;
    they start as those of `rotary`.

    Shapes: x `[B, T, G, width]`, positions `[B, T]`; c `[G, width]`.
    Cost: O(width log width) per token; angles in float64.
    Warning: as for `rotary`. Of an even width two frequencies, of an odd width one, stay.
    References: Learning the RoPEs: Better 2D and 3D Position Encodings with STRING (Schenck et al., 2025, arXiv
    2502.02562). [ATT-STRING-D1]
    """

    kind: Literal["circulant_string"] = "circulant_string"

    def refusal(self, width: int) -> str | None:
        return None if width > 2 else f"a circulant of width {width} is its own transpose"

    def start(self, width: int, heads: int, *, causal: bool) -> Params:
        place: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        pairs = (width - 1) // 2
        speed = torch.zeros(width // 2 + 1, **place)
        speed[1 : 1 + pairs] = BASE ** (-torch.arange(pairs, **place) / pairs)
        column = torch.fft.irfft(torch.complex(torch.zeros_like(speed), speed / 2), n=width)
        return {"circulant": column.repeat(heads, 1)}

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        if not x.numel():  # nothing that a Fourier transform would take
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        speed = 2 * torch.fft.rfft(params["circulant"].double()).imag
        angle = position[..., None, None] * speed
        turn = torch.complex(angle.cos().to(wide), angle.sin().to(wide))
        return torch.fft.irfft(torch.fft.rfft(x.to(wide)) * turn, n=x.shape[-1]).to(x.dtype)
