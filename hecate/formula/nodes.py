"""Expressions of a traced formula: nodes, of which there is one for each value; the functions that a text may call; and
torch's operations as nodes, those of autograd's backward passes included.

A text has `+ - * /`, comparisons, `&`, `|` and `NAMES`; all other operations are composed of these when a formula is
traced, with torch's results for NaN and infinity. Nothing is dropped that could be NaN: there is no rule for 0 x or x +
0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from hecate.errors import ConfigError

ALONG, DOWN = 1, 2  # axes of a row, and of a weight, whose rows lie along and whose columns lie down
SUMS = {"total": ALONG, "top": ALONG, "column_total": DOWN, "column_top": DOWN}
"""Sums and maxima of a text, of a row or of a column, and the axis that they take away."""
NAMES = ("where", "abs", "sqrt", "exp", "log", "log1p", "expm1", "tanh", "sin", "cos", "erf", "floor", "power", *SUMS)
"""Functions of a text: `SUMS`, and componentwise ones."""
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip
TRUTHS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or")
_FOLDED: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in "add sub mul neg abs lt le gt ge eq ne".split()},
    "div": operator.truediv, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
}  # fmt: skip


class Unprintable(ConfigError):
    """The reason why a formula stays in torch: no kernel can be printed from it."""


def _infix(op: str, turned: bool = False) -> Callable[[Node, Number], Node]:
    """An operation of a node and its right operand, or its left one if `turned`."""
    return lambda self, other: call(op, other, self) if turned else call(op, self, other)


class Node:
    """An operation on other nodes, an input (`in`, its name) or a constant (`const`, its value in each of two traces).

    `axes` has the axes, `ALONG` and `DOWN`, on which it has more than one number. Nodes of one `Nodes` are equal only
    if they are the same object.
    """

    __slots__ = ("args", "axes", "nodes", "op")

    def __init__(self, nodes: Nodes, op: str, args: tuple[Any, ...], axes: int) -> None:
        self.nodes, self.op, self.args, self.axes = nodes, op, args, axes

    def literal(self, *values: float) -> bool:
        """True for a constant that is the same in both traces and, if `values` are given, one of them."""
        return self.op == "const" and self.args[0] == self.args[1] and (not values or self.args[0] in values)

    @property
    def truth(self) -> bool:
        """True for a truth value: a comparison, or truth values combined."""
        return self.op in TRUTHS

    def __neg__(self) -> Node:
        return call("neg", self)

    __add__, __radd__ = _infix("add"), _infix("add", turned=True)
    __sub__, __rsub__ = _infix("sub"), _infix("sub", turned=True)
    __mul__, __rmul__ = _infix("mul"), _infix("mul", turned=True)
    __truediv__, __rtruediv__ = _infix("div"), _infix("div", turned=True)
    __lt__, __le__, __gt__, __ge__ = map(_infix, ("lt", "le", "gt", "ge"))


Number = Node | float


class Nodes:
    """The nodes of one formula: equal subexpressions are the same node."""

    def __init__(self) -> None:
        self._made: dict[Any, Node] = {}

    def same(self, op: str, *args: Any, axes: int = 0) -> Node:
        """The node of an operation and its arguments."""
        return self._made.setdefault((op, *args), Node(self, op, args, axes))

    def input(self, name: str, axes: int = 0) -> Node:
        """An input by its name."""
        return self.same("in", name, axes=axes)

    def const(self, value: float, other: float | None = None) -> Node:
        """A number, and its value in the other trace."""
        other = value if other is None else other
        key = ("const", repr(value), repr(other))  # 0.0 and -0.0 are two, NaN is one
        return self._made.setdefault(key, Node(self, "const", (value, other), 0))

    def size(self, axes: int) -> Node:
        """The number of numbers along axes: `N` in a row, `M` in a column."""
        sizes = [self.input(name) for name, axis in (("N", ALONG), ("M", DOWN)) if axes & axis]
        return sizes[0] if len(sizes) == 1 else sizes[0] * sizes[1]


def call(op: str, *arguments: Number) -> Node:
    """An operation, simplified where that changes no result."""
    nodes = next(item.nodes for item in arguments if isinstance(item, Node))
    args = [item if isinstance(item, Node) else nodes.const(float(item)) for item in arguments]
    if op == "mul" and all(item.truth for item in args):
        op = "and"
    if not all(item.truth for item in {"where": args[:1], "and": args, "or": args}.get(op, ())):
        raise Unprintable("it takes a number for an answer (True or False)")
    if op not in ("and", "or"):  # elsewhere a truth value counts as 1 or 0
        args = [where(x, 1, 0) if x.truth and (op, at) != ("where", 0) else x for at, x in enumerate(args)]
    if op in _FOLDED and all(item.op == "const" for item in args):
        try:
            return nodes.const(*(float(_FOLDED[op](*(item.args[at] for item in args))) for at in (0, 1)))
        except (ValueError, ZeroDivisionError, OverflowError):
            pass  # an operation that Python refuses is left to the kernel
    first, last = args[0], args[-1]
    if op == "mul":
        for one, other in ((first, last), (last, first)):
            if one.literal(1, -1):
                return other if one.args[0] == 1 else -other
    if (op == "div" and last.literal(1)) or (op == "sub" and last.literal(0) and math.copysign(1, last.args[0]) > 0):
        return first
    if op == "add" and last.op == "neg":
        return first - last.args[0]
    if op == "neg" and first.op == "neg":
        return first.args[0]
    if op == "where" and (args[1] is args[2] or first.literal()):
        return args[1] if args[1] is args[2] or first.args[0] else args[2]
    if op in SUMS and not first.axes & SUMS[op]:  # all numbers are equal
        return first if op.endswith("top") else first * nodes.size(SUMS[op])
    if op in ("total", "top") and first.op == f"column_{op}":  # of a whole weight, always in one order
        return call(first.op, call(op, first.args[0]))
    axes = 0
    for item in args:
        axes |= item.axes
    return nodes.same(op, *args, axes=axes & ~SUMS.get(op, 0))


def where(condition: Node, x: Number, y: Number) -> Node:
    """x where the condition holds, else y."""
    return call("where", condition, x, y)


def named(op: str) -> Callable[[Node], Node]:
    """A function of one argument by its name."""
    return lambda x: call(op, x)


exp, log, log1p, expm1, sqrt, absolute, tanh, erf = map(named, "exp log log1p expm1 sqrt abs tanh erf".split())


class Over(NamedTuple):
    """Sums and maxima over axes; over both, row by row first."""

    axes: int

    def total(self, x: Node) -> Node:
        """The sum."""
        x = call("total", x) if self.axes & ALONG else x
        return call("column_total", x) if self.axes & DOWN else x

    def top(self, x: Node) -> Node:
        """The largest number."""
        x = call("top", x) if self.axes & ALONG else x
        return call("column_top", x) if self.axes & DOWN else x

    def shifted(self, x: Node) -> Node:
        """x minus its largest number."""
        return x - self.top(x)

    def norm(self, x: Node, order: float = 2, *_: Any, **__: Any) -> Node:
        """The vector norm of order 1, 2 or infinity."""
        if order == 2:
            return sqrt(self.total(x * x))
        if order == 1:
            return self.total(absolute(x))
        if order == math.inf:
            return self.top(absolute(x))
        raise NotImplementedError


def isnan(x: Node) -> Node:
    """True for NaN."""
    return call("ne", x, x)


def sigmoid(x: Node) -> Node:
    """1 / (1 + e^-x)."""
    return 1 / (1 + exp(-x))


def smaller(x: Node, y: Number) -> Node:
    """min(x, y), NaN if either is."""
    return where(call("or", x < y, isnan(x)), x, y)


def larger(x: Node, y: Number) -> Node:
    """max(x, y), NaN if either is."""
    return where(call("or", x > y, isnan(x)), x, y)


def sign(x: Node) -> Node:
    """1, 0 or -1; 0 for NaN, as in torch."""
    return where(x > 0, 1, where(x < 0, -1, 0))


def clamp(x: Node, low: Number | None = None, high: Number | None = None) -> Node:
    """x between low and high."""
    y = x if low is None else where(x < low, low, x)
    return y if high is None else where(y > high, high, y)


def power(x: Number, n: Number) -> Node:
    """x^n; by products and roots for those exponents for which torch takes these."""
    if isinstance(x, Node) and isinstance(n, Node) and n.literal():
        nice: dict[float, Callable[[], Node]] = {
            0: lambda: x.nodes.const(1.0), 1: lambda: x, 2: lambda: x * x, 3: lambda: x * x * x, 0.5: lambda: sqrt(x),
            -0.5: lambda: 1 / sqrt(x), -1: lambda: 1 / x, -2: lambda: 1 / (x * x),
        }  # fmt: skip
        if n.args[0] in nice:
            return nice[n.args[0]]()
    return call("power", x, n)


def log_add_exp(x: Node, y: Node) -> Node:
    """log(e^x + e^y)."""
    return where(call("eq", x, y), x + math.log(2), larger(x, y) + log1p(exp(-absolute(x - y))))


def log_sigmoid(x: Node) -> Node:
    """log(1 / (1 + e^-x))."""
    return smaller(x, 0.0) - log1p(exp(-absolute(x)))


_HALF_ROOT, _DENSITY = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)


def _scaled(combine: Callable[[Any, Any], Node]) -> Callable[..., Node]:
    return lambda x, y, alpha=1: combine(x, y * alpha)


def _cumulative(x: Node) -> Node:
    return 0.5 * (1 + erf(x * _HALF_ROOT))


def _gelu_backward(g: Node, x: Node) -> Node:
    return g * (_cumulative(x) + x * _DENSITY * exp(x * -0.5 * x))


def _elu_backward(g: Node, alpha: Number, scale: Number, inner: Number, result: bool, x: Node) -> Node:
    below = g * inner * (x + alpha * scale) if result else g * inner * alpha * scale * exp(x * inner)
    return where(x > 0, g * scale, below)


def _softplus(x: Node, beta: Number = 1, threshold: Number = 20) -> Node:
    return where(x * beta > threshold, x, log1p(exp(x * beta)) / beta)


def _softplus_backward(g: Node, x: Node, beta: Number, threshold: Number) -> Node:
    return where(x * beta > threshold, g, g * sigmoid(x * beta))


def _softshrink(x: Node, width: Number = 0.5) -> Node:
    return where(x > width, x - width, where(x < -width, x + width, x * 0))


def _silu_backward(g: Node, x: Node) -> Node:
    share = sigmoid(x)
    return g * share * (1 + x * (1 - share))


def _sinh(x: Node) -> Node:
    return where(absolute(x) < 1, 0.5 * (expm1(x) - expm1(-x)), 0.5 * (exp(x) - exp(-x)))


def _counted(x: Node) -> Node:
    return where(x if x.truth else call("ne", x, 0), 1, 0)


COMPONENTWISE: dict[str, Callable[..., Any]] = {
    "add": _scaled(operator.add), "sub": _scaled(operator.sub), "rsub": lambda x, y, alpha=1: y - x * alpha,
    "mul": operator.mul, "div": operator.truediv, "neg": operator.neg, "reciprocal": lambda x: 1 / x,
    "pow": power, "sqrt": sqrt, "rsqrt": lambda x: 1 / sqrt(x), "abs": absolute,
    "sign": sign, "sgn": sign, "floor": named("floor"),
    "exp": exp, "exp2": lambda x: exp(x * math.log(2)), "expm1": expm1, "log": log, "log1p": log1p,
    "log2": lambda x: log(x) * (1 / math.log(2)), "logaddexp": log_add_exp,
    "sin": named("sin"), "cos": named("cos"), "tanh": tanh, "sinh": _sinh, "cosh": lambda x: 0.5 * (exp(x) + exp(-x)),
    "erf": erf, "sigmoid": sigmoid, "relu": lambda x: where(x <= 0, 0, x), "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * _cumulative(x), "leaky_relu": lambda x, slope=0.01: where(x > 0, x, x * slope),
    "softplus": _softplus, "softshrink": _softshrink,
    "elu": lambda x, a=1, s=1, i=1: where(x > 0, x * s, expm1(x * i) * (a * s)),
    "log_sigmoid_forward": lambda x: (log_sigmoid(x), x * 0), "threshold": lambda x, t, v: where(x <= t, v, x),
    "clamp": clamp, "clamp_min": lambda x, low: clamp(x, low), "clamp_max": lambda x, high: clamp(x, None, high),
    "hardtanh": lambda x, low=-1, high=1: clamp(x, low, high), "maximum": larger, "minimum": smaller, "where": where,
    "masked_fill": lambda x, mask, y: where(mask, y, x),
    "lerp": lambda x, y, w: x + w * (y - x), "addcmul": lambda x, a, b, value=1: x + value * a * b,
    "addcdiv": lambda x, a, b, value=1: x + value * a / b,
    "tanh_backward": lambda g, y: g * (1 - y * y), "sigmoid_backward": lambda g, y: g * (1 - y) * y,
    "threshold_backward": lambda g, x, t: where(x <= t, 0, g), "silu_backward": _silu_backward,
    "gelu_backward": _gelu_backward, "elu_backward": _elu_backward, "softplus_backward": _softplus_backward,
    "leaky_relu_backward": lambda g, x, slope, _=False: where(x > 0, g, g * slope),
    "log_sigmoid_backward": lambda g, x, _=None: g * sigmoid(-x),
    "hardtanh_backward": lambda g, x, low, high: where(call("and", x > low, x < high), g, 0),
    "softshrink_backward": lambda g, x, width: where(call("or", x < -width, x > width), g, 0),
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    **dict.fromkeys(("logical_not", "bitwise_not"), lambda x: call("eq", x, 0)),
    "eq": lambda x, y: call("eq", x, y), "ne": lambda x, y: call("ne", x, y), "isnan": isnan,
    **dict.fromkeys(("logical_and", "bitwise_and"), lambda x, y: call("and", x, y)),
    **dict.fromkeys(("logical_or", "bitwise_or"), lambda x, y: call("or", x, y)),
}  # fmt: skip
"""Operations number by number."""

ROWWISE: dict[str, Callable[..., Any]] = {
    "sum": lambda over, x, *_, **__: over.total(x), "amax": lambda over, x, *_, **__: over.top(x),
    "linalg_vector_norm": Over.norm, "mean": lambda over, x, *_, **__: over.total(x) / x.nodes.size(over.axes),
    "any": lambda over, x, *_: over.top(_counted(x)) > 0, "all": lambda over, x, *_: over.top(-_counted(x)) < 0,
    "logsumexp": lambda over, x, *_, **__: over.top(x) + log(over.total(exp(over.shifted(x)))),
    "_softmax": lambda over, x, *_: exp(over.shifted(x)) / over.total(exp(over.shifted(x))),
    "_log_softmax": lambda over, x, *_: over.shifted(x) - log(over.total(exp(over.shifted(x)))),
    "_softmax_backward_data": lambda over, g, y, *_: y * (g - over.total(y * g)),
    "_log_softmax_backward_data": lambda over, g, y, *_: g - exp(y) * over.total(g),
}  # fmt: skip
"""Operations along axes (`Over`)."""
