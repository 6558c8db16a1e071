"""What a step of an optimiser costs, relative to torch's on the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hecate.optim import DGD, M3, DeepMomentum, DeltaMomentum, KernelMomentum, Muon, PhiMomentum
from hecate.optim.lift import STEPS
from studies.costs.harness import WIDTH, Row, Run, Size, timed

SAMPLES = 256
LR = 1e-3
Make = Callable[[nn.Module], Optimizer]

MEMORIES: dict[str, Make] = {
    "phi_momentum identity": lambda m: PhiMomentum(m.parameters(), LR),
    "phi_momentum tanh": lambda m: PhiMomentum(m.parameters(), LR, feature_map="tanh"),
    "phi_momentum diagonal": lambda m: PhiMomentum(m.parameters(), LR, precondition="diagonal"),
    "kernel_momentum": lambda m: KernelMomentum(m.parameters(), LR),
    "delta_momentum matrix": lambda m: DeltaMomentum(m.parameters(), LR),
    "delta_momentum rows": lambda m: DeltaMomentum(m.parameters(), LR, reading="rows"),
    "delta_momentum scalar": lambda m: DeltaMomentum(m.parameters(), LR, reading="scalar"),
    "deep_momentum": lambda m: DeepMomentum(m.parameters(), LR),
    "deep_momentum shared": lambda m: DeepMomentum(m.parameters(), LR, shared=True),
    f"dgd mean, {SAMPLES} samples": lambda m: _attached(m, "mean"),
    f"dgd sequential, {SAMPLES} samples": lambda m: _attached(m, "sequential"),
}
ORTHOGONAL: dict[str, Make] = {
    "muon": lambda m: Muon(_matrices(m), LR),
    "muon bfloat16": lambda m: Muon(_matrices(m), LR, ns_dtype="bfloat16"),
    "m3 period 8": lambda m: M3(_matrices(m), LR),
    "phi_momentum orthogonalized": lambda m: PhiMomentum(_matrices(m), LR, orthogonalize=True),
}
PLAIN: dict[str, Make] = {
    "SGD momentum, foreach": lambda m: torch.optim.SGD(_given(m), LR, momentum=0.9, foreach=True),
    "AdamW, foreach": lambda m: torch.optim.AdamW(_given(m), LR, foreach=True),
}
TORCH_MUON: dict[str, Make] = {"torch.optim.Muon": lambda m: torch.optim.Muon(_matrices(m), LR)}


def optimisers(size: Size) -> Iterator[Row]:
    """Each optimiser against foreach SGD and AdamW; those that orthogonalise against torch's Muon.

    Parameters: two blocks of a transformer of width 256 with their vectors; matrices alone for
    those that orthogonalise.
    """
    for case, make in MEMORIES.items():
        for peer, other in PLAIN.items():
            yield _row(case, make, peer, other, size)
    for case, make in ORTHOGONAL.items():
        for peer, other in {**PLAIN, **TORCH_MUON}.items():
            yield _row(case, make, peer, other, size, matrices=True)


def _row(case: str, make: Make, peer: str, other: Make, size: Size, matrices: bool = False) -> Row:
    ours, theirs = (_steps(chosen, size, matrices) for chosen in (make, other))
    cost = timed(ours, theirs, size.fewer(3 if peer in TORCH_MUON else 1))
    note = f"{_count(size) / 1e6:.2g}M parameters"
    return Row(case, peer, forward=cost, note=note)


def _steps(make: Make, size: Size, matrices: bool) -> Run:
    """Steps on gradients of one backward pass, behind those that an optimiser watches to say whether its phi acts."""
    model = _model(size, bias=not matrices)
    optimizer = make(model)
    x = torch.randn(SAMPLES, _width(size), generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    model(x).square().mean().backward()
    for _ in range(STEPS + 1):
        optimizer.step()
    return optimizer.step


def _width(size: Size) -> int:
    return WIDTH // 2 if size.quick else 4 * WIDTH


def _model(size: Size, *, bias: bool = True) -> nn.Module:
    """Linear layers of the shapes of two transformer blocks."""
    width, made = _width(size), list[nn.Module]()
    for _ in range(2):
        shapes = [(width, 3 * width), (3 * width, width), (width, 4 * width), (4 * width, width)]
        made += [nn.Linear(*shape, bias=bias, dtype=torch.float32) for shape in shapes]
    model = nn.Sequential(*made)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, generator=draws, dtype=torch.float32)
            p.copy_(drawn / p.shape[-1] ** 0.5)
    return model


def _count(size: Size) -> float:
    return float(sum(p.numel() for p in _model(size).parameters()))


def _given(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def _attached(model: nn.Module, batch: Any) -> Optimizer:
    optimizer = DGD(model.parameters(), LR, batch=batch, unattached="sgd")
    optimizer.attach(model)
    return optimizer
