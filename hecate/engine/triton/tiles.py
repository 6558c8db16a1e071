"""Functions of printed formulas in Triton, and the functions that their text may call.

A bias takes rows of values `[C, V]`; `inside` `[1, V]` is the mask of the width N, and sums and maxima go along a row.
A retention takes a whole weight as a tile `[P, V]`, phi channels down, so the weight's rows are the tile's columns;
`whole` is the mask of its cells, `in_p` `[P, 1]` that of channels and `in_v` `[1, V]` that of values. No file is
written: Triton reads the text from memory, and its cache is keyed by the text. [ENG-TRITON-D9]
"""

import hashlib
import linecache
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import triton
import triton.language as tl

from hecate.bias import Bias
from hecate.formula import (
    AlgorithmFormula,
    Formula,
    Unprintable,
    Weights,
    bias_formula,
    map_nodes,
    printable,
    retention_formula,
)  # fmt: skip
from hecate.formula.nodes import ALONG, DOWN, SUMS, Node
from hecate.formula.printer import Text, literal, printed, uses
from hecate.phi import FeatureMap
from hecate.retention import Retention


@triton.jit
def total(AXIS: tl.constexpr, inside, x):
    """The sum along an axis, which is kept."""
    return tl.sum(tl.where(inside, x, 0.0), AXIS, keep_dims=True)


@triton.jit
def top(AXIS: tl.constexpr, inside, x):
    """The maximum along an axis; NaN if there is one, which the hardware's maximum ignores."""
    lost = tl.sum(tl.where(inside & (x != x), 1.0, 0.0), AXIS, keep_dims=True)
    most = tl.max(tl.where(inside & (x == x), x, float("-inf")), AXIS, keep_dims=True)
    return tl.where(lost > 0, float("nan"), most)


@triton.jit
def expm1(x):
    """e^x - 1, by its series where the difference would cancel."""
    near = x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8))))))
    return tl.where(tl.abs(x) < 0.5, x + x * near, tl.exp(x) - 1)


@triton.jit
def tanh(x):
    """tanh x from e^2|x| - 1, which stays accurate for small x."""
    y = expm1(2 * tl.where(tl.abs(x) > 20, 20.0, tl.abs(x)))
    return tl.where(x < 0, -1.0, 1.0) * (y / (y + 2))


@triton.jit
def log1p(x):
    """log(1 + x), corrected by x over the part of x that survives in 1 + x."""
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


# With `tl.` in front: the interpreter patches modules that a function's globals name, not aliases of functions in them.
NAMES = {name: f"tl.{name}(" for name in "where abs sqrt exp log sin cos erf floor".split()}
# Masks of sums, by the operand's axes: a weight's cells, or one number for each of its rows or columns.
IN_TILES = {ALONG | DOWN: "whole", ALONG: "in_p", DOWN: "in_v"}


def _named(node: Node, axis: int, inside: str | None = None) -> str:
    """A node's name and the arguments before its inputs; axis: of values; inside: the mask of sums, if it is one for
    all."""
    if node.op not in SUMS:
        return NAMES.get(node.op, f"{node.op}(")
    name = node.op.removeprefix("column_")
    return f"{name}({axis if name == node.op else 1 - axis}, {inside or IN_TILES[node.args[0].axes]}, "


class Tiles(NamedTuple):
    """A bias for the kernels: `psi(inside, N, p, v, cu)` is u, `pull(inside, N, p, v, g, cg)` the cotangents of p and v
    from that of u; `cu` and `cg` are their constants. moves: u depends on p, else it is -v; apart: values are
    independent; error: u is p - v."""

    psi: Any
    pull: Any
    cu: tuple[float, ...]
    cg: tuple[float, ...]
    moves: bool
    apart: bool
    error: bool


class Steps(NamedTuple):
    """A retention for the kernels: `step(*, X, D, r, c)` and `step_back(*, X, D, r, g, c)`, the cotangents of X, D and,
    per cell, r; `link(*, A, c)` and `link_back(*, A, g, c)`, None where the memory itself is carried. `*` stands for
    whole, in_p, in_v and the widths P and V. numbers: the constants `cs`, `cs_back`, `cl` and `cl_back`; apart: rows
    are independent."""

    step: Any
    step_back: Any
    link: Any
    link_back: Any
    numbers: tuple[tuple[float, ...], ...]
    apart: bool


