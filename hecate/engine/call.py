"""The one record of a scan: checked once, packed once, read by engines, layers and the microscope. [ENG-CALL-D1]"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hecate.checks import described, swapped
from hecate.engine.arguments import (
    Named,
    Shapes,
    check_config,
    check_mask,
    check_named,
    check_normalizer,
    check_params,
    check_readout,
    check_state,
    check_tensors,
    check_tokens,
    complete_gates,
    document_starts,
    general_gates,
)
from hecate.engine.tokens import NUMBERS, Carry
from hecate.errors import ShapeError
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.rule.state import initial_state, slot_shapes
from hecate.structure import Memory, starts
from hecate.tape import Tensors, can_inspect, is_traced, waits

GENERAL = (
    "erase",
    "write",
    "retain_value",
    "floor",
)  # the gates of `Gates` that come after the three that every rule has
RATES = "lr of each weight"  # as `Call.general` has it
# By a state's `position` on a device: its version, and the place in the chunk that all its memories are known to be at.
_PLACES = WeakTensorKeyDictionary()
TRACED = "torch has to see every operation here (torch.compile, torch.func, a dispatch mode)"


class Sequence(NamedTuple):
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


class Spec(NamedTuple):
    """A call without its tensors: what an `autograd.Function` may keep.

    Fields:
        config: the memory's.
        dtype: in which everything is computed and states are held.
        params: names of phi's parameters, learned and frozen.
        weights, slots: names of the state's tensors.
        counts: how many a state has of each kind, in the order of `Carry`.
        places: tokens since the chunk's start of the memory and, where it has one, its sum normaliser; None where they
            differ between memories or may not be looked at.
    """

    config: MemoryConfig
    dtype: torch.dtype
    params: tuple[tuple[str, ...], tuple[str, ...]]
    weights: tuple[str, ...]
    slots: tuple[str, ...]
    counts: tuple[int, ...]
    places: tuple[int | None, ...]


class Call:
    """One scan.

    `flat` has the inputs in the order of `Sequence`, phi's parameters, and for the memory, then for its sum normaliser
    if there is one, the weights at which memories restart and the state, `[N, ...]` of N = B H memories in the order of
    `Carry`. Other tensors of the same spec make another call: `Call(spec, flat)`.

    Attributes that engines ask for:
        length: number of tokens.
        steps: in how many the chunk engine takes them, where a sketch tells it.
        shape: of a memory's first weight, `(V, P)` for a matrix.
        device: type of the device of all tensors.
        dtype: of the state.
        values: dtype of v.
        retain: the gates `[B, T, H]` or `[B, T, H, P]`; None in a sketch that does not tell them.
        masks: which of the masks write and reset there are; masked: whether any.
        general: the names of erase, write, retain_value and floor where they are given, and `RATES` where lr is.
        traced: whether torch has to see every operation.
    """

    steps: int | None = None
    general: tuple[str, ...] = ()

    def __init__(self, spec: Spec, flat: Tensors, seen: Tensor | None = None) -> None:
        """`seen` counts tokens after the last, where phi needs positions."""
        self.spec, self.config, self.flat, self.seen = spec, spec.config, flat, seen
        self._traced: bool | None = None
        self.first = len(Sequence._fields) + len(spec.params[0]) + len(spec.params[1])  # where the memories begin
        v, weight = flat[2], flat[self.first]
        self.length, self.device, self.values, self.dtype = v.shape[1], v.device.type, v.dtype, spec.dtype  # type: ignore[union-attr]
        self.shape, self.retain = tuple(weight.shape[1:]), flat[4]  # type: ignore[union-attr]
        write, reset, _, erase, written, kept, floor = flat[NUMBERS : len(Sequence._fields)]
        self.masks = *(("write",) if write is not None else ()), *(("reset",) if reset is not None else ())
        self.masked = self.masks != ()
        if not erase is written is kept is floor is None:
            given = zip(GENERAL, (erase, written, kept, floor), strict=True)
            self.general = tuple(name for name, gate in given if gate is not None)
        if flat[3].dim() == 4:  # type: ignore[union-attr]
            self.general = (*self.general, RATES)

    @classmethod
    def of(
        cls,
        config: MemoryConfig,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates | None = None,
        *,
        phi_params: Params | None = None,
        state: MemoryState | None = None,
        initial: Named | None = None,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Call:
        """From the arguments of `memory_scan`: checks all that a caller can get wrong."""
        config = check_config(config)
        inputs = complete(config, q, k, v, gates, write_mask, reset_mask, cu_seqlens, going_on=state is not None)
        if state is not None:
            check_state(state)
            check_readout(config, state)
            inputs = _as_wide_as(state, inputs)
        if initial is not None:
            check_named("initial", initial)
        inputs, seen = numbered(config, state, inputs)
        params = check_params(config.feature_map, phi_params, k)
        dtype = state_dtype(config, q, k, v, initial if state is None else state.memory)
        if state is not None:
            check_normalizer(config, state)
        own, start, carry = _memory(config, state, initial, inputs, dtype, v.shape[-1])
        flat: Tensors = (*start, *carry.flat)
        places: tuple[int | None, ...] = (_place(config, state),)
        if config.normalizer != "none":  # the same memory with bias dot and the value 1 at every token
            held = None if state is None else state.normalizer
            zero = torch.zeros(k.shape[2], 1, carry.memory[0].shape[-1], dtype=dtype, device=k.device)
            _, start, count = _memory(config.counting, held, dict.fromkeys(own.memory, zero), inputs, dtype, 1)
            flat, places = (*flat, *start, *count.flat), (*places, _place(config, held))
        names = tuple(params["learned"]), tuple(params["frozen"])
        counts = tuple(map(len, carry[:-1]))
        spec = Spec(config, dtype, names, tuple(own.memory), tuple(own.slots), counts, places)
        return cls(spec, (*inputs, *params["learned"].values(), *params["frozen"].values(), *flat), seen)

    @classmethod
    def sketch(
        cls,
        config: MemoryConfig,
        *,
        length: int = 2,
        steps: int = 0,
        shape: tuple[int, ...] = (64, 64),
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        values: torch.dtype = torch.float32,
        retain: Tensor | None = None,
        masked: bool = False,
        traced: bool = False,
    ) -> Call:
        """A call without tensors, to ask which engine would run it: its answers are given."""
        call = cls.__new__(cls)
        call.config, call.length, call.steps, call.shape, call.device = config, length, steps, shape, device
        call.dtype, call.values, call.retain, call.masked, call._traced = dtype, values, retain, masked, traced
        call.masks, call.general = ("write", "reset") if masked else (), config.gating.gates
        return call

    @property
    def traced(self) -> bool:
        """Asked for by few engines, and only then found out."""
        if self._traced is None:
            self._traced = is_traced(*self.flat)
        return self._traced

    # What an engine runs on.

    @property
    def inputs(self) -> Sequence:
        """q, k, v, gates, masks and positions, as the caller has them."""
        return Sequence(*self.flat[: len(Sequence._fields)])  # type: ignore[arg-type]

    @property
    def params(self) -> Params:
        """phi's parameters."""
        learned, frozen = self.spec.params
        own: list[Any] = list(self.flat[len(Sequence._fields) : self.first])
        split = len(learned)
        return {"learned": dict(zip(learned, own, strict=False)), "frozen": dict(zip(frozen, own[split:], strict=True))}

    @property
    def memories(self) -> list[tuple[Memory, Carry]]:
        """The weights at which it restarts and the state, of the memory and of its sum normaliser if there is one."""
        counts, at, own = self.spec.counts, self.first, self.flat
        found: list[tuple[Memory, Carry]] = []
        for _ in self.spec.places:
            split = at + counts[0]
            found.append((own[at:split], Carry.of(counts, own, split)))  # type: ignore[arg-type]
            at = split + sum(counts) + 1
        return found

    @property
    def place(self) -> int | None:
        """Tokens since the chunk's start."""
        return self.spec.places[0]

    def of_normalizer(self) -> Call:
        """The call of the sum normaliser alone, as far as an engine asks for its config and its place."""
        return Call(self.spec._replace(config=self.config.counting, places=self.spec.places[1:]), self.flat)

    def rewritten(self, write: Tensor) -> Call:
        """The same call with another write mask."""
        inputs = self.inputs._replace(write=write)
        return Call(self.spec, (*inputs, *self.flat[len(inputs) :]), self.seen)

    def result(self, outputs: Tensors) -> tuple[Tensor, MemoryState]:
        """y, and the state by name, of the outputs of an engine: y and the states' tensors."""
        y, *flat = outputs
        states: list[MemoryState] = []
        lead = (self.flat[2].shape[0], self.flat[2].shape[2])  # type: ignore[union-attr]
        for at in range(0, len(flat), sum(self.spec.counts) + 1):
            carry = Carry.of(self.spec.counts, tuple(flat), at)
            states.append(named_state(self.spec.weights, self.spec.slots, carry, lead))
        if self.config.chunk > 1 and not self.masked:
            _remember(self, states)
        normalizer = states[1] if len(states) > 1 else None
        return y, states[0]._replace(normalizer=normalizer, seen=self.seen)  # type: ignore[return-value]


