"""The records of a scan: a `Plan`, shared by calls that look alike, and a `Call` with its tensors. [ENG-CALL-D1]

The looks of a call are the shapes, dtypes and devices of its arguments, and which of them are given. A call with new
looks is checked for whatever a caller can get wrong, and leaves a plan. For later calls with these looks only the
numbers in the gates are checked and the tensors packed: the same ones in the same order, hence the same bits.
[ENG-CALL-D2]
"""

from __future__ import annotations

from copy import copy
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hecate.checks import swapped
from hecate.engine import arguments
from hecate.engine.arguments import FURTHER, Named
from hecate.engine.tokens import Carry, counted
from hecate.errors import ShapeError
from hecate.phi import Params
from hecate.retention import Retention
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.rule.state import slot_shapes
from hecate.structure import Memory, starts
from hecate.tape import Tensors, can_inspect, is_traced, waits

GENERAL = tuple(FURTHER)
RATES = "lr of each weight"  # as `Plan.general` has it
# For a state's `position` on a device: its version, and the place in the chunk at which all memories are known to be.
_PLACES = WeakTensorKeyDictionary()
TRACED = "torch has to see every operation here (torch.compile, torch.func, a dispatch mode)"
MOST = 64  # the most plans, and the most programs for a single token, that a config keeps
DEFAULTS, NO_PARAMS = Gates(), Params(learned={}, frozen={})
_OF_CALLS = ("flat", "inputs", "memories", "params", "retain", "seen")
_OF_TENSORS = ("flat", "inputs", "retain", "seen")
_TENSORS, NUMERIC, _LOOK = {Tensor, torch.nn.Parameter}, (float, int), attrgetter("shape", "dtype", "device")


class Inputs(NamedTuple):
    """Inputs of a scan, checked and complete: `[B, T, H, *]`, gates `[B, T, H]` (retain also per channel), masks `[B,
    T]` or None, positions `[B, T]` or None where phi needs none; and the gates of `Gates` that few rules have, `[B, T,
    H, *]` or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    lr: Tensor
    retain: Tensor
    momentum: Tensor
    write: Tensor | None = None
    reset: Tensor | None = None
    position: Tensor | None = None
    erase: Tensor | None = None
    write_gate: Tensor | None = None
    retain_value: Tensor | None = None
    floor: Tensor | None = None


class TensorsNeeded(Exception):
    """Raised where an engine asks a plan for a call's tensors: its answer then holds for that call alone."""


