"""Tensor powers of a vector, in full or with equal entries merged, and their derivatives.

The block of degree i holds all products of i components. Merged ("symmetric"), the C(d + i - 1, i) distinct monomials
are kept, each times the square root of how often it occurs in the full power, so that in both layouts the inner product
of two blocks is (x.y)^i.

Monomials of degree i are ordered by their largest variable v: each is a monomial of degree i - 1 in the variables 0 ..
v times x_v, and those are a prefix of the block before. All tables below follow from that and are computed on the
device, without atomics, so results are reproducible bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, prod
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from hecate.errors import ConfigError

Degree = Annotated[int, Field(le=64)]
"""Highest power: beyond it factorials and powers leave the range of floats."""


class _Step(NamedTuple):
    parent: Tensor  # [N_i] which monomial of degree i - 1
    variable: Tensor  # [N_i] times which component
    scale: Tensor  # [N_i] square root of the growth of the multiplicity
    sizes: Tensor  # [d] how many monomials end in each variable
    starts: Tensor  # [d] where they begin


def widths(d: int, degree: int, symmetric: bool) -> list[int]:
    """Widths of the blocks of degree 0 .. `degree`."""
    return [comb(d + i - 1, i) if symmetric else d**i for i in range(degree + 1)]


def bounded(width: int, limit: int, d: int, knob: str, cure: str | None = None) -> int:
    """`width`, refused when the state would be wider than `limit`; `cure`: what else helps."""
    if width > limit:
        first = f"lower {knob}, " if cure is None else cure
        raise ConfigError(
            f"gives d_phi = {width:,} for inputs of width {d}, more than max_d_phi = {limit:,}; "
            f"{first}put a narrower `linear` before it with `compose`, or raise max_d_phi",
            (knob,),
        )
    return width


def powers(x: Tensor, degree: int, symmetric: bool) -> list[Tensor]:
    """Blocks of degree 0 .. `degree`, each `[..., N_i]`."""
    blocks = [torch.ones_like(x[..., :1])]
    if not symmetric:
        for _ in range(degree):
            blocks.append((blocks[-1].unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2))
        return blocks
    for step in _steps(x, degree):
        factors = _take(x, step.variable) * step.scale
        blocks.append(_take(blocks[-1], step.parent) * factors)
    return blocks


def powers_vjp(x: Tensor, blocks: Sequence[Tensor], cotangents: Sequence[Tensor | None], symmetric: bool) -> Tensor:
    """Cotangent of x from the cotangents of the blocks of degree 0 .. p, None for none."""
    degree = len(blocks) - 1
    steps = _steps(x, degree) if symmetric else [None] * degree
    gx, carried = torch.zeros_like(x), cotangents[degree]
    for i in range(degree, 0, -1):
        g, step = carried, steps[i - 1]
        if g is None:
            carried = cotangents[i - 1]
            continue
        if i == 1:  # the block of degree 1 is x itself
            return gx + g
        if step is None:
            spread = g.unflatten(-1, (-1, x.shape[-1])).mT
        else:
            spread = _spread(g * step.scale, step, blocks[i - 1].shape[-1])
        # Sums rather than many products of small matrices, which are slower and autocast.
        gx = gx + (spread * blocks[i - 1].unsqueeze(-2)).sum(-1)
        below, given = (spread * x.unsqueeze(-1)).sum(-2), cotangents[i - 1]
        carried = below if given is None else below + given
    return gx


def _spread(g: Tensor, step: _Step, width: int) -> Tensor:
    """`[..., N_i]` -> `[..., d, N_(i-1)]`: the cotangents of all products x_v m, 0 if not kept."""
    columns = torch.arange(width, device=g.device)
    kept = columns < step.sizes.unsqueeze(-1)
    # What is not kept reads a column of zeros behind the others.
    where = torch.where(kept, step.starts.unsqueeze(-1) + columns, g.shape[-1])
    spread = _take(torch.cat([g, torch.zeros_like(g[..., :1])], -1), where.flatten())
    return spread.unflatten(-1, where.shape)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Columns of `[..., n]`; on a CPU ten times faster from a matrix."""
    *lead, width = x.shape
    return x.reshape(prod(lead), width).index_select(1, index).reshape(*lead, len(index))


def _steps(x: Tensor, degree: int) -> list[_Step]:
    d, device = x.shape[-1], x.device
    sizes = torch.ones(d, dtype=torch.int64, device=device)
    last = run = torch.zeros(1, dtype=torch.int64, device=device)
    steps = []
    for i in range(1, degree + 1):
        total, ends = comb(d + i - 1, i), sizes.cumsum(0)
        starts = ends - sizes
        variable = torch.repeat_interleave(torch.arange(d, device=device), sizes, output_size=total)
        parent = torch.arange(total, device=device) - starts[variable]
        run = torch.where(last[parent] == variable, run[parent], 0) + 1
        steps.append(_Step(parent, variable, (i / run.to(x.dtype)).sqrt(), sizes, starts))
        sizes, last = ends, variable
    return steps