def _memory(
    config: MemoryConfig,
    state: MemoryState | None,
    initial: Named | None,
    inputs: Sequence,
    dtype: torch.dtype,
    d_v: int,
) -> tuple[MemoryState, Memory, Carry]:
    """A memory that goes on from a state, or starts at `initial`, and restarts there: its state by name, the weights at
    which it restarts and its state in order."""
    batch, _, heads, width = inputs.k.shape
    d_phi, device, reset = config.feature_map.output_dim(width), inputs.k.device, inputs.reset
    shapes = config.structure.shapes(d_phi, d_v)
    if initial is not None:
        check_tensors("initial", initial, {n: (heads, *s) for n, s in shapes.items()}, inputs.k, batch=batch)
    first, returns = None, reset is not None or config.retention.anchored
    if state is None or returns:
        if initial is None:
            initial = starts(config.structure, d_phi, d_v, heads=heads, dtype=dtype, device=device)
        wide = {name: initial[name].to(dtype) for name in shapes}
        first = initial_state(config, wide, shapes, batch, inputs.retain, d_phi=d_phi, d_v=d_v)
    own = first if state is None else _checked(config, state, shapes, slot_shapes(config, shapes, d_phi, d_v), inputs)
    carry = carry_of(own, dtype)  # type: ignore[arg-type]
    # Apart from the state even where that starts there: to a program they are two inputs.
    start = carry.memory if first is None or not returns else carry_of(first, dtype).memory
    return own, start, carry  # type: ignore[return-value]


