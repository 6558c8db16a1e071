"""Retentions as formulas of whole weights: the step and the memory of what is carried, each with its pullback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hecate.formula.bias import MIXED, kept, tried
from hecate.formula.nodes import ALONG, DOWN, Node, Nodes, Unprintable
from hecate.formula.printer import Text, nodes_of, printed
from hecate.retention import Retention

CELLS = ALONG | DOWN


class Weights(NamedTuple):
    """A function of weights as nodes: `out`, and `pulled`, the cotangents of its inputs from that of `out`, g. It is a
    `sum` if it is r X + D or X + D; `operations` are those of `out`.
    """

    out: Node
    pulled: tuple[Node, ...]
    operations: frozenset[str]
    sum: bool

    @property
    def gate(self) -> Node | None:
        """The cotangent of r cell by cell, of which that of one retain for all is the sum; None if it is no sum."""
        gate = self.pulled[-1]
        if gate.axes or gate.literal(0):
            return gate
        rows = gate.args[0] if gate.op == "column_total" else gate
        summed: Node | None = rows.args[0] if rows.op == "total" else None
        return summed

    @property
    def cellwise(self) -> bool:
        """True if no cell needs another."""
        return not self.operations & MIXED

    @property
    def rowwise(self) -> bool:
        """True if no row needs another."""
        return not self.operations & {"column_total", "column_top", "in M"}


class RetentionFormula(NamedTuple):
    """A retention as nodes, or in place of some of them why there are none.

    Fields:
        single: the step of X, D and r, one retain for a whole weight.
        cells: the same where every cell has an r of its own.
        link: the memory of the dual state A; None where the memory itself is carried.
        adds: whether the step is r X + D, or X + D, with D as `centred` leaves it.
    """

    single: Weights
    cells: Weights | str
    link: Weights | None
    adds: bool

    def step(self, *, single: bool) -> Weights | str:
        """The step, for one retain or for one of every cell, or why there is none."""
        return self.single if single else self.cells

    @property
    def plain(self) -> bool:
        """True if the step is r X + D, or X + D, of the memory itself."""
        return self.single.sum and self.link is None

    @property
    def cellwise(self) -> bool:
        """True if no cell of a memory needs another."""
        return self.single.cellwise and (self.link is None or self.link.cellwise)


def retention_formula(retention: Retention) -> RetentionFormula | str:
    """The formula of a retention, or why it has none."""
    found: RetentionFormula | str = kept(retention, _of_retention)
    return found


def retention_texts(retention: Retention) -> list[Text]:
    """The functions of a step under one retain and of the link, if there is one. Raises Unprintable."""
    formula = retention_formula(retention)
    if isinstance(formula, str):
        raise Unprintable(formula)
    texts = [printed("step", "XDr", [formula.single.out]), printed("step_back", "XDrg", formula.single.pulled)]
    if formula.link is not None:
        texts += [printed("link", "A", [formula.link.out]), printed("link_back", "Ag", formula.link.pulled)]
    return texts


def _of_retention(retention: Retention) -> RetentionFormula:
    def step(own: Any) -> Callable[..., Any]:
        return own.step

    def pulled(own: Any) -> Callable[..., Any]:
        return own.step_vjp

    state = {"X": CELLS, "D": CELLS}
    single = _weights(retention, step, pulled, {**state, "r": 0})
    cells = tried(lambda own: _weights(own, step, pulled, {**state, "r": CELLS}), retention)
    link = None
    if retention.dual:
        link = _weights(retention, lambda own: own.weights, lambda own: own.weights_vjp, {"A": CELLS})
    centred = nodes_of(retention, lambda own: own.centred, {"D": CELLS, "r": 0}, single.out.nodes, axes=2)
    return RetentionFormula(single, cells, link, single.out in _sums(single.out.nodes, centred[0]))


def _weights(
    retention: Retention, method: Callable[[Any], Any], vjp: Callable[[Any], Any], inputs: Mapping[str, int]
) -> Weights:
    nodes = Nodes()
    (out,) = nodes_of(retention, method, inputs, nodes, axes=2)
    found = nodes_of(retention, vjp, {**inputs, "g": CELLS}, nodes, axes=2)
    back = tuple([nodes.const(0.0) if node is None else node for node in found])
    operations = printed("f", (), [out]).operations
    if any(node.op == "in" and node.args[0] not in {*inputs, "g"} for node in (out, *back)):
        raise Unprintable("it is no weight")
    return Weights(out, back, operations, out in _sums(nodes, nodes.input("D", CELLS)))


def _sums(nodes: Nodes, direction: Node) -> list[Node]:
    """r X and X, plus a direction."""
    x, r = nodes.input("X", CELLS), nodes.input("r")
    return [a + b for own in (r * x, x * r, x) for a, b in ((own, direction), (direction, own))]
