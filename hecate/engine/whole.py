"""A scan with every check, by one of the engines: what `memory_scan` and the operator of torch.export run."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hecate.engine import nonfinite
from hecate.engine.arguments import check_config
from hecate.engine.call import Call
from hecate.engine.engine import EngineName, choose, explain
from hecate.engine.flops import counted, counters, hidden, scan_flops
from hecate.engine.readout import read_through
from hecate.engine.writes import one_write_each, read_once
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import Autodiff, Tape, differentiate, execute, several
from hecate.tape.bridge import without_autocast
from hecate.tape.ops import joined

_LOG = logging.getLogger("hecate.engine")


def whole_scan(config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None, **given: Any) -> Any:
    """`memory_scan` with every check, by one of the engines, for any number of tokens."""
    seen = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0
    counting = counters() if seen and given.get("tape") is None else []
    if not counting or not all(isinstance(x, Tensor) and x.dim() > 3 for x in (q, k, v)):
        return _scan(config, q, k, v, gates, **given)
    with hidden(counting):
        flops = scan_flops(_scan, config, q, k, v, gates, given.get("phi_params"))
    return counted(_scan, counting, flops, config, q, k, v, gates, **given)


def _scan(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None, *, engine: EngineName = "auto",
    autodiff: Autodiff = "auto", tape: Tape | None = None, name: str = "memory", **given: Any,
) -> tuple[Tensor, MemoryState]:  # fmt: skip
    how: dict[str, Any] = {"engine": engine, "autodiff": autodiff, "tape": tape, "name": name}
    record = execute if tape is None else tape
    if getattr(config, "writes", 1) > 1:
        single, (q, k, v, gates), given = one_write_each(check_config(config), q, k, v, gates, run=record, **given)
        y, state = _scan(single, q, k, v, gates, **given, **how)
        return read_once(config, y, run=record), state
    if not getattr(getattr(config, "readout", None), "plain", True):
        return read_through(_scan, config, q, k, v, gates, run=record, how=how, **given)
    call = Call.of(config, q, k, v, gates, **given)
    chosen = choose(call, engine)
    if not torch.compiler.is_compiling() and _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("memory %r, %d tokens: engine %s (%s)", name, call.length, *explain(call, engine))
    if v.numel() == 0 or (v.is_meta and engine == "auto" and tape is None):
        return _shapes_alone(call)
    policy = call.config.on_nonfinite
    if policy == "skip":
        call = nonfinite.skip(call)
    if autodiff == "auto":
        autodiff = chosen.autodiff(call.config)
    if tape is not None:
        outputs = chosen.outputs(call, tape)
    elif autodiff == "torch":  # autograd records it
        with without_autocast(call.plan.device):
            outputs = chosen.outputs(call, execute)
    else:
        # Of the plan alone: what a graph keeps of a call are the tensors that it saves.
        outputs = differentiate(partial(chosen.program, call.plan), call.flat, autodiff)
    y, *states = several(outputs)
    if tape is None and _may_read_early(call):
        y = joined(y, *call.flat)
    if policy == "raise":
        nonfinite.check(call, name, (y, *states))
    y, state = call.result((y, *states))
    if policy == "raise" and y.requires_grad:
        nonfinite.watch_cotangents(name, y, state, call.traced)
    return y, state


def _may_read_early(call: Call) -> bool:
    """True if no token may have been answered after a write of this call."""
    short = call.plan.length <= call.config.chunk
    if short or call.config.commit == "token":
        return short
    return call.plan.masks != ()


def _shapes_alone(call: Call) -> tuple[Tensor, MemoryState]:
    """The outputs of no tokens, or of tokens on meta: every input has the gradient 0, the state is as it was."""
    v = call.inputs.v
    y = joined(torch.zeros_like(v), *call.flat)
    _, state = call.result((y, *(item.clone() for _, carry in call.memories for item in carry.flat)))
    return y, state if state.seen is None else state._replace(seen=state.seen.clone())
