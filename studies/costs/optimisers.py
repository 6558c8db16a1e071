"""What a step of an optimiser costs, relative to torch's on the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hecate.optim import DGD, M3, DeepMomentum, DeltaMomentum, KernelMomentum, Muon, PhiMomentum
from hecate.optim.lift import STEPS
from studies.costs.harness import WIDTH, Row, Size, cost, timed

SAMPLES = 256
LR = 1e-3
Make = Callable[..., Optimizer]  # of parameters and a rate

MEMORIES: dict[str, Make] = {
    "phi_momentum identity": PhiMomentum,
    "phi_momentum tanh": partial(PhiMomentum, feature_map="tanh"),
    "phi_momentum diagonal": partial(PhiMomentum, precondition="diagonal"),
    "kernel_momentum": KernelMomentum,
    "delta_momentum matrix": DeltaMomentum,
    "delta_momentum rows": partial(DeltaMomentum, reading="rows"),
    "delta_momentum scalar": partial(DeltaMomentum, reading="scalar"),
    "deep_momentum": DeepMomentum,
    "deep_momentum shared": partial(DeepMomentum, shared=True),
    f"dgd mean, {SAMPLES} samples": partial(DGD, batch="mean", unattached="sgd"),
    f"dgd sequential, {SAMPLES} samples": partial(DGD, batch="sequential", unattached="sgd"),
}
ORTHOGONAL: dict[str, Make] = {
    "muon": Muon,
    "muon bfloat16": partial(Muon, ns_dtype="bfloat16"),
    "m3 period 8": M3,
    "phi_momentum orthogonalized": partial(PhiMomentum, orthogonalize=True),
}
PLAIN: dict[str, Make] = {
    "SGD momentum, foreach": partial(SGD, momentum=0.9, foreach=True),
    "AdamW, foreach": partial(AdamW, foreach=True),
}
TORCH_MUON: dict[str, Make] = {"torch.optim.Muon": torch.optim.Muon}


@cost
def optim(size: Size) -> Iterator[Row]:
    """Each optimiser against foreach SGD and AdamW; those that orthogonalise against torch's Muon.

    Parameters: two blocks of a transformer of width 256 with their vectors; matrices alone for
    those that orthogonalise.
    """
    groups = ((MEMORIES, PLAIN, True), (ORTHOGONAL, {**PLAIN, **TORCH_MUON}, False))
    note = f"{sum(p.numel() for p in _model(size).parameters()) / 1e6:.2g}M parameters"
    for cases, peers, vectors in groups:
        for case, make in cases.items():
            for peer, other in peers.items():
                ours, theirs = (_steps(chosen, size, vectors) for chosen in (make, other))
                taken = timed(ours, theirs, size.fewer(3 if peer in TORCH_MUON else 1))
                yield Row(case, peer, forward=taken, note=note)


def _steps(make: Make, size: Size, vectors: bool) -> Callable[[], object]:
    """Steps on gradients of one backward pass, behind those that an optimiser watches to say whether its phi acts."""
    model = _model(size, bias=vectors)
    optimizer = make(model.parameters(), LR)
    if isinstance(optimizer, DGD):
        optimizer.attach(model)
    x = torch.randn(SAMPLES, _width(size), generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    model(x).square().mean().backward()
    for _ in range(STEPS + 1):
        optimizer.step()
    return optimizer.step


def _width(size: Size) -> int:
    return WIDTH // 2 if size.quick else 4 * WIDTH


def _model(size: Size, *, bias: bool = True) -> nn.Module:
    """Linear layers of the shapes of two transformer blocks."""
    width = _width(size)
    shapes = [(width, 3 * width), (3 * width, width), (width, 4 * width), (4 * width, width)] * 2
    model = nn.Sequential(*(nn.Linear(*shape, bias=bias, dtype=torch.float32) for shape in shapes))
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, generator=draws, dtype=torch.float32)
            p.copy_(drawn / p.shape[-1] ** 0.5)
    return model
