"""What every level of a `CMS` does on a sequence, and which of them are dead."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hecate.cms.state import CMSState
from hecate.engine import written_before
from hecate.errors import HealthWarning, ShapeError
from hecate.nn import LayerState, Memory
from hecate.rule import memory_weights
from hecate.tape import Tape
from hecate.tape.tape import Call

if TYPE_CHECKING:
    from hecate.cms.cms import CMS


class LevelHealth(NamedTuple):
    """One level on one sequence; figures are means over the batch. [CMS-HEALTH-D1]

    Fields:
        name, period: of the level.
        commits: how often a sequence commits.
        fired: share of tokens and heads that fire; None where all do.
        norm_start, norm_end: Frobenius norm of a head's memory before and after.
        output_rms: root mean square of the level's output.
        half_life: tokens after which the retain gates leave half of a memory, median over heads
            (and channels).
        cotangent: norm of what a unit cotangent of y puts on the level's output and state.
        dead: why the level is dead, None if it is not.
    """

    name: str
    period: int
    commits: float
    fired: float | None
    norm_start: float
    norm_end: float
    output_rms: float
    half_life: float
    cotangent: float
    dead: str | None


def levels_health(layer: CMS, x: Tensor, state: CMSState | None) -> list[LevelHealth]:
    """Runs the layer on a tape, walks back from a unit cotangent of y, and reports."""
    if x.dim() != 3 or x.numel() == 0:
        raise ShapeError(
            f"health needs tokens: x must be [B, T, {layer.d_model}] with B and T at least 1, got {list(x.shape)}"
        )
    with torch.no_grad():
        _, started = layer(x[:, :0], state)  # checks state, and gives one where there is none
        tape = Tape(observe=True)
        masks: dict[str, Tensor | None] = {"write_mask": None, "reset_mask": None}
        y, after = layer.passed(x, started, masks, run=tape)
        tape.backward([y], [torch.full_like(y, y.numel() ** -0.5)], [x])
        written = written_before(started.written, None, None, x.shape[1]) + 1
        found = [_health(layer, index, _Passed(tape, started, after, written)) for index in range(len(layer.levels))]
    for level in found:
        if level.dead is not None:
            warnings.warn(f"level {level.name!r} of {layer.name!r} is dead: {level.dead}", HealthWarning, stacklevel=3)
    return found


class _Passed(NamedTuple):
    """What a run of the layer left behind."""

    tape: Tape
    before: CMSState
    after: CMSState
    written: Tensor  # tokens since the start after each one, [B, T]


def _health(layer: CMS, index: int, passed: _Passed) -> LevelHealth:
    level, memory = layer.config.levels[index], layer.memories[index]
    every = memory.config.chunk if memory.config.commit == "chunk" else 1
    calls = [call for call in passed.tape.calls if call.block.name == "level" and call.label == level.name]
    given, out = (torch.cat(list(ends), 1) for ends in zip(*map(_ends, calls), strict=True))
    gates = memory.gates.values(given)
    fired = None
    if "firing" in gates:
        fired = float((gates["firing"] > 0.5).double().mean())
    norms = passed.tape.norms(level.name)
    found = LevelHealth(
        name=level.name,
        period=level.period,
        commits=float((passed.written % every == 0).sum(1).double().mean()),
        fired=fired,
        norm_start=_norm(memory, passed.before.levels[index]),
        norm_end=_norm(memory, passed.after.levels[index]),
        output_rms=float(out.double().square().mean().sqrt()),
        half_life=_half_life(memory, given),
        cotangent=float(norms.get(f"{level.name}/level", torch.zeros(()))),
        dead=None,
    )
    never = bool((passed.written < every).all())
    return found._replace(dead="; ".join(_faults(found, never)) or None)


def _ends(call: Call) -> tuple[Tensor, Tensor]:
    return call.inputs[0], call.outputs[0]  # type: ignore[return-value]


def _norm(memory: Memory, state: LayerState) -> float:
    weights = memory_weights(memory.config, state.memory)
    squares = [w.double().square().flatten(2).sum(2) for w in weights.values()]
    return float(torch.stack(squares).sum(0).sqrt().mean())


def _half_life(memory: Memory, x: Tensor) -> float:
    """log(1/2) over the mean of log(retain), the median over heads."""
    retain = memory.gates(x).retain
    if not isinstance(retain, Tensor):
        return math.inf
    rates = retain.double().log().mean((0, 1))
    lives = torch.where(rates < 0, math.log(0.5) / rates, math.inf)
    return float(lives.median())


def _faults(level: LevelHealth, never: bool) -> Iterator[str]:
    if never:
        yield f"it has never committed, since no sequence is as long as its period {level.period}"
    if level.fired == 0.0:
        yield "its firing gate stays shut"
    if level.output_rms == 0.0:
        yield "its output is zero"
    if level.cotangent == 0.0:
        yield "no gradient reaches it"
