"""Dunnett's test against its published tables, Student's t, and draws."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from hecate.compare.statistics import against, critical, dunnett, dunnett_critical, pooled, pooled_intervals, tail
from hecate.errors import ConfigError

# Dunnett (1964), New tables for multiple comparisons with a control, two-sided, joint confidence 95 % and 99 %:
# degrees of freedom, critical values for 1, 2, ..., 9 treatments beside the control.
TABLE_95 = {
    5: (2.57, 3.03, 3.29, 3.48, 3.62, 3.73, 3.82, 3.90, 3.97),
    10: (2.23, 2.57, 2.76, 2.89, 2.99, 3.07, 3.14, 3.19, 3.24),
    20: (2.09, 2.38, 2.54, 2.65, 2.73, 2.80, 2.86, 2.90, 2.95),
    60: (2.00, 2.27, 2.41, 2.51, 2.58, 2.64, 2.69, 2.73, 2.77),
}


@pytest.mark.parametrize("freedom", TABLE_95)
@pytest.mark.spec("COMPARE-STAT-D3")
def test_critical_values_are_those_of_the_tables(freedom):
    for others in (1, 2, 4, 9):
        assert abs(dunnett_critical(others, freedom) - TABLE_95[freedom][others - 1]) < 0.006


@pytest.mark.parametrize("freedom", [1, 2, 7, 40, 1000])
def test_one_difference_is_student(freedom):
    for t in (0.1, 1.0, 2.5, 6.0):
        assert abs(dunnett(t, 1, freedom) - tail(t, freedom)) < 1e-6
    assert abs(dunnett_critical(1, freedom) - critical(freedom)) < 1e-4 * critical(freedom)


def test_it_is_the_share_of_draws_beyond():
    rng, others, freedom, draws = np.random.default_rng(0), 6, 8, 200_000
    deviation = np.sqrt(rng.chisquare(freedom, draws) / freedom)
    gaps = (rng.standard_normal((draws, others)) - rng.standard_normal((draws, 1))) / math.sqrt(2)
    beyond = (np.abs(gaps).max(1) / deviation > 2.4).mean()
    assert abs(beyond - dunnett(2.4, others, freedom)) < 4 * math.sqrt(beyond * (1 - beyond) / draws)


def test_it_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    values = {name: rng.normal(shift, 1, 5) for name, shift in (("a", 0.0), ("b", 1.0), ("c", 3.0))}
    theirs = stats.dunnett(values["b"], values["c"], control=values["a"], random_state=0).pvalue
    ours = [pair.adjusted for pair in against({name: list(own) for name, own in values.items()}, "a")]
    assert np.abs(np.array(ours) - theirs).max() < 1e-3  # theirs integrates by draws


@pytest.mark.spec("COMPARE-STAT-D3")
def test_cells_against_one():
    values = {"a": [1.0, 2.0, 3.0], "b": [0.0, 1.0, 2.0], "c": [11.0, 12.0, 13.0]}
    assert pooled(values) == (1.0, 6)
    b, c = against(values, "a")
    assert (b.first, b.second, b.verdict, b.difference.mean) == ("b", "a", "cannot tell", -1.0)
    error = math.sqrt(2 / 3)
    assert math.isclose(b.p, tail(1 / error, 6)) and math.isclose(b.adjusted, dunnett(1 / error, 2, 6))
    assert b.p < b.adjusted < 2 * b.p
    assert c.verdict == "worse" and math.isclose(c.difference.half, dunnett_critical(2, 6) * error, rel_tol=1e-6)
    half = pooled_intervals(values)["b"].half
    assert math.isclose(half, critical(6) / math.sqrt(3)) and half < critical(2) / math.sqrt(3)
    assert statistics.fmean(values["b"]) == pooled_intervals(values)["b"].mean


def test_what_cannot_be_told():
    (one,) = against({"a": [1.0], "b": [2.0]}, "a")
    assert one.verdict == "cannot tell" and math.isnan(one.difference.half) and one.adjusted == 1
    (same,) = against({"a": [1.0, 1.0], "b": [1.0, 1.0]}, "a")
    assert same.verdict == "cannot tell" and same.adjusted == 1
    (apart,) = against({"a": [1.0, 1.0], "b": [0.0, 0.0]}, "a")
    assert apart.verdict == "better" and apart.adjusted == 0
    assert against({"a": [1.0, 2.0]}, "a") == []
    lost, other = against({"a": [1.0, 2.0], "b": [1.0, math.nan], "c": [5.0, 5.5]}, "a")
    assert lost.verdict == other.verdict == "cannot tell" and other.p == 1
    with pytest.raises(ConfigError, match="same number of values"):
        against({"a": [1.0], "b": [1.0, 2.0]}, "a")
    with pytest.raises(ConfigError, match="at least 1"):
        dunnett(1.0, 0, 3)
