"""Which optimiser trains which parameters of a model, with what decay and how often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from hecate.errors import ConfigError, Problem
from hecate.optim import Leveled, OptimizerKind, level_groups
from hecate.optim.options import Group, Named
from hecate.train.config import OptimConfig
from hecate.train.optimisers import PartialKind, is_vector

_HERE = ("optim", "optimizer")


def build_optimizers(model: nn.Module, optim: OptimConfig) -> dict[str, Optimizer]:
    """The optimisers of a run by kind: one, or two with a fallback. [TRAIN-OPTIM-D2]"""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    periods = _periods(named, optim.periods)
    kind = optim.optimizer
    own = kind.trains(model)
    parts: list[tuple[tuple[str, ...], OptimizerKind, Named]] = [(_HERE, kind, own)]
    if isinstance(kind, PartialKind):
        if not own:
            raise ConfigError(
                f"{kind.kind!r} trains {kind.about}, and this model has none; choose a kind for "
                "any parameter, such as adamw",
                _HERE,
            )
        chosen = {name for name, _ in own}
        rest = [(n, p) for n, p in named if n not in chosen]
        parts.append(((*_HERE, "fallback"), kind.fallback, rest))
    found = {}
    for path, part, owned in parts:
        if owned:
            groups = parameter_groups(owned, optim.weight_decay, periods)
            found[part.kind] = _built(path, part, model, groups, optim.lr)
    return found


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, periods: Mapping[Tensor, int] | None = None
) -> list[Group]:
    """Groups by decay and period: matrices decay, vectors (scales, biases) do not.

    [TRAIN-OPTIM-D1]
    """
    found: dict[tuple[bool, int], Group] = {}
    for name, p in named:
        vector, period = is_vector(name, p), (periods or {}).get(p, 1)
        group = found.setdefault((vector, period), {"params": [], "param_names": []})
        group["params"].append(p)
        group["param_names"].append(name)
        group["weight_decay"] = 0.0 if vector else weight_decay
        if periods:
            group["period"] = period
    return [found[key] for key in sorted(found)]


def _built(path: tuple[str, ...], kind: OptimizerKind, model: nn.Module, groups: list[Group], lr: float) -> Optimizer:
    try:
        if kind.windowed and any("period" in group for group in groups):
            return Leveled(groups, lambda given: kind.build(model, given, lr))
        return kind.build(model, groups, lr)
    except ConfigError as error:
        raise ConfigError(Problem((*path, *p.path), p.message) for p in error.problems) from None


def _periods(named: Named, patterns: Mapping[str, int]) -> dict[Tensor, int]:
    """Steps per commit of every parameter; empty where no pattern is given."""
    if not patterns:
        return {}
    try:
        groups = level_groups(named, patterns)
    except ConfigError as error:
        raise ConfigError(str(error), ("optim", "periods")) from None
    return {p: group["period"] for group in groups for p in group["params"]}
