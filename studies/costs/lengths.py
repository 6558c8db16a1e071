"""Cost against the length of a sequence: the slope of log time over log T, and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hecate import MemoryConfig, named_rule
from hecate.microscope.style import COLOURS, MARKERS, finish, one_legend
from studies.costs.attention import softmax
from studies.costs.cases import gates, scan, sequence
from studies.costs.harness import Function, Row, Size, forward, forward_backward, timed
from studies.costs.study import Costs

LIMIT = 1.05


class Lengths(Costs):
    """The slopes, and in the figure the curves they are of."""

    name = "cost-lengths"
    about = "How does the cost of a memory grow from 1k to 64k tokens?"
    inches = (6.4, 4.8)

    def cases(self, size: Size) -> Iterator[Row]:
        """Forward and backward of memories from 1k to 64k tokens; softmax attention to 16k."""
        longest = 256 if size.quick else 65536
        points = [longest >> shift for shift in (6, 4, 2, 0)]
        momentum = MemoryConfig(retention="decay", algorithm="momentum")
        sides: dict[str, tuple[Function, int, int]] = {
            "linear attention": (scan(named_rule("hebbian")), 0, longest),
            "gated delta": (scan(named_rule("gated_delta")), 2, longest),
            "Titans linear, momentum": (scan(momentum), 3, longest),
            "torch SDPA, causal": (softmax, 0, longest >> 2),
        }
        self.curves: dict[str, list[tuple[int, float]]] = {}
        for name, (function, count, top) in sides.items():
            fitting = [length for length in points if length <= top]
            curve, slopes = [], []
            for measure in (forward, forward_backward):
                curve = [(n, _seconds(measure, function, n, count, size)) for n in fitting]
                slopes.append(slope(curve))
            self.curves[name] = curve
            yield Row(
                "lengths",
                f"{name}, T = {fitting[0]} ... {fitting[-1]}",
                "slope of log time over log T",
                goal=(LIMIT, LIMIT) if top == longest else (None, None),
                slopes=(slopes[0], slopes[1]),
            )

    def draw(self, figure: Any, rows: Sequence[Row]) -> None:
        """Forward and backward over T, both axes logarithmic."""
        axes = figure.subplots()
        for index, (name, curve) in enumerate(self.curves.items()):
            x, y = zip(*curve, strict=True)
            style = "--" if name.startswith("torch") else "-"
            look = {"color": COLOURS[index], "label": f"{name} (slope {slope(curve):.2f})"}
            axes.loglog(x, y, f"{MARKERS[index]}{style}", **look)
        title = f"B = 1, H = 4, D = 64, float32, threads: {torch.get_num_threads()}"
        finish(axes, title, "tokens T", "forward and backward, ms of CPU time", legend=False)
        one_legend(figure, axes, 2)


def slope(curve: Sequence[tuple[int, float]]) -> float:
    """Least squares of log y over log x."""
    x, y = ([math.log(value) for value in axis] for axis in zip(*curve, strict=True))
    return statistics.linear_regression(x, y).slope


def _seconds(measure: object, function: Function, length: int, count: int, size: Size) -> float:
    inputs: tuple[Tensor, ...] = sequence(length, batch=1)
    inputs = (*inputs, *gates(length, largest=0.1, batch=1)[:count])
    run = measure(function, inputs)
    return timed(run, _nothing, size.fewer(2 if function is not softmax else 9)).ours


def _nothing() -> None:
    pass
