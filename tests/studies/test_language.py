"""Byte models of equal size: what is compared, and how the table reads."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from hecate.compare import Comparison, pairs
from hecate.train.estimate import flops_of, sizes_of
from studies.language import LONGER, Language, Sizes, _twice, fitted, models, told

SMALL = Sizes(40, 2, 5, 64, 2, 1e9)
DATA = {"kind": "bundled", "max_bytes": 1 << 16}


def test_models_are_of_equal_size():
    some = ("gated_delta", "titans", "attention", "levels 1, 64", "HOPE 16, 128")
    cells = [fitted(name, models()[name], SMALL, DATA) for name in some]
    sizes = {cell.label: sizes_of(cell.config).parameters for cell in cells}
    target = sizes["gated_delta"]
    assert all(abs(size - target) < 0.09 * target for size in sizes.values()), sizes  # a step of the width at most
    plain = [size for name, size in sizes.items() if not name.endswith("128") or "window" in name]
    assert all(abs(size - target) <= 3 * SMALL.width * SMALL.layers for size in plain)  # one hidden unit of each MLP
    assert len({flops_of(cell.config) for cell in cells}) > 3
    assert {cell.config.data.kind for cell in cells} == {"bundled"} and Language.count >= 2


def test_passages_return_once_and_no_byte_is_lost():
    text = np.random.default_rng(0).integers(0, 256, 4 * 256 * 5 + 77, dtype=np.uint8)
    found = _twice(text).reshape(5, 2, 4, 256)
    assert np.array_equal(found[:, 0].reshape(-1), text[: 4 * 256 * 5])
    for first, second in found:
        assert sorted(map(bytes, first)) == sorted(map(bytes, second))
    assert any(not np.array_equal(first, second) for first, second in found)


def test_the_table_is_sorted_and_judges_by_the_first():
    cells = [fitted(name, models()[name], SMALL, DATA) for name in ("delta", "gated_delta", "mamba2", "yaad")]
    losses = {"delta": [2.0, 2.1, 2.2], "gated_delta": [1.0, 1.1, 1.2001], "mamba2": [1.0, 1.1, 1.2]}
    rows = [
        {"cell": name, "seed": seed, "lr": 1e-3, "steps": 7, "tokens": 1e6, "parameters": 5e5, "state_bytes": 64,
         "flops": 1e9, "folder": "", "loss": loss, "status": "finished", "metric": "bits_per_byte",
         "bits_per_byte": loss / math.log(2), "tokens_per_second": 10.0, "seconds": 3.0,
         "positions": [[0, 31, 3.0, 32], [32, 63, 1.0, 32], [64, 255, 0.5 + seed, 192]]}
        for name, of in losses.items() for seed, loss in enumerate(of)
    ]  # fmt: skip
    gone = {name: rows[0][name] for name in ("lr", "steps", "tokens", "parameters", "state_bytes", "flops")}
    rows += [{**gone, "cell": "yaad", "seed": seed, "loss": math.inf, "status": "diverged"} for seed in range(3)]
    found = told(Comparison(cells, rows, [], pairs({**losses, "yaad": [math.inf] * 3}), ["a note"]), SMALL)
    by = {row[0]: dict(zip(found.columns, row, strict=True)) for row in found.rows}
    assert [row[0] for row in found.rows] == ["mamba2", "gated_delta", "delta", "yaad"]
    assert [row[2] for row in found.rows] == [None, "cannot tell", "worse", "cannot tell"]
    assert by["yaad"]["loss (nats/byte)"] == "inf" and by["yaad"]["tokens/s"] is by["yaad"]["seconds"] is None
    found.draw(Figure())
    assert by["delta"]["loss up to 64"] == 2.0 and by["delta"][f"64 to {64 * LONGER}"] == 1.5
    assert found.notes[-1] == "a note"
