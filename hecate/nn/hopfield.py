"""A modern Hopfield memory: what linear attention becomes when phi has infinitely many features."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hecate.checks import described, expect_count, expect_number, named
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.phi.base import widened
from hecate.tape.bridge import can_inspect, without_autocast


class Retrieved(NamedTuple):
    """Result of a `Hopfield` call.

    Fields:
        values: read with the weights of the last update, `[..., Q, V]`.
        query: that update's result, `[..., Q, D]`; equal to `values` where values are the patterns.
        steps: updates that each query took, `[..., Q]` int64.
    """

    values: Tensor
    query: Tensor
    steps: Tensor


@named()
class Hopfield(nn.Module):
    """hopfield: xi <- X^T softmax(sharpness X xi), the patterns x_1..x_N being the rows of X.

    A memory that keeps every pattern. With values V it reads V^T softmax(sharpness X xi): for one step and sharpness
    D^(-1/2) that is softmax attention (as a layer: `SlidingAttention` with window=None), and linear attention with
    `phi.Favor` tends to it as num_features grows, for exp(k.q) is the kernel of infinitely many features. So it is what
    a phi is compared with. It has no parameters, and no state but the patterns that it is called with. [TRF-HOP-D1,
    TRF-HOP-R1]

    Args:
        sharpness: factor of the scores (the papers' inverse temperature beta).
        steps: updates; all but the last one move the query itself.
        tolerance: a query that an update moves no further than this stays there; one whose count
            of steps reaches `steps` may not have settled.

    Shapes: query `[..., Q, D]`, patterns `[..., N, D]`, values `[..., N, V]` (None: the patterns), mask bool `[..., N]`
    (False: no such pattern, whatever is there); leading axes broadcast. Evaluated in float32 or better, also under
    autocast. Without a present pattern the answer is 0.
    VJP: autograd's, through every update.
    Cost: steps Q N (D + V) multiplications, and Q N scores in memory.
    References: Hopfield Networks is All You Need (Ramsauer et al., 2020, arXiv 2008.02217), eqs 1 to 3 and theorem 5;
    Rethinking Attention with Performers (Choromanski et al., 2021, arXiv 2009.14794). Tests hold the update against
    numpy and torch's attention, the energy's descent and range, the retrieval bound on random patterns, and the limit
    against the estimator's variance. The paper's storage capacity (theorem 3) is cited, not tested.
    """

    def __init__(self, sharpness: float, *, steps: int = 1, tolerance: float = 0.0) -> None:
        super().__init__()
        if type(sharpness) not in (int, float) or not 0 < sharpness < math.inf:
            raise ConfigError(f"sharpness must be a finite number > 0, got {shorten(sharpness)}")
        expect_number(tolerance, "tolerance")
        expect_count(steps, "steps")
        self.sharpness, self.steps, self.tolerance = sharpness, steps, tolerance

    def forward(
        self, query: Tensor, patterns: Tensor, values: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Retrieved:
        """The values at the place where the query comes to rest, or is after `steps` updates."""
        values = patterns if values is None else values
        dtype, (query, patterns) = query.dtype, _prepare(query, patterns, mask, values)
        values = _present(values, mask).to(query.dtype)
        # A query for every set of patterns: each comes to rest by itself.
        lead = torch.broadcast_shapes(query.shape[:-2], patterns.shape[:-2])
        query = query.expand(*lead, *query.shape[-2:])
        taken = torch.ones(query.shape[:-1], dtype=torch.int64, device=query.device)
        moving = torch.ones_like(taken, dtype=torch.bool)
        with without_autocast(query.device.type):
            for step in range(self.steps):
                weights = self._weights(query, patterns, mask)
                moved = weights @ patterns
                if step == self.steps - 1:
                    break
                moving = moving & ((moved - query).detach().norm(dim=-1) > self.tolerance)
                if self.tolerance and can_inspect(moving) and not bool(moving.any()):
                    break
                # A query at rest repeats its last update: its answer does not depend on the others.
                query = torch.where(moving.unsqueeze(-1), moved, query)
                taken = taken + moving
            read = weights @ values
        return Retrieved(read.to(dtype), moved.to(dtype), taken)

    def weights(self, query: Tensor, patterns: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """softmax(sharpness X xi) over the present patterns, `[..., Q, N]`; 0 without any."""
        query, patterns = _prepare(query, patterns, mask)
        with without_autocast(query.device.type):
            return self._weights(query, patterns, mask)

    def _weights(self, query: Tensor, patterns: Tensor, mask: Tensor | None) -> Tensor:
        scores = self.sharpness * (query @ patterns.mT)
        if mask is None:
            return scores.softmax(-1)
        present = mask.unsqueeze(-2)
        blind = ~present.any(-1, keepdim=True)  # a softmax over nothing has no value
        weights = scores.masked_fill(~(present | blind), -math.inf).softmax(-1)
        return torch.where(blind, 0.0, weights)

    def energy(self, query: Tensor, patterns: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """E = -lse(X xi) + |xi|^2 / 2 + (log N) / sharpness + M^2 / 2, `[..., Q]`.

        lse(z) = log(sum exp(sharpness z)) / sharpness over the N present patterns, M the length of the longest. An
        update lowers E by at least |xi_new - xi|^2 / 2; E >= 0 for every query and E <= 2 M^2 for those no longer than
        M. Without a pattern E = |xi|^2 / 2. [TRF-HOP-I1]
        """
        query, patterns = _prepare(query, patterns, mask)
        here = patterns.new_ones(patterns.shape[:-1], dtype=torch.bool) if mask is None else mask
        count = here.sum(-1, keepdim=True)
        longest = _largest(patterns.square().sum(-1), least=0.0).unsqueeze(-1)
        none = (count == 0).unsqueeze(-1)
        with without_autocast(query.device.type):
            scores = self.sharpness * (query @ patterns.mT)
        # Where no pattern is present all scores stay: the sum over none has no gradient, and is thrown away below.
        lse = scores.masked_fill(~(here.unsqueeze(-2) | none), -math.inf).logsumexp(-1)
        attracted = (count.clamp(min=1).log() - lse) / self.sharpness + longest / 2
        return torch.where(none.squeeze(-1), 0.0, attracted) + query.square().sum(-1) / 2

    @staticmethod
    def separation(patterns: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """x_i.x_i - max_(j != i) x_i.x_j over the present patterns, `[..., N]`.

        Large where a pattern is easily told from others; inf for the only one, nan for an absent one. [TRF-HOP-I2]
        """
        _, wide = _prepare(patterns, patterns, mask)
        with without_autocast(wide.device.type):
            products = wide @ wide.mT
        hidden = torch.eye(wide.shape[-2], dtype=torch.bool, device=wide.device)
        if mask is not None:
            hidden = hidden | ~mask.unsqueeze(-2)
        nearest = _largest(products.masked_fill(hidden, -math.inf), least=-math.inf)
        apart = products.diagonal(dim1=-2, dim2=-1) - nearest
        return apart if mask is None else torch.where(mask, apart, math.nan)

    def error_bound(self, query: Tensor, patterns: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """2 M (N - 1) exp(-sharpness (separation_i - 2 M |xi - x_i|)), `[..., Q, N]`.

        No less than the distance from pattern x_i of one update of xi. For the weight of x_j is at most exp(-sharpness
        (x_i - x_j).xi), and (x_i - x_j).xi >= separation_i - 2 M |xi - x_i|; theorem 5 of the paper is the same with
        the fixed point's distance in a maximum beside the query's. It says nothing where it exceeds 2 M. Absent
        patterns have bound inf. [TRF-HOP-I2]"""
        query, wide = _prepare(query, patterns, mask)
        apart = self.separation(patterns, mask=mask)
        here = torch.ones_like(apart, dtype=torch.bool) if mask is None else mask
        length = _largest(wide.norm(dim=-1), least=0.0).unsqueeze(-1)
        distance = (query.unsqueeze(-2) - wide.unsqueeze(-3)).norm(dim=-1)
        margin = apart.unsqueeze(-2) - 2 * length.unsqueeze(-1) * distance
        others = 2 * length * (here.sum(-1, keepdim=True) - 1)
        bound = others.unsqueeze(-1) * (-self.sharpness * margin).exp()
        # A pattern alone is infinitely far from the others: it is retrieved from anywhere.
        bound = torch.where((apart == math.inf).unsqueeze(-2), 0.0, bound)
        return torch.where(here.unsqueeze(-2), bound, math.inf)

    def extra_repr(self) -> str:
        """The numbers."""
        return f"sharpness={self.sharpness:g}, steps={self.steps}, tolerance={self.tolerance:g}"


def _present(x: Tensor, mask: Tensor | None) -> Tensor:
    """Rows of x with zeros for absent ones, which may hold what is not finite."""
    return x if mask is None else torch.where(mask.unsqueeze(-1), x, 0.0)


def _largest(x: Tensor, *, least: float) -> Tensor:
    """The maximum along the last axis, but at least `least`, also if the axis is empty."""
    return F.pad(x, (0, 1), value=least).amax(-1)


def _prepare(
    query: Tensor, patterns: Tensor, mask: Tensor | None, values: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Query and present patterns in one dtype, float32 or better; refuses what does not fit together."""
    values = patterns if values is None else values
    for name, tensor in (("query", query), ("patterns", patterns), ("values", values)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ShapeError(f"{name} must be a floating point tensor, got {kind}; convert it")
    shapes = f"{list(query.shape)} and {list(patterns.shape)}"
    if query.dim() < 2 or patterns.dim() < 2 or query.shape[-1] != patterns.shape[-1]:
        raise ShapeError(f"query must be [..., Q, D] and patterns [..., N, D], got {shapes}")
    pairs = zip(query.shape[-3::-1], patterns.shape[-3::-1], strict=False)
    if any(a != b and 1 not in (a, b) for a, b in pairs):
        raise ShapeError(f"the leading axes of query and patterns must broadcast, got {shapes}")
    lead = patterns.shape[:-1]
    expected = f"the patterns' shape {list(lead)} before its width"
    if values.shape[:-1] != lead:
        raise ShapeError(f"values must have {expected}, got {list(values.shape)}")
    if mask is not None and getattr(mask, "dtype", None) != torch.bool:
        raise ShapeError(f"mask must be bool, True where a pattern is present, got {described(mask)}")
    if mask is not None and mask.shape != lead:
        raise ShapeError(f"mask must have {expected}, got {list(mask.shape)}")
    query = widened(query, patterns)
    return query, _present(patterns, mask).to(query.dtype)
