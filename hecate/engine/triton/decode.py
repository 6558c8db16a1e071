"""One token in place: the state on buffers of its own, one launch of the loop kernel, nothing that waits for the
device, so that a CUDA graph may hold it. [ENG-TRITON-D6]"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from hecate.engine.call import Call
from hecate.engine.features import to_tokens
from hecate.engine.one_token import looks_of
from hecate.engine.triton.engine import no_step
from hecate.errors import ConfigError
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import execute


def expect_in_place(config: MemoryConfig) -> None:
    """Refuses configs whose promises a state that is overwritten cannot keep."""
    if config.on_nonfinite != "propagate":
        raise ConfigError(
            f"in_place=True overwrites the state that on_nonfinite={config.on_nonfinite!r} goes back to; choose "
            "on_nonfinite='propagate' or in_place=False"
        )
    for name, plain, value in (
        ("normalizer", config.normalizer == "none", config.normalizer),
        ("readout", config.readout.plain, config.readout.kind),
        ("writes", config.writes == 1, config.writes),
        ("feature_map", not config.feature_map.needs_position, config.feature_map.kind),
    ):
        if not plain:
            raise ConfigError(f"in_place=True holds one state and nothing beside it, and {name}={value!r} needs more")


class InPlace:
    """The buffers of a memory and the steps on them.

    Attributes:
        state: over the buffers, which every call overwrites; None before `adopt`.
    """

    def __init__(self, config: MemoryConfig, params: Params | None) -> None:
        expect_in_place(config)
        self.config, self.params = config, params
        self.state: MemoryState | None = None
        self.plans: dict[tuple[object, ...], tuple[Gates, Tensor]] = {}  # what tokens look like: numbers, and y

    def adopt(self, state: MemoryState) -> MemoryState:
        """The buffers with the numbers of a state; new ones where its tensors have other shapes or places."""
        own = self.state
        pairs = [] if own is None else list(zip(_tensors(own), _tensors(state), strict=True))
        if pairs and all([(a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in pairs]):
            for a, b in pairs:
                a.copy_(b)
        else:
            self.plans.clear()
            with torch.inference_mode(False):
                held = [
                    {name: item.detach().clone().contiguous() for name, item in named.items()} for named in state[:2]
                ]
                own = state._replace(memory=held[0], slots=held[1])
        self.state = own
        return own  # type: ignore[return-value]

    def plan(self, looks: tuple[object, ...], token: tuple[Tensor, Tensor, Tensor], gates: Gates) -> None:
        """Makes what tokens of some looks need: gates that are numbers as tensors, and room for y.

        Raises:
            ConfigError: the kernel cannot take them.
        """
        q, k, v = (item.unsqueeze(1) for item in token)
        call = Call.of(self.config, q, k, v, _timed(gates), state=self.state, phi_params=self.params)
        if (reason := no_step(call)) is not None:
            raise ConfigError(f"in_place=True takes tokens in a kernel of engine 'triton', which cannot: {reason}")
        inputs = call.inputs
        with torch.inference_mode(False):
            found: dict[str, Any] = {"lr": inputs.lr, "retain": inputs.retain, "momentum": inputs.momentum}
            found |= {"erase": inputs.erase, "write": inputs.write_gate, "retain_value": inputs.retain_value}
            taken = (*self.config.forms.gates, True, True, True)
            numbers = {
                name: item.detach().clone()
                for (name, item), needed in zip(found.items(), taken, strict=True)
                if needed and item is not None and not isinstance(getattr(gates, name), Tensor)
            }
            self.plans[looks] = Gates(**numbers), torch.empty_like(v, memory_format=torch.contiguous_format)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None) -> Tensor:
        """y `[B, H, V]` of one token, in a buffer that the next call overwrites; a state was adopted before."""
        state, gates = self.state, Gates() if gates is None else gates
        if state is None:
            raise TypeError("no state was adopted")
        looks = looks_of(q, k, v, gates, state, self.params, None)
        if looks is None:
            raise ConfigError("in_place=True records no gradients; call it under torch.no_grad(), outside transforms")
        if looks not in self.plans:
            self.plan(looks, (q, k, v), gates)
        numbers, y = self.plans[looks]
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        timed = _timed(gates)._replace(**{name: item for name, item in numbers._asdict().items() if item is not None})
        with torch.no_grad():
            call = Call.of(self.config, q, k, v, timed, phi_params=self.params, state=state)
            tokens = to_tokens(call.config, call.inputs, call.params, torch.float32, execute)
            ((_, carry),) = call.memories
            loop = importlib.import_module("hecate.engine.triton.loops").Loop
            loop(self.config, None, (*carry.memory, *carry.slots, None, *tokens)).step(y)
        return y.squeeze(1)


def _tensors(state: MemoryState) -> list[Tensor]:
    return [*state.memory.values(), *state.slots.values()]


def _timed(gates: Gates) -> Gates:
    """With an axis of time."""
    return Gates(*(gate.unsqueeze(1) if isinstance(gate, Tensor) else gate for gate in gates))  # type: ignore[arg-type]