def _checked(config: MemoryConfig, state: MemoryState, shapes: Shapes, slots: Shapes, inputs: Sequence) -> MemoryState:
    """The state to go on from, checked against the shapes per memory that its config carries, and in their order."""
    batch, _, heads = inputs.lr.shape[:3]
    device, pending = inputs.k.device, dict(shapes) if config.commit == "chunk" else {}
    if count := config.remembered_keys:
        pending["keys"] = (count, config.feature_map.output_dim(inputs.k.shape[-1]) + 1)
    if config.accumulated_retain:
        pending["retain"] = tuple(inputs.retain.shape[3:])
        kept = state.pending.get("retain")
        if kept is not None and kept.dim() < 2 + len(pending["retain"]):
            kept = kept.unsqueeze(-1).expand(*kept.shape, *pending["retain"])
            state = state._replace(pending={**state.pending, "retain": kept})
    anchor = shapes if config.frozen_gradients else {}
    ordered: list[Any] = []
    for field, wanted in (("memory", shapes), ("slots", slots), ("anchor", anchor), ("pending", pending)):
        held = getattr(state, field)
        check_tensors(f"state.{field}", held, {n: (batch, heads, *s) for n, s in wanted.items()}, inputs.k)
        ordered.append({name: held[name] for name in wanted})
    if state.position.shape != (batch, heads) or state.position.device != device:
        raise ShapeError(
            f"state.position must be {[batch, heads]} on {device}, got {list(state.position.shape)} on "
            f"{state.position.device}"
        )
    return MemoryState(*ordered, *state[4:])  # type: ignore[call-arg]


def carry_of(state: MemoryState, dtype: torch.dtype | None = None) -> Carry:
    """A state's tensors by name, `[B, H, ...]`, as `[N, ...]` in order; floats in a dtype."""
    pending = dict(state.pending)
    retain, keys = pending.pop("retain", None), pending.pop("keys", None)
    rest = {} if retain is None else {"retain": retain}, {} if keys is None else {"keys": keys}
    kinds: list[Any] = []
    for held in (state.memory, state.slots, state.anchor, pending, *rest):
        flat: list[Tensor] = []
        for item in held.values():
            item = item.flatten(0, 1)
            flat.append(item.to(dtype) if dtype is not None and item.is_floating_point() else item)
        kinds.append(tuple(flat))
    return Carry(*kinds, state.position.flatten())  # type: ignore[call-arg]


def named_state(weights: tuple[str, ...], slots: tuple[str, ...], carry: Carry, lead: tuple[int, ...]) -> MemoryState:
    """A state's tensors `[N, ...]` by name, `[B, H, ...]`."""
    held: list[Any] = []
    kinds = carry.memory, carry.slots, carry.anchor, carry.pending
    for names, tensors in zip((weights, slots, weights, weights), kinds, strict=True):
        named = {}
        for name, tensor in zip(names, tensors, strict=False):
            named[name] = tensor.unflatten(0, lead)
        held.append(named)
    for name, kept in (("retain", carry.pending_retain), ("keys", carry.keys)):
        if kept:
            held[3][name] = kept[0].unflatten(0, lead)
    return MemoryState(*held, carry.position.unflatten(0, lead))  # type: ignore[call-arg]


