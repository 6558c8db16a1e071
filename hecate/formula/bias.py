"""Biases as formulas: u = grad(pred, target) and its derivative, printed from the variant's own methods."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

from hecate.bias import Bias
from hecate.errors import shorten
from hecate.formula.nodes import ROWS, Node, Nodes, Unprintable
from hecate.formula.printer import Text, nodes_of, printed

KEPT = 4096  # formulas that are remembered


class Formula(NamedTuple):
    """A bias as nodes and text: `psi(p, v, c)` is u = grad(p, v), `pull(p, v, u, g, c)` the cotangents of p and v from
    that of u.

    The traits are read off the nodes: `coordinatewise`, no number of a row needs another; `target`, u = -v; `error`,
    u = p - v; `linear`, a Jacobian without p, v and u.
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
    methods = tuple(getattr(type(bias), name, None) for name in bias._formulas)
    return _formula_of(methods, repr(bias), bias)


@lru_cache(KEPT)
def _formula_of(methods: tuple[Any, ...], text: str, bias: Bias) -> Formula | str:
    # Equal variants of two classes are two, and so are those whose methods were replaced, and 1 and 1.0.
    with ThreadPoolExecutor(1) as apart:  # which knows nothing of what transforms, compiles or differentiates here
        return apart.submit(_traced, bias).result()


def _traced(bias: Bias) -> Formula | str:
    nodes = Nodes()
    p, v = nodes.input("p"), nodes.input("v")
    try:
        (u,) = nodes_of(bias, lambda own: own.grad, "pv", nodes)
        gp, gv = nodes_of(bias, lambda own: own.grad_vjp, "pvg", nodes)
        known = {} if u.op in ("in", "const") else {u: "u"}
        psi, pull = printed("psi", "pv", [u]), printed("pull", "pvug", [gp, gv], known)
    except Unprintable as reason:
        return str(reason)
    except Exception as error:  # of the user's own formula, which may run in the token loop all the same
        return f"tracing it ended in {type(error).__name__}: {shorten(str(error))}"
    whole = psi.operations | pull.operations
    apart = not whole & {*ROWS, "in N"}
    linear = apart and not pull.operations & {"in p", "in v", "in u"}
    return Formula(u, (gp, gv), psi, pull, apart, target=u is -v, error=u is p - v, linear=linear)
