"""The gated MLP of a model's blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hecate.errors import ConfigError
from hecate.nn.parameters import blank, draw_normal, source_of


def hidden_width(width: int, ratio: float, name: str) -> int:
    """The hidden units that `mlp_ratio` gives a width of this name: 0, or at least one."""
    if 0 < ratio * width < 1:
        raise ConfigError(
            f"gives no hidden unit at {name}={width}, got {ratio:g}; set it to 0 or to at least {1 / width:g}",
            path=("mlp_ratio",),
        )
    return int(ratio * width)


class GatedMLP(nn.Module):
    """W_down(silu(W_gate x) * W_up x) of the normalised input."""

    def __init__(self, width: int, hidden: int, generator: torch.Generator | None = None, **place: Any) -> None:
        super().__init__()
        place.setdefault("device", None)
        self.norm = nn.RMSNorm(width, eps=1e-6, **place)
        self.up = blank(nn.Linear, width, 2 * hidden, bias=False, **place)
        self.down = blank(nn.Linear, hidden, width, bias=False, **place)
        if self.down.weight.device.type != "meta":
            self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draws the weights anew; the norm starts at one."""
        nn.init.ones_(self.norm.weight)
        for linear in (self.up, self.down):
            draw_normal(linear.weight, linear.in_features**-0.5, source_of(generator))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., width]`."""
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)
