"""Biases as the kernels know them: the names of a formula's text in Triton, and its functions.

They take rows of values `[C, V]`; `inside` `[1, V]` says what lies within the width N, and sums and maxima go along a
row. Nothing is written: Triton takes the text from memory, and its cache knows it by what it says. [ENG-TRITON-D9]
"""

import hashlib
import linecache
from functools import cache, lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from hecate.bias import Bias
from hecate.formula import Formula, bias_formula
from hecate.formula.printer import printed


@triton.jit
def total(inside, x):
    """The sum of each row, `[C, 1]`."""
    return tl.sum(tl.where(inside, x, 0.0), 1)[:, None]


@triton.jit
def top(inside, x):
    """The largest number of each row, or NaN, which the hardware's maximum passes over."""
    lost = tl.sum(tl.where(inside & (x != x), 1.0, 0.0), 1)
    return tl.where(lost > 0, float("nan"), tl.max(tl.where(inside & (x == x), x, float("-inf")), 1))[:, None]


@triton.jit
def expm1(x):
    """e^x - 1, by its series where the difference would cancel."""
    near = x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8))))))
    return tl.where(tl.abs(x) < 0.5, x + x * near, tl.exp(x) - 1)


@triton.jit
def tanh(x):
    """By e^2|x| - 1, which is small where x is."""
    y = expm1(2 * tl.where(tl.abs(x) > 20, 20.0, tl.abs(x)))
    return tl.where(x < 0, -1.0, 1.0) * (y / (y + 2))


@triton.jit
def log1p(x):
    """log(1 + x), times x over what 1 + x kept of it."""
    y = 1.0 + x
    kept = tl.where(y == 1, 1.0, y - 1)
    return tl.where((y == 1) | (y == float("inf")), x, tl.log(y) * (x / kept))


@triton.jit
def power(x, n):
    """x^n, of negative numbers for whole n."""
    size = tl.abs(x)
    y = tl.where(n == 0, 1.0, tl.where(size == 1, 1.0, tl.exp2(n * tl.log2(size))))
    signed = tl.where(n * 0.5 == tl.floor(n * 0.5), y, -y)
    return tl.where(x < 0, tl.where(n == tl.floor(n), signed, tl.where(size == float("inf"), y, float("nan"))), y)


# `tl.` in front: the interpreter replaces what it finds in this module, not functions under names of their own.
NAMES = {
    **{name: f"tl.{name}(" for name in "where abs sqrt exp log sin cos erf floor".split()},
    "total": "total(inside, ", "top": "top(inside, ",
}  # fmt: skip


class Tiles(NamedTuple):
    """A bias for the kernels: `psi(inside, N, p, v, cu)` is u, `pull(inside, N, p, v, g, cg)` the cotangents of p and v
    from that of u, `cu` and `cg` their numbers. u `moves` with p, or is -v; values are `apart` if none needs others."""

    psi: Any
    pull: Any
    cu: tuple[float, ...]
    cg: tuple[float, ...]
    moves: bool
    apart: bool


def tiles_of(bias: Bias) -> Tiles:
    """The functions of a bias. Raises Unprintable, which says why it has none."""
    return _tiles(bias_formula(bias))


@lru_cache(256)
def _tiles(formula: Formula) -> Tiles:
    given = "inside", "N: tl.constexpr", "p", "v"
    psi = printed("psi", given, [formula.u], names=NAMES)
    pull = printed("pull", (*given, "g"), formula.pulled, names=NAMES)
    text = f"{psi.source}\n{pull.source}".replace("INF", 'float("inf")').replace("NAN", 'float("nan")')
    numbers = psi.numbers or (0.0,), pull.numbers or (0.0,)  # an empty tuple is no argument
    return Tiles(*compiled(text), *numbers, not formula.target, formula.coordinatewise)


@cache
def compiled(text: str) -> tuple[Any, Any]:
    """psi and pull of a text, which is made of names of the table and numbers alone: no string of a user's is in it."""
    file = f"<hecate formula {hashlib.sha256(text.encode()).hexdigest()[:24]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), space := dict(globals()))
    return triton.jit(space["psi"]), triton.jit(space["pull"])
