"""Surfaces that optimisers descend, at all learning rates at once, and how well they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

Make = Callable[[list[dict[str, Any]]], Optimizer]  # groups of parameters, each with its lr

SIDE = 8  # of the quadratic's matrix
CONDITION = 100.0
ENOUGH = 1e-3  # the loss to be reached on a warped surface
PUBLISHED = None  # the start of the warped surfaces in the paper, instead of a seed
JITTER = 0.1  # around it
LOST = 1e9  # a loss from which nobody is waited for
FLOOR, CEILING = 1e-16, 1e6  # losses are shown between these


class Surface(NamedTuple):
    """n starting points `[n, r, c]`, and the losses `[*, n]` of points `[*, n, r, c]`."""

    start: Tensor
    loss: Callable[[Tensor], Tensor]


class Warp(NamedTuple):
    """psi(r, theta) = r^2 + k (r - theta + a sin(w r))^2: a valley that waves."""

    k: float
    a: float
    w: float


def quadratic(seeds: Sequence[int]) -> Surface:
    """w^T H w / 2 of matrices w, H of a drawn basis and eigenvalues from 1 / CONDITION to 1."""
    size = SIDE * SIDE
    values = torch.logspace(-math.log10(CONDITION), 0, size, dtype=torch.float64)
    start, hessian = [], []
    for seed in seeds:
        drawn = _normal(seed, size + 1, size)
        basis = torch.linalg.qr(drawn[1:]).Q
        hessian.append((basis * values) @ basis.T)
        start.append(drawn[0].view(SIDE, SIDE))
    curved = torch.stack(hessian)

    def loss(points: Tensor) -> Tensor:
        w = points.flatten(-2)
        return (w * torch.einsum("nij,...nj->...ni", curved, w)).sum(-1) / 2

    return Surface(torch.stack(start), loss)


def rosenbrock(seeds: Sequence[int]) -> Surface:
    """(1 - x)^2 + 100 (y - x^2)^2 from points around (-1.2, 1)."""
    around = torch.tensor([[-1.2, 1.0]], dtype=torch.float64)

    def loss(points: Tensor) -> Tensor:
        x, y = points[..., 0, 0], points[..., 0, 1]
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2

    return Surface(torch.stack([around + JITTER * _normal(seed, 1, 2) for seed in seeds]), loss)


def warped(warps: Sequence[Warp], seeds: Sequence[int | None]) -> Surface:
    """Every surface from every start, seeds fastest: (-3.5, 2) itself (None), or drawn around it.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 53.
    """
    k, a, w = torch.tensor(warps, dtype=torch.float64).repeat_interleave(len(seeds), 0).T
    start = torch.tensor([[-3.5, 2.0]], dtype=torch.float64).repeat(len(seeds), 1, 1)
    for number, seed in enumerate(seeds):
        if seed is not None:
            start[number] += JITTER * _normal(seed, 1, 2)

    def loss(points: Tensor) -> Tensor:
        r, theta = points[..., 0, 0], points[..., 0, 1]
        return r * r + k * (r - theta + a * torch.sin(w * r)) ** 2

    return Surface(start.repeat(len(warps), 1, 1), loss)


def descend(make: Make, surface: Surface, lrs: Tensor, steps: int, enough: float = 0.0) -> Tensor:
    """Losses `[steps + 1, L, n]` from every start by learning rates `[L, n]`, each on its own.

    Points are parameters of one optimiser, in groups by learning rate. One that has come to
    `enough`, or is lost, takes no more steps.
    """
    points = surface.start.expand(*lrs.shape, -1, -1).clone()
    grads, flat = torch.zeros_like(points), points.flatten(0, 1)
    params = [flat[number] for number in range(len(flat))]
    groups: dict[float, list[Tensor]] = {}
    for p, grad, lr in zip(params, grads.flatten(0, 1), lrs.flatten().tolist(), strict=True):
        p.grad = grad
        groups.setdefault(lr, []).append(p)
    optimizer = make([{"params": group, "lr": lr} for lr, group in groups.items()])
    live = torch.ones(len(params), dtype=torch.bool)
    history: list[Tensor] = []
    while len(history) <= steps:
        here = points.detach().requires_grad_()
        losses = surface.loss(here)
        history.append(losses.detach())
        (gradient,) = torch.autograd.grad(losses.sum(), here)
        goes_on = ((losses > enough) & (losses < LOST)).flatten()
        for number in (live & ~goes_on).nonzero().flatten().tolist():
            params[number].grad = None
        live &= goes_on
        if not live.any():
            history += [losses.detach()] * (steps + 1 - len(history))
        grads.copy_(gradient)
        optimizer.step()
    return torch.stack(history)


def final(history: Tensor) -> Tensor:
    """log10 of the last losses."""
    return history[-1].nan_to_num(nan=CEILING).clamp(FLOOR, CEILING).log10()


def steps_to(history: Tensor, enough: float) -> Tensor:
    """Steps until a loss is at most `enough`; infinity if none is."""
    there = history <= enough
    return torch.where(there.any(0), there.int().argmax(0).double(), math.inf)


class Score(NamedTuple):
    """A lower-is-better number per seed `[seeds]`, at the learning rate chosen on others."""

    values: Tensor
    merit: float  # on those others
    lr: float

    @property
    def mean(self) -> float:
        """Over the seeds shown."""
        return float(self.values.mean())


class Sweep(NamedTuple):
    """Steps to ENOUGH per surface and start, infinity if not within the budget."""

    steps: Tensor  # [surfaces, seeds]
    published: Tensor  # [surfaces], at the paper's start, by which learning rates were chosen
    lrs: Tensor  # [surfaces]

    def against(self, other: Sweep) -> tuple[Tensor, Tensor, Tensor]:
        """Shares of surfaces: reached, reached sooner and later than by another, `[seeds]`."""
        verdicts = self.steps < math.inf, self.steps < other.steps, self.steps > other.steps
        reached, won, lost = (verdict.double().mean(0) for verdict in verdicts)
        return reached, won, lost


def score(make: Make, grid: Sequence[float], tuning: Surface, shown: Surface, steps: int) -> Score:
    """log10 of the loss after `steps`."""
    lrs = torch.tensor(grid, dtype=torch.float64)[:, None]
    tried = final(descend(make, tuning, lrs.expand(-1, len(tuning.start)), steps)).mean(1)
    best = int(tried.argmin())
    history = descend(make, shown, lrs[best].expand(1, len(shown.start)), steps)
    return Score(final(history)[0], float(tried[best]), float(lrs[best]))


def sweep(make: Make, grid: Sequence[float], warps: Sequence[Warp], seeds: Sequence[int], steps: int) -> Sweep:
    """Each surface with the learning rate that is fastest there from the paper's start."""
    lrs = torch.tensor(grid, dtype=torch.float64)[:, None]
    surface = warped(warps, [PUBLISHED])
    history = descend(make, surface, lrs.expand(-1, len(warps)), steps, ENOUGH)
    needed = steps_to(history, ENOUGH)
    # Where none arrives, the one that came lowest may yet arrive from another start.
    order = torch.where(needed < math.inf, needed, steps - math.log10(FLOOR) + final(history) + 1)
    best = order.argmin(0)
    chosen = lrs[best, 0].repeat_interleave(len(seeds))[None]
    history = descend(make, warped(warps, seeds), chosen, steps, ENOUGH)
    shown = steps_to(history, ENOUGH)[0].view(-1, len(seeds))
    return Sweep(shown, needed.gather(0, best[None])[0], lrs[best, 0])


def _normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
