"""The structure: the model that a memory is, as a function of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hecate.checks import check_shapes, without_storage
from hecate.structure.graph import Graph
from hecate.tape import Block, Run, Tensors, formula_block, is_traced, one
from hecate.tape.ops import torch_vjp
from hecate.variant import Variant

Memory = tuple[Tensor, ...]


@dataclass(frozen=True)
class Cascade:
    """Two linear memories written apart from each other and read one after the other: with phi = [w; a], a of width
    `codes`, the first learns `link(W_1 w) -> a`, the second `W_2 a -> v` under the bias, and y = W_2 link(W_1 w_q).
    It also serves engines as the bias of the first memory.

    Fields:
        codes: the width of a.
        link: the block z `[..., codes]` -> code.
        grad: (z, a) -> the first memory's gradient by its prediction z.
        grad_vjp: (z, a, g) -> cotangents of z and a.
    """

    codes: int
    link: Block
    grad: Callable[[Tensor, Tensor], Tensor]
    grad_vjp: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    kind: ClassVar[str] = "behind a link"
    linear: ClassVar[bool] = False

    def grad_jvp(self, pred: Tensor, target: Tensor, tangent: Tensor) -> Tensor:
        """Hessian by the prediction times a tangent; it is symmetric."""
        return self.grad_vjp(pred, target, tangent)[0]

    def kernel_form(self) -> None:
        """None, as no named kernel form covers it."""

    token_form = kernel_form

    def model_dump_json(self) -> str:
        """JSON null, as it is not a setting."""
        return "null"


class SlotForm(NamedTuple):
    """Prediction in kernels from a matrix whose columns are divided by sqrt(|column|^2 + least^2). [ENG-NUM-D8]"""

    least: float


class Structure(Variant, family="structure"):
    """A model `pred = f(memory, p)` small enough to be trained at every token.

    A variant defines `shapes`, `predict` and its two derivatives: `predict_vjp`, whose weight part is the inner
    gradient (`pullback`), and `pullback_vjp`, the second-order term that carries the outer gradient through the inner
    one. Both fall back to `torch.func`. `gradient` combines them with a bias.

    Shapes: weights `[N, ...]` in the order of `shapes`, p `[N, P]`, pred and u `[N, V]`; N = batch x heads.
    """

    _derivatives = ("predict_vjp", "pullback_vjp")
    _formulas = ("shapes", "predict", "predict_vjp", "pullback", "pullback_vjp", "gradient", "gradient_vjp")
    _follows = MappingProxyType({
        "predict_vjp": ("predict",), "pullback": ("predict", "predict_vjp"),
        "pullback_vjp": ("predict", "predict_vjp", "pullback"), "gradient": ("predict", "pullback"),
        "gradient_vjp": ("predict", "pullback", "gradient"),
        **dict.fromkeys(("linear", "weighted_sum"), ("predict", "pullback", "gradient", "graph")),
    })  # fmt: skip
    drawn: ClassVar[bool] = True  # whether the weights start from a draw rather than at zero
    factored: ClassVar[bool] = False  # whether `graph` gives its linear layers, whose gradients are d h^T

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        """Shape of each weight of one memory, by name."""
        raise NotImplementedError(f"{type(self).__name__} defines no shapes")

    def init(
        self,
        d_phi: int,
        d_v: int,
        *,
        heads: int = 1,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> dict[str, Tensor]:
        """Initial weights `[H, ...]`, a point from which gradients flow: N(0, 1/fan_in) by default.

        Without a generator it draws from one seeded with 0, so that the weights are a constant of the structure.
        """
        shapes = self.shapes(d_phi, d_v)
        check_shapes(shapes, f"narrow the memory of structure {self.kind!r} or lower heads", heads)
        blank = without_storage(shapes, heads, dtype, device)
        if blank is not None:
            return blank
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        if not self.drawn:
            return {name: torch.zeros(heads, *shape, **place) for name, shape in shapes.items()}
        source = generator or torch.Generator().manual_seed(0)
        return {name: self.start(name, (heads, *shape), source, **place) for name, shape in shapes.items()}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator, **place: Any) -> Tensor:
        """Initial value of a weight `[H, ...]`, of the dtype and on the device of `place`."""
        draw = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return (draw / math.sqrt(shape[-1])).to(**place)

    @property
    def linear(self) -> bool:
        """True if pred = M p with one weight `[V, P]`, or M * p with one `[P]` if diagonal, as engines compute it."""
        return False

    @property
    def transposed(self) -> bool:
        """True if it learns phi(k) from v instead, pred = M v with M `[P, V]`, and answers M^T phi(q)."""
        return False

    @property
    def named(self) -> str:
        """Its name in messages."""
        return f"structure {self.kind!r}"

    @property
    def weighted_sum(self) -> bool:
        """True if pred is linear in the weights whose shape has the values' width, and so is the inner gradient of
        these weights; the gradients of others then do not depend on values."""
        return self.linear

    @property
    def diagonal(self) -> bool:
        """True if coordinate c of pred depends on coordinate c of the weight and of p alone."""
        return False

    def cascade(self) -> Cascade | None:
        """The structure as two linear memories, with weights in the order of `shapes`; None if it is not such."""
        return None

    def graph(self) -> Graph:
        """The linear layers of a `factored` structure and what lies between them."""
        raise NotImplementedError(f"{type(self).__name__} defines no graph")

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        """The memory's answer to p."""
        raise NotImplementedError(f"{type(self).__name__} defines no predict")

    def read(self, memory: Memory, p: Tensor) -> Tensor:
        """The memory's answer to a query: its prediction, or M^T p if it is `transposed`."""
        return _transposed_product(p, *memory) if self.transposed else self.predict(memory, p)

    def predict_vjp(self, memory: Memory, p: Tensor, u: Tensor) -> tuple[Memory, Tensor]:
        """Cotangents of the weights and of p from the cotangent u of the prediction."""
        return torch_vjp(self.predict, (memory, p), u)

    def pullback(self, memory: Memory, p: Tensor, u: Tensor) -> Memory:
        """The inner gradient: cotangents of the weights from u = d loss / d pred."""
        return self.predict_vjp(memory, p, u)[0]

    def pullback_vjp(self, memory: Memory, p: Tensor, u: Tensor, cotangents: Memory) -> tuple[Tensors, Tensor, Tensor]:
        """Cotangents of (memory, p, u) from those of `pullback`'s result; None for a weight if the result is a product
        of p and u alone, so that no gradient flows to it."""
        return torch_vjp(self.pullback, (memory, p, u), cotangents)

    def predict_block(self) -> Block:
        """`predict` as a tape block: (p, *weights) -> pred."""

        def vjp(p: Tensor, *rest: Tensor) -> Tensors:
            gmemory, gp = self.predict_vjp(rest[:-1], p, rest[-1])
            return gp, *gmemory

        name, by_hand = f"structure.{self.kind}.predict", self.hand_written()
        return formula_block(name, lambda p, *memory: self.predict(memory, p), vjp if by_hand else None)

    def read_block(self) -> Block:
        """`read` as a tape block: (p, *weights) -> answer."""
        return _READ_TRANSPOSED if self.transposed else self.predict_block()

    def pullback_block(self) -> Block:
        """`pullback` as a tape block: (p, u, *weights) -> gradients."""

        def vjp(p: Tensor, u: Tensor, *rest: Tensor) -> Tensors:
            count = len(rest) // 2
            gmemory, gp, gu = self.pullback_vjp(rest[:count], p, u, rest[count:])
            return gp, gu, *gmemory

        name, by_hand = f"structure.{self.kind}.pullback", self.hand_written()
        return formula_block(name, lambda p, u, *memory: self.pullback(memory, p, u), vjp if by_hand else None)

    def gradient(self, bias: Block, memory: Memory, p: Tensor, target: Tensor) -> tuple[Memory, Any]:
        """The inner gradient and what `gradient_vjp` reuses; `bias` is (pred, target) -> u.

        Override the two together to compute once what prediction and pullback share.
        """
        (u,), residuals = bias.apply((self.predict(memory, p), target))
        return self.pullback(memory, p, one((u,))), (memory, p, u, residuals)

    def gradient_vjp(self, bias: Block, residuals: Any, cotangents: Memory) -> tuple[Tensors, Tensors]:
        """Cotangents of the weights, and of (p, target), from those of `gradient`'s result."""
        memory, p, u, of_bias = residuals
        gmemory, gp, gu = self.pullback_vjp(memory, p, u, cotangents)
        gpred, gtarget = bias.pullback(of_bias, [gu])
        if gpred is None:
            return gmemory, (gp, gtarget)
        more, gp_more = self.predict_vjp(memory, p, gpred)
        both = zip(gmemory, more, strict=True)
        return tuple(b if a is None else a + b for a, b in both), (gp + gp_more, gtarget)

    def gradient_block(self, bias: Block) -> Block:
        """`gradient` as a tape block: (p, target, *weights) -> gradients."""

        def forward(p: Tensor, target: Tensor, *memory: Tensor) -> tuple[Tensors, Any]:
            return self.gradient(bias, memory, p, target)

        def vjp(residuals: Any, *cotangents: Tensor) -> Tensors:
            gmemory, ginputs = self.gradient_vjp(bias, residuals, cotangents)
            return *ginputs, *gmemory

        def program(run: Run, p: Tensor, target: Tensor, *memory: Tensor) -> Tensors:
            (pred,) = run(self.predict_block(), p, *memory)
            (u,) = run(bias, pred, target)
            return run(self.pullback_block(), p, u, *memory)

        return Block(f"structure.{self.kind}.gradient", forward, vjp, program)


