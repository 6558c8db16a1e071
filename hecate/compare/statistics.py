"""Intervals and verdicts from a few seeds: Student's t, paired over seeds, corrected by Holm; and several cells against
one, with a deviation pooled over them, corrected by Dunnett.

With few seeds (3 to 10) a bootstrap gives intervals that are too narrow; t intervals have the right width if the values
are about normal. References: Student (1908); Dunnett (1955); Holm (1979).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hecate.errors import ConfigError

Array = NDArray[np.float64]
Verdict = Literal["better", "worse", "cannot tell"]


class Interval(NamedTuple):
    """A mean, and half the width of its interval: NaN if there is only one value."""

    mean: float
    half: float

    def text(self, spec: str = ".4f") -> str:
        """The text "mean +- half", or only the mean if half is NaN; a sign in the format only applies to the mean."""
        return f"{self.mean:{spec}}" + ("" if math.isnan(self.half) else f" +- {self.half:{spec.lstrip('+')}}")


class Pair(NamedTuple):
    """Comparison of two cells: the mean over seeds of first minus second with its interval, p by the t test, p
    corrected for the number of pairs, and the verdict on the first; smaller is better."""

    first: str
    second: str
    difference: Interval
    p: float
    adjusted: float
    verdict: Verdict


def tail(t: float, freedom: int) -> float:
    """The probability that |Student's t| exceeds |t|, for an integer number of degrees of freedom.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4, finite sums. [COMPARE-STAT-D1]
    """
    if freedom < 1:
        raise ConfigError(f"t needs at least one degree of freedom, got {freedom}")
    angle = math.atan2(abs(t), math.sqrt(freedom))
    odd, cosine = freedom % 2, math.cos(angle)
    term = cosine if odd else 1.0
    total = 0.0
    for number in range(2 if not odd else 3, freedom + 1, 2):
        total += term
        term *= cosine**2 * (number - 1) / number
    inside = (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
    return min(max(1 - inside, 0.0), 1.0)


def critical(freedom: int, level: float = 0.95) -> float:
    """The two-sided critical value: Student's t is within +- this with probability `level`."""
    return _root(lambda t: tail(t, freedom), 1 - level)


def _root(falling: Callable[[float], float], value: float) -> float:
    """The positive number at which a decreasing function has a value, by bisection."""
    low, high = 0.0, 1.0
    while falling(high) > value:
        high *= 2
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return (low + high) / 2


def dunnett(t: float, others: int, freedom: int) -> float:
    """The probability that any of `others` differences to a control exceeds t standard errors in size, if all true
    means are equal and all cells have the same number of values. [COMPARE-STAT-D3]

    The differences X_i - X_0 share the control, so that their correlation is 1/2, and the deviation s, with `freedom`
    degrees of freedom:

        1 - E_s E_z [Phi(z + sqrt(2) t s) - Phi(z - sqrt(2) t s)]^others,   z ~ N(0, 1), s^2 ~ chi^2_freedom / freedom

    by Gauss-Hermite over z and Gauss-Legendre over s; for one difference it is Student's t. Source: Dunnett (1955).
    """
    if freedom < 1 or others < 1:
        raise ConfigError(f"Dunnett's test needs others and degrees of freedom of at least 1, got {others}, {freedom}")
    (z, by_z), (at, by_s) = _nodes()
    reach = 8 / math.sqrt(2 * freedom)
    low, high = max(0.0, 1 - reach), 1 + reach
    s = (low + high + (high - low) * at) / 2
    by_s = by_s * np.exp((freedom - 1) * np.log(s) - freedom * (s**2 - 1) / 2)
    width = torch.from_numpy(math.sqrt(2) * abs(t) * s)[:, None]
    middle = torch.from_numpy(z)
    inside = (torch.special.ndtr(middle + width) - torch.special.ndtr(middle - width)) ** others
    mass = by_s @ inside.numpy() @ by_z / (by_s.sum() * by_z.sum())
    return min(max(1 - float(mass), 0.0), 1.0)


