"""Patterns of +-1, memories of them, and how many each recovers from flipped bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.nn import Hopfield
from hecate.phi import Favor, FeatureMap, Identity, Polynomial
from studies.against_softmax import parameters

FLIPPED = 0.1  # share of a query's bits, one at least
QUERIES = 200
CHUNK = 512  # patterns at a time
ROUNDING = 1e-5  # a bit read below this share of the largest is a tie, and wrong


class Memory(NamedTuple):
    """Reads sign(sum over patterns x of k(x, query) x).

    With a feature map k is phi(x).phi(y), and the memory is a matrix of d times d_phi numbers, like
    that of linear attention; without one it is exp(x.y) over the patterns themselves: softmax
    attention, the modern Hopfield network. Both see patterns times sqrt(beta).
    """

    name: str
    phi: FeatureMap | None
    beta: float = 1.0
    diagonal: bool = True  # False: no bit writes to itself, as in the classical network

    def numbers(self, d: int) -> int | None:
        """In the matrix; None where the patterns themselves are kept."""
        return None if self.phi is None else d * self.phi.output_dim(d)

    @property
    def is_random(self) -> bool:
        """Whether its features are drawn."""
        return self.phi is not None and self.phi.is_random


CLASSICAL = Memory("classical: identity, no diagonal", Identity(), diagonal=False)
IDENTITY = Memory("identity", Identity())
POLYNOMIALS = tuple(Memory(f"polynomial, degree {p}", Polynomial(degree=p, coefficients="ones")) for p in (2, 3))
SOFTMAX = tuple(Memory(f"softmax, beta {beta:g}", None, beta) for beta in (0.25, 1.0, 4.0))
BETAS = (0.1, 0.4, 1.0, 2.0, 4.0, 6.0)  # of which favor takes the best on other seeds


def favor(features: int, beta: float) -> Memory:
    """exp(beta x.y) by positive random features."""
    return Memory(f"favor, {features} features", Favor(num_features=features, scale="none"), beta)


def flips(d: int) -> int:
    """Bits that a query has wrong."""
    return max(1, round(FLIPPED * d))


def grid(largest: int) -> list[int]:
    """Numbers of patterns from 1 on, each about sqrt(2) times the last."""
    steps = range(2 * int(math.log2(largest)) + 1)
    return sorted({round(2 ** (step / 2)) for step in steps})


def drawn(count: int, d: int, g: torch.Generator) -> Tensor:
    """Patterns `[count, d]` of +-1."""
    return torch.randint(0, 2, (count, d), generator=g).mul_(2).sub_(1).float()


def queries(patterns: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """The first patterns `[QUERIES, d]`, over again if there are fewer, and the same with flips."""
    wanted = patterns[torch.arange(QUERIES) % len(patterns)]
    order = torch.rand(wanted.shape, generator=g).argsort(-1)
    return wanted, torch.where(order < flips(patterns.shape[-1]), -wanted, wanted)


def recovered(memory: Memory, d: int, counts: Sequence[int], seed: int) -> list[float]:
    """Share of queries that one update makes exactly right, for each number of patterns."""
    g = torch.Generator().manual_seed(seed)
    patterns = drawn(counts[-1], d, g)
    read = _similar(memory, patterns) if memory.phi is None else _matrix(memory, patterns, seed)
    shares = []
    for count in counts:
        wanted, noisy = queries(patterns[:count], g)
        values = read(noisy, count)
        tie = values.abs() <= ROUNDING * values.abs().amax(-1, keepdim=True)
        found = torch.where(tie, 0.0, values.sign())
        shares.append(float((found == wanted).all(-1).float().mean()))
    return shares


Read = Callable[[Tensor, int], Tensor]  # queries, number of patterns -> values before the sign


def _matrix(memory: Memory, patterns: Tensor, seed: int) -> Read:
    """Written pattern by pattern, so counts must grow."""
    d = patterns.shape[-1]
    phi = memory.phi or Identity()
    params = parameters(phi, d, seed, torch.float32)
    root = math.sqrt(memory.beta)
    state, written = patterns.new_zeros(phi.output_dim(d), d), 0

    def read(noisy: Tensor, count: int) -> Tensor:
        nonlocal written
        for chunk in _chunks(patterns[written:count]):
            state.add_(phi(root * chunk, params).T @ chunk)
        written = count
        values = phi(root * noisy, params) @ state
        return values if memory.diagonal else values - count * memory.beta * noisy

    return read


def _similar(memory: Memory, patterns: Tensor) -> Read:
    """In float64, a part of the queries at a time: every pattern has a score for each."""
    hopfield, kept = Hopfield(memory.beta), patterns.double()

    def read(noisy: Tensor, count: int) -> Tensor:
        parts = noisy.double().split(QUERIES // 8)
        return torch.cat([hopfield.weights(part, kept[:count]) @ kept[:count] for part in parts])

    return read


def _chunks(patterns: Tensor) -> Iterator[Tensor]:
    if len(patterns):
        yield from patterns.split(CHUNK)


def capacity(counts: Sequence[int], shares: Sequence[float]) -> float:
    """Patterns of which half are recovered, between counts on a log scale; inf if never fewer."""
    for place in range(1, len(counts)):
        left, right = shares[place - 1], shares[place]
        if right < 0.5:
            step = (left - 0.5) / (left - right) if left > 0.5 else 0.0
            return counts[place - 1] * (counts[place] / counts[place - 1]) ** step
    return math.inf


def expected(kernel: Callable[[Tensor], Tensor], d: int, count: float, own: bool = True) -> float:
    """Share recovered if what the other patterns add to a bit is normal.

    `kernel` is a function of x.y. A bit of the read is the pattern's k(d - 2 flips), plus what the
    others add: on average `pull` towards the query's bit, with `noise`; both from the distribution
    of a sum of d - 1 signs. Without `own` (no diagonal) there is no pull.
    """
    wrong = flips(d)
    steps = torch.arange(d, dtype=torch.float64)
    rest = 2 * steps - (d - 1)  # x.y without the bit
    weight = (math.lgamma(d) - torch.lgamma(steps + 1) - torch.lgamma(d - steps) - (d - 1) * math.log(2)).exp()
    same, other = (kernel(rest + bit if own else rest) for bit in (1, -1))
    pull = float((weight * (same - other)).sum() / 2)
    square = float((weight * (same.square() + other.square())).sum() / 2)
    noise = math.sqrt(max(count - 1, 0) * (square - pull**2)) or math.ulp(0)
    signal = float(kernel(torch.tensor(float(d - 2 * wrong), dtype=torch.float64)))
    good, bad = ((1 + math.erf((signal + sign * (count - 1) * pull) / noise / math.sqrt(2))) / 2 for sign in (1, -1))
    return good ** (d - wrong) * bad**wrong


def nearest(d: int) -> float:
    """Patterns at which half the queries have another pattern at least as near as their own."""
    wrong = flips(d)
    ball = sum(math.comb(d, k) for k in range(wrong + 1))
    return 1 + math.log(2) / -math.log1p(-ball / 2**d)


def expected_capacity(memory: Memory, d: int) -> float | None:
    """Where `expected` falls to one half; of softmax, `nearest`; None for favor."""
    if memory.phi is None:
        return nearest(d) if memory.beta >= 4 else None
    if memory.is_random:
        return None
    degree = memory.phi.degree if isinstance(memory.phi, Polynomial) else 1

    def kernel(z: Tensor) -> Tensor:
        powers = [z**p for p in range(degree + 1)]
        return torch.stack(powers).sum(0) if degree > 1 else z

    low, high = 1.0, 1e9
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        above = expected(kernel, d, middle, memory.diagonal) > 0.5
        low, high = (middle, high) if above else (low, middle)
    return low


class Outcome(NamedTuple):
    """A memory's shares `[seeds][counts]` by width."""

    memory: Memory
    counts: Sequence[int]
    shares: Mapping[int, Sequence[Sequence[float]]]

    def capacities(self, d: int) -> list[float]:
        """One per seed; inf beyond the largest number tried."""
        return [capacity(self.counts, shares) for shares in self.shares[d]]

    def reached(self) -> list[int]:
        """Widths at which every seed saw the end."""
        return [d for d in self.shares if all(map(math.isfinite, self.capacities(d)))]


def growth(outcome: Outcome, axis: Callable[[float], float]) -> list[float] | None:
    """Slope of log2 capacity over d, or of log over log: seed by seed."""
    widths = outcome.reached()
    if len(widths) < 2:
        return None
    found = zip(*(outcome.capacities(d) for d in widths), strict=True)
    return [_fit(widths, capacities, axis) for capacities in found]


def expected_growth(outcome: Outcome) -> float:
    """The power of d by which `expected_capacity` grows over the same widths."""
    widths = outcome.reached()
    hoped = [expected_capacity(outcome.memory, d) or math.nan for d in widths]
    return _fit(widths, hoped, math.log)


def _fit(widths: Sequence[int], capacities: Sequence[float], axis: Callable[[float], float]) -> float:
    """Least squares."""
    unit = math.log(2) if axis is float else 1.0
    x = torch.tensor([axis(d) for d in widths], dtype=torch.float64)
    y = torch.tensor(capacities, dtype=torch.float64).log() / unit
    return float(((x - x.mean()) * y).sum() / (x - x.mean()).square().sum())
