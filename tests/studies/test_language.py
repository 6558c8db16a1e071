"""Byte models of equal size: what is compared, and how the table reads."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from hecate.compare import Comparison
from hecate.compare.statistics import against
from hecate.train.estimate import sizes_of
from studies.language import LANGUAGE, LONGER, REFERENCE, SIZES, TRANSFORMER, Sizes, fitted, models, report

SMALL = Sizes(40, 2, 5, 64, 2, 1e5)
DATA = {"kind": "bundled", "max_bytes": 1 << 16}


def test_models_are_of_equal_size():
    sizes = SIZES
    cells = [fitted(name, model, sizes, DATA) for name, model in models().items()]
    counts = {cell.label: sizes_of(cell.config).parameters for cell in cells}
    step = 3 * sizes.width * sizes.layers  # one hidden unit of each MLP
    hope = counts.pop("HOPE")  # it has no MLP to make it fit
    assert all(abs(count - counts[REFERENCE]) <= step for count in counts.values()), counts
    assert abs(hope - counts[REFERENCE]) <= 0.02 * counts[REFERENCE]
    assert max(hope, *counts.values()) <= 300_000 and sizes.tokens >= 5e6 and LANGUAGE.seeds >= 3


def test_attention_has_what_memories_have():
    around = models()[TRANSFORMER]["attention"]
    own = fitted(REFERENCE, models()[REFERENCE], SMALL, DATA).config.model
    assert (around["conv_kernel"], around["output_gate"]) == (own.conv_kernel, own.output_gate) == (4, True)
    assert models()["plain GPT"] == {"attention": {"kind": "attention"}}


def test_the_table_is_sorted_and_judges_by_the_reference():
    names = (REFERENCE, "kda", "titans", "plain GPT")
    cells = [fitted(name, models()[name], SMALL, DATA) for name in names]
    losses = {REFERENCE: [1.0, 1.1, 1.2], "kda": [1.0, 1.1, 1.25], "titans": [2.0, 2.1, 2.2]}
    rows = [
        {"cell": name, "seed": seed, "lr": 1e-3, "steps": 7, "tokens": 1e6, "parameters": 5e5, "state_bytes": 64,
         "flops": 1e9, "folder": "", "loss": loss, "status": "finished", "metric": "bits_per_byte",
         "bits_per_byte": loss / math.log(2), "tokens_per_second": 10.0, "seconds": 3.0,
         "positions": [[0, 31, 3.0, 32], [32, 63, 1.0, 32], [64, 255, 0.5 + seed, 192]]}
        for name, of in losses.items() for seed, loss in enumerate(of)
    ]  # fmt: skip
    gone = {name: rows[0][name] for name in ("lr", "steps", "tokens", "parameters", "state_bytes", "flops")}
    rows += [{**gone, "cell": "plain GPT", "seed": seed, "loss": math.inf, "status": "diverged"} for seed in range(3)]
    found = report(Comparison(cells, rows, [], [], ["a note"]), SMALL)
    by = {row[0]: dict(zip(found.columns, row, strict=True)) for row in found.rows}
    assert [row[0] for row in found.rows] == [REFERENCE, "kda", "titans", "plain GPT"]
    assert [row[3] for row in found.rows] == [None, "cannot tell", "worse", None]
    (kda, titans) = against(losses, REFERENCE)
    assert by["titans"][f"less {REFERENCE}'s"] == f"+1.000 +- {titans.difference.half:.3f}" and kda.adjusted > 0.5
    assert by["plain GPT"]["loss (nats/byte)"] == "diverged from 3 seeds" and by["plain GPT"]["tokens/s"] is None
    assert by["kda"]["loss up to 64"] == 2.0 and by["kda"][f"64 to {64 * LONGER}"] == 1.5
    assert found.notes[-1] == "a note"
    found.draw(Figure())
