"""Gatings that correct what is written or read by the token's own key or gates: Comba, HGRN2, preconditioned delta."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.gating.base import Gating, Masks, Shapes, Sizes, Written, running
from hecate.gating.heads import head, logit


class Comba(Gating):
    """comba: the memory is asked at c k, and read at q - d c k.

    c = sigmoid(a) per head closes the loop at the state (`erase`), d per head at the read. q and k have to be of unit
    length before, and phi the identity: fla's kernels normalise c k as well, which cancels c.

    Shapes: a and d `[H]`.
    References: Comba (Hu et al., 2025, arXiv 2506.02475). [GATE-COMBA-D1]
    """

    kind: Literal["comba"] = "comba"
    one_key: ClassVar[bool] = True
    _makes: ClassVar[tuple[str, ...]] = ("erase",)
    correction: float = Field(1.0, description="d at the start; 0.02 is suggested for small models")
    feedback: float = Field(1.0, description="a at the start")

    def refusal(self, config: Any) -> str | None:
        if config.key_norm != "none":
            return f"key_norm={config.key_norm!r} would undo what it does to q and k; use the layer's qk_norm"
        return None

    def shapes(self, sizes: Sizes) -> Shapes:
        return {"a": (sizes.heads,), "d": (sizes.heads,)}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        return torch.full(shape, self.feedback if name == "a" else self.correction, dtype=torch.float64)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        c = torch.sigmoid(params["a"])
        q = made.q - (params["d"] * c).to(made.q.dtype).unsqueeze(-1) * made.k
        return made._replace(q=q, gates={**made.gates, "erase": c.expand(made.k.shape[:-1])}), {}


class Complement(Gating):
    """complement: retain = sigmoid(a k + b) per channel; what is not kept is written, with the key 1 - retain.

    The layer's key, behind its convolution, is the forget gate's logit, as in the released layer. a starts at 1, b at
    retain 0.9 for k = 0: ours, for the paper's lower bounds. With `keys` keys stay and retain has a head of its own.

    Shapes: a and b `[H, D]`; phi keeps the width D of keys.
    References: HGRN2 (Qin et al., 2024, arXiv 2404.07904). [GATE-TIED-D1]
    """

    kind: Literal["complement"] = "complement"
    one_key: ClassVar[bool] = True
    _makes: ClassVar[tuple[str, ...]] = ("write",)
    keys: bool = Field(False, description="whether the layer's keys stay; else the written key is 1 - retain alone")

    @property
    def replaces(self) -> tuple[str, ...]:
        return self._makes if self.keys else (*self._makes, "retain")

    def refusal(self, config: Any) -> str | None:
        if not config.retention.uses_retain:
            return f"retention {config.retention.kind!r} has no retain gate"
        alike = self.keys or config.retention.gate_form.channels
        return None if alike else "it makes a retain gate per channel; set retention.channels, or gating.keys"

    def shapes(self, sizes: Sizes) -> Shapes:
        return {} if self.keys else dict.fromkeys(("a", "b"), (sizes.heads, sizes.d_key))

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        return torch.full(shape, 1.0 if name == "a" else logit(0.9), dtype=torch.float64)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        k, retain = made.k, made.gates.get("retain")
        if not self.keys:
            logits = params["a"] * k.to(torch.promote_types(k.dtype, torch.float32)) + params["b"]
            k, retain = torch.ones_like(k), torch.sigmoid(logits)
        if retain is None:
            raise TypeError("a config without retain was not refused")
        return made._replace(k=k, gates={**made.gates, "retain": retain, "write": 1 - retain}), {}


class Curvature(Gating):
    """curvature: the written key is the key times base^(-r / (1 + |r|)), r = log(A + eps) - c, per channel.

    A_t = decay_t A_{t-1} + rate_t k_t * k_t runs over the squares of the keys so far, the token's own among them: a
    diagonal of their curvature. Channels that were written often are written more cautiously. The factor lies in
    (1/base, base), so that with lr up to 2 an eigenvalue could reach 1 - 2 base: keep lr at most 2 / base.

    Shapes: decay and rate `[B, T, H]` = sigmoid(W x + b), c `[H]`, A `[B, H, D]`.
    References: Preconditioned DeltaNet (Tumma et al., 2026, arXiv 2604.21100). [GATE-CURV-D1]
    """

    kind: Literal["curvature"] = "curvature"
    one_key: ClassVar[bool] = True
    channels: ClassVar[tuple[str, ...]] = ("write",)
    _makes: ClassVar[tuple[str, ...]] = ("write",)
    base: float = Field(1.5, gt=1)
    eps: float = Field(1e-6, gt=0)
    center: float = Field(-0.2, description="c at the start")
    decay: float = Field(0.99, gt=0, lt=1, description="at the start")
    rate: float = Field(0.5, gt=0, lt=1, description="at the start")
    names: ClassVar[tuple[str, ...]] = ("decay", "rate")

    @property
    def erases(self) -> float:
        return self.base

    def refusal(self, config: Any) -> str | None:
        if config.algorithm.lr * self.base > config.algorithm.stable_step:
            limit = config.algorithm.stable_step
            return (
                f"lr={config.algorithm.lr:g} times base={self.base:g} passes {limit:g}, where writes diverge; lower one"
            )
        return None

    def shapes(self, sizes: Sizes) -> Shapes:
        heads: Shapes = {f"{name}.weight": (sizes.heads, sizes.d_model) for name in self.names}
        return heads | {f"{name}.bias": (sizes.heads,) for name in self.names} | {"center": (sizes.heads,)}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        return {"curvature": (sizes.heads, sizes.d_key)}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        value = {"center": self.center, "decay.bias": logit(self.decay), "rate.bias": logit(self.rate)}.get(name, 0.0)
        return torch.full(shape, value, dtype=torch.float64)

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, made: Written, held: Mapping[str, Tensor], masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        decay, rate = (torch.sigmoid(head(params, name, x)).unsqueeze(-1) for name in self.names)
        square = made.k.to(decay.dtype).square()
        total = running(decay, rate * square, held["curvature"], masks)
        r = torch.log(total + self.eps) - params["center"].to(total.dtype).unsqueeze(-1)
        factor = torch.exp(-math.log(self.base) * r / (1 + r.abs()))
        last = total[:, -1] if x.shape[1] else held["curvature"]
        return made._replace(gates={**made.gates, "write": factor}), {"curvature": last}
