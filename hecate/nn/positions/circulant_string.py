"""Rotation by the exponential of a learned circulant matrix."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hecate.nn.positions.base import Params, Rotation
from hecate.nn.positions.rotate import BASE


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

    def init(
        self,
        width: int,
        *,
        heads: int = 1,
        causal: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Params:
        place: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        pairs = (width - 1) // 2
        speed = torch.zeros(width // 2 + 1, **place)
        speed[1 : 1 + pairs] = BASE ** (-torch.arange(pairs, **place) / pairs)
        column = torch.fft.irfft(torch.complex(torch.zeros_like(speed), speed / 2), n=width)
        return {"circulant": column.repeat(heads, 1).to(dtype=dtype, device=device)}

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        if not x.numel():  # nothing that a Fourier transform would take
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        speed = 2 * torch.fft.rfft(params["circulant"].double()).imag
        angle = position[..., None, None] * speed
        turn = torch.complex(angle.cos().to(wide), angle.sin().to(wide))
        return torch.fft.irfft(torch.fft.rfft(x.to(wide)) * turn, n=x.shape[-1]).to(x.dtype)
