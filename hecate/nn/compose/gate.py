"""What attention and memory say, as one vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hecate.nn.compose.config import Combination


class Gate(nn.Module):
    """One vector from a carrier c and a memory's answer m, with learned weights w. [ATT-GATE-D1]

    multiply: c * (1 + tanh(w * m)); add: c + w * m. Both leave c whole where the memory answers 0.
    paper: rms(c) w_c * sigmoid(rms(m) w_m), which then halves it; for mal m alone.
    """

    def __init__(
        self,
        kind: Combination,
        d_model: int,
        *,
        memory_alone: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.kind: str = kind
        rows = {"multiply": 1, "add": 1, "paper": 2}[kind]
        if kind == "paper" and memory_alone:
            self.kind, rows = "memory", 0
        self.weight = None
        if rows:
            self.weight = nn.Parameter(torch.ones(rows, d_model, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Weights to one; draws nothing."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, carrier: Tensor, answer: Tensor) -> Tensor:
        """Both `[..., d_model]`."""
        if self.weight is None:
            return answer
        weight = self.weight.to(carrier.dtype)
        if self.kind == "paper":
            width = (carrier.shape[-1],)
            carrier = nn.functional.rms_norm(carrier, width, eps=1e-6) * weight[0]
            return carrier * torch.sigmoid(nn.functional.rms_norm(answer, width, eps=1e-6) * weight[1])
        if self.kind == "add":
            return carrier + weight[0] * answer
        return carrier * (1 + torch.tanh(weight[0] * answer))

    def extra_repr(self) -> str:
        """The kind."""
        return self.kind
