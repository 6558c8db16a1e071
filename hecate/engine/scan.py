"""`memory_scan`: a memory over a sequence."""

from __future__ import annotations

import logging
from typing import get_args

import torch
from torch import Tensor

from hecate.engine.arguments import as_wide_as, complete, complete_initial, complete_state, state_dtype
from hecate.engine.by_hand import is_traced
from hecate.engine.call import Call
from hecate.engine.chunk import chunk_steps
from hecate.engine.cotangents import watch_cotangents
from hecate.engine.finite import Watched, all_finite, can_inspect, finite_writes, raise_at_first
from hecate.engine.given import check_named, check_state
from hecate.engine.one_token import one_token
from hecate.engine.parameters import check_params
from hecate.engine.parts import Part, counts_along, merged, normalizer_part, part_of, split_carries
from hecate.engine.positions import numbered
from hecate.engine.prepare import Sequence, fold_heads, params_tensors, to_tokens
from hecate.engine.program import counting, engine_of, program_of
from hecate.engine.select import Chosen, EngineName, choose_engine
from hecate.engine.tokens import expand_to
from hecate.errors import ConfigError, shorten
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.rule.rule import one, several
from hecate.tape import Autodiff, Tape, differentiate, execute

_LOG = logging.getLogger("hecate.engine")


def memory_scan(
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    phi_params: Params | None = None,
    state: MemoryState | None = None,
    initial: dict[str, Tensor] | None = None,
    write_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    engine: EngineName = "auto",
    autodiff: Autodiff = "auto",
    tape: Tape | None = None,
    name: str = "memory",
) -> tuple[Tensor, MemoryState]:
    """Writes and reads a memory at every token of a sequence. [ENG-SCAN-D1]

    Shapes: q, k `[B, T, H, D]`, v `[B, T, H, V]`; result y `[B, T, H, V]` in v's dtype and the state after the last
    token, in `config.state_dtype` or better. Scanning a sequence in pieces, each from the state of the last, gives the
    same result as scanning it whole.

    Args:
        gates: lr, retain and momentum; None takes the rule's defaults.
        phi_params: parameters from `config.feature_map.init(D, heads=H)`; may be left out without
            any.
        state: the state to go on from; None starts at `initial`.
        initial: weights `[H, ...]` or `[B, H, ...]` by name, where a memory starts and restarts;
            None takes the structure's own (zero for a matrix). The retention has the last word on where that is:
            `Retention.start`.
        write_mask: `[B, T]` bool; at False the token is read but leaves the memory exactly as it
            was, whatever it carries.
        reset_mask: `[B, T]` bool; at True the memory restarts from `initial` before that token.
        cu_seqlens: `[documents + 1]` int, borders of documents packed into one row (B = 1); resets
            at each.
        engine: `"auto"` picks the fastest exact one; results agree within rounding.
        autodiff: `"tape"` recomputes (memory of order sqrt(T)), `"torch"` lets autograd record;
            `"auto"` takes autograd for linear memories beyond the token loop, else the tape.
        tape: record the call on this tape instead of autograd; `tape.backward` then takes the
            cotangent of y to q, k, v, tensor gates and phi parameters.
        name: what errors call this memory.

    Raises:
        ConfigError: an engine or gate that the config cannot honour, a gate out of its range,
            parameters that are not those of phi.
        ShapeError: tensors that do not fit together, or what is no tensor.
        NonFiniteError: under `on_nonfinite="raise"`, with batch row, head and token; on a CPU also
            in the backward pass, for a gradient that reaches the memory. It cannot be raised while compiling or inside
            `torch.func` transforms, which forbid looking at values.
    """

    def whole() -> tuple[Tensor, MemoryState]:
        return whole_scan(
            config, q, k, v, gates, phi_params=phi_params, state=state, initial=initial, write_mask=write_mask,
            reset_mask=reset_mask, cu_seqlens=cu_seqlens, engine=engine, autodiff=autodiff, tape=tape, name=name,
        )  # fmt: skip

    masked = not (write_mask is None and reset_mask is None and cu_seqlens is None)
    single = isinstance(q, Tensor) and q.dim() == 4 and q.shape[1] == 1
    if not single or masked or tape is not None or engine != "auto" or autodiff not in get_args(Autodiff):
        return whole()
    return one_token(whole, config, q, k, v, gates, state, phi_params, initial)