class Plan:
    """Everything that calls with the same looks share, without tensors. Engines decide by it whether they can run such
    calls, and an `autograd.Function` keeps nothing else of a call beside its tensors.

    Attributes:
        config: the memory's.
        length: number of tokens.
        shape: of a memory's first weight, `(V, P)` for a matrix; width: D, the width of keys.
        device: type of the device of all tensors.
        values: dtype of v, hence of the outputs; dtype: that of the computation and of states.
        channels: whether retain has one value per phi channel, `[B, T, H, P]`.
        masks: which of "write" and "reset" are given; masked: whether either is.
        general: the names of erase, write, retain_value and floor where they are given, and `RATES` where lr is.
        traced: whether torch has to see every operation.
        place: tokens since the chunk's start; None where memories differ in it or values cannot be read.
        steps: of a sketch, the number of steps in which the chunk engine takes the tokens; else None.
        by_tensors: whether the choice of an engine holds for one call only: an engine has asked for the tensors, or no
            other call uses the plan.
        choice: the engine that `choose` took last, behind what it depended on.
        looks: whether reading values is free, as on a CPU; None: not known, every tensor is asked.
        names: of phi's parameters, learned and frozen; first: where the memories begin in `Call.flat`.
        kinds: names and shapes of the weights, slots, anchor and pending tensors of one memory; counts: how many a
            state has of each kind, in the order of `Carry`; widths: P and V.
        short: an engine's short way to run such calls from the arguments as given; False if it has none, None if no
            engine was asked.
        wide: P where an unfinished chunk in the state has retain per channel, but the gate does not; else 0.
        numbered: whether phi needs positions; anchored: whether the memory forgets towards its start; starts: whether
            the retention has a `start` of its own.
        counter: the plan of the sum normaliser, if there is one; counting: whether this is such a plan.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    place: int | None = 0
    looks: bool | None = None
    choice: tuple[Any, Any] = (None, None)
    counter: Plan | None = None
    short: Any = None
    by_tensors = counting = numbered = anchored = starts = False
    first = wide = 0

    def __init__(
        self, config: MemoryConfig, *, length: int = 2, steps: int | None = None, shape: tuple[int, ...] = (64, 64),
        device: str = "cpu", dtype: torch.dtype = torch.float32, values: torch.dtype = torch.float32,
        masks: tuple[str, ...] = (), general: tuple[str, ...] = (), channels: bool = False, traced: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.length, self.steps, self.shape, self.device = config, length, steps, shape, device
        self.dtype, self.values, self.masks, self.general, self.channels = dtype, values, masks, general, channels
        self.masked, self.traced = masks != (), traced

    @classmethod
    def sketch(cls, config: MemoryConfig, *, steps: int = 0, masked: bool = False, **attributes: Any) -> Plan:
        """A plan without a call, to find out which engine would run one; `attributes` are those of `__init__`."""
        masks = ("write", "reset") if masked else ()
        return cls(config, steps=steps, masks=masks, general=config.gating.gates, **attributes)

    @classmethod
    def of(
        cls, config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates, params: Params,
        state: MemoryState | None, initial: Named | None, write: Tensor | None, reset: Tensor | None,
    ) -> Plan:  # fmt: skip
        """From the arguments of `memory_scan`, all of which it checks, except for the numbers in gates."""
        check_alike(q, k, v, write, reset)
        arguments.check_gates(config, gates, k, v)
        arguments.check_held(config, state)
        if initial is not None:
            arguments.check_named("initial", initial)
        arguments.check_position(config, state, k)
        pending_retain, retain = None if state is None else state.pending.get("retain"), gates.retain
        channels = isinstance(retain, Tensor) and retain.dim() == 4
        wide = 0 if pending_retain is None or pending_retain.dim() < 3 or channels else pending_retain.shape[-1]
        masks = tuple(name for name, mask in (("write", write), ("reset", reset)) if mask is not None)
        general = tuple(name for name in GENERAL if getattr(gates, name) is not None)
        if isinstance(gates.lr, Tensor) and gates.lr.dim() == 4:
            general = (*general, RATES)
        channels = channels or wide > 0
        looks: Any = {"length": v.shape[1], "device": v.device.type, "values": v.dtype, "channels": channels}
        dtype = state_dtype(config, q, k, v, initial if state is None else state.memory)
        names = tuple(params["learned"]), tuple(params["frozen"])

        def blank() -> Plan:  # called twice, as not every version of torch.compile can trace a copy
            plan = cls(config, dtype=dtype, masks=masks, general=general, **looks)
            plan.wide, plan.by_tensors = wide, True
            plan.numbered, plan.anchored = config.feature_map.needs_position, config.retention.anchored
            plan.names, plan.first = names, len(Inputs._fields) + sum(map(len, names))
            return plan

        plan = blank()
        if config.normalizer != "none":  # the same memory with bias dot and the value 1 at every token
            plan.counter = blank()
            plan.counter.counting = True
            plan.counter._lay_out(config.counting, None if state is None else state.normalizer, None, k, 1)
        plan._lay_out(config, state, initial, k, v.shape[-1])
        return plan

    @classmethod
    def around(cls, config: MemoryConfig, flat: Tensors, names: tuple[tuple[str, ...], tuple[str, ...]]) -> Plan:
        """The plan of a call that is known by its tensors, `Call.flat`, and by the names of phi's parameters."""
        inputs = Inputs(*flat[: len(Inputs._fields)])  # type: ignore[arg-type]
        general = tuple([name for name, gate in zip(GENERAL, inputs[9:], strict=True) if gate is not None])
        first, v = len(inputs) + sum(map(len, names)), inputs.v
        looks: dict[str, Any] = {
            "length": v.shape[1], "device": v.device.type, "values": v.dtype, "dtype": flat[first].dtype,  # type: ignore[union-attr]
            "masks": tuple([name for name in ("write", "reset") if getattr(inputs, name) is not None]),
            "general": (*general, RATES) if inputs.lr.dim() == 4 else general, "channels": inputs.retain.dim() == 4,
        }  # fmt: skip
        plans: list[Any] = [None]
        # The sum normaliser's first, which the memory's holds.
        for counting in (True, False) if config.normalizer != "none" else (False,):
            plan = cls(config, **looks)
            plan.names, plan.first, plan.counting, plan.counter, plan.by_tensors = (
                names,
                first,
                counting,
                plans[-1],
                True,
            )
            plan._lay_out(config.counting if counting else config, None, None, inputs.k, 1 if counting else v.shape[-1])
            plans.append(plan)
        return plans[-1]

    def _lay_out(
        self, config: MemoryConfig, state: MemoryState | None, initial: Named | None, k: Tensor, d_v: int
    ) -> None:
        """Fills in the shapes of one memory's tensors, and checks the given state and initial weights against them."""
        batch, _, heads, width = k.shape
        d_phi = config.feature_map.output_dim(width)
        shapes = config.structure.shapes(d_phi, d_v)
        slots, pending = slot_shapes(config, shapes, d_phi, d_v), dict(shapes) if config.commit == "chunk" else {}
        summed, anchor = len(pending), shapes if config.frozen_gradients else {}
        if config.accumulated_retain:
            pending["retain"] = (d_phi,) if self.channels else ()
        if count := config.remembered_keys:
            pending["keys"] = (count, d_phi + 1)
        self.config, self.width, self.widths, self.place = config, width, (d_phi, d_v), place_of(config, state)
        self.kinds, self.shape = (shapes, slots, anchor, pending), next(iter(shapes.values()))
        self.counts = (len(shapes), len(slots), len(anchor), summed, int("retain" in pending), int("keys" in pending))
        self.starts = type(config.retention).start is not Retention.start
        if initial is not None:
            arguments.check_tensors("initial", initial, {n: (heads, *s) for n, s in shapes.items()}, k, batch=batch)
        if state is None:
            return
        pending_retain, fields = state.pending.get("retain"), ("memory", "slots", "anchor", "pending")
        for field, wanted in zip(fields, self.kinds, strict=True):
            tensors = getattr(state, field)
            if field == "pending" and pending_retain is not None and pending_retain.dim() == 2 and "retain" in wanted:
                wanted = {**wanted, "retain": ()}  # the chunk began with one retain per head
            arguments.check_tensors(f"state.{field}", tensors, {n: (batch, heads, *s) for n, s in wanted.items()}, k)
        if state.position.shape != (batch, heads) or state.position.device != k.device:
            raise ShapeError(
                f"state.position must be {[batch, heads]} on {k.device}, got {list(state.position.shape)} on "
                f"{state.position.device}"
            )

    @property
    def tensors(self) -> Call:
        """Raises `TensorsNeeded`: a plan has none. `choose` then asks the engine again with the call, every time."""
        if self.steps is not None:
            raise AttributeError("a sketch has no tensors")
        self.by_tensors = True
        raise TensorsNeeded

    def __getattr__(self, name: str) -> Any:
        if name in _OF_CALLS and self.steps is None:
            return self.tensors
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    # A call of the plan.

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, params: Params, state: MemoryState | None,
        initial: Named | None, write: Tensor | None, reset: Tensor | None, *, whole: bool = False,
    ) -> Call:  # fmt: skip
        """A call from arguments that look like those of the plan; refuses numbers in gates that are out of range. Where
        an engine has a short way, the tensors are packed only when asked for, or at once if `whole`."""
        if self.short and not whole:  # where no number has to be checked
            return Call(self, None, traced=False, arguments=(q, k, v, gates, params, state, initial, write, reset))
        (lr, retain, momentum), further = arguments.filled_gates(self.config, gates, k, write, self.looks)
        if self.wide:
            retain = retain.unsqueeze(-1).expand(*retain.shape, self.wide)
        position, count = None, None
        if self.numbered:
            position, count = counted(_count(state, k), write, reset, k.shape[1])
        flat = [q, k, v, lr, retain, momentum, write, reset, position, *further]
        flat += [*params["learned"].values(), *params["frozen"].values()]
        returns, plan = reset is not None or self.anchored, self
        while plan is not None:
            fresh = plan.weights(initial, k) if state is None or returns else {}
            carry = plan.fresh(fresh, k) if state is None else plan.flattened(state)
            # Not the state's tensors, even where it starts at these weights: a program takes them as two inputs.
            flat += [item.flatten(0, 1) for item in fresh.values()] if returns else carry[: plan.counts[0]]
            flat += carry
            state, plan = None if state is None else state.normalizer, plan.counter  # type: ignore[assignment]
        return Call(self, tuple(flat), count, traced=None if self.looks is None else False)

    def weights(self, initial: Named | None, k: Tensor) -> Named:
        """Weights at which a memory starts and restarts, `[B, H, ...]` by name: 0 for a sum normaliser."""
        (batch, _, heads, _), dtype, shapes = k.shape, self.dtype, self.kinds[0]
        if self.counting:
            initial = {name: torch.zeros(heads, *shape, dtype=dtype, device=k.device) for name, shape in shapes.items()}
        elif initial is None:
            initial = starts(self.config.structure, *self.widths, heads=heads, dtype=dtype, device=k.device)
        weights: Named = {}
        for name, shape in shapes.items():
            weight = initial[name].to(dtype)
            lead = weight.shape[: weight.dim() - len(shape)]
            if self.starts:
                start = self.config.retention.start(weight.reshape(lead.numel(), *shape))
                if start.shape[1:] != shape:
                    retention = self.config.retention
                    raise ShapeError(f"start of {retention!r} must be [N, *{list(shape)}], got {list(start.shape)}")
                weight = start.reshape(weight.shape)
            weights[name] = weight if len(lead) == 2 else weight.expand(batch, *weight.shape)
        return weights

    def fresh(self, weights: Named, k: Tensor) -> list[Tensor]:
        """The state before the first token, from starting weights, in the order of `Carry`."""
        _, slots, anchor, pending = self.kinds
        tensors = []
        for item in weights.values():  # no comprehension, which is a frame in every call
            tensors.append(item.flatten(0, 1))
        count, like = k.shape[0] * k.shape[2], tensors[0]
        for shape in slots.values():
            tensors.append(like.new_zeros(count, *shape))
        tensors += [item.flatten(0, 1) for item in weights.values()] if anchor else []
        for name, shape in pending.items():
            tensors.append((like.new_ones if name == "retain" else like.new_zeros)(count, *shape))
        tensors.append(torch.zeros(count, dtype=torch.int64, device=like.device))
        return tensors

    def flattened(self, state: MemoryState) -> list[Tensor]:
        """The state to go on from, floats in the state's dtype, in the order of `Carry`."""
        flat: list[Tensor] = []
        for shapes, tensors in zip(self.kinds, state[:4], strict=True):
            for name, shape in shapes.items():
                item = tensors[name]
                if name == "retain" and item.dim() < 2 + len(shape):
                    item = item.unsqueeze(-1).expand(*item.shape, *shape)
                item = item.flatten(0, 1)
                flat.append(item.to(self.dtype) if item.is_floating_point() else item)
        flat.append(state.position.flatten())
        return flat


