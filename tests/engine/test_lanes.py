"""The names of kernels for vectors of numbers: how far each is off, and what it makes of zeros, infinities and NaN."""

from __future__ import annotations

import operator
from functools import cache
from itertools import product
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")
from hecate.engine.cpu import lanes  # noqa: E402
from hecate.engine.cpu.vectors import FOUR, ONE, inline, load, per_vector, store  # noqa: E402

DTYPES = [np.float32, np.float64]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, np.inf, -np.inf, np.nan]
EXACT = {"abs": np.abs, "sqrt": np.sqrt, "floor": np.floor}
# Units in the last place that a name may be off.
WORST = {"log": 1.0, "log1p": 1.0} | dict.fromkeys(["exp", "expm1", "tanh", "sin", "cos", "erf", "power"], 1.5)
UNARY = [name for name in (*WORST, *EXACT) if name != "power"]
POWER = lanes.power
POWERS = [1.3, 3.7, 0.1, -0.1, -2.5, 5.0, -3.0, 2.0, 1e-3, 40.7, -171.3, 1e4, 1.0, -1.0]


@cache
def compiled(function: Any) -> tuple[Any, Any]:
    """A function of three over arrays, in vectors of 64 bytes and in fours."""
    function = inline(function)

    @numba.njit(error_model="numpy")
    def whole(a, b, c, y):
        for i in range(0, y.size, per_vector(y)):
            store(y, i, function(load(a, i, ONE), load(b, i, ONE), load(c, i, ONE)))

    @numba.njit(error_model="numpy")
    def fours(a, b, c, y):
        for i in range(0, y.size, 4):
            store(y, i, function(load(a, i, FOUR), load(b, i, FOUR), load(c, i, FOUR)))

    return whole, fours


def applied(function: Any, *inputs: Any) -> Any:
    """To arrays in whole vectors; the same in fours."""
    a, b, c = (*inputs, *inputs[:1] * 2)[:3]
    found = [np.empty_like(a) for _ in range(2)]
    for run, y in zip(compiled(function), found, strict=True):
        run(a, b, c, y)
    np.testing.assert_array_equal(*found)
    return found[0]


@cache
def unary(name: str) -> Any:
    function = lanes.NAMES[name]
    return lambda a, b, c: function(a)


def power(a: Any, b: Any, c: Any) -> Any:
    return POWER(a, b)


def padded(x: Any) -> Any:
    return np.concatenate([x, np.ones(-x.size % 16, x.dtype)])


def samples(dtype: Any) -> Any:
    """Every exponent and sign, numbers of everyday size, and both sides of where formulas change."""
    rng, whole = np.random.default_rng(0), np.uint32 if dtype == np.float32 else np.uint64
    bits = rng.integers(0, np.iinfo(whole).max, 20000, whole).view(dtype)
    near = [rng.normal(size=6000) * scale for scale in (1e-6, 1e-3, 0.1, 1, 10, 40)]
    edges = np.array([*[k * np.log(2) / 2 for k in range(1, 12)], 0.625, 0.5**0.5, 2**0.5, 1.0, 2.0, 20.0, 1e-30])
    edges = np.concatenate([edges, [40.0, 87.3, 88.7, 89.0, 103.3, 104.0, 708.4, 709.8, 710.0, 744.5, 745.2, 746.0]])
    edges = (edges[:, None] * (1 + np.finfo(dtype).eps * np.arange(-40, 41))).ravel()
    around = 1 + rng.normal(size=6000) * 10.0 ** -rng.uniform(0, 8, 6000)
    tiny = np.finfo(dtype).tiny * rng.uniform(0, 4, 2000)
    parts = [np.where(np.isnan(bits), dtype(np.nan), bits), *near, edges, -edges, around, -around, tiny, -tiny]
    return np.concatenate([part.astype(dtype) for part in parts])


def off(found: Any, exact: Any) -> Any:
    """Distances in units in the last place; infinities are one step beyond the largest number."""
    dtype, top = found.dtype, np.finfo(found.dtype).max
    with np.errstate(all="ignore"):
        nearest = exact.astype(dtype)
        assert np.array_equal(np.isnan(found), np.isnan(nearest))
        there = np.isfinite(nearest) | np.isfinite(found)
        step = np.spacing(np.minimum(np.abs(nearest), top)).astype(exact.dtype)
        ends = [np.where(np.isinf(x), np.sign(x) * (top + np.spacing(top).astype(exact.dtype)), x)
                for x in (found.astype(exact.dtype), np.where(np.isinf(nearest), nearest, exact))]  # fmt: skip
        return (np.abs(ends[0] - ends[1]) / step)[there]


