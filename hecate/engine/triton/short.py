"""Calls of looks that were seen before, by what is given alone: no tensor is made but those that kernels read or write.

A first call of its looks goes the way of all engines, which checks it, fills in what is missing and says what is wrong.
The next differs from it in numbers that no host may look at, so that nothing is left to be found: its state is laid out
and its kernels are launched. The same kernels take the same numbers, hence the same bits. [ENG-TRITON-D12]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hecate.engine.call import Call, Inputs
from hecate.engine.tokens import Carry, Tokens
from hecate.engine.triton.kernel import kernel_of
from hecate.rule import Gates, MemoryState
from hecate.tape import Tensors, several

FIELDS = len(Inputs._fields)  # of a call's tensors, ahead of its states


class Short:
    """The way of a plan's calls from what is given to block kernels, which make features themselves."""

    def __init__(self, call: Call, exact: str, part: int) -> None:
        """Of a call that went the whole way; in a precision, in parts of so many tokens or, with 0, whole."""
        config, self.dtype, self.exact, self.part = call.config, call.plan.dtype, exact, part
        self.config, self.slots = config, len(call.plan.kinds[1])
        ((self.name, self.shape),) = call.plan.kinds[0].items()
        self.uses = True, config.retention.uses_retain, self.slots > 0
        hand = kernel_of(config, call.memories[0][1], exact, raw=True, part=part)
        self.run = hand._replace(plain=self.plain).block().forward

    @classmethod
    def of(cls, call: Call, exact: str, part: int) -> Short | None:
        """The short way of calls that look like one; None where more is to be done than to launch kernels."""
        plan, config = call.plan, call.config
        if plan.looks is not False or plan.by_tensors or plan.masked or plan.general:
            return None
        if plan.starts or plan.wide or plan.anchored or plan.first > FIELDS or config.structure.drawn:
            return None
        if config.forms.dampens or config.forms.per_head or config.on_nonfinite == "skip":
            return None
        numbers = call.inputs[:6]
        if any(item.dtype != plan.dtype and item.itemsize >= plan.dtype.itemsize for item in numbers):
            return None  # to be cast
        return cls(call, exact, part)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState | None, initial: Any
    ) -> Tensors:
        """Outputs, and the new state's tensors in the order of `Carry`."""
        states, position = self.states(k, state, initial)
        given: list[Any] = []
        for gate, used, default in zip(gates, self.uses, self.config.forms.defaults):  # noqa: B905
            if used and not isinstance(gate, Tensor):
                number = default if gate is None else float(gate)
                wide = torch.promote_types(k.dtype, torch.float32)
                gate = torch.full(k.shape[:3], number, dtype=wide, device=k.device)
            given.append(gate if used else None)
        inputs: Tensors = (*states, states[0], k, q, v, *given, None, None, None, None)
        return *self.run(*inputs)[0], position

    def states(self, k: Tensor, state: MemoryState | None, initial: Any) -> tuple[list[Tensor], Tensor]:
        """The memory and its slot `[N, V, P]`, in the order of `Carry`, and its position."""
        if state is not None:
            held = [*state.memory.values(), *state.slots.values()]
            return [item.flatten(0, 1).to(self.dtype) for item in held], state.position.flatten()
        batch, _, heads, _ = k.shape
        count, found = batch * heads, []
        if initial is not None:
            weight = initial[self.name].to(self.dtype)
            weight = weight if weight.dim() > 3 else weight.expand(batch, *weight.shape)
            found.append(weight.flatten(0, 1))
        empty = 1 + self.slots - len(found)
        if empty:
            place: dict[str, Any] = {"dtype": self.dtype, "device": k.device}
            found += torch.zeros(empty, count, *self.shape, **place).unbind(0)
        return found, torch.zeros(count, dtype=torch.int64, device=k.device)

    def plain(self, *inputs: Tensor | None) -> Tensors:
        """The same as the kernels in plain torch, with the gates that they do not read."""
        memory, *slots = several(inputs[: 1 + self.slots])
        tokens = Tokens(*inputs[2 + self.slots :])  # type: ignore[arg-type]
        neutral = torch.ones_like(tokens.lr)
        tokens = tokens._replace(**{name: neutral for name in ("retain", "momentum") if getattr(tokens, name) is None})
        position = torch.zeros(len(memory), dtype=torch.int64, device=memory.device)
        carry = Carry((memory,), tuple(slots), (), (), (), (), position)
        own = kernel_of(self.config, carry, self.exact, raw=True, part=self.part)
        return own.plain(*inputs[: 2 + self.slots], *tokens)
