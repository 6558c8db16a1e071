"""Traces a variant's torch formula as nodes, and prints them as text that torch, numba and Triton run.

The torch methods are the only source of a kernel. A config's own numbers become arguments `c` of the text: the formula
is traced once more with the variant's float fields moved a little, and constants that differ between the two traces
came from them. So another `delta` gives the same text and the same kernel; if a number decides which branch the formula
takes, each branch has its own text, with the number in it. A trace of more and wider rows in float32 shows which
constants are the number of values, `N`; those that follow from shapes or the dtype in another way are refused. Formulas
of rows of values are traced on `[rows, N]`, those of whole weights on `[memories, M, N]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hecate.errors import ConfigError
from hecate.formula.nodes import ALONG, COMPONENTWISE, DOWN, INFIX, NAMES, ROWWISE, Node, Nodes, Over, Unprintable, call
from hecate.variant import Variant

# Numbers of rows and their sizes in a trace: all differ, so that a shape shows whether it is per row, column or memory.
ROWS, SIZES = 3, {1: (5,), 2: (4, 5)}
MORE, WIDER = 7, {1: (64,), 2: (16, 64)}
OTHERS = {1: ((2,), (257,)), 2: ((17, 2), (2, 257))}  # for which a formula must take the same branches
ALIASES = frozenset(
    "view reshape unsqueeze squeeze expand clone detach alias contiguous to _to_copy _unsafe_view positive".split()
)
"""Operations whose result has the numbers of their input."""
CONSTANTS = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "_efficientzerotensor"), 0.0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0),
}
"""Operations whose result is the same number everywhere."""
ON_HOST = frozenset(("_local_scalar_dense", "equal", "is_nonzero", "_is_all_true", "_is_any_true"))
"""Operations that read a number of a tensor on the host."""
_IGNORED = ("dtype", "layout", "device", "pin_memory", "memory_format")
HOST = "it looks at a number of a tensor on the host (`if`, `.item()`), where a kernel has all tokens at once"
DEPTH = 6  # at which an expression gets a name
DEEPEST = 150  # operations in a chain: longer ones are refused, as nodes are walked recursively


Numbers = Sequence[float]


class _Whole(Node):
    """A sum over more than a row: the loss of all memories, which no result may read."""


class Trace(TorchDispatchMode):
    """Records operations on inputs. `other` are the constants of a trace of the moved variant in their order, `wider`
    those of a trace of wider rows."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch wraps the method, and its first call imports all of dynamo

    def __init__(self, nodes: Nodes, like: Tensor, other: Numbers | None = None, wider: Numbers | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        (self.rows, *self.sizes), self.dtype = like.shape, like.dtype
        self.nodes, self.other, self.wider = nodes, other, wider
        self.local: set[int] = set()  # constants made by the formula itself, which nothing else can change
        self.known: dict[int, Node] = {}
        self.alive: list[Tensor] = []  # ids are unique only among tensors that are alive
        self.shared: set[int] = set()  # tensors that may share memory: no operation may write into them
        self.constants: list[float] = []
        self.operations: list[str] = []

    @property
    def way(self) -> tuple[int, list[str]]:
        """The number of constants, and the operations: equal for traces that took the same branches."""
        return len(self.constants), self.operations

    def name(self, tensor: Tensor, node: Node) -> None:
        """Records the node of a tensor."""
        self.known[id(tensor)] = node
        self.alive.append(tensor)

    def node(self, item: Any, name: str) -> Any:
        """The node of a tensor or a number; other arguments as they are."""
        if isinstance(item, Tensor):
            node = self.known.get(id(item))
            if isinstance(node, _Whole):
                raise Unprintable(f"aten.{node.op} goes over more than a row of values")
            if node is not None:
                return node
            if item.numel() == 1 and id(item) in self.local:
                return self._constant(float(item))
            raise Unprintable(f"it has a tensor of its own, {tuple(item.shape)}, in aten.{name}")
        number = isinstance(item, float) or (isinstance(item, int) and not isinstance(item, bool))
        return self._constant(item) if number else item

    def _constant(self, value: float) -> Node:
        at, value = len(self.constants), float(value)
        self.constants.append(value)
        wide = value if self.wider is None else self.wider[at] if at < len(self.wider) else math.nan
        if wide in (value, _rounded(value)) or (math.isnan(wide) and math.isnan(value)):
            return self.nodes.const(value, None if self.other is None else self.other[at])
        counts = _counts(WIDER[len(self.sizes)])
        for (axes, size), more in zip(_counts(self.sizes).items(), counts.values(), strict=True):
            if (value, wide) == (size, more):
                return self.nodes.size(axes)
            if (value, wide) == (1 / size, 1 / more):
                return 1 / self.nodes.size(axes)
        what = "follows from how many there are, or from the dtype"
        raise Unprintable(f"a number of it, {value:g} for {_by(self.sizes)} values in {self.dtype}, {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        operands = [item for part in (*args, *kwargs.values()) for item in (part if isinstance(part, list) else [part])]
        traced = any(isinstance(item, Tensor) and id(item) in self.known for item in operands)
        if traced and name in ON_HOST:
            raise Unprintable(HOST)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unprintable(f"aten.{name} draws random numbers")
        out = func(*args, **kwargs)
        if name in CONSTANTS or name in ("full_like", "full"):
            nodes: Any = self._constant(CONSTANTS[name] if name in CONSTANTS else float(args[1]))
        elif not traced:  # it takes constants only
            constants = [item for item in (out if isinstance(out, tuple | list) else [out]) if isinstance(item, Tensor)]
            if not any(isinstance(item, Tensor) and id(item) not in self.local for item in operands):
                self.local |= set(map(id, constants))
            self.alive += constants
            return out
        else:
            nodes = self._results(name, args, kwargs, out)
        self.operations.append(name)
        if name in ALIASES and name != "clone":
            self.shared |= {id(args[0]), id(out)}
        pairs: list[Any] = list(zip(out, nodes, strict=True)) if isinstance(out, tuple) else [(out, nodes)]
        for tensor, node in pairs:
            self._fits(name, tensor, node, counted=name == "sum" and args[0].dtype == torch.bool)
            self.name(tensor, node)
        return out

    def _results(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """Nodes of an operation's results."""
        if name in ALIASES:
            node = self.node(args[0], name)
            asked = out.is_floating_point() and not args[0].is_floating_point()
            return call("where", node, 1, 0) if asked else node
        plain = name.removesuffix("_")
        if plain in COMPONENTWISE:
            if plain != name and id(args[0]) in self.shared:
                raise Unprintable(f"aten.{name} writes into what has another name")
            operation, operands = COMPONENTWISE[plain], [self.node(item, name) for item in args]
        elif name in ROWWISE:
            if (over := self._over(name, args, kwargs)) is None:
                return _Whole(self.nodes, name, (), axes=ALONG)
            operation = partial(ROWWISE[name], over)
            operands = [self.node(x, name) if isinstance(x, Tensor) else x for x in args]
        else:
            raise Unprintable(f"aten.{name} has no kernel form")
        named = {key: self.node(item, name) for key, item in kwargs.items() if key not in _IGNORED}
        try:
            return operation(*operands, **named)
        except (NotImplementedError, TypeError):
            raise Unprintable(f"aten.{name} as called has no kernel form") from None

    def _over(self, name: str, args: Any, kwargs: dict[str, Any]) -> Over | None:
        """The axes over which an operation reduces; None if it also reduces over rows or memories."""
        at = 2 if name in ("linalg_vector_norm", "_softmax_backward_data", "_log_softmax_backward_data") else 1
        axes = args[at] if len(args) > at else kwargs.get("dim")
        axes = [axes] if isinstance(axes, int) else list(axes or range(args[0].dim()))
        sizes = [args[0].shape[axis] for axis in axes]
        known = _counts(self.sizes)
        if len(self.sizes) == 1 and sizes != self.sizes:
            return None
        if any(size not in (1, *self.sizes) for size in sizes):
            return None
        return Over(sum(axis for axis in (ALONG, DOWN) if known.get(axis) in sizes))

    def _fits(self, name: str, tensor: Tensor, node: Node, counted: bool) -> None:
        """Refuses results that are neither a row nor one number per row, and dtypes other than the inputs' unless the
        result is a truth value."""
        number = tensor.dim() == 0 and tensor.dtype == torch.get_default_dtype()
        if tensor.dtype != self.dtype and not (number or counted or (tensor.dtype == torch.bool and node.truth)):
            raise Unprintable(f"it computes in {tensor.dtype}, in aten.{name}")
        if isinstance(node, _Whole) or node.op == "const":
            return
        shape = [size for size in tensor.shape if size != 1]
        rest = [size for size in self.sizes if size in shape]
        what = "row of values" if len(self.sizes) == 1 else "weight"
        if shape not in ([self.rows, *rest], []):
            raise Unprintable(f"aten.{name} leaves the {what}: its result is {list(tensor.shape)}")
        along = zip((ALONG, DOWN), self.sizes[::-1], strict=False)
        if any(node.axes & axis and size not in shape for axis, size in along):
            raise Unprintable(f"aten.{name} takes a part of a {what.partition(' ')[0]}")


def _counts(sizes: Sequence[int]) -> dict[int, int]:
    """The number of numbers along each axis of a row or a weight, and along both."""
    along = {ALONG: sizes[-1]}
    return along if len(sizes) == 1 else {**along, DOWN: sizes[0], ALONG | DOWN: sizes[0] * sizes[1]}


def _by(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def traced(
    function: Callable[..., Any], inputs: Mapping[str, int], nodes: Nodes, *constants: Numbers | None,
    sizes: tuple[int, ...] = SIZES[1],
) -> tuple[list[Node], Trace]:  # fmt: skip
    """Nodes of the results of a function of tensors, and its trace; `inputs` has the axes of each input. With sizes
    other than those of `SIZES` there are more rows, in float32."""
    rows, dtype = (ROWS, torch.float64) if sizes in SIZES.values() else (MORE, torch.float32)
    numbers = torch.linspace(0.1, 1.1, rows * math.prod(sizes), dtype=dtype).view(rows, *sizes)
    tensors = [(numbers if axes else numbers.flatten(1)[:, 0]).clone() for axes in inputs.values()]
    with torch.enable_grad(), Trace(nodes, numbers, *constants) as mode:
        for name, tensor in zip(inputs, tensors, strict=True):
            mode.name(tensor, nodes.input(name, inputs[name]))
            mode.shared.add(id(tensor))
        out = function(*tensors)
        results = out if isinstance(out, tuple | list) else (out,)
        return [mode.node(item, "the result") for item in results], mode


class Text(NamedTuple):
    """A function `name(*inputs, c)`: its source, the values of c, and the operations in it."""

    name: str
    source: str
    numbers: tuple[float, ...]
    operations: frozenset[str]


def nodes_of(
    variant: Variant, method: Callable[[Any], Callable[..., Any]], inputs: Mapping[str, int], nodes: Nodes, *,
    axes: int = 1,
) -> list[Node]:  # fmt: skip
    """The nodes of a method's results, in which constants that come from the variant's fields have two different
    values; the inputs are rows, or with `axes=2` weights."""
    sizes = SIZES[axes]
    _, wide = traced(method(variant), inputs, Nodes(), sizes=WIDER[axes])
    other, constants = moved(variant), None
    if other is not None:
        with suppress(Unprintable):  # without moved fields there is still a text
            _, trace = traced(method(other), inputs, Nodes(), sizes=sizes)
            constants = trace.constants if trace.way == wide.way else None
    results, trace = traced(method(variant), inputs, nodes, constants, wide.constants, sizes=sizes)
    traces = {shape: traced(method(variant), inputs, Nodes(), sizes=shape)[1] for shape in OTHERS[axes]}
    if any(each.way != trace.way for each in (wide, *traces.values())):
        raise Unprintable("it takes another way for rows of another width or dtype")
    for shape, each in traces.items():
        for value, at_wider, number in zip(trace.constants, wide.constants, each.constants, strict=True):
            if math.isnan(value):
                continue
            known = value
            if _rounded(value) != _rounded(at_wider):
                along = next(at for at, size in _counts(sizes).items() if value in (size, 1 / size))
                known = _counts(shape)[along] ** (1 if value > 1 else -1)
            if _rounded(number) != _rounded(known):
                what = f"{number:g} for {_by(shape)} values"
                raise Unprintable(f"a number of it, {what}, follows from the width in its own way")
    return results


def _rounded(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))  # as in an operation with float32 tensors


def moved(variant: Variant) -> Variant | None:
    """The variant with each of its float fields, and those of variants in its fields, moved a little if its checks
    allow that; None if none can be moved."""
    copy = None
    for at, name in enumerate(type(variant).model_fields):
        value = getattr(variant, name)
        other: Variant | float | None = None
        if isinstance(value, Variant):
            other = moved(value)
        elif isinstance(value, float) and value != 0 and math.isfinite(value):
            other = value * (1 - 0.0137 / (at + 3))
        if other is not None:
            with suppress(ConfigError):  # a field that allows no other number stays in the text
                copy = (copy or variant).model_copy(update={name: other})
    return copy


def printed(
    name: str, inputs: Sequence[str], results: Sequence[Node], known: dict[Node, str] | None = None,
    names: Callable[[Node], str] | None = None,
) -> Text:  # fmt: skip
    """Text of the function that computes nodes; `known` ones are inputs by these names, `names` is as in `said`."""
    text, used = dict(known or {}), uses(results, known or {})
    depth: dict[Node, int] = {}
    level: dict[Node, int] = {}
    for node in used:
        level[node] = 0 if node.op in ("in", "const") else 1 + max(level.get(item, 0) for item in node.args)
    if (deepest := max(level.values())) > DEEPEST:
        raise Unprintable(f"it is {deepest} operations deep, and kernels are printed of up to {DEEPEST}")
    lines: list[str] = []
    numbers: list[float] = []
    operations: set[str] = {f"in {other}" for node, other in text.items() if node in used}
    for node, count in used.items():
        if node in text:
            continue
        if node.op == "in":
            text[node] = node.args[0]
            operations.add(f"in {node.args[0]}")
        elif node.op == "const":
            text[node] = literal(node.args[0]) if node.literal() else f"c[{len(numbers)}]"
            numbers += [] if node.literal() else [node.args[0]]
        else:
            operations.add(node.op)
            depth[node] = 1 + max(depth.get(item, 0) for item in node.args)
            expression = said(node, text, names)
            if count > 1 or depth[node] > DEPTH:
                text[node], depth[node] = f"t{len(lines)}", 0
                lines.append(f"    {text[node]} = {expression}")
            else:
                text[node] = expression if node.op in NAMES else f"({expression})"
    back = ", ".join(text[node] for node in results)
    source = "\n".join([f"def {name}({', '.join(inputs)}, c):", *lines, f"    return {back}", ""])
    return Text(name, source, tuple(numbers), frozenset(operations))


def uses(results: Sequence[Node], known: Mapping[Node, str]) -> dict[Node, int]:
    """Number of uses of each node; arguments come before the nodes that use them."""
    count: dict[Node, int] = {}
    order: list[Node] = []

    def visit(node: Node) -> None:
        count[node] = count.get(node, 0) + 1
        if count[node] == 1:
            if node not in known and node.op not in ("in", "const"):
                for item in node.args:
                    visit(item)
            order.append(node)

    for node in results:
        visit(node)
    return {node: count[node] for node in order}


def said(node: Node, text: Mapping[Node, str], names: Callable[[Node], str] | None = None) -> str:
    """Text of an operation from the texts of its arguments; `names` gives the beginning of a call."""
    args = [text[item] for item in node.args]
    if node.op == "neg":
        return f"-{args[0]}"
    if node.op in INFIX:
        return f"{args[0]} {INFIX[node.op]} {args[1]}"
    return f"{names(node) if names else f'{node.op}('}{', '.join(args)})"


def literal(value: float) -> str:
    """Text of a number."""
    if math.isnan(value):
        return "NAN"
    digits = repr(abs(value)) if math.isfinite(value) else "INF"
    return f"(-{digits})" if math.copysign(1, value) < 0 else digits
