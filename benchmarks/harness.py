"""Equal results first, then process CPU time of interleaved runs, medians, their ratio."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Case = Callable[[], Sequence[Tensor]]


class Row(NamedTuple):
    """One comparison; times in milliseconds of process CPU time."""

    group: str
    case: str
    peer: str
    ours_ms: float
    peer_ms: float
    error: float

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.peer_ms

    @property
    def line(self) -> str:
        return (
            f"{self.group:<14} {self.case:<34} {self.ours_ms:9.2f} ms  vs {self.peer:<28} "
            f"{self.peer_ms:9.2f} ms  ratio {self.ratio:6.3f}  error {self.error:.1e}"
        )


def compare(
    group: str, case: str, ours: Case, peer: str, theirs: Case, *, repeats: int, tolerance: float
) -> Row:
    """Runs both sides in turn; refuses to time results that differ by more than `tolerance`."""
    error = max(
        float((a - b).detach().norm() / b.detach().norm().clamp(min=1e-30))
        for a, b in zip(ours(), theirs(), strict=True)
    )
    if not error <= tolerance:
        raise AssertionError(f"{group} {case}: results differ by {error:.2e} from {peer}")
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, run in enumerate((ours, theirs)):
            start = time.process_time()
            run()
            times[side].append(1e3 * (time.process_time() - start))
    return Row(group, case, peer, *(statistics.median(side) for side in times), error)


def forward_backward(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Case:
    """The output and the gradients of all inputs for one fixed cotangent."""
    generator = torch.Generator().manual_seed(1)
    cotangent: list[Tensor] = []

    def run() -> list[Tensor]:
        leaves = [item.detach().requires_grad_() for item in inputs]
        y = function(*leaves)
        if not cotangent:
            cotangent.append(torch.randn(y.shape, generator=generator))
        return [y, *torch.autograd.grad(y, leaves, cotangent[0].to(y.dtype))]

    return run


def forward(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Case:
    """The output alone, without recording."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [function(*inputs)]

    return run


def markdown(rows: Sequence[Row]) -> str:
    """A table for the README."""
    lines = [
        "| group | case | peer | ours, ms | peer, ms | ratio | error |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.group} | {r.case} | {r.peer} | {r.ours_ms:.1f} | {r.peer_ms:.1f} | {r.ratio:.3f} | "
        f"{r.error:.0e} |"
        for r in rows
    ]
    return "\n".join(lines)
