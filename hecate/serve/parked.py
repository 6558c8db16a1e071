"""States kept in half their bytes, and the rules that do not bear it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from hecate import states
from hecate.algorithm import RLS, NewtonSchulz
from hecate.checks import expect_choice
from hecate.errors import ConfigError
from hecate.readout import Ridge
from hecate.retention import Lq
from hecate.rule import MemoryConfig

ParkedDtype = Literal["float16"]


def parking(dtype: ParkedDtype | None) -> Callable[[Any], Any]:
    """A copy of a state as it is kept: `states.park`, or `states.clone` where no dtype is given."""
    if dtype is None:
        return states.clone
    expect_choice(dtype, "parked_dtype", ("float16",))
    return states.park


def check_parked(model: nn.Module, dtype: ParkedDtype) -> None:
    """Refuses a model with a memory in which the rounding of a state does not fade. [SERVE-PARK-D1]

    Raises:
        ConfigError: names the memory and the setting.
    """
    for name, module in model.named_modules():
        rule = getattr(module, "rule", None)
        if isinstance(rule, MemoryConfig) and (why := _unbearable(rule)) is not None:
            raise ConfigError(f"parked_dtype={dtype!r} and {name or 'the model'}: {why}; leave parked_dtype out")


def _unbearable(rule: MemoryConfig) -> str | None:
    """Why what is rounded once moves all later answers."""
    if isinstance(rule.algorithm, RLS):
        return "algorithm 'rls' keeps an inverse of all keys, in which errors add up"
    if isinstance(rule.readout, Ridge) and not rule.retention.uses_retain:
        return f"readout 'ridge' under retention {rule.retention.kind!r} keeps all keys, and solving magnifies errors"
    if isinstance(rule.retention, Lq) and rule.retention.q > 2:
        return f"retention 'lq' with q={rule.retention.q:g} has powers that are steep at 0, and errors grow"
    if isinstance(rule.algorithm, NewtonSchulz) and not rule.structure.linear:
        return (
            f"algorithm 'newton_schulz' on structure {rule.structure.kind!r} takes steps of one size, and errors grow"
        )
    return None