def _transposed_product(p: Tensor, weight: Tensor) -> Tensor:
    return (weight.mT @ p.unsqueeze(-1)).squeeze(-1)


def _transposed_product_vjp(p: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return (weight @ g.unsqueeze(-1)).squeeze(-1), p.unsqueeze(-1) * g.unsqueeze(-2)


_READ_TRANSPOSED = formula_block("structure.read.transposed", _transposed_product, _transposed_product_vjp)
StructureKind = Structure


KEPT, LARGEST = 32, 2**26  # number of starts in the cache, and bytes of the largest


def starts(
    structure: Structure, d_phi: int, d_v: int, *, heads: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """`structure.init` without a generator: weights `[H, ...]`, which are shared and must not be written to. The draw,
    on the CPU, is made once for each device and cached, as otherwise every call would wait for it. [STR-INIT-I1]"""
    shapes = structure.shapes(d_phi, d_v) if structure.drawn and not is_traced() else {}
    if not 0 < heads * sum(map(math.prod, shapes.values())) * dtype.itemsize <= LARGEST:
        return structure.init(d_phi, d_v, heads=heads, dtype=dtype, device=device)
    return dict(_cached_init(structure, d_phi, d_v, heads, dtype, device))


@lru_cache(KEPT)
def _cached_init(
    structure: Structure, d_phi: int, d_v: int, heads: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    with torch.inference_mode(False), torch.no_grad():  # autograd may save cached tensors
        return structure.init(d_phi, d_v, heads=heads, dtype=dtype, device=device)
