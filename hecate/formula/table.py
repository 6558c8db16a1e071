"""Operations of torch as nodes: what a formula may call, backward operations of autograd among them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from hecate.formula.nodes import (
    Node,
    Number,
    absolute,
    call,
    clamp,
    erf,
    exp,
    expm1,
    isnan,
    larger,
    log,
    log1p,
    log_add_exp,
    log_sigmoid,
    named,
    power,
    sigmoid,
    sign,
    smaller,
    softmax,
    sqrt,
    tanh,
    top,
    total,
    where,
)  # fmt: skip

ALIASES = frozenset(
    "view reshape unsqueeze squeeze expand clone detach alias contiguous to _to_copy _unsafe_view positive".split()
)
"""Operations whose result has the numbers of their input."""
CONSTANTS = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "_efficientzerotensor"), 0.0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0),
}
"""Operations whose result is a number everywhere."""
ON_HOST = frozenset(("_local_scalar_dense", "equal", "is_nonzero", "_is_all_true", "_is_any_true"))
"""Operations that read a number of a tensor on the host."""
_HALF_ROOT, _DENSITY = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)


def _scaled(combine: Callable[[Any, Any], Node]) -> Callable[..., Node]:
    return lambda x, y, alpha=1: combine(x, y * alpha)


def _cumulative(x: Node) -> Node:
    return 0.5 * (1 + erf(x * _HALF_ROOT))


def _exact(approximate: str) -> None:
    if approximate != "none":
        raise NotImplementedError


def _gelu(x: Node, approximate: str = "none") -> Node:
    _exact(approximate)
    return x * _cumulative(x)


def _gelu_backward(g: Node, x: Node, approximate: str = "none") -> Node:
    _exact(approximate)
    return g * (_cumulative(x) + x * _DENSITY * exp(-0.5 * x * x))


def _elu_backward(g: Node, alpha: Number, scale: Number, inner: Number, result: bool, x: Node) -> Node:
    below = g * inner * (x + alpha * scale) if result else g * inner * alpha * scale * exp(x * inner)
    return where(x > 0, g * scale, below)


def _norm(x: Node, order: float = 2, *_: Any, **__: Any) -> Node:
    if order == 2:
        return sqrt(total(x * x))
    if order == 1:
        return total(absolute(x))
    if order == math.inf:
        return top(absolute(x))
    raise NotImplementedError


def _softplus(x: Node, beta: Number = 1, threshold: Number = 20) -> Node:
    return where(x * beta > threshold, x, log1p(exp(x * beta)) / beta)


def _softplus_backward(g: Node, x: Node, beta: Number, threshold: Number) -> Node:
    return where(x * beta > threshold, g, g * sigmoid(x * beta))


def _softshrink(x: Node, width: Number = 0.5) -> Node:
    return where(x > width, x - width, where(x < -width, x + width, x * 0))


def _silu_backward(g: Node, x: Node) -> Node:
    share = sigmoid(x)
    return g * share * (1 + x * (1 - share))


def _log_softmax(x: Node, *_: Any) -> Node:
    shifted = x - top(x)
    return shifted - log(total(exp(shifted)))


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
    "gelu": _gelu, "leaky_relu": lambda x, slope=0.01: where(x > 0, x, x * slope), "softplus": _softplus,
    "softshrink": _softshrink,
    "elu": lambda x, a=1, s=1, i=1: where(x > 0, x * s, expm1(x * i) * (a * s)),
    "log_sigmoid_forward": lambda x: (log_sigmoid(x), x * 0), "threshold": lambda x, t, v: where(x <= t, v, x),
    "clamp": clamp, "clamp_min": lambda x, low: clamp(x, low), "clamp_max": lambda x, high: clamp(x, None, high),
    "hardtanh": lambda x, low=-1, high=1: clamp(x, low, high), "maximum": larger, "minimum": smaller, "where": where,
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
    "eq": lambda x, y: call("eq", x, y), "ne": lambda x, y: call("ne", x, y), "isnan": isnan,
    **dict.fromkeys(("logical_and", "bitwise_and"), lambda x, y: call("and", x, y)),
    **dict.fromkeys(("logical_or", "bitwise_or"), lambda x, y: call("or", x, y)),
}  # fmt: skip
"""Operations number by number."""

ROWWISE: dict[str, Callable[..., Any]] = {
    "sum": lambda x, *_, **__: total(x), "amax": lambda x, *_, **__: top(x), "linalg_vector_norm": _norm,
    "any": lambda x, *_: top(_counted(x)) > 0, "all": lambda x, *_: top(-_counted(x)) < 0,
    "mean": lambda x, *_, **__: total(x) / x.nodes.input("N", row=True),
    "logsumexp": lambda x, *_, **__: top(x) + log(total(exp(x - top(x)))),
    "_softmax": lambda x, *_: softmax(x), "_log_softmax": _log_softmax,
    "_softmax_backward_data": lambda g, y, *_: y * (g - total(y * g)),
    "_log_softmax_backward_data": lambda g, y, *_: g - exp(y) * total(g),
}  # fmt: skip
"""Operations along a row; `N` is its length."""
