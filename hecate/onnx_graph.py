"""Graphs of ONNX in fewer nodes, of the same numbers but for rounding: norms as one operator, shapes said once."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import RewriteRule, rewrite
from onnxscript.rewriter.rules.common import expand_before_binary_op_rules

TINY = 2.0**-126
"""Of float32, the least number with all its digits."""


def shorter(model: Any) -> Any:
    """Norms as `RMSNormalization`, softplus as one operator, nothing expanded that an operator expands by itself, and
    chains of operators that only say another shape as one `Reshape` or none. In place."""
    for rules in (*_RULES, expand_before_binary_op_rules):
        rewrite(model, rules)
    for graph in model.graphs():
        _reshape(graph)
    for tidy in _TIDY:
        tidy(model)
    return model


# What torch's converter makes of torch's functions and of hecate's, in the order of its operands.


def _softplus(op: Any, x: Any) -> Any:
    return op.Where(op.Greater(x, 20.0), x, op.Softplus(x))


def _rms(op: Any, x: Any, axes: Any, eps: Any, scale: Any) -> Any:
    """`torch.rms_norm`."""
    return op.Mul(op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Pow(x, 2.0), axes), eps)))), scale)


def _level(op: Any, x: Any, axes: Any) -> tuple[Any, Any]:
    """`hecate.tape.ops.largest` and `levelling`."""
    longest = op.ReduceMax(op.Abs(x), axes)
    power = op.Neg(op.Clip(op.Floor(op.Div(op.Log(longest), math.log(2))), -126.0, 126.0))
    return longest, op.Where(op.Greater(longest, 0.0), op.Pow(2.0, power), 1.0)


def _keys(op: Any, x: Any, axes: Any) -> Any:
    """key_norm="l2" where nobody looks at numbers."""
    x = op.Mul(x, _level(op, x, axes)[1])
    size = op.ReduceSum(op.Pow(x, 2.0), axes)
    return op.Div(x, op.Sqrt(op.Where(op.Greater(size, 0.0), size, 1.0)))


def _layers(op: Any, x: Any, axes: Any, far: Any, eps: Any) -> Any:
    """qk_norm="l2" where nobody looks at numbers."""
    longest, level = _level(op, x, axes)
    level = op.Where(op.Greater(longest, far), level, 1.0)
    x, least = op.Mul(x, level), op.Mul(level, eps)
    size = op.ReduceSum(op.Pow(x, 2.0), axes)
    return op.Mul(x, op.Reciprocal(op.Sqrt(op.Where(op.Equal(size, 0.0), 1.0, op.Add(size, op.Mul(least, least))))))


def _both(op: Any, x: Any, axes: Any, far: Any, eps: Any) -> Any:
    """The first of the second, which is the first."""
    return _keys(op, _layers(op, x, axes, far, eps), axes)


def _unit(op: Any, x: Any, floor: float, eps: float = 1e-6) -> Any:
    """x / sqrt(|x|^2 + eps^2), whose squares are those of x over the sum of |x|, if that is above a floor: 1, where eps
    then is too small to be seen, or TINY, where it is beside every x but 0."""
    width = x.shape[-1]
    least, scale = (op.Constant(value=ir.tensor(item, dtype=x.dtype)) for item in ([floor], [width**-0.5] * width))
    near = op.Div(x, op.Max(op.ReduceL1(x, op.Constant(value=ir.tensor([-1]))), least))
    return op.RMSNormalization(near, scale, axis=-1, epsilon=eps**2 / width)


def _root(op: Any, x: Any, eps: Any, scale: Any, **_: Any) -> Any:
    return op.RMSNormalization(x, scale, axis=-1, epsilon=_number(eps))


def _number(value: Any) -> float:
    return float(value.const_value.numpy().item())


def _last(_: Any, x: Any, axes: Any, **__: Any) -> bool:
    """True of numbers along the last axis."""
    return x.shape is not None and axes.const_value.numpy().tolist() in ([-1], [len(x.shape) - 1])


_RULES = (
    [RewriteRule(_both, lambda op, x, **_: _unit(op, x, TINY), _last)],
    [
        RewriteRule(_keys, lambda op, x, **_: _unit(op, x, TINY), _last),
        RewriteRule(_layers, lambda op, x, eps, **_: _unit(op, x, 1.0, _number(eps)), _last),
        RewriteRule(_rms, _root, _last),
        RewriteRule(_softplus, lambda op, x: op.Softplus(x)),
    ],
)  # fmt: skip
_TIDY = (
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    common.LiftSubgraphInitializersToMainGraphPass(),
    common.DeduplicateInitializersPass(),
    common.CommonSubexpressionEliminationPass(),
    common.RemoveUnusedNodesPass(),
)


def _reshape(graph: Any) -> None:
    """One `Reshape` for what only says another shape, several in a row among them, and none for the same shape."""
    origins: dict[Any, Any] = {}
    for node in tuple(graph):
        if not _says_shape(node):
            continue
        x, y = node.inputs[0], node.outputs[0]
        sizes = [size if isinstance(size, int) else -1 for size in y.shape]
        x = origins.get(x, x)
        if x.shape == y.shape and (not y.is_graph_output() or (x.producer() and not x.is_graph_output())):
            origins[y] = x
            if y.is_graph_output():
                x.name, y.name = y.name, None
            y.replace_all_uses_with(x, replace_graph_outputs=True)
        elif sizes.count(-1) < 2 and 0 not in sizes:
            shape = ir.node("Constant", [], {"value": ir.tensor(sizes, ir.DataType.INT64)})
            said = ir.node("Reshape", [x, shape.outputs[0]])
            (made,) = said.outputs
            made.shape, made.type = y.shape, y.type
            ir.convenience.replace_nodes_and_values(graph, node, [node], [shape, said], [y], [made])
            origins[made] = x


def _says_shape(node: Any) -> bool:
    """True if an operator's output has the numbers of its first input, in order."""
    x, y = (*node.inputs, None)[0], node.outputs[0]
    if any(item is None or item.shape is None or item.shape.has_unknown_dim() for item in (x, y)):
        return False
    if node.op_type == "Transpose":
        order = [at for at in node.attributes["perm"].value if x.shape[at] != 1]
        return order == sorted(order)
    if node.op_type == "Slice":  # a step of -1 turns them round
        return x.shape == y.shape and (len(node.inputs) < 5 or bool((node.inputs[4].const_value.numpy() > 0).all()))
    return node.op_type in ("Reshape", "Squeeze", "Unsqueeze")
