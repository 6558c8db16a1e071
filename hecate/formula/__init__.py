"""Formulas as text: a variant's torch methods are traced and printed, and the same text runs under every compiler.

Knobs have formulas, from the variant's own methods: a bias's u = grad(pred, target) and its derivative, an activation
with its two derivatives, a retention's step of whole weights and its memory as a function of the dual state, and an
algorithm's direction, each with its pullback; and the updates that a componentwise phi makes of gradients."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hecate.activation import Activation
from hecate.algorithm import Algorithm
from hecate.bias import Bias
from hecate.errors import shorten
from hecate.formula.nodes import ALONG, DOWN, SUMS, Node, Nodes, Unprintable
from hecate.formula.printer import Text, nodes_of, printed
from hecate.phi import FeatureMap
from hecate.retention import Retention
from hecate.variant import Variant

__all__ = [
    "MIXES", "AlgorithmFormula", "Formula", "RetentionFormula", "Text", "Unprintable", "Weights", "activation_nodes",
    "activation_text", "algorithm_formula", "algorithm_texts", "bias_formula", "formula_of", "is_cheap",
    "map_formula", "map_nodes", "printable", "retention_formula", "retention_texts",
]  # fmt: skip

MIXES = "a coordinate needs the whole row, where an activation goes coordinate by coordinate"
KEPT = 4096  # formulas in the cache
CELLS = ALONG | DOWN
T = TypeVar("T")
MIXED = {*SUMS, "in N", "in M"}  # operations that make a number depend on others
CHEAP = frozenset("in x,in g,add,sub,mul,neg,abs,exp,where,lt,le,gt,ge,eq,ne,and,or,not".split(","))


class Formula(NamedTuple):
    """A bias as nodes and text: `psi(p, v, c)` is u = grad(p, v), `pull(p, v, u, g, c)` the cotangents of p and v from
    that of u.

    Traits follow from the nodes: `coordinatewise`, no number of a row depends on another; `target`, u = -v, and
    `error`, u = p - v, each with the matching derivative; `linear`, a Jacobian without p, v and u.
    """

    u: Node
    pulled: tuple[Node, Node]
    psi: Text
    pull: Text
    coordinatewise: bool
    target: bool
    error: bool
    linear: bool

    @property
    def digest(self) -> str:
        """A digest of the texts."""
        return hashlib.sha256(f"{self.psi.source}\n{self.pull.source}".encode()).hexdigest()[:24]


def bias_formula(bias: Bias) -> Formula:
    """The formula of a bias; raises Unprintable, with the reason, if it has none."""
    return printable(formula_of(bias))


def formula_of(bias: Bias) -> Formula | str:
    """The formula of a bias, or the reason why it has none."""
    return cached_formula(bias, _of_bias)


def activation_nodes(activation: Activation) -> tuple[Node, Node, Node] | str:
    """act(x), act'(x) and act''(x) as nodes of x, or the reason why there are none."""
    return cached_formula(activation, _of_activation)


def activation_text(activation: Activation) -> Text:
    """The text of an activation with its two derivatives; raises Unprintable if there is none."""
    return printed("act", "x", printable(activation_nodes(activation)))


def printable(formula: T | str) -> T:
    """The formula; raises Unprintable if it is a reason why there is none."""
    if isinstance(formula, str):
        raise Unprintable(formula)
    return formula


def cached_formula(variant: Variant, make: Callable[..., T], *options: Any) -> T | str:
    """The formula that `make` returns for a variant, cached, or the reason why there is none."""
    # The key tells apart equal variants of two classes, variants whose methods were replaced, and 1 from 1.0.
    return _made_apart(make, tuple(_methods(variant)), repr(variant), variant, *options)


def _methods(variant: Variant) -> Iterator[Any]:
    """The methods of a variant's formulas, the values that they read, and the same for variants in its fields."""
    for name in variant._formulas:
        yield (method := getattr(type(variant), name, None))
        yield from _outside(method, set())
    for field in type(variant).model_fields:
        if isinstance(inner := getattr(variant, field), Variant):
            yield type(inner)
            yield from _methods(inner)


