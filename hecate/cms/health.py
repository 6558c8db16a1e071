"""Health of levels: faults that a layer shows before it is run, and statistics of every level on a sequence."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from hecate.cms.config import CMSConfig, LevelConfig
from hecate.errors import HealthWarning, StabilityWarning
from hecate.nn import LayerState, Memory
from hecate.nn.rule import features_of
from hecate.nn.strength import NOTHING, write_strength
from hecate.rule import memory_weights

LevelCall = tuple[Tensor, Tensor, LayerState]  # a level's input and output, and its state after it
KEYS = 512  # of a window that are drawn; a longer one is extrapolated


def warn_of_levels(config: CMSConfig, memories: tuple[Memory, ...]) -> None:
    """Warns the layer's builder, two calls up, of levels whose windows may diverge, and of levels of a chain whose
    output is zero until their first commit. [CMS-LAYER-I4]"""
    for level, memory in zip(config.levels, memories, strict=True):
        algorithm, largest = memory.config.algorithm, _largest_step(level.period, memory)
        if largest is not None:
            fitting = algorithm.lr * algorithm.stable_step / largest
            warnings.warn(
                f"level {memory.name!r}: the {level.period} steps that its period sums up come to {largest:.3g} along "
                f"one direction of phi, measured on random keys at the ceiling lr={algorithm.lr:g} of its gate, and "
                f"bias {memory.config.bias.kind!r} may diverge beyond {algorithm.limits()}; set algorithm.lr "
                f"below {fitting:.2g}, or shorten the period",
                StabilityWarning,
                stacklevel=4,
            )
    if config.composition != "chained":
        return
    for level, memory in zip(config.levels[:-1], memories[:-1], strict=True):
        weights = memory.initial.tensors.values()
        empty = memory.config.structure.linear and not any(w.count_nonzero() for w in weights)
        if level.period > 1 and empty:
            warnings.warn(
                f"level {memory.name!r} starts empty and commits every {level.period} tokens: until its first commit "
                f"it passes zero to the levels behind it, so sequences shorter than {level.period} train nothing; use "
                "composition 'sequential', or a structure that starts with weights, such as 'mlp'",
                HealthWarning,
                stacklevel=4,
            )


def _largest_step(period: int, memory: Memory) -> float | None:
    """The largest eigenvalue of the sum of lr phi(k) phi(k)^T over a window of random keys, at the ceiling of the lr
    gate; None if no window can diverge."""
    config = memory.config
    if period == 1 or config.blocks or not config.algorithm.linear or config.diverging(math.inf) is None:
        return None
    count = min(period, KEYS)
    keys, params = memory.random_keys(count, memory.qk_norm)
    position = torch.arange(count, device="cpu").unsqueeze(0) if config.feature_map.needs_position else None
    keys = keys.unsqueeze(0)
    with torch.no_grad():
        _, phi, lr = features_of(config, keys, keys, params, config.algorithm.lr, position=position)
        rows = (phi * lr.sqrt().unsqueeze(-1))[0].transpose(0, 1)
        tall = rows.shape[1] > rows.shape[2]
        largest = torch.linalg.eigvalsh(rows.mT @ rows if tall else rows @ rows.mT)[:, -1].max()
    return config.diverging(float(largest) * period / count, lr=1.0)


class LevelHealth(NamedTuple):
    """One level on one sequence; figures are means over the batch. [CMS-HEALTH-D1]

    Fields:
        name, period: of the level.
        commits: how often a sequence commits.
        fired: share of tokens and heads that fire; None where all do.
        norm_start, norm_end: Frobenius norm of a head's memory before and after.
        output_rms: root mean square of the level's output.
        half_life: tokens after which the retain gates leave half of a memory, median over heads (and channels).
        cotangent: norm of what a unit cotangent of y puts on the level's output and state.
        strength: the most that a write changes an answer, in shares of its error or value; None where none can be
            followed for 32 tokens. [NN-WRITE-D1]
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
    strength: float | None
    dead: str | None


def record_calls(memory: Memory) -> tuple[list[LevelCall], RemovableHandle]:
    """A list to which every call of a level's memory is added, and what ends that.

    All of a state is made to require a gradient, constants such as an emptied sum too: cotangents reach them."""
    calls: list[LevelCall] = []

    def watched(item: Tensor) -> Tensor:
        return item.detach().requires_grad_() if item.is_floating_point() and not item.requires_grad else item

    def hook(_: nn.Module, given: tuple[Any, ...], made: tuple[Tensor, LayerState]) -> tuple[Tensor, LayerState]:
        made = pytree.tree_map_only(Tensor, watched, made)
        calls.append((given[0], *made))
        return made

    return calls, memory.register_forward_hook(hook)


def level_health(
    level: LevelConfig,
    memory: Memory,
    calls: list[LevelCall],
    before: LayerState,
    after: LayerState,
    written: Tensor,
    y: Tensor,
) -> LevelHealth:
    """Statistics of a level in a run of its layer that gave y, recorded by autograd.

    `written` tells how many tokens since the start there are after each one, `[B, T]`."""
    every = memory.config.chunk if memory.config.commit == "chunk" else 1
    made = [leaf for call in calls for leaf in pytree.tree_leaves(call[1:]) if leaf is not None and leaf.requires_grad]
    unit = torch.full_like(y, y.numel() ** -0.5)
    cotangents = torch.autograd.grad(y, made, unit, retain_graph=True, allow_unused=True)
    norms = [cotangent.norm() for cotangent in cotangents if cotangent is not None]
    with torch.no_grad():
        given, out = torch.cat([call[0] for call in calls], 1), torch.cat([call[1] for call in calls], 1)
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
            cotangent=math.hypot(*map(float, norms)),
            strength=_strength(memory, given, before),
            dead=None,
        )
    never = bool((written < every).all())
    faults = {
        f"it has never committed, since no sequence is as long as its period {level.period}": never,
        "its firing gate stays shut": found.fired == 0.0,
        "its output is zero": found.output_rms == 0.0,
        "no gradient reaches it": found.cotangent == 0.0,
        "its writes change nothing": found.strength is not None and found.strength < NOTHING,
    }
    return found._replace(dead="; ".join(fault for fault, holds in faults.items() if holds) or None)


def _strength(memory: Memory, x: Tensor, before: LayerState) -> float | None:
    asked = memory.asked(x, before)[0]
    found = write_strength(asked if asked.config.writes == 1 else asked.each_write())
    return None if found is None else found.largest


def _norm(memory: Memory, state: LayerState) -> float:
    weights = memory_weights(memory.config, state.memory)
    squares = [w.double().square().flatten(2).sum(2) for w in weights.values()]
    return float(torch.stack(squares).sum(0).sqrt().mean())


def _half_life(memory: Memory, x: Tensor) -> float:
    """log(1/2) over the mean of log(retain), the median over heads."""
    retain = memory.asked(x)[0].gates.retain
    if not isinstance(retain, Tensor):
        return math.inf
    rates = retain.double().log().mean((0, 1))
    lives = torch.where(rates < 0, math.log(0.5) / rates, math.inf)
    return float(lives.median())
