"""A world of two paces, and memories of several levels in it; nothing is trained.

Half the tokens write entries of a table that changes rarely (task A, then B, then A again), each
again and again; the other half bind a key to a value once, to be asked for soon. A level is the
delta rule with fixed gates; what it says is the nearest value of a codebook.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from hecate.cms import LevelConfig
from hecate.engine import memory_scan
from hecate.phi.random import haar
from hecate.rule import Gates, MemoryState

WIDTH = 64  # of keys and values; one level holds WIDTH * WIDTH numbers
VALUES = 128  # in the codebook
TABLE = 16  # entries of a task's table
AGES = 64  # tokens back to which bindings are asked for
RECENT = 16  # ages that count as recent
PROBES = 16  # per phase
NEVER = math.inf


class Level(NamedTuple):
    """A square delta-rule memory on its own projections of keys and values."""

    width: int
    lr: float
    half_life: float  # tokens after which half of it is left; NEVER without decay
    period: int = 1

    def __str__(self) -> str:
        life = "" if self.half_life == NEVER else f", half-life {self.half_life:g}"
        period = "" if self.period == 1 else f", every {self.period}"
        return f"{self.width}x{self.width} lr {self.lr:g}{life}{period}"


class System(NamedTuple):
    """Levels from fast to slow; their reads are added up.

    With `residual` a level is written with what the slower ones do not know yet, else with all.
    """

    levels: tuple[Level, ...]
    residual: bool = False


class Stream(NamedTuple):
    """Tokens of A | B | A for S seeds: `keys` [S, T, D] are to recall `values` [S, T] of `code`."""

    code: Tensor  # [S, VALUES, D]
    table_keys: Tensor  # [S, 2 * TABLE, D]; A's, then B's
    table_values: Tensor  # [S, 2 * TABLE]
    keys: Tensor
    values: Tensor
    from_table: Tensor  # [S, T]: whether the token is an entry of a table


class Recall(NamedTuple):
    """Shares recalled by the whole (index 0 of R) and by each level alone."""

    tables: Tensor  # [R, S, probes, 2]: of the tables of A and of B
    bindings: Tensor  # [R, S, AGES]: of bindings by age, averaged over the later probes
    bytes: int  # of the states of one sequence

    def kept(self) -> Tensor:
        """Of table A after phase B, per seed."""
        return self.tables[0, :, 2 * PROBES - 1, 0]

    def recent(self) -> Tensor:
        """Of bindings written 1 to RECENT tokens ago, per seed."""
        return self.bindings[0, :, :RECENT].mean(1)

    def score(self) -> Tensor:
        """What a memory is chosen by: both kinds of recall count alike."""
        return (self.kept() + self.recent()) / 2

    def alone(self, number: int) -> Recall:
        """That of level `number`, counted from 1, without the others."""
        return Recall(self.tables[number:], self.bindings[number:], self.bytes)

    def part(self, seeds: slice) -> Recall:
        """The same of some seeds."""
        return Recall(self.tables[:, seeds], self.bindings[:, seeds], self.bytes)


def draw_stream(seeds: Sequence[int], phase: int) -> Stream:
    """Three phases of tokens for every seed."""
    drawn = zip(*(_drawn(seed, phase) for seed in seeds), strict=True)
    return Stream(*(torch.stack(part) for part in drawn))


def _drawn(seed: int, phase: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)

    def unit(*shape: int) -> Tensor:
        return normalize(torch.randn(*shape, WIDTH, generator=g, dtype=torch.float32), dim=-1)

    length = 3 * phase
    code, table_keys, fresh = unit(VALUES), unit(2 * TABLE), unit(length)
    table_values = torch.randint(VALUES, (2 * TABLE,), generator=g)
    values = torch.randint(VALUES, (length,), generator=g)
    from_table = torch.rand(length, generator=g) < 0.5
    entry = torch.randint(TABLE, (length,), generator=g)
    entry = entry + TABLE * (torch.arange(length) // phase % 2)
    keys = torch.where(from_table[:, None], table_keys[entry], fresh)
    values = torch.where(from_table, table_values[entry], values)
    return code, table_keys, table_values, keys, values, from_table


class _Running:
    """One level as it goes: its projections, rule, gates and state."""

    def __init__(self, level: Level, number: int) -> None:
        g = torch.Generator().manual_seed(number)
        whole = level.width == WIDTH
        eye = torch.eye(WIDTH, dtype=torch.float32)
        self.key, self.value = (eye if whole else haar(WIDTH, g)[:, : level.width].float() for _ in range(2))
        decays = level.half_life != NEVER
        rule = {"retention": "decay" if decays else "none", "read": "before"}
        self.rule = LevelConfig.model_validate({"name": f"level {number}", "period": level.period, "memory": rule}).rule
        retain = 0.5 ** (1 / level.half_life) if decays else None
        self.gates = Gates(lr=level.lr, retain=retain)
        self.state: MemoryState | None = None

    def write(self, keys: Tensor, values: Tensor) -> Tensor:
        """Writes [S, T, D] tokens; what was predicted of each before it was written."""
        k = normalize(keys @ self.key, dim=-1).unsqueeze(2)
        v = (values @ self.value).unsqueeze(2)
        y, self.state = memory_scan(self.rule, k, k, v, self.gates, state=self.state)
        return y.squeeze(2) @ self.value.T

    def read(self, keys: Tensor) -> Tensor:
        """Predictions [S, N, D] for queries; writes nothing."""
        q = normalize(keys @ self.key, dim=-1).unsqueeze(2)
        v = q.new_zeros(*q.shape[:3], self.value.shape[1])
        masked = torch.zeros(q.shape[:2], dtype=torch.bool)
        y, _ = memory_scan(self.rule, q, q, v, self.gates, state=self.state, write_mask=masked)
        return y.squeeze(2) @ self.value.T


@torch.no_grad()
def measure(system: System, stream: Stream) -> Recall:
    """Runs a system over the stream and asks it, PROBES times a phase, what it knows."""
    levels = [_Running(level, number) for number, level in enumerate(system.levels)]
    length = stream.keys.shape[1]
    piece = length // (3 * PROBES)
    tables, bindings = [], []
    for end in range(piece, length + 1, piece):
        now = slice(end - piece, end)
        values = stream.values[:, now, None].expand(-1, -1, WIDTH)
        target = stream.code.gather(1, values)
        for level in reversed(levels):
            known = level.write(stream.keys[:, now], target)
            target = target - known if system.residual else target
        table, binding = _asked(levels, stream, end)
        tables.append(table)
        if end > AGES + piece * (PROBES // 4):
            bindings.append(binding)
    size = sum(level.state.bytes for level in levels if level.state is not None)
    by_age = torch.stack(bindings).nanmean(0)
    return Recall(torch.stack(tables, 2), by_age, size // stream.keys.shape[0])


def _asked(levels: list[_Running], stream: Stream, end: int) -> tuple[Tensor, Tensor]:
    """Recall of both tables [R, S, 2] and of recent bindings by age [R, S, AGES] (NaN: none)."""
    recent = slice(max(0, end - AGES), end)
    keys = torch.cat([stream.table_keys, stream.keys[:, recent]], 1)
    values = torch.cat([stream.table_values, stream.values[:, recent]], 1)
    reads = [level.read(keys) for level in levels]
    seen = torch.stack([torch.stack(reads).sum(0), *reads])
    right = ((seen @ stream.code.mT).argmax(-1) == values).float()
    tables = right[..., : 2 * TABLE].unflatten(-1, (2, TABLE)).mean(-1)
    by_age = right[..., 2 * TABLE :].masked_fill(stream.from_table[:, recent], math.nan).flip(-1)
    missing = AGES - by_age.shape[-1]
    return tables, pad(by_age, (0, missing), value=math.nan)
