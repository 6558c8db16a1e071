"""Gatings of memories that take one step a chunk: values that look at tokens ahead, an lr for every weight."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from hecate.gating.base import Gated, Gating, Masks, Named, Parts, Shapes, Sizes, Written, latest, running
from hecate.gating.heads import head, inverse_softplus
from hecate.variant import Conflicts


class TargetConv(Gating):
    r"""target_conv: v_t becomes sum_o c_o * v_(t+o), o from -(taps - 1 - ahead) to ahead, inside the chunk.

    A depthwise convolution with `ahead` taps over tokens to come, zeros beyond the chunk. It is causal because writes
    of a chunk act from the next one on, and exact token by token because a Hebbian sum knows no order: the product of
    k_t and v_(t+o) is written when the later of both has come. So a token makes 1 + ahead writes: (k_t, sum over o <= 0
    of c_o v_(t+o)) and (k_(t-o), c_o v_t) for each o > 0. Any split of a sequence gives the same; a chunk that is not
    full has not stepped. lr is the algorithm's own for all tokens.

    Formula: $v_t \leftarrow \sum_{o=-(\mathrm{taps}-1-\mathrm{ahead})}^{\mathrm{ahead}} c_o \odot v_{t+o} \quad
    \text{within the chunk}$
    Shapes: c `[taps, H, V]`, from 0 but for the token's own tap; state: the last keys and values written, `[B, H, D]`
    and `[B, H, V]`, and how many tokens of the chunk have come.
    Cost: 1 + ahead times the features of keys and the writes.
    Warning: with own=0, as the paper starts for models that are trained already, nothing is written until c has moved,
    and a matrix that starts at zero answers nothing. The paper multiplies by a matrix behind the convolution; here the
    layer's projection of values stands ahead of it, and with a diagonal one they are the same.
    References: In-Place Test-Time Training (2026, arXiv 2604.06169). [GATE-TARGET-D1]
    """

    kind: Literal["target_conv"] = "target_conv"
    taps: int = Field(5, ge=1, le=64)
    ahead: int = Field(2, ge=1, le=8, description="taps over tokens to come")
    own: float = Field(1.0, description="the token's own tap at the start; 0: no write at all")
    _makes: ClassVar[tuple[str, ...]] = ("lr",)

    def conflicts(self) -> Conflicts:
        if self.ahead >= self.taps:
            yield ("ahead",), f"{self.ahead} taps ahead and the token's own are more than taps={self.taps}; raise taps"

    def refusal(self, config: Any) -> str | None:
        writes = self.ahead + 1
        if config.writes != writes:
            return (
                f"{self.ahead} taps ahead make {writes} writes of a token, got writes={config.writes}; set both alike"
            )
        if config.commit != "chunk" or config.read != "before":
            return "it looks ahead within a chunk, which is causal with commit='chunk' and read='before' alone"
        if not config.forms.target:
            return f"bias {config.bias.kind!r} makes a write depend on those before it, and it changes their order"
        if config.normalizer != "none":
            return f"normalizer={config.normalizer!r} would count each of its writes as a token; it needs 'none'"
        if config.on_nonfinite == "skip":
            return "on_nonfinite='skip' would leave out tokens of a chunk that it has counted; use another"
        return None

    def pairs(self, writes: int) -> int:
        return 1

    @property
    def _behind(self) -> int:
        return self.taps - 1 - self.ahead

    def parts(self, sizes: Sizes) -> Parts:
        def start(shape: tuple[int, ...], _: torch.Generator) -> Tensor:
            taps = torch.zeros(shape, dtype=torch.float64)
            taps[self._behind] = self.own
            return taps

        return {"conv": ((self.taps, sizes.heads, sizes.d_value), start)}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        keys = {f"key{j}": (sizes.heads, sizes.d_key) for j in range(1, self.ahead + 1)}
        values = {f"value{j}": (sizes.heads, sizes.d_value) for j in range(1, self._behind + 1)}
        return {**keys, **values, "count": (1,)}

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
        after: dict[str, Tensor] = {}

        def back(now: Tensor, name: str, depth: int) -> list[Tensor]:
            """A token's own and those of the written tokens before it, the nearest first."""
            found = [now]
            for j in range(1, depth + 1):
                before, after[f"{name}{j}"] = latest(found[-1], held[f"{name}{j}"], masks)
                found.append(before.to(now.dtype))
            return found

        keys, values = back(made.k, "key", self.ahead), back(made.v, "value", self._behind)
        one = torch.ones(*x.shape[:2], 1, dtype=held["count"].dtype, device=x.device)
        count = running(one, one, held["count"], masks)
        after["count"] = (count[:, -1] if x.shape[1] else held["count"]).remainder(masks.chunk)
        place = (count - 1).remainder(masks.chunk).unsqueeze(-1)  # `[B, T, 1, 1]`, of a written token
        taps, behind = params["conv"].to(made.v.dtype), self._behind
        own = reduce(add, [taps[behind - j] * torch.where(place >= j, v, 0.0) for j, v in enumerate(values)])
        later = [taps[behind + j] * torch.where(place >= j, made.v, 0.0) for j in range(1, self.ahead + 1)]
        written = made._replace(k=torch.stack(keys, 2), v=torch.stack([own, *later], 2))
        return written, after


