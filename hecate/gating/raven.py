"""Gates of Raven: a router sends each token to a few slots, and what is not chosen is left as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear, logsigmoid

from hecate.checks import Size
from hecate.errors import ConfigError
from hecate.gating.base import Gating, Masks, Shapes, Sizes, Written
from hecate.gating.heads import normal, rate_start, shrink, spread

_TOP = 32


class Raven(Gating):
    r"""raven: retain = exp(g c_i) in slot i, write = 1 - retain, c the largest sigmoid(W x), brought to the sum 1.

    g = -A softplus(a x + b) per head is how much a token replaces, c how that is shared out: the product of retain over
    slots is exp(g). A slot that is not chosen has c = 0, keeps all (retain is 1) and is given nothing (write is 0), to
    the last bit. Of equal scores the first slots are chosen. A, a and b start as Mamba-2 starts them, W at
    N(0, 1/d_model), ours. The choice itself has no derivative.

    Formula: $\alpha_t = \exp(g_t c_t),\quad \mathrm{write}_t = 1 - \alpha_t,\quad g_t = -A\, \mathrm{softplus}(a^\top
    x_t + b)$
    $c_{t,i} = \frac{\mathrm{sigmoid}(W x_t)_i}{\sum_{j \in T} \mathrm{sigmoid}(W x_t)_j} \ \text{if } i \in
    T,\ \text{else } 0,\quad T \ \text{the largest of them}$
    Shapes: retain and write `[B, T, H, D]`; W `[H, D, d_model]`, a `[H, d_model]`, A and b `[H]`.
    References: Raven (Afzal, Bick et al., goombalab, 2026) by its authors' pages and its layer in
    flash-linear-attention; a paper could not be read. Left out: Gumbel noise on W x while training, SiLU of values,
    the gate per slot of GLA in the place of g. [GATE-RAVEN-D1]
    """

    kind: Literal["raven"] = "raven"
    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain")
    channels: ClassVar[tuple[str, ...]] = ("retain", "write")
    top: Size | None = Field(
        None, ge=1, description="slots that a token goes to; None: 32, or all where there are fewer"
    )

    def refusal(self, config: Any) -> str | None:
        return None if "write" in config.readout.gates else "it makes the gate write; set readout='slots'"

    def shapes(self, sizes: Sizes) -> Shapes:
        if self.top is not None and self.top > sizes.d_key:
            few = f"a token goes to {self.top} slots, and there are {sizes.d_key}, as many as a key is wide"
            raise ConfigError(f"{few}; lower top or widen keys", path=("gating", "top"))
        return {
            "slots.weight": (sizes.heads, sizes.d_key, sizes.d_model),
            "share.weight": (sizes.heads, sizes.d_model),
            "share.bias": (sizes.heads,),
            "share.rate": (sizes.heads,),
        }

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        if name == "share.bias":
            return rate_start(shape, source)
        return spread(shape, source, 0.0, 16.0) if name == "share.rate" else normal(shape, source, sizes.d_model**-0.5)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        weight, wide = params["slots.weight"], torch.promote_types(x.dtype, torch.float32)
        scores = linear(x.to(wide), weight.flatten(0, 1).to(wide)).unflatten(-1, weight.shape[:2])
        log = shrink(params, "share", x).unsqueeze(-1) * _shares(scores, _TOP if self.top is None else self.top)
        return made._replace(gates={**made.gates, "retain": torch.exp(log), "write": -torch.expm1(log)}), {}


def _shares(scores: Tensor, top: int) -> Tensor:
    """The `top` largest sigmoids over their sum, 0 elsewhere; as a softmax of logarithms, which never divides by 0."""
    logs = logsigmoid(scores)
    if top < scores.shape[-1]:
        # By scores, which differ where their sigmoids have reached 1; stable, so that equal ones are chosen alike.
        order = scores.detach().sort(dim=-1, descending=True, stable=True).indices
        left = torch.ones_like(scores, dtype=torch.bool).scatter(-1, order[..., :top], False)
        logs = logs.masked_fill(left, -torch.inf)
    return torch.softmax(logs, -1)
