"""How attention and a memory make one layer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hecate.errors import ConfigError
from hecate.nn.sliding import AttentionNorm
from hecate.sizes import Size
from hecate.variant import Config

Combination = Literal["multiply", "add", "paper"]


class AttentionConfig(Config):
    """How attention and memory make one layer.

    Fields:
        kind: "mag" gates attention by the memory, "mal" attends to the memory's answers, "mac"
            attends within segments to what the memory said at their start, "attention" leaves the memory out.
        window: tokens that a token sees, itself included; None for all. Not for mac.
        segment: tokens of a segment; mac needs it, nothing else has it.
        persistent, rotary, kv_heads, qk_norm: as in `SlidingAttention`.
        gate: how two vectors become one, see `Gate`; None for multiply (mag, mac) or add (mal).
    """

    kind: Literal["mac", "mag", "mal", "attention"] = "mag"
    window: Size | None = Field(None, ge=1)
    segment: Size | None = Field(None, ge=1)
    persistent: Size = Field(0, ge=0)
    rotary: bool = True
    kv_heads: Size | None = Field(None, ge=1)
    qk_norm: AttentionNorm = "rms"
    gate: Combination | None = None

    @model_validator(mode="after")
    def _fitting(self) -> AttentionConfig:
        if self.kind == "mac" and self.window is not None:
            raise ConfigError(
                f"is {self.window}, but kind 'mac' attends within segment={self.segment}, which "
                "takes the window's place; leave window out, or choose kind 'mag' or 'mal'",
                path=("window",),
            )
        if self.kind == "mac" and self.segment is None:
            raise ConfigError(
                "is None, but kind 'mac' needs it: the tokens of a segment, at whose start the memory is asked",
                path=("segment",),
            )
        if self.kind != "mac" and self.segment is not None:
            raise ConfigError(
                f"is {self.segment}, but only kind 'mac' has segments, not {self.kind!r}; set window instead",
                path=("segment",),
            )
        if self.kind == "attention" and self.gate is not None:
            raise ConfigError(
                f"is {self.gate!r}, but kind 'attention' has no memory to gate with; leave it out", path=("gate",)
            )
        return self

    @property
    def combination(self) -> Combination:
        """The gate, chosen by the kind where none is given."""
        return self.gate or ("add" if self.kind == "mal" else "multiply")

    @property
    def has_memory(self) -> bool:
        """Whether a memory is part of the layer."""
        return self.kind != "attention"
