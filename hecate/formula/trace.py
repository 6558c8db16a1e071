"""Traces what torch computes of some tensors as nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hecate.formula.nodes import Node, Nodes, Unprintable, where
from hecate.formula.table import ALIASES, COMPONENTWISE, CONSTANTS, ON_HOST, ROWWISE

ROWS, WIDTH = 3, 5  # of the tensors that are traced: unlike, so that shapes tell one number per row from values
_IGNORED = ("dtype", "layout", "device", "pin_memory", "memory_format")
HOST = "it looks at a number of a tensor on the host (`if`, `.item()`), where a kernel has all tokens at once"


class _Whole(Node):
    """A sum over more than a row: the loss of all memories, which no result may read."""


class Trace(TorchDispatchMode):
    """Records operations on inputs; `told` are the constants of a trace before it, in its order."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method, and imports all of dynamo when it is first called

    def __init__(self, nodes: Nodes, told: Sequence[float] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes, self.told = nodes, told
        self.known: dict[int, Node] = {}
        self.alive: list[Tensor] = []  # an id is that of a tensor as long as it lives
        self.constants: list[float] = []
        self.operations: list[str] = []

    def name(self, tensor: Tensor, node: Node) -> None:
        """Says which node a tensor is."""
        self.known[id(tensor)] = node
        self.alive.append(tensor)

    def node(self, item: Any, name: str) -> Any:
        """The node of a tensor or a number; other arguments as they are."""
        if isinstance(item, Tensor):
            found = self.known.get(id(item))
            if isinstance(found, _Whole):
                raise Unprintable(f"aten.{found.op} goes over more than a row of values")
            if found is not None:
                return found
            if item.numel() == 1:
                return self._constant(float(item))
            raise Unprintable(f"it has a tensor of its own, {tuple(item.shape)}, in aten.{name}")
        number = isinstance(item, float) or (isinstance(item, int) and not isinstance(item, bool))
        return self._constant(item) if number else item

    def _constant(self, value: float) -> Node:
        self.constants.append(float(value))
        return self.nodes.const(float(value), None if self.told is None else self.told[len(self.constants) - 1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = [item for part in (*args, *kwargs.values()) for item in (part if isinstance(part, list) else [part])]
        traced = any(isinstance(item, Tensor) and id(item) in self.known for item in given)
        if traced and name in ON_HOST:
            raise Unprintable(HOST)
        out = func(*args, **kwargs)
        if name in CONSTANTS or name in ("full_like", "full"):
            made: Any = self._constant(CONSTANTS[name] if name in CONSTANTS else float(args[1]))
        elif not traced:
            return out  # of constants alone
        else:
            made = self._made(name, args, kwargs, out)
        self.operations.append(name)
        if name.endswith("_") and not name.endswith("__"):
            self.known[id(args[0])] = made
        pairs: list[Any] = list(zip(out, made, strict=True)) if isinstance(out, tuple) else [(out, made)]
        for tensor, node in pairs:
            self._fits(name, tensor, node)
            self.name(tensor, node)
        return out

    def _made(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """What an operation makes of nodes."""
        plain = name if name in COMPONENTWISE else name.rstrip("_")
        if name in ALIASES:
            made = self.node(args[0], name)
            if out.is_floating_point() and out.dtype != torch.float64:
                raise Unprintable(f"it computes in {out.dtype}")
            asked = out.is_floating_point() and not args[0].is_floating_point()
            return where(made, 1, 0) if asked else made
        if plain in COMPONENTWISE:
            operation, given = COMPONENTWISE[plain], [self.node(item, name) for item in args]
        elif name in ROWWISE:
            if not self._along_row(name, args, kwargs):
                return _Whole(self.nodes, name, (), row=False)
            operation, given = ROWWISE[name], [self.node(x, name) if isinstance(x, Tensor) else x for x in args]
        else:
            raise Unprintable(f"aten.{name} has no kernel form")
        named = {key: self.node(item, name) for key, item in kwargs.items() if key not in _IGNORED}
        try:
            return operation(*given, **named)
        except (NotImplementedError, TypeError):
            raise Unprintable(f"aten.{name} as called has no kernel form") from None

    def _along_row(self, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        """True of an operation along the last axis, of rows."""
        at = 2 if name in ("linalg_vector_norm", "_softmax_backward_data", "_log_softmax_backward_data") else 1
        axes = args[at] if len(args) > at else kwargs.get("dim")
        axes = [axes] if isinstance(axes, int) else list(axes or range(args[0].dim()))
        return bool([axis % args[0].dim() for axis in axes] == [args[0].dim() - 1] and args[0].shape[-1] == WIDTH)

    def _fits(self, name: str, tensor: Tensor, node: Node) -> None:
        """Refuses what is neither a row nor a number of one."""
        if isinstance(node, _Whole) or node.op == "const":
            return
        shape = tuple(tensor.shape)
        row = shape in ((ROWS, 1), (ROWS,), (), (1,))
        if not row and shape != (ROWS, WIDTH):
            raise Unprintable(f"aten.{name} leaves the row of values: its result is {list(shape)}")
        if row and not node.row:
            raise Unprintable(f"aten.{name} takes a part of a row")


def traced(
    function: Callable[..., Any], inputs: Sequence[str], nodes: Nodes, told: Sequence[float] | None = None
) -> tuple[list[Node], Trace]:
    """Nodes of what a function of tensors returns; an input in capitals is one number per row."""
    with _disable_current_modes():  # a formula may be asked for while something else is traced
        numbers = torch.linspace(0.1, 1.1, ROWS * WIDTH, dtype=torch.float64)
        given = [numbers[:ROWS].clone() if name.isupper() else numbers.view(ROWS, WIDTH).clone() for name in inputs]
        with torch.enable_grad(), Trace(nodes, told) as mode:
            for name, tensor in zip(inputs, given, strict=True):
                mode.name(tensor, nodes.input(name, row=name.isupper()))
            out = function(*given)
            results = out if isinstance(out, tuple | list) else (out,)
            return [mode.node(item, "the result") for item in results], mode
