"""Formulas as parts of the walk: a row of values, four at a time, in as many loops as sums wait for one another.

`learn(p, v, u, n, c)` and `learn_back(p, v, u, gu, gp, gv, n, c)`, as `parts` says. A sum or a maximum of the row, and
what is made of such alone, is four equal numbers, so that the names of `lanes` serve it, too. [ENG-NUM-D8]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from hecate.engine.cpu import lanes
from hecate.engine.cpu.cells import Cells, Scratch, descent_of, link_of, step_of
from hecate.engine.cpu.vectors import ONE, filled, load, mad, per_vector, store
from hecate.formula import AlgorithmFormula, Formula, Weights
from hecate.formula.nodes import SUMS, Node
from hecate.formula.printer import literal, said, uses

SIGNATURES = {"learn": "p, v, u, n, c", "learn_back": "p, v, u, gu, gp, gv, n, c", "act": "x, y, d, dd, n, c"}


class Row(NamedTuple):
    """Functions of a part there and back, as text, the numbers of c, and what scratch space they need."""

    kind: str
    there: str
    back: str
    numbers: tuple[float, ...]
    scratch: Scratch = Scratch()

    @property
    def name(self) -> str:
        """A name by which equal texts are one part."""
        return f"{self.kind}_{hashlib.sha256((self.there + self.back).encode()).hexdigest()[:16]}"


@cache
def row_of(formula: Formula) -> Row:
    """The functions of a bias."""
    u, (gp, gv) = formula.u, formula.pulled
    numbers: dict[Node, int] = {}
    known = {} if u.op in ("in", "const") else {u: "u"}
    there = printed("learn", {"p": "p", "v": "v"}, {"u": u}, {}, numbers)
    inputs = {"p": "p", "v": "v", "g": "gu"}
    back = printed("learn_back", inputs, {"gp": gp, "gv": gv}, known, numbers)
    return Row("learn", there, back, tuple(node.args[0] for node in numbers))


@cache
def act_of(nodes: tuple[Node, Node, Node]) -> Row:
    """The function of an activation: a row's values and its first and second derivatives, in whole vectors."""
    numbers: dict[Node, int] = {}
    there = printed("act", {"x": "x"}, dict(zip(("y", "d", "dd"), nodes, strict=True)), {}, numbers)
    return Row("act", there, "", tuple(node.args[0] for node in numbers))


def printed(
    name: str, inputs: Mapping[str, str], results: Mapping[str, Node], known: Mapping[Node, str],
    numbers: dict[Node, int],
) -> str:  # fmt: skip
    """A function that writes nodes into arrays; `inputs` are the arrays of a formula's inputs, `known` those of nodes
    that are there already. The config's own numbers are added to `numbers`, with their places in c."""
    stages: dict[Node, int] = {}  # loops that have to be over before a node is known
    for node in results.values():
        _stage(node, known, stages)
    text = {node: f"s{at}" for at, node in enumerate(item for item in stages if item.op in SUMS)}
    sums = list(text)
    arrays = dict.fromkeys([*inputs.values(), *known.values()])
    text |= {node: f"{array}4" for node, array in known.items()}
    first, count = next(iter(arrays)), 0
    lines = [f"def {name}({SIGNATURES[name]}):", f"    zero = filled(load({first}, 0, WIDE), 0.0)"]
    lines += ["    place = places(zero)", f"    size = per_vector({first}) * len(WIDE) or 4"]
    for stage in range(max(stages.values()) + 1):
        here = [node for node in sums if stages[node] == stage + 1]
        lines += [f"    {text[node]} = {'zero' if node.op == 'total' else 'zero - INF'}" for node in here]
        lines += [f"    for i in range(0, {first}.size, size):"]  # behind n, too, where zeros belong
        lines += [f"        {array}4 = load({array}, i, WIDE)" for array in arrays]
        inside = dict(text)
        wanted = [node.args[0] for node in here] if here else list(results.values())
        for node in uses(wanted, inside):
            if node in inside:
                continue
            if node.op == "in":
                inside[node] = "(zero + n)" if node.args[0] == "N" else f"{inputs[node.args[0]]}4"
            elif node.op == "const":
                own = literal(node.args[0])
                inside[node] = own if node.literal() else f"c[{numbers.setdefault(node, len(numbers))}]"
            else:
                inside[node], count = f"t{count}", count + 1
                lines.append(f"        {inside[node]} = {said(node, inside)}")
        for node in here:
            own, adds = text[node], node.op == "total"
            kept = f"where(place + i < n, {inside[node.args[0]]}, {'0.0' if adds else '-INF'})"
            lines.append(f"        {own} = {own} + {kept}" if adds else f"        {own} = larger({own}, {kept})")
        if not here:  # what lies behind the row stays 0
            kept = "where(place + i < n, {}, 0.0)"
            lines += [f"        store({array}, i, {kept.format(inside[node])})" for array, node in results.items()]
        lines += [f"    {text[node]} = {node.op}({text[node]})" for node in here]
    return "\n".join([*lines, ""])


def _stage(node: Node, known: Mapping[Node, str], stages: dict[Node, int]) -> int:
    if node not in stages:
        own = node.op in SUMS
        below = 0 if node in known or node.op in ("in", "const") else max(_stage(x, known, stages) for x in node.args)
        stages[node] = below + own
    return stages[node]


_KNOWN: dict[str, Row] = {}


def part(found: Formula | Weights | AlgorithmFormula | tuple[Node, Node, Node], kind: str = "") -> tuple[Any, ...]:
    """The name of the part that a bias, an activation, a link, an algorithm or, with its kind of retain, a step brings,
    its numbers, options and scratch space."""
    if isinstance(found, AlgorithmFormula):
        row = _of_cells("descend", *descent_of(found))
    elif isinstance(found, Weights):
        row = _of_cells("step", *step_of(found, kind)) if kind else _of_cells("link", *link_of(found))
    else:
        row = row_of(found) if isinstance(found, Formula) else act_of(found)
    _KNOWN[row.name] = row
    return row.name, row.numbers or (0.0,), (), row.scratch


def _of_cells(kind: str, there: Cells, back: Cells, numbers: tuple[float, ...]) -> Row:
    return Row(kind, there.text, back.text, numbers, Scratch(*map(max, there.scratch, back.scratch)))


def function(name: str, back: bool, vectors: int = 1, whole: bool = False) -> Callable[..., Any]:
    """A part by its name, for numba to compile; `cells` go through so many vectors at once, and need no masks where
    rows are `whole` vectors."""
    space = {
        **lanes.NAMES, "larger": lanes.larger, "first": lanes.first, "places": lanes.places, "INF": math.inf,
        "NAN": math.nan, "WIDE": ONE * vectors, "per_vector": per_vector, "filled": filled,
        "load": load, "store": store, "mad": mad, "__name__": __name__,
    }  # fmt: skip
    if name.startswith(("step", "link", "descend")):
        space |= {"power": lanes.quick_power, "exp": lanes.quick_exp, "thirds": lanes.thirds}
        space["thirds_above"] = lanes.thirds_above
        space["true"] = lanes.true if whole else lanes.where
    # numba keeps on disk what comes from a file, and the next process imports the module that it names.
    row = _KNOWN[name]
    exec(compile(row.back if back else row.there, __file__, "exec"), space)
    return space[f"{row.kind}_back" if back else row.kind]
