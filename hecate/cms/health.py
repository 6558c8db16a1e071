"""Whether levels do their work: faults that a layer shows before it is run, and what every level does on a sequence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.cms.config import CMSConfig, LevelConfig
from hecate.engine import Sequence, to_tokens
from hecate.errors import HealthWarning, StabilityWarning
from hecate.nn import LayerState, Memory
from hecate.nn.rule import random_keys
from hecate.rule import memory_weights
from hecate.tape import Tape, execute

KEYS = 512  # of a window that are drawn; a longer one is extrapolated


def warn_if_windows_diverge(level: LevelConfig, memory: Memory) -> None:
    """Measures the largest eigenvalue of the sum of lr phi(k) phi(k)^T over a window of random keys, at the ceiling of
    the lr gate. [CMS-LAYER-I4]"""
    config = memory.config
    algorithm = config.algorithm
    if level.period == 1 or not algorithm.linear or config.diverging(math.inf) is None:
        return
    count = min(level.period, KEYS)
    with torch.no_grad():
        lengths = _step_lengths(memory, count)
    largest = config.diverging(float(lengths.max()) * level.period / count, lr=1.0)
    if largest is not None:
        fitting = algorithm.lr * algorithm.stable_step / largest
        warnings.warn(
            f"level {memory.name!r}: the {level.period} steps that its period sums up come to "
            f"{largest:.3g} along one direction of phi, measured on random keys at the ceiling "
            f"lr={algorithm.lr:g} of its gate, and bias {config.bias.kind!r} may diverge beyond "
            f"{algorithm.stable_step:g}; set algorithm.lr below {fitting:.2g}, or shorten the "
            "period",
            StabilityWarning,
            stacklevel=4,
        )


def warn_if_nothing_passes(config: CMSConfig, memories: tuple[Memory, ...]) -> None:
    """Names the levels of a chain whose output is zero until their first commit."""
    for level, memory in zip(config.levels[:-1], memories[:-1], strict=True):
        weights = memory.initial.tensors.values()
        empty = memory.config.structure.linear and not any(w.count_nonzero() for w in weights)
        if level.period > 1 and empty:
            warnings.warn(
                f"level {memory.name!r} starts empty and commits every {level.period} tokens: "
                f"until its first commit it passes zero to the levels behind it, so sequences "
                f"shorter than {level.period} train nothing; use composition 'sequential', or a "
                "structure that starts with weights, such as 'mlp'",
                HealthWarning,
                stacklevel=4,
            )


def _step_lengths(memory: Memory, count: int) -> Tensor:
    """The largest eigenvalue per head, for a window of `count` random keys."""
    drawn, params = random_keys(memory, count, memory.qk_norm)
    keys = drawn.unsqueeze(0)
    ones = torch.ones_like(keys[..., 0])
    position = torch.arange(count, device="cpu").unsqueeze(0) if memory.config.feature_map.needs_position else None
    lr = ones * memory.config.algorithm.lr
    sequence = Sequence(keys, keys, keys, lr, ones, ones, position=position)
    tokens = to_tokens(memory.config, sequence, params, torch.float64, execute)
    rows = (tokens.phi_k * tokens.lr.sqrt().unsqueeze(-1))[0].transpose(0, 1)
    tall = rows.shape[1] > rows.shape[2]
    return torch.linalg.eigvalsh(rows.mT @ rows if tall else rows @ rows.mT)[:, -1]


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


def level_health(
    level: LevelConfig, memory: Memory, before: LayerState, after: LayerState, written: Tensor, tape: Tape
) -> LevelHealth:
    """What a level did in a run of its layer on a tape, which has been walked back from a unit cotangent of y.

    `written` tells how many tokens since the start there are after each one, `[B, T]`."""
    every = memory.config.chunk if memory.config.commit == "chunk" else 1
    calls = [call for call in tape.calls if call.block.name == "level" and call.label == level.name]
    given = torch.cat([call.inputs[0] for call in calls], 1)  # type: ignore[misc]
    out = torch.cat([call.outputs[0] for call in calls], 1)  # type: ignore[misc]
    fired = memory.gates.values(given).get("firing")
    found = LevelHealth(
        name=level.name,
        period=level.period,
        commits=float((written % every == 0).sum(1).double().mean()),
        fired=None if fired is None else float((fired > 0.5).double().mean()),
        norm_start=_norm(memory, before),
        norm_end=_norm(memory, after),
        output_rms=float(out.double().square().mean().sqrt()),
        half_life=_half_life(memory, given),
        cotangent=float(tape.norms(level.name).get(f"{level.name}/level", torch.zeros(()))),
        dead=None,
    )
    never = bool((written < every).all())
    return found._replace(dead="; ".join(_faults(found, never)) or None)


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