@cache
def _nodes() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Nodes and weights of `dunnett`, over z and over s."""
    return np.polynomial.hermite_e.hermegauss(80), np.polynomial.legendre.leggauss(120)


def dunnett_critical(others: int, freedom: int, level: float = 0.95) -> float:
    """The two-sided critical value of Dunnett's test: all of `others` differences to a control are within +- this many
    standard errors with probability `level`."""
    return _root(lambda t: dunnett(t, others, freedom), 1 - level)


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean and t interval of independent values, one per seed. [COMPARE-STAT-D1]"""
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return Interval(mean, math.nan)
    return Interval(mean, critical(len(values) - 1, level) * statistics.stdev(values) / math.sqrt(len(values)))


def paired(values: Sequence[float]) -> float:
    """p of the t test for a mean difference of zero; 1 for a single value, or if a value is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return 1.0
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return tail(mean / error, len(values) - 1)


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected by Holm's method, which bounds the probability of any false finding. [COMPARE-STAT-D2]"""
    adjusted, most = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        most = max(most, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = most
    return adjusted


def pairs(losses: Mapping[str, Sequence[float]], level: float = 0.95) -> list[Pair]:
    """Comparison of every two cells, each with a value per seed, for the same seeds in the same order.
    [COMPARE-STAT-D2]"""
    if len({len(values) for values in losses.values()}) > 1:
        raise ConfigError("cells are compared over the same seeds; give each the same number of values")
    names = list(combinations(losses, 2))
    gaps = [[a - b for a, b in zip(losses[one], losses[two], strict=True)] for one, two in names]
    ps = [paired(gap) for gap in gaps]
    verdicts = []
    for (one, two), gap, p, adjusted in zip(names, gaps, ps, holm(ps), strict=True):
        verdict = _verdict(statistics.fmean(gap), adjusted, level)
        verdicts.append(Pair(one, two, interval(gap, level), p, adjusted, verdict))
    return verdicts


def _verdict(gap: float, p: float, level: float) -> Verdict:
    return ("better" if gap < 0 else "worse") if p < 1 - level else "cannot tell"


def pooled(values: Mapping[str, Sequence[float]]) -> tuple[float, int]:
    """Standard deviation around the means of cells, pooled over them, and its degrees of freedom. [COMPARE-STAT-D3]"""
    freedom = sum(len(cell) - 1 for cell in values.values())
    squares = sum((value - statistics.fmean(cell)) ** 2 for cell in values.values() for value in cell)
    return (math.sqrt(squares / freedom) if freedom else math.nan), freedom


def pooled_intervals(values: Mapping[str, Sequence[float]], level: float = 0.95) -> dict[str, Interval]:
    """Mean and t interval of each cell by the pooled deviation; NaN if each has a single value. [COMPARE-STAT-D3]"""
    deviation, freedom = pooled(values)
    reach = critical(freedom, level) * deviation if freedom else math.nan
    return {name: Interval(statistics.fmean(cell), reach / math.sqrt(len(cell))) for name, cell in values.items()}


def against(values: Mapping[str, Sequence[float]], reference: str, level: float = 0.95) -> list[Pair]:
    """Comparison of every other cell with a reference, corrected by Dunnett's method; all have the same number of
    values, one per seed; smaller is better. [COMPARE-STAT-D3]"""
    if len({len(cell) for cell in values.values()}) > 1:
        raise ConfigError("cells are compared over the same seeds; give each the same number of values")
    others = [name for name in values if name != reference]
    deviation, freedom = pooled(values)
    verdicts: list[Pair] = []
    if not others:
        return verdicts
    reach = dunnett_critical(len(others), freedom, level) if freedom else math.nan
    for name in others:
        gap = statistics.fmean(values[name]) - statistics.fmean(values[reference])
        if not freedom or not math.isfinite(gap) or not math.isfinite(deviation):
            verdicts.append(Pair(name, reference, Interval(gap, math.nan), 1.0, 1.0, "cannot tell"))
            continue
        error = deviation * math.sqrt(2 / len(values[reference]))
        t = gap / error if error else math.copysign(math.inf, gap) if gap else 0.0
        p, adjusted = (tail(t, freedom), dunnett(t, len(others), freedom)) if math.isfinite(t) else (0.0, 0.0)
        difference, verdict = Interval(gap, reach * error), _verdict(gap, adjusted, level)
        verdicts.append(Pair(name, reference, difference, p, adjusted, verdict))
    return verdicts
