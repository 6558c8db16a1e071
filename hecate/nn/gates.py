"""Gate heads: inner learning rate, kept fraction and momentum from the token."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hecate.rule import Gates, MemoryConfig
from hecate.tape.bridge import without_autocast


class GateHeads(nn.Module):
    """lr = lr_max sigmoid(w.x + b), retain = sigmoid(w.x + b), momentum = sigmoid(w.x + b), per
    head.

    Gates see the token, never phi(k). At initialisation w = 0, so every gate starts at a stated
    value: lr at half of `config.algorithm.lr` (which is its ceiling), times (1 - momentum) if the
    algorithm has momentum, because momentum multiplies the effective step by 1/(1 - momentum);
    retain and momentum at the config's own values, kept 1e-4 away from 0 and 1. An item stored at
    the start thus halves after log(1/2)/log(retain) tokens. [NN-GATE-D1]

    With `firing`, a fourth gate g = sigmoid(w.x + b), 3/4 at the start, decides whether a token is
    written: h = 1[g > 1/2] makes lr h lr and retain 1 - h (1 - retain), so an idle token neither
    writes nor decays. h passes its gradient to g unchanged (straight through). [CMS-FIRE-D1]

    Shapes: x `[B, T, d_model]` -> gates `[B, T, H]` in float32 or better; None for gates the rule
    lacks.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: MemoryConfig,
        *,
        firing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.lr_max = config.algorithm.lr
        momentum = config.algorithm.default_momentum
        starts = {"lr": 0.5 * (1 - momentum)}
        if config.retention.uses_retain:
            starts["retain"] = config.retention.default_retain
        if config.algorithm.uses_momentum:
            starts["momentum"] = momentum
        if firing:
            starts["firing"] = 0.75
        self.starts = starts
        self.weight = nn.ParameterDict(
            {name: torch.empty(heads, d_model, device=device, dtype=dtype) for name in starts}
        )
        self.bias = nn.ParameterDict(
            {name: torch.empty(heads, device=device, dtype=dtype) for name in starts}
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Weights to zero, biases to the starting values; draws nothing."""
        with torch.no_grad():
            for name, start in self.starts.items():
                self.weight[name].zero_()
                # A gate that starts at exactly 0 or 1 could never leave it.
                inside = min(max(start, 1e-4), 1 - 1e-4)
                self.bias[name].fill_(math.log(inside / (1 - inside)))

    def forward(self, x: Tensor) -> Gates:
        """The gates of every token."""
        values = self.values(x)
        lr, retain = self.lr_max * values["lr"], values.get("retain")
        if "firing" in values:
            gate = values["firing"]
            # The difference is exactly zero; its gradient is that of the gate.
            fired = (gate > 0.5).to(gate.dtype) + (gate - gate.detach())
            lr = lr * fired
            retain = None if retain is None else retain * fired + (1 - fired)
        return Gates(lr=lr, retain=retain, momentum=values.get("momentum"))

    def values(self, x: Tensor) -> dict[str, Tensor]:
        """sigmoid(w.x + b) of every gate by name, `[B, T, H]`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x.device.type):
            return {
                name: torch.sigmoid(
                    nn.functional.linear(
                        wide, weight.to(wide.dtype), self.bias[name].to(wide.dtype)
                    )
                )
                for name, weight in self.weight.items()
            }
