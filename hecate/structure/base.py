"""The structure: what the memory is, as a function of its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.tape import Block, Tensors
from hecate.variant import Variant

Memory = tuple[Tensor, ...]


class Structure(Variant, family="structure"):
    """A model `pred = f(memory, p)` small enough to be trained at every token.

    A variant gives `shapes`, `predict` and its two derivatives: `predict_vjp`, whose weight part is
    the inner gradient (`pullback`), and `pullback_vjp`, the second-order term that carries the
    outer gradient through the inner one. Both fall back to `torch.func`.

    Shapes: weights `[N, ...]` in the order of `shapes`, p `[N, P]`, pred and u `[N, V]`; N = batch
    x heads.
    """

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
        """Initial weights `[H, ...]`: a point from which gradients flow.

        Without a generator the draw comes from one seeded with 0, so it is a constant of the
        structure.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no init")

    @property
    def linear(self) -> bool:
        """Whether pred is linear in the weights and in p, with one weight: `[V, P]`, or `[P]` if
        diagonal."""
        return False

    @property
    def diagonal(self) -> bool:
        """Whether coordinate c of pred depends on coordinate c of the weight and of p alone."""
        return False

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        """The memory's answer to p."""
        raise NotImplementedError(f"{type(self).__name__} defines no predict")

    def predict_vjp(self, memory: Memory, p: Tensor, u: Tensor) -> tuple[Memory, Tensor]:
        """Cotangents of the weights and of p from the cotangent u of the prediction."""
        _, pull = torch.func.vjp(self.predict, memory, p)  # type: ignore[misc]
        gmemory, gp = pull(u)
        return gmemory, gp

    def pullback(self, memory: Memory, p: Tensor, u: Tensor) -> Memory:
        """The inner gradient: cotangents of the weights from u = d loss / d pred."""
        return self.predict_vjp(memory, p, u)[0]

    def pullback_vjp(
        self, memory: Memory, p: Tensor, u: Tensor, cotangents: Memory
    ) -> tuple[Memory, Tensor, Tensor]:
        """Cotangents of (memory, p, u) from those of `pullback`'s result."""
        _, pull = torch.func.vjp(self.pullback, memory, p, u)  # type: ignore[misc]
        gmemory, gp, gu = pull(cotangents)
        return gmemory, gp, gu

    @classmethod
    def hand_written(cls) -> bool:
        """Whether both derivatives are written by hand."""
        base = Structure
        return cls.predict_vjp is not base.predict_vjp and cls.pullback_vjp is not base.pullback_vjp

    def predict_block(self) -> Block:
        """`predict` as a tape block: (p, *weights) -> pred."""

        def forward(p: Tensor, *memory: Tensor) -> tuple[Tensors, Tensors]:
            return (self.predict(memory, p),), (p, *memory)

        def vjp(inputs: Memory, g: Tensor) -> tuple[Tensor, ...]:
            gmemory, gp = self.predict_vjp(inputs[1:], inputs[0], g)
            return gp, *gmemory

        return Block(
            f"structure.{self.kind}.predict", forward, vjp if self.hand_written() else None
        )

    def pullback_block(self) -> Block:
        """`pullback` as a tape block: (p, u, *weights) -> gradients."""

        def forward(p: Tensor, u: Tensor, *memory: Tensor) -> tuple[Tensors, Tensors]:
            return self.pullback(memory, p, u), (p, u, *memory)

        def vjp(inputs: Memory, *cotangents: Tensor) -> tuple[Tensor, ...]:
            gmemory, gp, gu = self.pullback_vjp(inputs[2:], inputs[0], inputs[1], cotangents)
            return gp, gu, *gmemory

        return Block(
            f"structure.{self.kind}.pullback", forward, vjp if self.hand_written() else None
        )


StructureKind = Structure


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """`[N, V, P] , [N, P] -> [N, V]`."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """`[N, V], [N, P] -> [N, V, P]`."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)
