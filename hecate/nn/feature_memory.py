"""A memory before phi, or in its place."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hecate.checks import Size
from hecate.engine import memory_features
from hecate.errors import ConfigError
from hecate.nn.parameters import draw_normal
from hecate.nn.rule import RuleParameters
from hecate.rule import MemoryConfig, MemoryState


class FeatureMemoryConfig(MemoryConfig):
    """The rule of a feature memory, and what its answers are: see `FeatureMemory`.

    Fields beside those of `MemoryConfig`, which stands for one with `residual`:
        residual: features are k + M(k), of the keys' width; else M(k) alone.
        d_value: the width of M(k) without `residual`; None takes that of the keys.
    """

    residual: bool = True
    d_value: Size | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _from_memory(cls, data: Any) -> Any:
        if type(data) is MemoryConfig:
            return {name: getattr(data, name) for name in data.model_fields_set}
        return data

    @model_validator(mode="after")
    def _one_width(self) -> FeatureMemoryConfig:
        if self.residual and self.d_value is not None:
            raise ConfigError(
                f"d_value={self.d_value} with residual=True: k + M(k) has the width of k; "
                "leave d_value out, or set residual=False",
                path=("d_value",),
            )
        return self

    def width(self, d_key: int) -> int:
        """Width of the features of keys of width `d_key`."""
        return d_key if self.d_value is None else self.d_value


class FeatureMemory(RuleParameters):
    """A memory M before phi: q and k become x + M_t(x), or M_t(x) with `residual=False`.

    With `residual`, M is written with (k_t, k_t) under gates of its own: it learns as the sequence goes by which
    directions keys take, and an empty M, as a matrix starts, leaves q and k as they are. Without, phi is the memory: M
    is written with (k_t, U k_t), U `[H, F, D]` learned, so that features follow what U asks for and the sequence has
    shown; M starts at learned weights drawn
    as N(0, 1/fan_in) (a deep one at its own), since an empty one would make every feature 0. [NN-FEAT-D1] [NN-FEAT-D2]

    Shapes: x `[B, T, d_model]`, q and k `[B, T, H, D]` in, `[B, T, H, F]` out, F = `d_value`.
    """

    config: FeatureMemoryConfig

    def __init__(
        self, d_model: int, heads: int, config: FeatureMemoryConfig, *, d_key: int, learned_initial: bool, **place: Any
    ) -> None:
        own: dict[str, Any] = {"d_key": d_key, "d_value": config.width(d_key), "learned_initial": learned_initial}
        super().__init__(d_model, heads, config, **own, **place)
        self.target = None
        if not config.residual:
            self.target = nn.Parameter(torch.empty(heads, self.d_value, d_key, **place))

    def draw_rule(self, source: torch.Generator, like: Tensor) -> None:
        """Everything anew, without `residual` a start that answers."""
        super().draw_rule(source, like)
        if self.target is not None:
            draw_normal(self.target, self.phi_width**-0.5, source)
            self.draw_answering(self.initial, self.d_value, source, like)

    def values(self, k: Tensor) -> Tensor:
        """What M is written with at keys `[B, T, H, D]`."""
        return k if self.target is None else torch.einsum("bthd,hfd->bthf", k, self.target)

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        state: MemoryState | None,
        *,
        write_mask: Tensor | None,
        reset_mask: Tensor | None,
        **how: Any,
    ) -> tuple[Tensor, Tensor, MemoryState]:
        """q, k and the state after the last token; `how` are engine, autodiff and name."""
        own: dict[str, Any] = {"residual": self.config.residual, "phi_params": self.phi_params, **how}
        own |= {"initial": self.initial.tensors, "write_mask": write_mask, "reset_mask": reset_mask}
        return memory_features(self.config, q, k, self.values(k), self.gates(x), state=state, **own)
