"""A short path for calls whose signature was seen before; it makes only the tensors that kernels read or write.

The first call of a signature takes the path of all engines, which validates it, fills in defaults and reports errors. A
later call differs only in device values, which no host may look at, so nothing is left to check: its state is laid out
and its kernels are launched. The same kernels get the same numbers, hence the same bits. [ENG-TRITON-D12]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hecate.engine.arguments import Named
from hecate.engine.call import Call, Inputs
from hecate.engine.triton.kernel import kernel_of
from hecate.rule import Gates, MemoryState
from hecate.tape import Tensors

FIELDS = len(Inputs._fields)  # tensors of a call, before its states


def is_short(call: Call) -> bool:
    """True if calls of this signature need nothing but the launch of block kernels."""
    plan, config = call.plan, call.config
    if plan.looks is not False or plan.by_tensors or plan.masked or plan.general:
        return False
    if plan.starts or plan.wide or plan.anchored or plan.first > FIELDS or config.structure.drawn:
        return False
    if config.forms.dampens or config.forms.per_head or config.on_nonfinite == "skip":
        return False
    # Tensors of other dtypes have to be cast.
    return all(item.dtype == plan.dtype or item.itemsize < plan.dtype.itemsize for item in call.inputs[:6])


class Short:
    """Runs a plan's calls from a caller's tensors straight in block kernels, which compute the features."""

    def __init__(self, call: Call, exact: str, part: int) -> None:
        """call: one that took the full path; exact: the precision; part: tokens per part, or 0 for whole rows."""
        config, self.plan, self.slots = call.config, call.plan, len(call.plan.kinds[1])
        self.uses, self.defaults = (True, config.retention.uses_retain, self.slots > 0), config.forms.defaults
        self.run = kernel_of(config, exact, raw=True, part=part).block().forward

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState | None, initial: Named | None
    ) -> Tensors:
        """Outputs, and the new state's tensors in the order of `Carry`."""
        *states, position = self.states(k, state, initial)
        filled: list[Any] = []
        for gate, used, default in zip(gates, self.uses, self.defaults):  # noqa: B905
            if used and not isinstance(gate, Tensor):
                number = default if gate is None else float(gate)
                wide = torch.promote_types(k.dtype, torch.float32)
                gate = torch.full(k.shape[:3], number, dtype=wide, device=k.device)
            filled.append(gate if used else None)
        inputs: Tensors = (*states, states[0], k, q, v, *filled, None, None, None, None)
        return *self.run(*inputs)[0], position

    def states(self, k: Tensor, state: MemoryState | None, initial: Named | None) -> list[Tensor]:
        """The memory and its slot `[N, V, P]`, in the order of `Carry`, and its position."""
        if state is not None:
            return self.plan.flattened(state)
        if initial is not None:
            return self.plan.fresh(self.plan.weights(initial, k), k)
        count = k.shape[0] * k.shape[2]
        zeros = torch.zeros(1 + self.slots, count, *self.plan.shape, dtype=self.plan.dtype, device=k.device)
        return [*zeros.unbind(0), torch.zeros(count, dtype=torch.int64, device=k.device)]
