"""Prints a variant's torch formula as text that torch, numba and Triton run.

The torch methods are the only source of a kernel. A config's own numbers become arguments `c` of the text: the formula
is traced once more with the variant's float fields moved a little, and constants that differ between the two traces
came from them. So another `delta` is the same text, and the same kernel; where a number steers which way the formula
takes, each way has a text of its own, with the number in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from hecate.errors import ConfigError
from hecate.formula.nodes import INFIX, NAMES, Node, Nodes, Unprintable
from hecate.formula.trace import traced
from hecate.variant import Variant

DEPTH = 6  # of an expression before it gets a name


class Text(NamedTuple):
    """A function `name(*inputs, c)`: its source, the values of c, and the operations that are in it."""

    name: str
    source: str
    numbers: tuple[float, ...]
    operations: frozenset[str]


def both_ways(
    variant: Variant, method: Callable[[Any], Callable[..., Any]], inputs: Sequence[str], nodes: Nodes
) -> list[Node]:
    """The nodes of a method's results, in which the variant's own numbers differ between their two values."""
    other, told, operations = moved(variant), None, None
    if other is not None:
        try:
            _, first = traced(method(other), inputs, Nodes())
            told, operations = first.constants, first.operations
        except Unprintable:
            pass  # as it is, it may have a text
    try:
        results, trace = traced(method(variant), inputs, nodes, told)
        same = told is None or (len(trace.constants) == len(told) and trace.operations == operations)
    except IndexError:  # more constants than were told
        same = False
    return results if same else traced(method(variant), inputs, nodes)[0]


def moved(variant: Variant) -> Variant | None:
    """The variant with each of its float fields moved a little where it bears that; None if none does."""
    found = None
    for at, name in enumerate(type(variant).model_fields):
        value = getattr(variant, name)
        if isinstance(value, float) and value != 0 and math.isfinite(value):
            with suppress(ConfigError):  # the number of a field that has to be what it is stays in the text
                found = (found or variant).model_copy(update={name: value * (1 - 0.0137 / (at + 3))})
    return found


def printed(name: str, inputs: Sequence[str], results: Sequence[Node], known: dict[Node, str] | None = None) -> Text:
    """The function that computes nodes; those `known` are inputs under that name."""
    text, used = dict(known or {}), _uses(results, known or {})
    depth: dict[Node, int] = {}
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
            own = said(node, text)
            if count > 1 or depth[node] > DEPTH:
                text[node], depth[node] = f"t{len(lines)}", 0
                lines.append(f"    {text[node]} = {own}")
            else:
                text[node] = own if node.op in NAMES else f"({own})"
    back = ", ".join(text[node] for node in results)
    source = "\n".join([f"def {name}({', '.join(inputs)}, c):", *lines, f"    return {back}", ""])
    return Text(name, source, tuple(numbers), frozenset(operations))


def _uses(results: Sequence[Node], known: dict[Node, str]) -> dict[Node, int]:
    """How often each node is used, arguments before what is made of them."""
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


def said(node: Node, text: Mapping[Node, str]) -> str:
    """An operation, its arguments as they are in the text."""
    args = [text[item] for item in node.args]
    if node.op == "neg":
        return f"-{args[0]}"
    return f"{args[0]} {INFIX[node.op]} {args[1]}" if node.op in INFIX else f"{node.op}({', '.join(args)})"


def literal(value: float) -> str:
    """A number."""
    if math.isnan(value):
        return "NAN"
    found = repr(abs(value)) if math.isfinite(value) else "INF"
    return f"(-{found})" if math.copysign(1, value) < 0 else found


def torch_names(dtype: torch.dtype) -> dict[str, Any]:
    """The names of a text as torch runs it: a check that needs no compiler."""

    def where(condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
        x, y = (item if isinstance(item, torch.Tensor) else torch.tensor(item, dtype=dtype) for item in (x, y))
        return torch.where(condition, x, y)

    names = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}
    return names | {
        "where": where, "power": torch.pow, "total": lambda x: x.sum(-1, keepdim=True),
        "top": lambda x: x.amax(-1, keepdim=True), "INF": math.inf, "NAN": math.nan,
    }  # fmt: skip


def in_torch(text: Text, dtype: torch.dtype, width: int) -> Callable[..., Any]:
    """A text as torch runs it, of tensors and the numbers c."""
    names = torch_names(dtype) | {"N": float(width)}
    exec(compile(text.source, f"<formula {text.name}>", "exec"), names)
    return names[text.name]
