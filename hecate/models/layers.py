"""What the models share: layers that are drawn anew one by one, and the gated MLP of their blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hecate.errors import ConfigError
from hecate.nn.conv import RMSNorm
from hecate.nn.parameters import blank, draw_normal, source_of


def redraw(generator: torch.Generator | None, *layers: nn.Module | None) -> None:
    """Draws layers anew in this order: weights of linear layers and embeddings from N(0, 1 / width), norms at one; what
    has no storage stays as it is."""
    for layer in layers:
        if isinstance(layer, nn.RMSNorm):
            layer.reset_parameters()
        elif isinstance(layer, nn.Linear | nn.Embedding):
            if not layer.weight.is_meta:
                draw_normal(layer.weight, layer.weight.shape[1] ** -0.5, source_of(generator))
        elif layer is not None and not isinstance(layer, nn.Dropout):
            layer.reset_parameters(generator)  # type: ignore[operator]


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


class GatedMLP(Layers):
    """W_down(silu(W_gate x) * W_up x) of the normalised input."""

    def __init__(self, width: int, hidden: int, generator: torch.Generator | None = None, **place: Any) -> None:
        super().__init__()
        place.setdefault("device", None)
        self.norm = RMSNorm(width, **place)
        self.up = blank(nn.Linear, width, 2 * hidden, bias=False, **place)
        self.down = blank(nn.Linear, hidden, width, bias=False, **place)
        redraw(generator, self.up, self.down)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., width]`."""
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)
