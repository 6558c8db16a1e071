"""The exponential gates of the mLSTM, stabilised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hecate.gating.base import Gating, Masks, Shapes, Sizes, Written, last_written, running_max
from hecate.gating.heads import head, normal


class MLSTM(Gating):
    r"""mlstm: lr = exp(i) and retain = sigmoid(f), read over max(|z.q|, 1), with numbers that stay in range.

    With m_t = max(log retain + m_{t-1}, i), memory and z hold exp(-m) of themselves: lr' = exp(i - m_t), retain' =
    exp(log retain + m_{t-1} - m_t), both in [0, 1], and the divisor is max(|z.q|, exp(-m_t)), the gate `floor` of
    `normalizer="max"`. What is read does not depend on m, so no gradient flows through it. A state carries m, which is
    0 at the start and after a reset.

    Formula: $m_t = \max(\log\, \mathrm{sigmoid}(f_t) + m_{t-1},\ i_t),\quad i_t = w_i^\top x_t + b_i,\quad f_t =
    w_f^\top x_t + b_f$
    $\eta_t = \exp(i_t - m_t),\quad \alpha_t = \exp(\log\, \mathrm{sigmoid}(f_t) + m_{t-1} - m_t),\quad \mathrm{floor}_t
    = \exp(-m_t)$
    Shapes: i and f `[B, T, H]`; state m `[B, H]`.
    References: xLSTM (Beck et al., 2024, arXiv 2405.04517). [GATE-MLSTM-D1]
    """

    kind: Literal["mlstm"] = "mlstm"
    one_key: ClassVar[bool] = True
    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain", "floor")

    def refusal(self, config: Any) -> str | None:
        if config.normalizer != "max" or not config.retention.uses_retain:
            return "it makes lr, retain and the floor of the divisor; set normalizer='max' and retention 'decay'"
        return None

    def shapes(self, sizes: Sizes) -> Shapes:
        gates = {f"{name}.weight": (sizes.heads, sizes.d_model) for name in ("i", "f")}
        return gates | {f"{name}.bias": (sizes.heads,) for name in ("i", "f")}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"m": (sizes.heads,)}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        if name == "i.bias":
            return normal(shape, source, 0.1)
        return torch.linspace(3.0, 6.0, *shape, dtype=torch.float64) if name == "f.bias" else torch.zeros(shape)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        i, kept = head(params, "i", x), logsigmoid(head(params, "f", x))
        with torch.no_grad():
            m = running_max(kept, i, held["m"], masks)
            before, last = last_written(m, held["m"], Masks(None, masks.reset))
        left = kept + (before - m)
        left = left - left.detach().relu()  # above 0 by rounding alone
        gates = {"lr": torch.exp(i - m), "retain": torch.exp(left), "floor": torch.exp(-m)}
        return made._replace(gates={**made.gates, **gates}), {"m": last}
