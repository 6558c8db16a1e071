"""One token in place: the state lives in buffers, a step is one launch of the one-token kernel, and nothing waits for
the device, so a CUDA graph can capture it. [ENG-TRITON-D6]"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.engine.call import Call
from hecate.engine.features import to_tokens
from hecate.engine.one_token import looks_of
from hecate.engine.triton.engine import no_step, raw_token
from hecate.errors import ConfigError
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import execute, waits


def expect_in_place(config: MemoryConfig) -> None:
    """Refuses configs that need an earlier state again, or anything beside the one state."""
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


class Plan(NamedTuple):
    """Shared by tokens of one signature: tensors in the kernel's order for arguments that the caller leaves out, else
    None; the output buffer; the launch, None if torch computes the features; whether every call checks gate values."""

    numbers: list[Tensor | None]
    y: Tensor
    launch: Callable[[list[Tensor]], None] | None
    checks: bool = False


class InPlace:
    """The state buffers of a memory, and steps that overwrite them.

    Attributes:
        state: a view of the buffers, overwritten by every call; None before `adopt`.
    """

    def __init__(self, config: MemoryConfig, params: Params | None) -> None:
        expect_in_place(config)
        self.config, self.params = config, params
        self.state: MemoryState | None = None
        self.plans: dict[tuple[object, ...], Plan] = {}  # by a token's signature, strides included

    def adopt(self, state: MemoryState) -> MemoryState:
        """Copies a state into the buffers, or into new ones if shapes, dtypes or devices differ, and returns them."""
        buffers = self.state
        pairs = [] if buffers is None else list(zip(_tensors(buffers), _tensors(state), strict=True))
        if pairs and all([(a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in pairs]):
            for a, b in pairs:
                a.copy_(b)
        else:
            self.plans.clear()
            # Buffers outlive a caller's inference mode, and are also written outside of it.
            with torch.inference_mode(False):
                copies = [
                    {name: item.detach().clone().contiguous() for name, item in named.items()} for named in state[:2]
                ]
                buffers = state._replace(memory=copies[0], slots=copies[1])
        self.state = buffers
        return buffers  # type: ignore[return-value]

    def plan(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> Plan:
        """Prepares what tokens of one signature need.

        Raises:
            ConfigError: the kernel cannot take them.
        """
        call = self.call(q, k, v, gates)
        if (reason := no_step(call)) is not None:
            raise ConfigError(f"in_place=True takes tokens in a kernel of engine 'triton', which cannot: {reason}")
        # The kernel takes erase and write together: ones stand in for a missing one.
        inputs, keys = call.inputs, None if gates.erase is gates.write is None else torch.ones_like(call.inputs.lr)
        retain = inputs.retain if self.config.retention.uses_retain else None
        momentum = inputs.momentum if self.config.algorithm.slots else None
        both = (keys if x is None else x for x in (inputs.erase, inputs.write_gate))
        tensors = (*inputs[:4], retain, momentum, *both, inputs.retain_value)
        with torch.inference_mode(False):
            y = torch.empty_like(v, memory_format=torch.contiguous_format)
            arguments = [
                None if x is None else passed if isinstance(passed, Tensor) else x.detach().squeeze(1).clone()
                for x, passed in zip(tensors, (q, k, v, *gates), strict=False)
            ]
        pairs = zip(arguments, (q, k, v, *gates), strict=False)
        numbers = [y if x is None else None if x is passed else x for x, passed in pairs]
        launch = self.launch(True, arguments, y) if raw_token(self.config) else None
        return Plan(numbers, y, launch, checks=not waits(k))

    def call(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> Call:
        """The validated call of a token."""
        timed = Gates(*(x.unsqueeze(1) if isinstance(x, Tensor) else x for x in gates))  # type: ignore[arg-type]
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        with torch.no_grad():
            return Call.of(self.config, q, k, v, timed, state=self.state, phi_params=self.params)

    def launch(self, raw: bool, given: list[Tensor | None], y: Tensor) -> Any:
        """The launch of the one-token kernel for tensors like these."""
        launcher = importlib.import_module("hecate.engine.triton.loops").OneToken
        return launcher(self.config, raw, _tensors(self.state), given, y)  # type: ignore[arg-type]

    def features(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> list[Tensor | None]:
        """A token's features, value, lr, retain and momentum, made in torch when the kernel lacks its map or step."""
        gates, taken = gates._replace(erase=None, write=None, retain_value=None), self.config.forms.gates
        entries = zip(gates._fields, plan.numbers[3:6], taken, strict=False)
        numbers = {name: x for name, x, needed in entries if needed and x is not None and x is not plan.y}
        call = self.call(q, k, v, gates._replace(**numbers))
        with torch.no_grad():
            tokens = to_tokens(call.config, call.inputs, call.params, torch.float32, execute)
        return [x.squeeze(1) for x in (tokens.phi_q, tokens.phi_k, *tokens[2:6])]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None) -> Tensor:
        """y `[B, H, V]` of one token, in a buffer that the next call overwrites; needs a state from `adopt`."""
        state, gates = self.state, Gates() if gates is None else gates
        if state is None:
            raise TypeError("no state was adopted")
        looks = looks_of(q, k, v, gates, state, self.params, None)
        if looks is None:
            raise ConfigError("in_place=True records no gradients; call it under torch.no_grad(), outside transforms")
        # The launch depends on strides, which `looks_of` leaves out.
        looks += tuple([x.stride() for x in (q, k, v, *gates) if isinstance(x, Tensor)])
        plan = self.plans.get(looks)
        if plan is None:
            self.plans[looks] = plan = self.plan(q, k, v, gates)
        elif plan.checks and plan.launch is not None:
            self.call(q, k, v, gates)
        args: list[Any] = [arg if x is None else x for x, arg in zip(plan.numbers, (q, k, v, *gates))]  # noqa: B905
        if plan.launch is None:
            args[:6] = self.features(plan, q, k, v, gates)
            there = [None if number is plan.y else x for number, x in zip(plan.numbers, args, strict=True)]
            self.launch(False, there, plan.y)(args)
        else:
            plan.launch(args)
        return plan.y


def _tensors(state: MemoryState) -> list[Tensor]:
    return [*state.memory.values(), *state.slots.values()]