def wider(dtype: Any) -> Any:
    if dtype == np.float32:
        return np.float64
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("no float wider than 64 bits here")
    return np.longdouble


def judged(name: str, found: Any, exact: Any, worst: float) -> None:
    errors = off(found, exact)
    print(f"{name} {found.dtype}: worst {float(errors.max()):.3f} mean {float(errors.mean()):.3f}")
    assert errors.max() <= worst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNARY)
def test_names_are_near(name, dtype):
    x = samples(dtype)
    if name == "erf" and dtype == np.float64:
        x = x[:: x.size // 3000]
    x = padded(x)
    found = applied(unary(name), x)
    with np.errstate(all="ignore"):
        if name in EXACT:
            np.testing.assert_array_equal(found, EXACT[name](x))
            return
        if name == "erf":
            exact = erf(x)
        else:
            exact = getattr(np, name)(x.astype(wider(dtype)))
    judged(name, found, exact, WORST[name])


def erf(x: Any) -> Any:
    if x.dtype == np.float32:
        return torch.erf(torch.from_numpy(x.astype(np.float64))).numpy()
    with mpmath.workprec(80):
        return np.array([wider(x.dtype)(str(mpmath.erf(float(value)))) for value in x])


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_numbers_are_near(dtype):
    x, ends = samples(dtype), (-87, 88) if dtype == np.float32 else (-708, 709)
    x = padded(x[~np.isnan(x)])
    exp = lanes.normal_exp
    function = lambda a, b, c: exp(a)  # noqa: E731 - compiled once
    judged("normal exp", applied(function, x), np.exp(x.clip(*ends).astype(wider(dtype))), WORST["exp"])
    assert np.isnan(applied(function, np.full(16, np.nan, dtype))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [-1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (-2, 1))])
def test_thirds_are_near(n, dtype):
    """A root is off by 1.5, its square by twice as much and its own rounding."""
    x = np.abs(samples(dtype))
    x = padded(x[(x >= np.finfo(dtype).tiny) & (x < np.inf)])
    ends, found = padded(np.array([np.inf, np.nan], dtype)), []
    for own in (lanes.thirds, lanes.thirds_above):
        function = lambda a, b, c, own=own: own(a, n)  # noqa: E731 - compiled once
        found.append(applied(function, x))
        same(applied(function, ends), ends ** (n / 3))
    judged(f"thirds {n}", found[0], x.astype(wider(dtype)) ** (n / wider(dtype)(3)), 4.0)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_are_near(dtype):
    x, rng = padded(samples(dtype)), np.random.default_rng(1)
    with np.errstate(all="ignore"):
        reach = np.log(np.finfo(dtype).max) / np.abs(np.log(np.abs(x)))
        to_the_ends = (reach * rng.uniform(-1.1, 1.1, x.size)).astype(dtype)
    for n in [*(np.full(x.size, n, dtype) for n in POWERS), to_the_ends]:
        with np.errstate(all="ignore"):
            exact = np.power(x.astype(wider(dtype)), n.astype(wider(dtype)))
        judged(f"power {n[0]}", applied(power, x, n), exact, WORST["power"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNARY)
def test_ends_are_those_of_torch(name, dtype):
    info = np.finfo(dtype)
    ends = [info.max, info.tiny, 1e-40, 3e-39, 100.0, 1e4]
    x = padded(np.array([*SPECIAL, *ends, *(-end for end in ends)], dtype))
    found = applied(unary(name), x)
    expected = getattr(torch, name)(torch.from_numpy(x)).numpy()
    same(found, expected, worst=2 * info.eps)


def same(found: Any, expected: Any, worst: float = 0.0) -> None:
    """To a relative error, the signs of zeros among what has to be equal."""
    np.testing.assert_allclose(found, expected, rtol=worst, atol=0)
    there = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found)[there], np.signbit(expected)[there])


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_end_as_those_of_torch(dtype):
    ends = [1e-40, 1e30, -1e30, 3.0, -3.0, 1.3, -1.3]
    pairs = np.array([*product([*SPECIAL, *ends], repeat=2)], dtype).T
    x, n = (padded(np.ascontiguousarray(row)) for row in pairs)
    found = applied(power, x, n)
    same(found, torch.pow(torch.from_numpy(x), torch.from_numpy(n)).numpy(), worst=4 * np.finfo(dtype).eps)


