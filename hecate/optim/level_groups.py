"""Levels by the names of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from hecate.errors import ConfigError, did_you_mean, shorten
from hecate.optim.options import Group


def level_groups(
    named_parameters: Iterable[tuple[str, Tensor]], periods: Mapping[str, int], *, default: int = 1
) -> list[Group]:
    """Parameter groups by name: one per period, the fastest first.

    `level_groups(model.named_parameters(), {"*.levels.2.*": 64, "*.levels.1.*": 8})`: the first pattern (shell style)
    that fits a name decides, `default` where none does. Parameters that need no gradient are left out. A pattern that
    decides nothing is a `ConfigError`. [OPTIM-LEVEL-D4]"""
    for period in (*periods.values(), default):
        check_level({"period": period, "reduce": "mean"})
    named = [(name, value) for name, value in named_parameters if value.requires_grad]
    found: dict[int, list[Tensor]] = {}
    idle = dict.fromkeys(periods)
    for name, parameter in named:
        pattern = next((p for p in periods if fnmatchcase(name, p)), None)
        idle.pop(pattern, None)  # type: ignore[arg-type]
        period = default if pattern is None else periods[pattern]
        found.setdefault(period, []).append(parameter)
    for pattern in idle:
        names = [name for name, _ in named]
        some = ", ".join(names[:4]) + (", ..." if names[4:] else "")
        hint = did_you_mean(pattern, names)
        raise ConfigError(f"the pattern {pattern!r} decides no parameter's level; names are {some}.{hint}")
    return [{"params": found[period], "period": period} for period in sorted(found)]


def check_level(group: Group) -> None:
    """Refuses a period or a reduction that means nothing."""
    period, reduce = group["period"], group["reduce"]
    if type(period) is not int or period < 1:
        raise ConfigError(f"period must be an integer >= 1, got {shorten(period)}")
    if reduce not in ("mean", "sum"):
        raise ConfigError(f"reduce must be 'mean' or 'sum', got {shorten(reduce)}")
    if period > 1 and group.get("differentiable"):
        raise ConfigError(
            f"differentiable=True with period={period}: a window keeps no graph of its steps; "
            "use period=1 for this group"
        )
