"""Layers of the models: drawn anew one by one, their norms and the MLPs of their blocks."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hecate.errors import ConfigError
from hecate.nn.blocks import RMSNorm, swiglu
from hecate.nn.parameters import blank, redraw


class Layers(nn.Module):
    """A module whose parameters are those of its layers."""

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        redraw(generator, *self.children())


def hidden_width(width: int, ratio: float, name: str) -> int:
    """The hidden units that `mlp_ratio` gives a width of this name: 0, or at least one."""
    if 0 < ratio * width < 1:
        raise ConfigError(
            f"gives no hidden unit at {name}={width}, got {ratio:g}; set it to 0 or to at least {1 / width:g}",
            path=("mlp_ratio",),
        )
    return int(ratio * width)


Norm = Literal["rms", "layer"]


def norm_of(kind: Norm, width: int, **place: Any) -> nn.RMSNorm | nn.LayerNorm:
    """The norm of a width: of the root mean square, or of mean and variance with a learned shift."""
    return RMSNorm(width, **place) if kind == "rms" else nn.LayerNorm(width, eps=1e-5, **place)


class GatedMLP(Layers):
    """W_down(silu(W_gate x) * W_up x) of the normalised input."""

    parts: ClassVar[int] = 2  # matrices of the width of `hidden` that the input meets

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
        place.setdefault("device", None)
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
