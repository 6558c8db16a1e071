"""Knobs as formulas: a bias's u = grad(pred, target) and its derivative, an activation and its two, from the variant's
own methods."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from hecate.activation import Activation
from hecate.bias import Bias
from hecate.errors import shorten
from hecate.formula.nodes import ALONG, SUMS, Node, Nodes, Unprintable
from hecate.formula.printer import Text, nodes_of, printed
from hecate.variant import Variant

MIXES = "a coordinate needs the whole row, where an activation goes coordinate by coordinate"
KEPT = 4096  # formulas that are remembered
MIXED = {*SUMS, "in N", "in M"}  # operations by which one number needs others


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
    found: Formula | str = kept(bias, _of_bias)
    return found


def activation_nodes(activation: Activation) -> tuple[Node, Node, Node] | str:
    """act(x), act'(x) and act''(x) as nodes of x, or why there are none."""
    found: tuple[Node, Node, Node] | str = kept(activation, _of_activation)
    return found


def kept(variant: Variant, make: Callable[[Any], Any]) -> Any:
    """The formula that is made of a variant, once, or why it could not be made."""
    # Equal variants of two classes are two, and so are those whose methods were replaced, and 1 and 1.0.
    return _made(make, tuple(_methods(variant)), repr(variant), variant)


def _methods(variant: Variant) -> Iterator[Any]:
    """Methods that are its formulas, and those of the variants in its fields."""
    for name in variant._formulas:
        yield getattr(type(variant), name, None)
    for field in type(variant).model_fields:
        if isinstance(inner := getattr(variant, field), Variant):
            yield type(inner)
            yield from _methods(inner)


@lru_cache(KEPT)
def _made(make: Callable[[Any], Any], methods: tuple[Any, ...], text: str, variant: Variant) -> Any:
    with ThreadPoolExecutor(1) as apart:  # which knows nothing of what transforms, compiles or differentiates here
        return apart.submit(tried, make, variant).result()


def tried(make: Callable[[Any], Any], variant: Variant) -> Any:
    """The formula that is made of a variant, or why it could not be made."""
    try:
        return make(variant)
    except Unprintable as reason:
        return str(reason)
    except Exception as error:  # of the user's own formula, which may run in the token loop all the same
        return f"tracing it ended in {type(error).__name__}: {shorten(str(error))}"


def _of_bias(bias: Bias) -> Formula:
    nodes = Nodes()
    p, v = nodes.input("p", ALONG), nodes.input("v", ALONG)
    (u,) = nodes_of(bias, lambda own: own.grad, dict.fromkeys("pv", ALONG), nodes)
    gp, gv = nodes_of(bias, lambda own: own.grad_vjp, dict.fromkeys("pvg", ALONG), nodes)
    known = {} if u.op in ("in", "const") else {u: "u"}
    psi, pull = printed("psi", "pv", [u]), printed("pull", "pvug", [gp, gv], known)
    whole = psi.operations | pull.operations
    apart = not whole & MIXED
    linear = apart and not pull.operations & {"in p", "in v", "in u"}
    g = nodes.input("g", ALONG)
    target = u is -v and (gp, gv) == (nodes.const(0.0), -g)
    return Formula(u, (gp, gv), psi, pull, apart, target, error=u is p - v and (gp, gv) == (g, -g), linear=linear)


def _of_activation(activation: Activation) -> tuple[Node, Node, Node]:
    def orders(own: Any) -> Callable[..., Any]:
        def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = own.value(x)
            slope = own.slope(x, y)
            return y, slope, own.bend(x, y, slope)

        return function

    y, slope, bend = nodes_of(activation, orders, {"x": ALONG}, Nodes())
    if printed("act", "x", [y, slope, bend]).operations & MIXED:
        raise Unprintable(MIXES)
    return y, slope, bend
