"""Health of memories: the effect of their writes, at once and some tokens later; faults of levels that show before any
run; and statistics of every level on a sequence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from hecate.cms.config import CMSConfig, LevelConfig
from hecate.errors import ConfigError, HealthWarning, ShapeError, StabilityWarning
from hecate.nn import LayerState, Memory
from hecate.nn.rule import ScanArguments, features_of
from hecate.rule import memory_weights

LATER = 32  # tokens
NOTHING = 1e-3  # a memory is dead if no write changes an answer by more


class Strength(NamedTuple):
    """Effect of the writes of N tokens, means over sequences and heads, `[N]`. [NN-WRITE-D1]

    The memory is read at a token's key, without the token's write and with it: y and y' are the two answers, e and e'
    their differences from the value.

    Fields:
        tokens: indices of the tokens.
        share: 1 - |e'| / |e| as soon as the write can be read, where e is not 0.
        share_later: the same some tokens later, after the writes of those.
        pull: <y' - y, v> / |v|^2, the effect in memories that sum values and learn no error.
        pull_later: the same some tokens later.
        size: mean of |y'| over mean of |v|.
    """

    tokens: Tensor
    share: Tensor
    share_later: Tensor
    pull: Tensor
    pull_later: Tensor
    size: Tensor

    @property
    def largest(self) -> float:
        """The largest effect of any of the writes, by any measure."""
        return max(float(item.abs().max()) for item in self[1:5])


def reading_lag(asked: ScanArguments) -> int:
    """Number of tokens after which a write can first be read."""
    config = asked.config
    if config.commit == "chunk":
        return config.chunk
    return 1 if config.read == "before" else 0


def places(asked: ScanArguments, count: int = 4, later: int = LATER) -> list[int]:
    """At most `count` tokens, evenly spread, whose writes can be followed for `later` tokens in every sequence; if
    chunks commit as a whole, tokens that close a chunk."""
    length, lag = asked.v.shape[1], reading_lag(asked)
    written = asked.v.new_ones(length, dtype=torch.bool) if asked.write_mask is None else asked.write_mask.all(0)
    fits: list[int] = []
    for t in range(length - lag - later):
        whole = lag < 2 or (t + 1) % lag == 0
        restarts = asked.reset_mask is not None and bool(asked.reset_mask[:, t + 1 : t + lag + later + 1].any())
        if whole and bool(written[t]) and not restarts:
            fits.append(t)
    if len(fits) <= count:
        return fits
    return [fits[round(index * (len(fits) - 1) / (count - 1))] for index in range(count)]


@torch.no_grad()
def write_strength(asked: ScanArguments, tokens: Sequence[int] | None = None, *, later: int = LATER) -> Strength | None:
    """Effect of the writes of some tokens; None if no write can be followed for `later` tokens.

    Args:
        asked: the scan, as `Memory.asked` returns it, with one write per token.
        tokens: the tokens whose writes are measured; None takes those of `places`.
        later: number of tokens after which they are measured again.

    Raises:
        ConfigError: several writes per token.
        ShapeError: a token whose write cannot be followed.
    """
    if asked.config.writes != 1:
        got = f"got writes={asked.config.writes}; pass asked.each_write()"
        raise ConfigError(f"write_strength takes one write per token, {got}")
    lag, length = reading_lag(asked), asked.v.shape[1]
    chosen = places(asked, later=later) if tokens is None else list(tokens)
    if not chosen:
        return None
    for t in chosen:
        if not 0 <= t < length - lag - later:
            raise ShapeError(
                f"the write of token {t} is read from token {t + lag} on and looked for {later} later, and there are "
                f"{length} tokens; give one below {length - lag - later}"
            )
    with_write, without = (_answers(asked, chosen, lag, later, written) for written in (True, False))
    k_tokens = torch.tensor(chosen, device=asked.v.device)
    v = asked.v[:, k_tokens].double()  # [B, N, H, V]
    measures: list[Tensor] = []
    for y1, y0 in zip(with_write, without, strict=True):
        error, before = (v - y1).norm(dim=-1), (v - y0).norm(dim=-1)
        share = torch.where(before > 0, 1 - error / before, torch.nan)
        square = v.square().sum(-1)
        pull = torch.where(square > 0, ((y1 - y0) * v).sum(-1) / square, torch.nan)
        measures += [share.nanmean((0, 2)), pull.nanmean((0, 2))]
    size = with_write[0].norm(dim=-1).mean((0, 2)) / v.norm(dim=-1).mean((0, 2))
    share, pull, share_later, pull_later = (item.nan_to_num(0.0).cpu() for item in measures)
    return Strength(k_tokens.cpu(), share, share_later, pull, pull_later, size.cpu())


def _answers(asked: ScanArguments, tokens: Sequence[int], lag: int, later: int, written: bool) -> tuple[Tensor, Tensor]:
    """Answers to the keys of tokens, `[B, N, H, V]`, once their writes can be read and `later` tokens after that; with
    the writes or without. It scans one copy of the sequences for each token."""
    copies, batch = len(tokens), len(asked.v)
    if asked.write_mask is None:
        asked = asked._replace(write_mask=asked.v.new_ones(asked.v.shape[:2], dtype=torch.bool))
    repeated = asked.repeat(copies)
    copy, at = torch.arange(copies, device=asked.v.device), torch.tensor(tokens, device=asked.v.device)

    def by_copy(item: Any) -> Any:  # [N B, T, ...] to [N, B, T, ...]; copy n is changed at its token alone
        return item.unflatten(0, (copies, batch))

    q = by_copy(repeated.q)
    q[copy, :, at + lag] = q[copy, :, at + lag + later] = asked.k[:, at].transpose(0, 1)
    if asked.config.commit == "chunk" and isinstance(repeated.gates.lr, Tensor):
        # Not by mask: a masked token is not counted, so its chunk would close later.
        by_copy(repeated.gates.lr)[copy, :, at] *= written
    else:
        by_copy(repeated.write_mask)[copy, :, at] &= written
    y = by_copy(repeated.scan()[0].double())
    return y[copy, :, at + lag].transpose(0, 1), y[copy, :, at + lag + later].transpose(0, 1)


LevelCall = tuple[Tensor, Tensor, LayerState]  # a level's input and output, and its state after it
KEYS = 512  # random keys for a window; a longer one is extrapolated


def warn_of_levels(config: CMSConfig, memories: tuple[Memory, ...]) -> None:
    """Warns, at the line that builds the layer, of levels whose windows may diverge, and of levels of a chain whose
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
        commits: number of commits in a sequence.
        fired: share of tokens and heads that fire; None without a firing gate.
        norm_start, norm_end: Frobenius norm of a head's memory before and after.
        output_rms: root mean square of the level's output.
        half_life: tokens after which the retain gates leave half of a memory, median over heads (and channels).
        cotangent: norm of the cotangents of the level's output and state from a unit cotangent of y.
        strength: largest change of an answer by a write, relative to its error or value; None if no write can be
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
    """A list that receives every call of a level's memory, and the handle that ends this.

    All tensors of a state are made to require gradients, also constants such as an emptied sum, so that cotangents
    reach them."""
    calls: list[LevelCall] = []

    def watch(x: Tensor) -> Tensor:
        return x.detach().requires_grad_() if x.is_floating_point() and not x.requires_grad else x

    def hook(_: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, LayerState]) -> tuple[Tensor, LayerState]:
        outputs = pytree.tree_map_only(Tensor, watch, outputs)
        calls.append((inputs[0], *outputs))
        return outputs

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
    """Statistics of a level from its calls in one run of the layer, with output y, recorded by autograd.

    `written` is the number of tokens since the start after each one, `[B, T]`."""
    every = memory.config.chunk if memory.config.commit == "chunk" else 1
    nodes = [leaf for call in calls for leaf in pytree.tree_leaves(call[1:]) if leaf is not None and leaf.requires_grad]
    unit = torch.full_like(y, y.numel() ** -0.5)
    cotangents = torch.autograd.grad(y, nodes, unit, retain_graph=True, allow_unused=True)
    norms = [cotangent.norm() for cotangent in cotangents if cotangent is not None]
    with torch.no_grad():
        inputs, out = torch.cat([call[0] for call in calls], 1), torch.cat([call[1] for call in calls], 1)
        fired = memory.gates.values(inputs).get("firing")
        report = LevelHealth(
            name=level.name,
            period=level.period,
            commits=float((written % every == 0).sum(1).double().mean()),
            fired=None if fired is None else float((fired > 0.5).double().mean()),
            norm_start=_norm(memory, before),
            norm_end=_norm(memory, after),
            output_rms=float(out.double().square().mean().sqrt()),
            half_life=_half_life(memory, inputs),
            cotangent=math.hypot(*map(float, norms)),
            strength=_strength(memory, inputs, before),
            dead=None,
        )
    never = bool((written < every).all())
    faults = {
        f"it has never committed, since no sequence is as long as its period {level.period}": never,
        "its firing gate stays shut": report.fired == 0.0,
        "its output is zero": report.output_rms == 0.0,
        "no gradient reaches it": report.cotangent == 0.0,
        "its writes change nothing": report.strength is not None and report.strength < NOTHING,
    }
    return report._replace(dead="; ".join(fault for fault, holds in faults.items() if holds) or None)


def _strength(memory: Memory, x: Tensor, before: LayerState) -> float | None:
    asked = memory.asked(x, before)[0]
    strength = write_strength(asked if asked.config.writes == 1 else asked.each_write())
    return None if strength is None else strength.largest


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
