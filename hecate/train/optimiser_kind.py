"""What a kind of optimiser is to a run: which parameters it trains, and how it is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import field_validator
from torch import Tensor, nn

from hecate import optim
from hecate.errors import ConfigError
from hecate.variant import Variant

Group = dict[str, Any]
Named = list[tuple[str, nn.Parameter]]


class OptimizerKind(Variant, family="optimizer"):
    """What turns gradients into steps: a `factory` and, as fields, its arguments."""

    factory: ClassVar[Callable[..., torch.optim.Optimizer]]

    def trains(self, model: nn.Module) -> Named:
        """The parameters of a model that this kind trains, by name."""
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def build(self, model: nn.Module, groups: list[Group], lr: float) -> torch.optim.Optimizer:
        """The optimiser of these groups of a model; in `Leveled` where they have a `period`."""
        make = partial(type(self).factory, lr=lr, **self.options())
        leveled = any("period" in group for group in groups)
        return optim.Leveled(groups, make) if leveled else make(groups)

    def options(self) -> dict[str, Any]:
        """The arguments of `factory`."""
        names = type(self).model_fields.keys() - {"kind", "fallback"}
        return {name: getattr(self, name) for name in sorted(names)}


class PartialKind(OptimizerKind):
    """An optimiser of some parameters; every other is trained by `fallback`, at the same lr."""

    fallback: OptimizerKind
    about: ClassVar[str]  # the parameters that it trains

    @field_validator("fallback")
    @classmethod
    def _takes_any_parameter(cls, fallback: OptimizerKind) -> OptimizerKind:
        if isinstance(fallback, PartialKind):
            given = f"{fallback.kind!r}, which trains {fallback.about}"
            raise ConfigError(f"must be a kind for any parameter, got {given}; take adamw")
        return fallback


def is_vector(name: str, p: Tensor) -> bool:
    """Whether a parameter is one by shape, or by name: norms and biases per head are matrices."""
    return p.dim() < 2 or name.rsplit(".", 1)[-1] in ("norm", "bias")


def outer_layers(model: nn.Module) -> set[int]:
    """Embeddings with what is tied to them, and the output layer, by identity."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return embeddings | {id(p) for n, p in model.named_parameters() if n.startswith("head.")}