def whole_scan(
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    phi_params: Params | None = None,
    state: MemoryState | None = None,
    initial: dict[str, Tensor] | None = None,
    write_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    engine: EngineName = "auto",
    autodiff: Autodiff = "auto",
    tape: Tape | None = None,
    name: str = "memory",
) -> tuple[Tensor, MemoryState]:
    """`memory_scan` with every check, by one of the engines, for any number of tokens."""
    if not isinstance(config, MemoryConfig):
        raise ConfigError(
            f"config must be a MemoryConfig, got {shorten(config)} ({type(config).__name__}); make "
            "one by MemoryConfig(...) or MemoryConfig.model_validate(...)"
        )
    if not torch.compiler.is_compiling():
        config = config.validated()
    sequence = complete(config, q, k, v, gates, write_mask, reset_mask, cu_seqlens, going_on=state is not None)
    check_state(state)
    if initial is not None:
        check_named("initial", initial)
    sequence = as_wide_as(state, sequence)
    sequence, seen = numbered(config, state, sequence)
    params = check_params(config.feature_map, phi_params, k)
    dtype = state_dtype(config, q, k, v, state, initial)
    start = complete_initial(config, initial, sequence, dtype, unread=state is not None and sequence.reset is None)
    own = complete_state(config, state, start, sequence, dtype)
    parts = [part_of(config, own, start, state)]
    if config.normalizer == "sum":
        parts.append(normalizer_part(config, own, sequence, dtype))
    held = (*params_tensors(params), *(tensor for part in parts for tensor in part.flat))
    chosen = _chosen(engine, sequence, parts, held, dtype, name)
    if autodiff == "auto" and chosen != "sequential" and config.structure.linear:
        autodiff = "torch"
    if q.shape[1] == 0 or sequence.v.numel() == 0:
        return _nothing(parts, v, seen, *sequence, *held)
    sequence = _leave_out_nonfinite(parts, sequence, params, dtype)
    runs = [engine_of(chosen, part, sequence.v.dtype) for part in parts]
    along = len(parts) > 1 and counts_along(parts[0], chosen)
    program = program_of(parts, params, dtype, runs, along)
    flat = (*sequence, *held)
    y, *rest = program(tape, *flat) if tape is not None else differentiate(program, flat, autodiff)
    carries = split_carries(several(tuple(rest)), parts)
    if config.on_nonfinite == "raise" and can_inspect(one((y,)), *carries[0].flat):
        if not all(all_finite(one((y,)), carry) for carry in carries):
            raise_at_first(_watched(parts, sequence, params, dtype), one((y,)), name)
    state = merged(parts, carries)._replace(seen=seen)
    if config.on_nonfinite == "raise" and one((y,)).requires_grad:
        watch_cotangents(name, one((y,)), state)
    return one((y,)), state


def _nothing(parts: list[Part], v: Tensor, seen: Tensor | None, *inputs: Tensor | None) -> tuple[Tensor, MemoryState]:
    """The outputs of no tokens, where every input has the gradient 0, and the state as it was."""
    y = torch.zeros_like(v)
    for item in inputs:
        if item is not None and item.is_floating_point():
            y = y + item.sum().to(v.dtype)  # to no number at all
    own = [part.carry.rebuilt(tuple(item.clone() for item in part.carry.flat)) for part in parts]
    return y, merged(parts, own)._replace(seen=None if seen is None else seen.clone())


def _chosen(
    asked: EngineName, sequence: Sequence, parts: list[Part], held: tuple[Tensor, ...], dtype: torch.dtype, name: str
) -> Chosen:
    """The engine for this call, told to the log."""
    length = sequence.v.shape[1]
    shape = tuple(next(iter(parts[0].state.memory.values())).shape[2:])
    chosen, reason = choose_engine(
        parts[0].config,
        asked,
        Call(
            length,
            chunk_steps(parts[0].config, sequence, parts[0].state, parts[0].position),
            shape,
            sequence.v.device.type,
            dtype,
            sequence.v.dtype,
            sequence.retain,
            sequence.write is not None or sequence.reset is not None,
            # `auto` takes a single token through the loop, whoever looks on.
            traced=(asked != "auto" or length > 1) and is_traced(*sequence[:6], *held),
        ),
    )
    if not torch.compiler.is_compiling():
        _LOG.debug("memory %r, %d tokens: engine %s (%s)", name, length, chosen, reason)
    return chosen


def _watched(parts: list[Part], sequence: Sequence, params: Params, dtype: torch.dtype) -> list[Watched]:
    tokens = fold_heads(to_tokens(parts[0].config, sequence, params, dtype, execute), execute)
    return [
        Watched(part.config, counting(tokens) if index else tokens, part.carry, part.initial)
        for index, part in enumerate(parts)
    ]


def _leave_out_nonfinite(parts: list[Part], sequence: Sequence, params: Params, dtype: torch.dtype) -> Sequence:
    """Under `on_nonfinite="skip"`, masks the tokens that would break a memory."""
    if parts[0].config.on_nonfinite != "skip":
        return sequence
    good = finite_writes(_watched(parts, sequence, params, dtype))
    heads = sequence.lr.shape[2]
    good = good.unflatten(0, (-1, heads)).transpose(1, 2)
    mask = good if sequence.write is None else good & expand_to(sequence.write, good)
    return sequence._replace(write=mask)