def _outside(function: Any, known: set[Any]) -> Iterator[Any]:
    """Numbers and functions that a user's function reads besides its arguments: if they change, as when a notebook's
    cell is run again, it is another formula."""
    if not isinstance(function, FunctionType) or function.__module__.startswith(("hecate.", "torch")):
        return
    if function not in known:
        known.add(function)
        try:
            outside = inspect.getclosurevars(function)
        except ValueError:  # a name of the enclosing function has no value yet
            return
        for name, value in {**outside.globals, **outside.nonlocals}.items():
            itself = isinstance(value, Hashable) and (callable(value) or inspect.ismodule(value))
            yield name, value if itself else repr(value)
            yield from _outside(value, known)


@lru_cache(KEPT)
def _made_apart(make: Callable[..., Any], methods: tuple[Any, ...], text: str, *arguments: Any) -> Any:
    with ThreadPoolExecutor(1) as apart:  # in a thread without the transforms, tracing and grad mode of this one
        return apart.submit(formula_or_reason, make, *arguments).result()


def formula_or_reason(make: Callable[..., T], variant: Variant, *options: Any) -> T | str:
    """The formula that `make` returns for a variant, or the reason why there is none."""
    try:
        return make(variant, *options)
    except Unprintable as reason:
        return str(reason)
    except Exception as error:  # in a user's formula, which may still run in the token loop
        return f"tracing it ended in {type(error).__name__}: {shorten(str(error))}"


def _of_bias(bias: Bias) -> Formula:
    nodes = Nodes()
    p, v = nodes.input("p", ALONG), nodes.input("v", ALONG)
    (u,) = nodes_of(bias, attrgetter("grad"), dict.fromkeys("pv", ALONG), nodes)
    gp, gv = nodes_of(bias, attrgetter("grad_vjp"), dict.fromkeys("pvg", ALONG), nodes)
    known = {} if u.op in ("in", "const") else {u: "u"}
    psi, pull = printed("psi", "pv", [u]), printed("pull", "pvug", [gp, gv], known)
    whole = psi.operations | pull.operations
    apart = not whole & MIXED
    linear = apart and not pull.operations & {"in p", "in v", "in u"}
    g = nodes.input("g", ALONG)
    target = u is -v and (gp, gv) == (nodes.const(0.0), -g)
    return Formula(u, (gp, gv), psi, pull, apart, target, error=u is p - v and (gp, gv) == (g, -g), linear=linear)


def _of_activation(activation: Activation) -> tuple[Node, Node, Node]:
    def orders(variant: Any) -> Callable[..., Any]:
        def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = variant.value(x)
            slope = variant.slope(x, y)
            return y, slope, variant.bend(x, y, slope)

        return function

    y, slope, bend = nodes_of(activation, orders, {"x": ALONG}, Nodes())
    if printed("act", "x", [y, slope, bend]).operations & MIXED:
        raise Unprintable(MIXES)
    return y, slope, bend


# Maps.


def map_formula(feature_map: FeatureMap, *, centred: bool = False, pulled: bool = False) -> Text | str:
    """Text `phi(x, c)` of a componentwise map without parameters, or the reason why there is none: phi(x) - phi(0) if
    `centred`, and if `pulled` J^T times the features, J the derivative of phi at x."""
    return cached_formula(feature_map, _of_map, centred, pulled)


def _of_map(feature_map: FeatureMap, centred: bool, pulled: bool) -> Text:
    def features(variant: Any) -> Callable[..., Any]:
        zero = variant.forward(torch.zeros(1, dtype=torch.float64), _NOTHING)[0].item() if centred else 0.0

        def function(x: Tensor) -> Tensor:
            y, residuals = variant.forward(x, _NOTHING)
            if zero:  # and exactly 0 at 0, whatever rounding leaves
                y = torch.where(x != 0, y - zero, 0.0)
            return variant.vjp(residuals, y)[0] if pulled else y

        return function

    return printed("phi", "x", _number_by_number(feature_map, features, "x"))