def looks_in(arguments: Any, tensors: list[Any]) -> list[object] | None:
    """The looks of arguments: everything about them except the numbers in their tensors, which are appended to
    `tensors`. None if one is neither None, a number, a tensor nor a dict of tensors."""
    looks: list[object] = []
    for item in arguments:
        if item is None:
            looks.append(None)
        elif type(item) is dict:
            looks.append(tuple(item))
            tensors += item.values()
        elif type(item) in NUMERIC:
            looks += (type(item), item)
        else:
            looks.append(Tensor)
            tensors.append(item)
    return [*looks, *map(_LOOK, tensors)] if _TENSORS.issuperset(map(type, tensors)) else None


class Call:
    """One scan: its plan, and its tensors. It has all attributes of its plan, too.

    `flat` has the inputs in the order of `Inputs`, phi's parameters, and for the memory, then for its sum normaliser
    if there is one, the weights at which memories restart and the state, `[N, ...]` of N = B H memories in the order of
    `Carry`. Other tensors of the same plan make another call: `Call(plan, flat)`.

    Attributes:
        inputs: q, k, v, gates, masks and positions, not yet cast or mapped to phi-space.
        retain: the gates `[B, T, H]` or `[B, T, H, P]`.
        seen: number of tokens after the last, where phi needs positions.
        traced: whether torch has to see every operation.
    """

    def __init__(
        self, plan: Plan, flat: Tensors | None, seen: Tensor | None = None, *, traced: bool | None = None,
        arguments: tuple[Any, ...] | None = None,
    ) -> None:  # fmt: skip
        """`flat` may be None: it is then packed from `arguments` when first asked for."""
        self.plan, self.config, self.given = plan, plan.config, arguments
        if traced is not None:
            self.traced = traced
        if flat is not None:
            self.flat, self.seen = flat, seen
            self.inputs = Inputs(*flat[: len(Inputs._fields)])  # type: ignore[arg-type]
            self.retain = self.inputs.retain

    @classmethod
    def of(
        cls, config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None, *,
        phi_params: Params | None = None, state: MemoryState | None = None, initial: Named | None = None,
        write_mask: Tensor | None = None, reset_mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> Call:  # fmt: skip
        """From the arguments of `memory_scan`: by the plan of an earlier call with the same looks, or else checked."""
        gates, params = DEFAULTS if gates is None else gates, NO_PARAMS if phi_params is None else phi_params
        if cu_seqlens is not None:
            arguments.check_tokens(q, k, v)
            reset_mask = arguments.document_starts(reset_mask, cu_seqlens, k, going_on=state is not None)
        options = (state, initial, write_mask, reset_mask)
        looks = _looks(config, q, k, v, gates, params, *options)
        if (plan := None if looks is None else config.plans.get(looks)) is None:
            plans, config = getattr(config, "plans", {}), arguments.check_config(config)
            arguments.check_tokens(q, k, v)
            params = arguments.check_params(config.feature_map, phi_params, k)
            plan = Plan.of(config, q, k, v, gates, params, *options)
            if looks is not None:
                plan.by_tensors, plan.looks = False, not waits(k)
                keep(plans, looks, plan)
        return plan.call(q, k, v, gates, params, *options)

    def __getattr__(self, name: str) -> Any:
        if name == "plan":  # while `copy` makes the object
            raise AttributeError(name)
        if name == "traced":  # not known from the looks
            self.traced = is_traced(*self.flat)
            return self.traced
        if name in _OF_TENSORS:
            whole = self.plan.call(*self.given, whole=True)  # type: ignore[misc]
            self.flat, self.seen, self.inputs, self.retain = whole.flat, whole.seen, whole.inputs, whole.retain
            return vars(self)[name]
        return getattr(self.plan, name)

    @property
    def tensors(self) -> Call:
        """Itself."""
        return self

    # What an engine runs on.

    @property
    def params(self) -> Params:
        """phi's parameters."""
        learned, frozen = self.plan.names
        phi: list[Any] = list(self.flat[len(Inputs._fields) : self.plan.first])
        split = len(learned)
        return {"learned": dict(zip(learned, phi, strict=False)), "frozen": dict(zip(frozen, phi[split:], strict=True))}

    @property
    def memories(self) -> list[tuple[Memory, Carry]]:
        """(restart weights, state) of the memory, and of its sum normaliser if there is one."""
        counts, at, flat = self.plan.counts, self.plan.first, self.flat
        memories: list[tuple[Memory, Carry]] = []
        while at < len(flat):
            split = at + counts[0]
            memories.append((flat[at:split], Carry.of(counts, flat, split)))  # type: ignore[arg-type]
            at = split + sum(counts) + 1
        return memories

    def of_normalizer(self) -> Call:
        """The call of the sum normaliser: its config and place; the tensors are still those of the whole call."""
        return Call(self.plan.counter, self.flat)  # type: ignore[arg-type]

    def rewritten(self, write: Tensor) -> Call:
        """The same call with another write mask."""
        plan, inputs = copy(self.plan), self.inputs._replace(write=write)
        plan.masks, plan.masked, plan.short = ("write", *plan.masks), True, None
        return Call(plan, (*inputs, *self.flat[len(inputs) :]), self.seen)

    def result(self, outputs: Tensors) -> tuple[Tensor, MemoryState]:
        """y, and the state with its tensors by name, from an engine's outputs: y and the states' tensors in order."""
        y, *flat = outputs
        states: list[MemoryState] = []
        lead, plan = (y.shape[0], y.shape[2]), self.plan  # type: ignore[union-attr]
        for at in range(0, len(flat), sum(plan.counts) + 1):
            carry = Carry.of(plan.counts, tuple(flat), at)
            states.append(named_state(tuple(plan.kinds[0]), tuple(plan.kinds[1]), carry, lead))
        if self.config.chunk > 1 and not plan.masks:
            _remember(self, states)
        normalizer = states[1] if len(states) > 1 else None
        if normalizer is None and not plan.numbered:
            return y, states[0]  # type: ignore[return-value]
        return y, states[0]._replace(normalizer=normalizer, seen=self.seen)  # type: ignore[return-value]


def _looks(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates, params: Params, state: MemoryState | None,
    initial: Named | None, write: Tensor | None, reset: Tensor | None,
) -> tuple[object, ...] | None:  # fmt: skip
    """The looks of a call: all that checks and engines may depend on, except its numbers. None where torch has to see
    every operation, which a scan asks torch here and nowhere else, and where an argument is of a wrong type."""
    plain = isinstance(config, MemoryConfig) and type(gates) is Gates and type(params) is dict
    if torch.compiler.is_compiling() or not plain or params.keys() != NO_PARAMS.keys():
        return None
    arguments: tuple[Any, ...] = (*gates, write, reset, initial, params["learned"], params["frozen"])
    if state is not None:
        if type(state) is not MemoryState or type(state.normalizer) not in (type(None), MemoryState):
            return None
        *fields, normalizer, count, readout = state
        arguments += (*fields, count, readout, *(normalizer or ()))
    tensors: list[Any] = [q, k, v]
    looks = looks_in(arguments, tensors)
    if looks is None or is_traced(*tensors):
        return None
    places = None if config.chunk == 1 or state is None else (place_of(config, state), place_of(config, normalizer))
    return (len(arguments), places, *looks)


def keep(cache: dict[Any, Any], looks: object, entry: Any) -> None:
    """Stores an entry for calls with these looks, in place of the oldest if there are `MOST`."""
    if len(cache) >= MOST:
        cache.pop(next(iter(cache)), None)
    cache[looks] = entry


def carry_of(state: MemoryState) -> Carry:
    """A state's tensors by name, `[B, H, ...]`, as `[N, ...]` in order."""
    pending = dict(state.pending)
    retain, keys = pending.pop("retain", None), pending.pop("keys", None)
    rest = {} if retain is None else {"retain": retain}, {} if keys is None else {"keys": keys}
    kinds: list[Any] = []
    for tensors in (state.memory, state.slots, state.anchor, pending, *rest):
        flat: list[Tensor] = []
        for item in tensors.values():
            flat.append(item.flatten(0, 1))
        kinds.append(tuple(flat))
    return Carry(*kinds, state.position.flatten())  # type: ignore[call-arg]


def named_state(weights: tuple[str, ...], slots: tuple[str, ...], carry: Carry, lead: tuple[int, ...]) -> MemoryState:
    """A state's tensors `[N, ...]` by name, `[B, H, ...]`."""
    fields: list[Any] = []
    kinds = carry.memory, carry.slots, carry.anchor, carry.pending
    for names, tensors in zip((weights, slots, weights, weights), kinds, strict=True):
        named = {}
        for name, tensor in zip(names, tensors, strict=False):
            named[name] = tensor.unflatten(0, lead)
        fields.append(named)
    for name, tensors in (("retain", carry.pending_retain), ("keys", carry.keys)):
        if tensors:
            fields[3][name] = tensors[0].unflatten(0, lead)
    return MemoryState(*fields, carry.position.unflatten(0, lead))  # type: ignore[call-arg]


def state_dtype(config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, weights: Named | None) -> torch.dtype:
    """The dtype of a state: the highest precision among the config, the inputs and the weights to go on from or start
    at."""
    dtype = config.dtype
    for tensor in (q, k, v, *(() if weights is None else weights.values())):
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def place_of(config: MemoryConfig, state: MemoryState | None) -> int | None:
    """Tokens since the chunk's start, 0 without a state; None if memories differ in it or values cannot be read.

    Reading values waits for the device, so that is done only where there are chunks, and the call that made the state
    has not noted the place."""
    if config.chunk == 1 or state is None or state.position.numel() == 0:
        return 0
    if not can_inspect(state.position):
        return None
    version, place = _PLACES.get(state.position, (None, 0))
    if version is not None and version == state.position._version:  # inference tensors have none
        return place
    low, high = torch.stack(state.position.aminmax()).tolist()
    return low if low == high and low >= 0 else None


def _remember(call: Call, states: list[MemoryState]) -> None:
    """Notes the place at which each state ends, if known, so that the next call need not read it from the device."""
    chunk, first = call.config.chunk, states[0].position
    if not waits(first) or call.traced or first.is_inference():
        return
    for plan, state in zip((call.plan, call.plan.counter), states):  # noqa: B905
        place = plan.place  # type: ignore[union-attr]
        if place is not None and place < chunk:
            _PLACES[state.position] = state.position._version, (place + call.length) % chunk


def complete(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, write_mask: Tensor | None,
    reset_mask: Tensor | None, cu_seqlens: Tensor | None, *, going_on: bool = False,
) -> Inputs:  # fmt: skip
    """The inputs of a scan, checked, with every gate as a tensor."""
    arguments.check_tokens(q, k, v)
    if cu_seqlens is not None:
        reset_mask = arguments.document_starts(reset_mask, cu_seqlens, k, going_on=going_on)
    check_alike(q, k, v, write_mask, reset_mask)
    gates = DEFAULTS if gates is None else gates
    arguments.check_gates(config, gates, k, v)
    first, further = arguments.filled_gates(config, gates, k, write_mask)
    return Inputs(q, k, v, *first, write_mask, reset_mask, None, *further)  # type: ignore[call-arg]


def check_alike(q: Tensor, k: Tensor, v: Tensor, write: Tensor | None, reset: Tensor | None) -> None:
    """Refuses tokens and masks that are not of the same sequences."""
    if q.shape != k.shape or v.shape[:3] != k.shape[:3]:
        raise ShapeError(
            f"q and k must be [B, T, H, D] and v [B, T, H, V] with equal B, T, H; got q {list(q.shape)}, k "
            f"{list(k.shape)}, v {list(v.shape)}{swapped(v.shape, k.shape) or swapped(q.shape, k.shape)}"
        )
    arguments.check_mask("write_mask", write, k)
    arguments.check_mask("reset_mask", reset, k)


# Positions of tokens, counted across calls, for feature maps that depend on them.


def numbered(config: MemoryConfig, state: MemoryState | None, inputs: Inputs) -> tuple[Inputs, Tensor | None]:
    """The inputs with the positions of their tokens, and the number of tokens after the last.

    A position is the number of tokens written since the start or the last reset; both are None where phi needs none.
    [ENG-POS-D1]
    """
    arguments.check_position(config, state, inputs.k)
    if not config.feature_map.needs_position:
        return inputs, None
    position, count = counted(_count(state, inputs.k), inputs.write, inputs.reset, inputs.k.shape[1])
    return inputs._replace(position=position), count


def _count(state: MemoryState | None, k: Tensor) -> Tensor:
    count = None if state is None else state.seen
    return torch.zeros(k.shape[:1], dtype=torch.int64, device=k.device) if count is None else count
