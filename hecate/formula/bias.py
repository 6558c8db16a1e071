"""Knobs as formulas: a bias's u = grad(pred, target) and its derivative, an activation and its two, from the variant's
own methods."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from hecate.activation import Activation
from hecate.bias import Bias
from hecate.errors import shorten
from hecate.formula.nodes import ROWS, Node, Nodes, Unprintable
from hecate.formula.printer import Text, nodes_of, printed
from hecate.variant import Variant

MIXES = "a coordinate needs the whole row, where an activation goes coordinate by coordinate"
KEPT = 4096  # formulas that are remembered


class Formula(NamedTuple):
    """A bias as nodes and text: `psi(p, v, c)` is u = grad(p, v), `pull(p, v, u, g, c)` the cotangents of p and v from
    that of u.

    The traits are read off the nodes: `coordinatewise`, no number of a row needs another; `target`, u = -v, and
    `error`, u = p - v, both with the derivative that belongs to it; `linear`, a Jacobian without p, v and u.
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
        """A name by which equal texts are equal."""
        return hashlib.sha256(f"{self.psi.source}\n{self.pull.source}".encode()).hexdigest()[:24]


def bias_formula(bias: Bias) -> Formula:
    """The formula of a bias. Raises Unprintable, which says why it has none."""
    found = formula_of(bias)
    if isinstance(found, str):
        raise Unprintable(found)
    return found


def formula_of(bias: Bias) -> Formula | str:
    """The formula of a bias, or why it has none."""
    found: Formula | str = _kept(bias, _of_bias)
    return found


def activation_nodes(activation: Activation) -> tuple[Node, Node, Node] | str:
    """act(x), act'(x) and act''(x) as nodes of x, or why there are none."""
    found: tuple[Node, Node, Node] | str = _kept(activation, _of_activation)
    return found


def _kept(variant: Variant, make: Callable[[Any], Any]) -> Any:
    # Equal variants of two classes are two, and so are those whose methods were replaced, and 1 and 1.0.
    methods = tuple(getattr(type(variant), name, None) for name in variant._formulas)
    return _made(make, methods, repr(variant), variant)


@lru_cache(KEPT)
def _made(make: Callable[[Any], Any], methods: tuple[Any, ...], text: str, variant: Variant) -> Any:
    with ThreadPoolExecutor(1) as apart:  # which knows nothing of what transforms, compiles or differentiates here
        return apart.submit(_tried, make, variant).result()


def _tried(make: Callable[[Any], Any], variant: Variant) -> Any:
    try:
        return make(variant)
    except Unprintable as reason:
        return str(reason)
    except Exception as error:  # of the user's own formula, which may run in the token loop all the same
        return f"tracing it ended in {type(error).__name__}: {shorten(str(error))}"


def _of_bias(bias: Bias) -> Formula:
    nodes = Nodes()
    p, v = nodes.input("p"), nodes.input("v")
    (u,) = nodes_of(bias, lambda own: own.grad, "pv", nodes)
    gp, gv = nodes_of(bias, lambda own: own.grad_vjp, "pvg", nodes)
    known = {} if u.op in ("in", "const") else {u: "u"}
    psi, pull = printed("psi", "pv", [u]), printed("pull", "pvug", [gp, gv], known)
    whole = psi.operations | pull.operations
    apart = not whole & {*ROWS, "in N"}
    linear = apart and not pull.operations & {"in p", "in v", "in u"}
    g = nodes.input("g")
    target = u is -v and (gp, gv) == (nodes.const(0.0), -g)
    return Formula(u, (gp, gv), psi, pull, apart, target, error=u is p - v and (gp, gv) == (g, -g), linear=linear)


def _of_activation(activation: Activation) -> tuple[Node, Node, Node]:
    def orders(own: Any) -> Callable[..., Any]:
        def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = own.value(x)
            slope = own.slope(x, y)
            return y, slope, own.bend(x, y, slope)

        return function

    y, slope, bend = nodes_of(activation, orders, "x", Nodes())
    if printed("act", "x", [y, slope, bend]).operations & {*ROWS, "in N"}:
        raise Unprintable(MIXES)
    return y, slope, bend