def _number_by_number(feature_map: FeatureMap, method: Callable[[Any], Callable[..., Any]], inputs: str) -> list[Node]:
    """The nodes of a method of a map, whose results depend on one number of each input."""
    if not feature_map.traits().componentwise:
        raise Unprintable("it makes features of rows, not of single numbers")
    nodes = nodes_of(feature_map, method, dict.fromkeys(inputs, ALONG), Nodes())
    if printed("phi", inputs, nodes).operations & MIXED:
        raise Unprintable("it says that it goes number by number, and needs the whole row")
    return nodes


def map_nodes(feature_map: FeatureMap) -> tuple[Node, Node] | str:
    """phi(x) of a componentwise map without parameters and the cotangent of x from that of phi, g, as nodes, or the
    reason why there are none."""
    return cached_formula(feature_map, _with_pullback)


def is_cheap(feature_map: FeatureMap) -> bool:
    """True if phi and its pullback are printed of `CHEAP` operations: to make features again, wherever a kernel loads a
    row, then costs less than to store them."""
    nodes = map_nodes(feature_map)
    return not isinstance(nodes, str) and printed("phi", "xg", nodes).operations <= CHEAP


def _with_pullback(feature_map: FeatureMap) -> tuple[Node, Node]:
    def both(variant: Any) -> Callable[..., Any]:
        def function(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
            y, residuals = variant.forward(x, _NOTHING)
            return y, variant.vjp(residuals, g)[0]

        return function

    there, back = _number_by_number(feature_map, both, "xg")
    return there, back


_NOTHING: Any = {"learned": {}, "frozen": {}}


# Algorithms.


class AlgorithmFormula(NamedTuple):
    """An algorithm as nodes, for each number of a weight: `results`, the direction and the new slots, as functions of
    `inputs`, the gradient G, the gates lr and m and the slots s0, s1, ...; and `pulled`, the cotangents of the inputs
    from those of the results, `cotangents` g, h0, h1, ...
    """

    inputs: tuple[Node, ...]
    cotangents: tuple[Node, ...]
    results: tuple[Node, ...]
    pulled: tuple[Node, ...]

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.results) - 1


def algorithm_formula(algorithm: Algorithm) -> AlgorithmFormula | str:
    """The formula of an algorithm that steps every number of a weight by its own gradient, or the reason for none."""
    return cached_formula(algorithm, _of_algorithm)


def algorithm_texts(algorithm: Algorithm) -> list[Text]:
    """The texts of the direction with the new slots, and of their pullback; raises Unprintable if there are none."""
    formula = printable(algorithm_formula(algorithm))
    inputs, cotangents = ([node.args[0] for node in nodes] for nodes in (formula.inputs, formula.cotangents))
    back = printed("direction_back", [*inputs, *cotangents], formula.pulled)
    return [printed("direction", inputs, formula.results), back]


def _of_algorithm(algorithm: Algorithm) -> AlgorithmFormula:
    if not algorithm.takes_any_gradient():
        raise Unprintable("it descends a gradient of its own")
    weight = (3, 5)
    if any(shape != weight for shape in algorithm.slot_shapes(weight).values()):
        raise Unprintable("its slots are no weights")
    slots, nodes = range(len(algorithm.slots)), Nodes()
    inputs = {"G": CELLS, "lr": 0, "m": 0, **{f"s{at}": CELLS for at in slots}}
    cotangents = {"g": CELLS, **{f"h{at}": CELLS for at in slots}}

    def pulled(variant: Any) -> Callable[..., Any]:
        return lambda *tensors: variant.direction_vjp(tensors[: len(inputs)], *tensors[len(inputs) :])

    results = nodes_of(algorithm, attrgetter("direction"), inputs, nodes, axes=2)
    back = _cotangents(algorithm, pulled, {**inputs, **cotangents}, nodes)
    if printed("f", (), [*results, back[0], *back[3:]]).operations & MIXED:
        raise Unprintable("a number of its step needs others of the weight")
    read, pulled_from = (tuple(nodes.input(*item) for item in axes.items()) for axes in (inputs, cotangents))
    return AlgorithmFormula(read, pulled_from, tuple(results), tuple(back))