def test_powers_take_numbers():
    x = np.linspace(0.1, 3, 16)
    np.testing.assert_allclose(applied(lambda a, b, c: POWER(POWER(2, a), 1.5), x), (2**x) ** 1.5, rtol=2e-15)


PAIRS = np.array([*product([*SPECIAL, 3.0, 1e-40, 1e30], repeat=2)]).T


OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_round_once(dtype):
    """All in one kernel: c says which."""
    x, y = (padded(row.astype(dtype)) for row in PAIRS)
    add, sub, mul, div = OPERATORS
    where = lanes.where

    def each(a: Any, b: Any, c: Any) -> Any:
        """By two vectors, or by numbers on either side."""
        pairs = where(c < 2, where(c < 1, add(a, b), sub(a, b)), where(c < 3, mul(a, b), div(a, b)))
        left = where(c < 6, where(c < 5, add(0.1, add(a, 3)), sub(0.1, sub(a, 3))), mul(0.1, mul(a, 3)))
        return where(c < 4, pairs, where(c < 7, left, div(0.1, div(a, 3))))

    with np.errstate(all="ignore"):
        expected = [on(x, y) for on in OPERATORS] + [on(dtype(0.1), on(x, dtype(3))) for on in OPERATORS]
    which = np.repeat(np.arange(8, dtype=dtype), x.size)
    same(applied(each, np.tile(x, 8), np.tile(y, 8), which), np.concatenate(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_comparisons_are_those_of_torch(dtype):
    """All in one kernel, each with a vector, or else with a number, as the digits of a sum."""
    x, y = (padded(row.astype(dtype)) for row in PAIRS)
    where = lanes.where

    def digit(on: Any, size: float) -> Any:
        return inline(lambda a, b: where(on(a, b), 2 * size, where(on(a, 1), size, 0.0)))

    one, two, three, four, five, six = (digit(on, 3.0**at) for at, on in enumerate(COMPARISONS))
    found = applied(lambda a, b, c: one(a, b) + two(a, b) + three(a, b) + four(a, b) + five(a, b) + six(a, b), x, y)
    expected = 0
    for at, on in enumerate(COMPARISONS):
        both, alone = (on(torch.from_numpy(x), other).numpy() for other in (torch.from_numpy(y), 1))
        expected = expected + 3.0**at * np.where(both, 2, np.where(alone, 1, 0))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_are_joined(dtype):
    x, y = (padded(row.astype(dtype)) for row in PAIRS)
    where = lanes.where
    found = applied(lambda a, b, c: where((a < b) & (a != 1), 1, where((a < b) | (a == 1), 2, 0)), x, y)
    np.testing.assert_array_equal(found, np.where((x < y) & (x != 1), 1, 2 * ((x < y) | (x == 1))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_contracted(dtype):
    x, y, z = np.random.default_rng(0).normal(size=(3, 1024)).astype(dtype)
    np.testing.assert_array_equal(applied(lambda a, b, c: a * b + c, x, y, z), x * y + z)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lanes_of_a_vector_meet(dtype):
    x = np.random.default_rng(0).normal(size=64).astype(dtype)
    x[8], x[33], x[48:52] = np.nan, np.inf, -np.inf
    total, top = lanes.total, lanes.top

    @numba.njit(error_model="numpy")
    def run(x, y, z):
        for i in range(0, x.size, 4):
            store(y, i, total(load(x, i, FOUR)))
            store(z, i, top(load(x, i, FOUR)))

    y, z, rows = np.empty_like(x), np.empty_like(x), torch.from_numpy(x).view(-1, 4)
    run(x, y, z)
    np.testing.assert_allclose(y, rows.sum(-1, keepdim=True).expand(-1, 4).numpy().ravel(), rtol=1e-5)
    np.testing.assert_array_equal(z, rows.amax(-1, keepdim=True).expand(-1, 4).numpy().ravel())


def test_every_name_is_there():
    names = "where abs sqrt exp log log1p expm1 tanh sin cos erf floor power total top"
    assert set(lanes.NAMES) == set(names.split())