def steps_of(retention: Retention, *, single: bool) -> Steps:
    """The functions of a retention; `single`: retain is one number. Raises Unprintable if it has none."""
    formula = retention_formula(retention)
    step = formula if isinstance(formula, str) else formula.step(single=single)
    if isinstance(formula, str) or isinstance(step, str):
        raise Unprintable(str(step))
    return _steps(step, formula.link)


@lru_cache(256)
def _steps(step: Weights, link: Weights | None) -> Steps:
    if step.gate is None:
        raise Unprintable("the cotangent of its retain is no sum over cells")
    pulled = [*step.pulled[:2], step.gate]
    texts = [_of_weights("step", "XDr", [step.out]), _of_weights("step_back", "XDrg", pulled)]
    if link is not None:
        texts += [_of_weights("link", "A", [link.out]), _of_weights("link_back", "Ag", link.pulled)]
    functions, numbers = compiled(texts)
    apart = step.rowwise and (link is None or link.rowwise)
    there, back, linked, linked_back = (*functions, None, None)[:4]
    return Steps(there, back, linked, linked_back, (*numbers, (0.0,), (0.0,))[:4], apart)


def _of_weights(name: str, inputs: Sequence[str], results: Sequence[Node]) -> Text:
    arguments = "whole", "in_p", "in_v", "N: tl.constexpr", "M: tl.constexpr", *inputs
    return printed(name, arguments, results, names=partial(_named, axis=0))


@lru_cache(256)
def descent_of(formula: AlgorithmFormula) -> tuple[Any, Any, tuple[tuple[float, ...], tuple[float, ...]]]:
    """`descend(*, G, lr, m, S, c)`, an algorithm's direction and next slot; `descend_back(*, G, lr, m, S, g, h, c)`,
    the cotangents of G, lr, m and S from those of the two; and the constants of both. `*` is as in `Steps`. Without a
    slot, S and h pass through unchanged."""
    before, after = (formula.results[0].nodes.input(name, ALONG | DOWN) for name in ("s0", "h0"))
    texts = [
        _of_weights("descend", ("G", "lr", "m", "s0"), (*formula.results, before)[:2]),
        _of_weights("descend_back", ("G", "lr", "m", "s0", "g", "h0"), (*formula.pulled, after)[:4]),
    ]
    (there, back), numbers = compiled(texts)
    return there, back, (numbers[0], numbers[1])


def map_of(feature_map: FeatureMap) -> list[Any]:
    """`phi(x, c)` and `pull(x, g, c)` of an elementwise map. Its constants are in the text, as one tuple of constants
    holds both functions, and c is unused. Raises Unprintable if it has none."""
    return _map(*printable(map_nodes(feature_map)))


@lru_cache(256)
def _map(there: Node, back: Node) -> list[Any]:
    numbers = {node: literal(node.args[0]) for node in uses([there, back], {}) if node.op == "const"}
    names = partial(_named, axis=1)
    texts = [printed("phi", "x", [there], numbers, names), printed("pull", "xg", [back], numbers, names)]
    return compiled(texts)[0]


def tiles_of(bias: Bias, *, turned: bool = False) -> Tiles:
    """The functions of a bias, for rows or, `turned`, for columns. Raises Unprintable with the reason if it has
    none."""
    return _tiles(bias_formula(bias), turned)


@lru_cache(256)
def _tiles(formula: Formula, turned: bool) -> Tiles:
    inputs, names = ("inside", "N: tl.constexpr", "p", "v"), partial(_named, axis=0 if turned else 1, inside="inside")
    psi = printed("psi", inputs, [formula.u], names=names)
    (psi_of, pull_of), (cu, cg) = compiled([psi, printed("pull", (*inputs, "g"), formula.pulled, names=names)])
    return Tiles(psi_of, pull_of, cu, cg, not formula.target, formula.coordinatewise, formula.error)


def compiled(texts: Sequence[Text]) -> tuple[list[Any], list[tuple[float, ...]]]:
    """The functions of texts, and the constants of each: (0,) for none, as Triton takes no empty tuple."""
    source, names = "\n".join(text.source for text in texts), tuple(text.name for text in texts)
    return _compiled(source, names), [text.numbers or (0.0,) for text in texts]


@cache
def _compiled(text: str, names: tuple[str, ...]) -> list[Any]:
    """The functions of a text. It consists of names from the table and numbers, never of a user's strings."""
    text = text.replace("INF", 'float("inf")').replace("NAN", 'float("nan")')
    file = f"<hecate formula {hashlib.sha256(text.encode()).hexdigest()[:24]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), space := dict(globals()))
    return [triton.jit(space[name]) for name in names]
