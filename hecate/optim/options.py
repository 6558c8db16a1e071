"""The options of an optimiser, declared once: for its constructor, for its groups and for a file."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

import torch
from pydantic import Field
from pydantic.fields import FieldInfo
from torch import Tensor, nn

from hecate.checks import expect_choice
from hecate.errors import ConfigError
from hecate.tape.bridge import can_inspect
from hecate.variant import Variant

Group = dict[str, Any]
Named = list[tuple[str, nn.Parameter]]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
MatrixView = Literal["flatten", "last"]


class OptimizerKind(Variant, family="optimizer"):
    """Optimiser, which turns gradients into steps: a `factory` and, as fields, its arguments.

    A `MatrixOptimizer` has one as `Options`: the fields are arguments of its constructor and options of its groups
    too, where they may take the ends of their intervals (a momentum of 1) and tensors of one element.
    """

    factory: ClassVar[Callable[..., torch.optim.Optimizer]]
    windowed: ClassVar[bool] = True  # whether `Leveled` may hand it the mean of several gradients

    def trains(self, model: nn.Module) -> Named:
        """The parameters of a model that this kind trains, by name."""
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def build(self, model: nn.Module, groups: list[Group], lr: float) -> torch.optim.Optimizer:
        """The optimiser of these groups of a model."""
        return type(self).factory(groups, lr=lr, **self.options())

    def options(self) -> Group:
        """The arguments of `factory`."""
        return {name: getattr(self, name) for name in sorted(type(self).model_fields.keys() - {"kind", "fallback"})}


class Allowed(NamedTuple):
    """Allowed values of an option: one of `words`, or a number (`kind` float or int) from low to high."""

    words: tuple[Any, ...]
    kind: type | None = None
    low: float = 0
    high: float = math.inf

    def check(self, name: str, value: Any, slack: float = 0.0) -> None:
        """Refuses a value that is neither; slack is how far beyond its bounds a number may be."""
        if self.kind is None:
            return expect_choice(value, name, self.words)
        tensor = isinstance(value, Tensor)
        if (tensor and self.kind is float and not can_inspect(value)) or (not tensor and value in self.words):
            return
        number = value.item() if tensor and self.kind is float and value.numel() == 1 else value
        fits = type(number) is int or (self.kind is float and isinstance(number, float))
        if not fits or not self.low - slack <= number <= self.high + slack or number == math.inf:
            what = "an integer" if self.kind is int else "a finite number"
            bound = "" if self.high == math.inf else f" and at most {self.high}"
            raise ConfigError(f"{name} must be {what} of at least {self.low}{bound}, got {value!r}")


def allowed(field: FieldInfo) -> Allowed | None:
    """Allowed values of a field of words, flags and numbers; None if its type is another, for a check of its own.

    Ends of intervals count as inside, because an experiment wants to see them.
    """
    words: list[Any] = []
    kind: type | None = None
    limits: list[Any] = list(field.metadata)
    waiting: list[Any] = [field.annotation]
    while waiting:
        found = waiting.pop(0)
        if get_origin(found) in (Union, UnionType):
            waiting += get_args(found)
        elif get_origin(found) is Annotated:
            waiting.append(get_args(found)[0])
            limits += [limit for given in get_args(found)[1:] for limit in given.metadata]
        elif get_origin(found) is Literal:
            words += get_args(found)
        elif found is bool or found is type(None):
            words += (True, False) if found is bool else (None,)
        elif found in (int, float):
            kind = found
        else:
            return None
    low = max((getattr(x, end) for x in limits for end in ("ge", "gt") if hasattr(x, end)), default=0)
    tops = [x.le if hasattr(x, "le") else x.lt - (kind is int) for x in limits if hasattr(x, "le") or hasattr(x, "lt")]
    return Allowed(tuple(words), kind, low, min(tops, default=math.inf))


def signature_of(fields: dict[str, FieldInfo], positional: tuple[str, ...]) -> inspect.Signature:
    """A constructor's: `params`, these fields by place, the others by name."""
    made = [inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name in dict.fromkeys([*positional, *fields]):
        how = inspect.Parameter.POSITIONAL_OR_KEYWORD if name in positional else inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(name, how, default=fields[name].default, annotation=fields[name].annotation))
    return inspect.Signature(made)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the line of the caller outside of this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("hecate.optim", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def name_of(group: Group, p: Tensor) -> str:
    """The parameter's name, or its place in the group and its shape."""
    place = next(i for i, other in enumerate(group["params"]) if other is p)
    if "param_names" in group:
        return f"parameter {group['param_names'][place]!r}"
    return f"parameter {place} {list(p.shape)}"
