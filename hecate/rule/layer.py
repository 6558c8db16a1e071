"""Options of the layer around a memory: what the published layers of one rule differ in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hecate.checks import Size
from hecate.variant import Config, Conflicts

Squash = Literal["sigmoid", "rectified"]
OutputGate = Literal["silu", "sigmoid", "none"]


class OutputNorm(Config):
    """The RMS norm behind a memory: w y / sqrt(mean y^2 + eps).

    Fields:
        eps: beside the mean square.
        over: the mean is of each "head", or of "all" heads together.
        weight: w is a number for each channel of each "head", or "shared" by the heads.
        place: the norm stands "before_gate", or "after_gate", of answers that the gate has multiplied.
    """

    eps: float = Field(1e-6, gt=0)
    over: Literal["head", "all"] = "head"
    weight: Literal["head", "shared"] = "head"
    place: Literal["before_gate", "after_gate"] = "before_gate"


class OutputOptions(Config):
    """Between a memory and a layer's map out: norm(y) gate(W x + b).

    Fields:
        gate: the function of the output gate; "none" leaves the gate out.
        rank: W = W_2 W_1 with so many rows in W_1; null: W as it is.
        bias: whether b is there, 0 at first.
        norm: the norm of answers.
    """

    gate: OutputGate = "silu"
    rank: Size | None = Field(None, ge=1)
    bias: bool = False
    norm: OutputNorm = OutputNorm()

    def conflicts(self) -> Conflicts:
        """Settings of a gate that is not there."""
        if self.gate == "none":
            for name, needless in self.of_gate().items():
                if needless:
                    yield (name,), "there is no output gate with gate 'none'; leave it out, or set gate"

    def of_gate(self) -> dict[str, bool]:
        """The settings that only an output gate has, by name, and whether each is another than the default."""
        return {"rank": self.rank is not None, "bias": self.bias, "norm": self.norm.place == "after_gate"}


class ConvOptions(Config):
    """The short convolution of a layer.

    Fields:
        bias: whether it adds a number to each channel, 0 at first.
        on: whether values pass through it, too, "qkv", or queries and keys alone, "qk"; the others pass neither it nor
            its activation.
    """

    bias: bool = False
    on: Literal["qkv", "qk"] = "qkv"


class LayerOptions(Config):
    """Options of the layer around a memory; without any it is the layer of before. [NN-OPT-D1]

    Fields:
        key_heads: heads of queries and keys, each for as many memories that follow one another; null: one each.
        qk_eps: beside the square of the length (or the mean square, for `qk_norm` "rms") of queries and keys, as most
            published layers write it, 1e-6; null: 1e-12.
        conv: the short convolution.
        output: norm and gate behind the memory.
        lr_bias: whether the lr gate has a bias; without it lr starts at half its ceiling.
        momentum: the momentum gate of s = w.x + b, "sigmoid" or "rectified": max(0, tanh s), whose derivative is that
            of tanh s wherever s lies, so that a gate at 0 learns.
        later_writes: the lr gate of a token's writes but the first, "sigmoid" or "rectified", times its ceiling; the
            latter starts at 0.
    """

    key_heads: Size | None = Field(None, ge=1)
    qk_eps: float | None = Field(None, gt=0)
    conv: ConvOptions = ConvOptions()
    output: OutputOptions = OutputOptions()
    lr_bias: bool = True
    momentum: Squash = "sigmoid"
    later_writes: Squash = "sigmoid"


LAYER = LayerOptions()
"""The layer of a config without options."""