def state_dtype(config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, held: Named | None) -> torch.dtype:
    """In what a state is held: the highest precision among the config, the inputs and the state to go on from or to
    start at."""
    dtype = config.dtype
    for tensor in (q, k, v, *(() if held is None else held.values())):
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _place(config: MemoryConfig, state: MemoryState | None) -> int | None:
    """Tokens since the chunk's start, 0 without a state; None if memories differ or none may look.

    Looking at values waits for the device, so it is done only where there are chunks, and where it is not known from
    the call that made the state."""
    if config.chunk == 1 or state is None or state.position.numel() == 0:
        return 0
    if not can_inspect(state.position):
        return None
    version, place = _PLACES.get(state.position, (None, 0))
    if version == state.position._version:
        return place
    low, high = torch.stack(state.position.aminmax()).tolist()
    return low if low == high and low >= 0 else None


def _remember(call: Call, states: list[MemoryState]) -> None:
    """Keeps the places at which known ones end, lest the next call wait for the device that holds them."""
    chunk, first = call.config.chunk, states[0].position
    if not waits(first) or call.traced or first.is_inference():
        return
    for place, state in zip(call.spec.places, states, strict=True):
        if place is not None and place < chunk:
            _PLACES[state.position] = state.position._version, (place + call.length) % chunk


def _as_wide_as(state: MemoryState, inputs: Sequence) -> Sequence:
    """The sequence with retain per phi channel where an unfinished chunk has kept it so."""
    kept = state.pending.get("retain")
    if kept is None or kept.dim() < 3 or inputs.retain.dim() == 4:
        return inputs
    retain = inputs.retain.unsqueeze(-1)
    return inputs._replace(retain=retain.expand(*retain.shape[:-1], kept.shape[-1]))


def complete(
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None,
    write_mask: Tensor | None,
    reset_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    going_on: bool = False,
) -> Sequence:
    """The checked inputs with every gate as a tensor."""
    check_tokens(q, k, v)
    if q.shape != k.shape or v.shape[:3] != k.shape[:3]:
        raise ShapeError(
            f"q and k must be [B, T, H, D] and v [B, T, H, V] with equal B, T, H; got q {list(q.shape)}, k "
            f"{list(k.shape)}, v {list(v.shape)}{swapped(v.shape, k.shape) or swapped(q.shape, k.shape)}"
        )
    if cu_seqlens is not None:
        reset_mask = document_starts(reset_mask, cu_seqlens, k, going_on=going_on)
    for name, mask in (("write_mask", write_mask), ("reset_mask", reset_mask)):
        if mask is not None:
            check_mask(name, mask, k)
    own = complete_gates(config, gates, k, v, write_mask)
    general = general_gates(config, gates or Gates(), k, v, write_mask)
    return Sequence(q, k, v, *own, write_mask, reset_mask, None, *general)  # type: ignore[call-arg]


# Positions of tokens, counted across calls, for feature maps that depend on them.


def numbered(config: MemoryConfig, state: MemoryState | None, sequence: Sequence) -> tuple[Sequence, Tensor | None]:
    """The sequence with its tokens' positions, and the count of tokens at its end.

    A position is the number of tokens written since the start or the last reset; both are None where phi needs none.
    [ENG-POS-D1]
    """
    needed, seen = config.feature_map.needs_position, None if state is None else state.seen
    if state is not None and (seen is not None) != needed:
        raise ShapeError(
            f"state.seen is {'a count' if seen is not None else 'None'}, but feature_map {config.feature_map.kind!r} "
            f"needs {'one' if needed else 'none'}; was the state made with another config?"
        )
    if not needed:
        return sequence, None
    k = sequence.k
    if seen is None:
        seen = torch.zeros(k.shape[:1], dtype=torch.int64, device=k.device)
    if seen.shape != k.shape[:1] or seen.dtype != torch.int64 or seen.device != k.device:
        raise ShapeError(
            f"state.seen must be int64 {list(k.shape[:1])} on {k.device}, got {described(seen)} on {seen.device}"
        )
    position, seen = counted(seen, sequence.write, sequence.reset, k.shape[1])
    return sequence._replace(position=position), seen


def counted(seen: Tensor, write: Tensor | None, reset: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """`written_before`, and the count `[B]` after the last token."""
    position = written_before(seen, write, reset, length)
    if length:
        seen = position[:, -1] + (1 if write is None else write[:, -1])
    return position, seen


def written_before(seen: Tensor, write: Tensor | None, reset: Tensor | None, length: int) -> Tensor:
    """Tokens written before each of `length` tokens since the start or the last reset, `[B, T]`.

    `seen` `[B]` counts those of earlier calls.
    """
    if write is None:
        write = torch.ones(*seen.shape, length, dtype=torch.bool, device=seen.device)
    before = write.cumsum(1) - write.long()
    start = -seen.unsqueeze(1)
    if reset is not None:
        # Counts only grow, so the largest one at a reset so far is that of the last reset.
        start = torch.where(reset, before, start).cummax(1).values
    return before - start
