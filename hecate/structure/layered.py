"""Structures made of linear layers: what they share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from hecate.structure.base import Memory, Structure
from hecate.structure.graph import Cotangents, Graph, evaluate, factors, factors_vjp, through, trace, traced
from hecate.tape import Block, Tensors, one


class Layered(Structure):
    """Helper for structures of linear layers: a variant gives `graph` and `shapes`.

    Both derivatives follow from the graph, and so does the dual form of the chunk engine, which reads the state of
    every token without building its weights. Not a variant itself: it has no kind.
    """

    @abstractmethod
    def graph(self) -> Graph:
        """The layers and what lies between them."""

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        return evaluate(self.graph(), memory, p.unsqueeze(1))[-1].squeeze(1)

    def predict_vjp(self, memory: Memory, p: Tensor, u: Tensor) -> tuple[Memory, Tensor]:
        graph = self.graph()
        past = trace(graph, memory, p.unsqueeze(1))
        flowing = Cotangents(len(past.values))
        flowing.add(len(graph.nodes), u.unsqueeze(1))
        gmemory, gp = through(graph, memory, past, flowing)
        return tuple(gmemory), gp.squeeze(1)

    def pullback(self, memory: Memory, p: Tensor, u: Tensor) -> Memory:
        graph = self.graph()
        past = trace(graph, memory, p.unsqueeze(1))
        d, h, _ = factors(graph, memory, past, u.unsqueeze(1))
        return tuple(di.mT * hi for di, hi in zip(d, h, strict=True))

    def pullback_vjp(self, memory: Memory, p: Tensor, u: Tensor, cotangents: Memory) -> tuple[Tensors, Tensor, Tensor]:
        graph = self.graph()
        past = trace(graph, memory, p.unsqueeze(1))
        d, h, flowed = factors(graph, memory, past, u.unsqueeze(1))
        gd = [torch.bmm(hi, c.mT) for hi, c in zip(h, cotangents, strict=True)]
        gh = [torch.bmm(di, c) for di, c in zip(d, cotangents, strict=True)]
        above, gu, values = factors_vjp(graph, memory, past, flowed, gd, gh)
        gmemory, gp = through(graph, memory, past, values, above)
        gu = torch.zeros_like(u) if gu is None else gu.squeeze(1)
        return tuple(gmemory), gp.squeeze(1), gu

    def predict_block(self) -> Block:
        if not self.factored:
            return super().predict_block()
        graph = self.graph()

        def forward(p: Tensor, *memory: Tensor) -> tuple[Tensors, Any]:
            values = evaluate(graph, memory, p.unsqueeze(1))
            return (values[-1].squeeze(1),), (memory, values)

        def vjp(kept: Any, g: Tensor) -> Tensors:
            memory, past = kept[0], traced(graph, kept[1])
            flowing = Cotangents(len(past.values))
            flowing.add(len(graph.nodes), g.unsqueeze(1))
            gmemory, gp = through(graph, memory, past, flowing)
            return gp.squeeze(1), *gmemory

        return Block(f"structure.{self.kind}.predict", forward, vjp)

    def gradient(self, bias: Block, memory: Memory, p: Tensor, target: Tensor) -> tuple[Memory, Any]:
        if not self.factored:
            return super().gradient(bias, memory, p, target)
        graph = self.graph()
        past = trace(graph, memory, p.unsqueeze(1))
        outputs, of_bias = bias.apply((past.values[-1].squeeze(1), target))
        d, h, flowed = factors(graph, memory, past, one(outputs).unsqueeze(1))
        grads = tuple(di.mT * hi for di, hi in zip(d, h, strict=True))
        return grads, (graph, memory, past, d, h, flowed, of_bias)

    def gradient_vjp(self, bias: Block, kept: Any, cotangents: Memory) -> tuple[Tensors, Tensors]:
        if not self.factored:
            return super().gradient_vjp(bias, kept, cotangents)
        graph, memory, past, d, h, flowed, of_bias = kept
        gd = [torch.bmm(hi, c.mT) for hi, c in zip(h, cotangents, strict=True)]
        gh = [torch.bmm(di, c) for di, c in zip(d, cotangents, strict=True)]
        above, gu, values = factors_vjp(graph, memory, past, flowed, gd, gh)
        if gu is None:
            gu = torch.zeros_like(past.values[-1])
        gpred, gtarget = bias.pullback(of_bias, [gu.squeeze(1)])
        values.add(len(graph.nodes), None if gpred is None else gpred.unsqueeze(1))
        gmemory, gp = through(graph, memory, past, values, above)
        return tuple(gmemory), (gp.squeeze(1), gtarget)

    @property
    def factored(self) -> bool:
        """Whether no subclass has replaced what the graph gives."""
        names = ("predict", "predict_vjp", "pullback", "pullback_vjp", "gradient", "gradient_vjp")
        return all(getattr(type(self), name) is getattr(Layered, name) for name in names)
