"""The study of levels: its world against a plain loop, and that it compares like with like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from studies.levels import AGES, NEVER, PROBES, TABLE, WIDTH, Level, System, _Running, draw_stream, families, measure

PHASE = 64
SYSTEMS = [
    System((Level(64, 0.5, NEVER),)),
    System((Level(32, 1.0, 8), Level(48, 0.2, 128, 8)), residual=False),
    System((Level(24, 1.0, 8), Level(24, 0.4, 64, 4), Level(48, 0.2, NEVER, 16)), residual=True),
]


def by_hand(system: System, stream, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Right answers about tables [probes, 2] and by age [probes, AGES], token by token."""
    code, keys = stream.code[seed].double().numpy(), stream.keys[seed].double().numpy()
    running = [_Running(level, n) for n, level in enumerate(system.levels)]
    projections = [(r.key.double().numpy(), r.value.double().numpy()) for r in running]
    memory = [np.zeros((level.width, level.width)) for level in system.levels]
    window = [np.zeros_like(m) for m in memory]

    def seen(level: int, key: np.ndarray) -> np.ndarray:
        small = key @ projections[level][0]
        return small / np.linalg.norm(small)

    def right(key: np.ndarray, value: int) -> bool:
        answer = sum(projections[n][1] @ (memory[n] @ seen(n, key)) for n in range(len(system.levels)))
        return int(np.argmax(code @ answer)) == value

    tables, ages = [], []
    for t, (key, value) in enumerate(zip(keys, stream.values[seed].tolist(), strict=True)):
        target = code[value]
        for n, level in reversed(list(enumerate(system.levels))):
            k, v = seen(n, key), target @ projections[n][1]
            retain = 1.0 if level.half_life == NEVER else 0.5 ** (1 / level.half_life)
            known = memory[n] @ k
            if system.residual:
                target = target - projections[n][1] @ known
            window[n] += level.lr * np.outer(known - v, k)
            if (t + 1) % level.period == 0:
                memory[n] = retain**level.period * memory[n] - window[n]
                window[n] = np.zeros_like(window[n])
        if (t + 1) % (3 * PHASE // (3 * PROBES)) == 0:
            rows = [
                right(stream.table_keys[seed, i].double().numpy(), int(stream.table_values[seed, i]))
                for i in range(2 * TABLE)
            ]
            tables.append(np.mean(np.reshape(rows, (2, TABLE)), 1))
            back = [s for s in range(t, t - AGES, -1)]
            ages.append(
                [
                    np.nan if s < 0 or stream.from_table[seed, s] else right(keys[s], int(stream.values[seed, s]))
                    for s in back
                ]
            )
    return np.stack(tables), np.array(ages, dtype=float)


@pytest.mark.parametrize("system", SYSTEMS, ids=["one", "sum", "residual"])
def test_the_world_against_a_loop_by_hand(system: System):
    stream = draw_stream([3, 4], PHASE)
    recall = measure(system, stream)
    piece = PHASE // PROBES
    later = [i for i in range(3 * PROBES) if (i + 1) * piece > AGES + piece * (PROBES // 4)]
    for seed in range(2):
        tables, ages = by_hand(system, stream, seed)
        assert 0.1 < tables.mean() < 0.9  # something to see
        np.testing.assert_allclose(recall.tables[seed].numpy(), tables, atol=1e-6)
        np.testing.assert_allclose(recall.bindings[seed].numpy(), np.nanmean(ages[later], 0), atol=1e-6)


def test_the_stream_is_what_it_says():
    stream = draw_stream([0, 1], PHASE)
    again = draw_stream([1], PHASE)
    assert all(torch.equal(a[1], b[0]) for a, b in zip(stream, again, strict=True))
    phase = torch.arange(3 * PHASE) // PHASE
    for seed in range(2):
        drawn = (stream.keys[seed, :, None] == stream.table_keys[seed]).all(-1)
        assert torch.equal(drawn.any(1), stream.from_table[seed])
        entry = drawn[stream.from_table[seed]].int().argmax(1)
        assert torch.equal(entry // TABLE, phase[stream.from_table[seed]] % 2)
        assert torch.equal(stream.values[seed, stream.from_table[seed]], stream.table_values[seed, entry])


@pytest.mark.parametrize("quick", [True, False])
def test_like_is_compared_with_like(quick: bool):
    found = families(quick)
    for systems in found.values():
        assert all(sum(level.width**2 for level in system.levels) <= WIDTH**2 for system in systems)
    # one memory is chosen from at least as many settings, and heads and levels from the same gates
    several = {name: systems for name, systems in found.items() if name != "one memory"}
    assert all(len(found["one memory"]) >= len(systems) for systems in several.values())
    gates = {
        name: [(s.levels[0][1:3], s.levels[-1][1:3]) for s in systems] for name, systems in several.items()
    }  # fmt: skip
    assert len({str(each) for each in gates.values()}) == 1
    heads = [systems for name, systems in found.items() if "heads" in name]
    assert len(heads) == 2 and all(not s.residual and {v.period for v in s.levels} == {1} for h in heads for s in h)


def test_two_levels_that_add_are_two_heads_but_for_their_period():
    stream = draw_stream([0], PHASE)
    heads, levels = (families(True)[name][0] for name in ("two heads, a decay each", "two levels, sum"))
    same = System(tuple(level._replace(period=1) for level in levels.levels))
    assert torch.equal(measure(heads, stream).tables, measure(same, stream).tables)