def _cotangents(variant: Variant, method: Callable[[Any], Any], inputs: Mapping[str, int], nodes: Nodes) -> list[Node]:
    """The cotangents of weights, 0 where there is none."""
    cotangents = nodes_of(variant, method, inputs, nodes, axes=2)
    return [nodes.const(0.0) if node is None else node for node in cotangents]


# Retentions.


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
        """The cotangent of r for each cell, whose sum is that of one retain for all; None if that is not a sum."""
        gate = self.pulled[-1]
        if gate.axes or gate.literal(0):
            return gate
        rows = gate.args[0] if gate.op == "column_total" else gate
        return rows.args[0] if rows.op == "total" else None

    @property
    def cellwise(self) -> bool:
        """True if no cell depends on another."""
        return not self.operations & MIXED

    @property
    def rowwise(self) -> bool:
        """True if no row depends on another."""
        return not self.operations & {"column_total", "column_top", "in M"}


class RetentionFormula(NamedTuple):
    """A retention as nodes; in place of those of `cells` it may have the reason why there are none.

    Fields:
        single: the step of X, D and r, one retain for a whole weight.
        cells: the same with an r for every cell.
        link: the memory of the dual state A; None if the memory itself is carried.
        adds: whether the step is r X + D, or X + D, with D as `centred` returns it.
    """

    single: Weights
    cells: Weights | str
    link: Weights | None
    adds: bool

    def step(self, *, single: bool) -> Weights | str:
        """The step for one retain or for one of every cell, or the reason why there is none."""
        return self.single if single else self.cells

    @property
    def plain(self) -> bool:
        """True if the step is r X + D, or X + D, of the memory itself."""
        return self.single.sum and self.link is None

    @property
    def cellwise(self) -> bool:
        """True if no cell of a memory depends on another."""
        return self.single.cellwise and (self.link is None or self.link.cellwise)


def retention_formula(retention: Retention) -> RetentionFormula | str:
    """The formula of a retention, or the reason why it has none."""
    return cached_formula(retention, _of_retention)


def retention_texts(retention: Retention) -> list[Text]:
    """The texts of a step under one retain and of the link, if there is one; raises Unprintable if there are none."""
    formula = printable(retention_formula(retention))
    texts = [printed("step", "XDr", [formula.single.out]), printed("step_back", "XDrg", formula.single.pulled)]
    if formula.link is not None:
        texts += [printed("link", "A", [formula.link.out]), printed("link_back", "Ag", formula.link.pulled)]
    return texts


def _of_retention(retention: Retention) -> RetentionFormula:
    state = {"X": CELLS, "D": CELLS}
    single = _weights(retention, "step", {**state, "r": 0})
    cells = formula_or_reason(_weights, retention, "step", {**state, "r": CELLS})
    link = _weights(retention, "weights", {"A": CELLS}) if retention.dual else None
    centred = nodes_of(retention, attrgetter("centred"), {"D": CELLS, "r": 0}, single.out.nodes, axes=2)
    return RetentionFormula(single, cells, link, single.out in _sums(single.out.nodes, centred[0]))


def _weights(retention: Retention, method: str, inputs: Mapping[str, int]) -> Weights:
    nodes = Nodes()
    (out,) = nodes_of(retention, attrgetter(method), inputs, nodes, axes=2)
    back = _cotangents(retention, attrgetter(f"{method}_vjp"), {**inputs, "g": CELLS}, nodes)
    operations = printed("f", (), [out]).operations
    if any(node.op == "in" and node.args[0] not in {*inputs, "g"} for node in (out, *back)):
        raise Unprintable("it is no weight")
    return Weights(out, tuple(back), operations, out in _sums(nodes, nodes.input("D", CELLS)))


def _sums(nodes: Nodes, direction: Node) -> list[Node]:
    """r X and X, plus a direction."""
    x, r = nodes.input("X", CELLS), nodes.input("r")
    return [a + b for term in (r * x, x * r, x) for a, b in ((term, direction), (direction, term))]
