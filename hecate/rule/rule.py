"""A memory rule: the four knobs and the one formula that joins them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.algorithm import GD, AlgorithmKind
from hecate.bias import L2, BiasKind
from hecate.retention import NoRetention, RetentionKind
from hecate.structure import Matrix, Memory, StructureKind
from hecate.tape import Block, Run, execute
from hecate.variant import Config


class TokenGates(NamedTuple):
    """Gates of one token for N memories: lr and momentum `[N]`, retain `[N]` or `[N, P]`."""

    lr: Tensor
    retain: Tensor
    momentum: Tensor


class MemoryRule(Config):
    """Structure, attentional bias, retention and algorithm: the four choices of MIRAS.

    Every method works on phi(k) and phi(q), never on keys themselves, which is why any feature map
    goes with any rule. All are pure: they return new tensors and touch nothing. `run` executes the
    blocks: `execute` forgets them, a `Tape` records them.

    Shapes: phi_k, phi_q `[N, P]`, v `[N, V]`; weights and slots `[N, ...]` in the structure's
    order, slots of one weight after the other. [RULE-WRITE-D1]
    """

    structure: StructureKind = Matrix()
    bias: BiasKind = L2()
    retention: RetentionKind = NoRetention()
    algorithm: AlgorithmKind = GD()

    def read(self, memory: Memory, phi_q: Tensor, *, run: Run = execute, label: str = "") -> Tensor:
        """y = f(memory, phi_q)."""
        return one(run(self.structure.predict_block(), phi_q, *memory, label=label))

    def gradient(
        self, anchor: Memory, phi_k: Tensor, v: Tensor, *, run: Run = execute, label: str = ""
    ) -> Memory:
        """Gradient of the inner loss by the weights, taken at `anchor`."""
        pred = one(run(self.structure.predict_block(), phi_k, *anchor, label=label))
        u = one(run(self.bias.block(), pred, v, label=label))
        return several(run(self.structure.pullback_block(), phi_k, u, *anchor, label=label))

    def apply(
        self,
        memory: Memory,
        slots: Memory,
        gradient: Memory,
        gates: TokenGates,
        *,
        run: Run = execute,
        label: str = "",
    ) -> tuple[Memory, Memory]:
        """One step of the algorithm followed by retention: the new weights and slots."""
        count = len(self.algorithm.slots)
        new_memory: list[Tensor] = []
        new_slots: list[Tensor] = []
        for index, (weight, grad) in enumerate(zip(memory, gradient, strict=True)):
            own = slots[index * count : (index + 1) * count]
            direction, *carried = several(
                run(self.algorithm.block(), grad, gates.lr, gates.momentum, *own, label=label)
            )
            stepped = run(self.retention.block(), weight, direction, gates.retain, label=label)
            new_memory.append(one(stepped))
            new_slots += carried
        return tuple(new_memory), tuple(new_slots)

    def write(
        self,
        memory: Memory,
        slots: Memory,
        phi_k: Tensor,
        v: Tensor,
        gates: TokenGates,
        *,
        anchor: Memory | None = None,
        run: Run = execute,
        label: str = "",
    ) -> tuple[Memory, Memory]:
        """One token's write; the gradient is taken at `anchor`, by default at the memory itself."""
        grads = self.gradient(memory if anchor is None else anchor, phi_k, v, run=run, label=label)
        return self.apply(memory, slots, grads, gates, run=run, label=label)

    def decayed(
        self, memory: Memory, retain: Tensor, *, run: Run = execute, label: str = ""
    ) -> Memory:
        """The memory after retention and before the step: the anchor of `before_gradient`."""
        block = self.retention.block()
        return tuple(
            one(run(block, weight, torch.zeros_like(weight), retain, label=label))
            for weight in memory
        )

    def blocks(self) -> tuple[Block, ...]:
        """The blocks a write and a read are made of."""
        return (
            self.structure.predict_block(),
            self.bias.block(),
            self.structure.pullback_block(),
            self.algorithm.block(),
            self.retention.block(),
        )


def one(outputs: tuple[Tensor | None, ...]) -> Tensor:
    """The only output of a block."""
    (output,) = outputs
    if output is None:
        raise TypeError("a block returned None where a tensor was expected")
    return output


def several(outputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """All outputs of a block, none of them None."""
    return tuple(one((output,)) for output in outputs)