class LargeChunk(Gating):
    r"""large_chunk: lr = softplus(W x + b), momentum the mean of sigmoid(W x + b) over the chunk so far, retain 1.

    Every weight of a memory has an lr of its own, which weighs the tokens of a chunk against each other; no ceiling
    bounds it. The step that closes a chunk takes the momentum of its last written token: the mean over the chunk.

    Formula: $\eta_{t,i} = \mathrm{softplus}(w_i^\top x_t + b_i) \ \text{for weight } i,\quad \alpha_t = 1$
    $\mu_t = \frac{1}{t - s + 1} \sum_{j=s}^{t} \mathrm{sigmoid}(w^\top x_j + b),\quad s \ \text{the first token of the
    chunk}$
    Shapes: lr `[B, T, H, W]`, W in `[W, H, d_model]` for each of W weights, momentum `[B, T, H]`; state: the sum of the
    chunk's gates `[B, H]` and how many tokens of it have come.
    References: Test-Time Training Done Right (Zhang et al., 2025, arXiv 2505.23884), released code. [GATE-LARGE-D1]
    """

    kind: Literal["large_chunk"] = "large_chunk"
    one_key: ClassVar[bool] = True
    _makes: ClassVar[tuple[str, ...]] = ("lr", "retain", "momentum")
    lr: float = Field(1e-3, gt=0, description="where x is 0, at the start")

    def refusal(self, config: Any) -> str | None:
        if not config.algorithm.uses_momentum:
            return f"it makes momentum, and algorithm {config.algorithm.kind!r} has none; use one that has"
        reason = config.rates_refusal()
        return None if reason is None else f"it makes an lr for each weight, but {reason}"

    def parts(self, sizes: Sizes) -> Parts:
        each, own = (sizes.weights, sizes.heads), (sizes.heads,)
        heads: Parts = {"lr.weight": ((*each, sizes.d_model), 0.0), "momentum.weight": ((*own, sizes.d_model), 0.0)}
        return heads | {"lr.bias": (each, inverse_softplus(self.lr)), "momentum.bias": (own, 0.0)}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"total": (sizes.heads,), "count": (1,)}

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        lr = torch.einsum("btd,whd->bthw", wide, params["lr.weight"].to(wide.dtype))
        lr = softplus(lr + params["lr.bias"].mT.to(wide.dtype))
        own = torch.sigmoid(head(params, "momentum", x))
        one = torch.ones(*x.shape[:2], 1, dtype=held["count"].dtype, device=x.device)
        count = running(one, one, held["count"], masks)
        place = (count - 1).remainder(masks.chunk).to(own.dtype)  # of a written token
        total = running((place > 0).to(own.dtype), own, held["total"], masks)
        gates = {**made.gates, "lr": lr, "momentum": total / (place + 1)}
        if not x.shape[1]:
            return made._replace(gates=gates), dict(held)
        return made._replace(gates=gates), {"total": total[:, -1], "count": count[:, -1].remainder(masks.chunk)}
