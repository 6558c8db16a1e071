"""The state that a memory carries from token to token, and the gates that steer it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.checks import named
from hecate.errors import NonFiniteError
from hecate.late import look
from hecate.rule.config import MemoryConfig
from hecate.states import State
from hecate.tape.ops import over


@named()
class Gates(NamedTuple):
    """Gates of the write of every token: with p = phi(k) and * componentwise, for a matrix under l2

        X  = diag(retain_value) M diag(retain)
        M' = X - lr (A (erase * p) - v) (write * p)^T,   A = M, or X with decay_order="before_gradient"

    Each is a tensor `[B, T, H]`, a float for all tokens, or None for the rule's default.

    Fields:
        lr: inner learning rate, >= 0; where one step a chunk moves several weights also `[B, T, H, W]`, one for each.
        retain: kept fraction in [0, 1]; also `[B, T, H, P]`, one value per phi channel.
        momentum: of the algorithm, in [0, 1].
        erase: factor of phi(k) where the memory is asked what it has to unlearn, any number; also `[B, T, H, P]`. 0
            makes the write a Hebbian one. Default 1.
        write: factor of phi(k) in what is written, any number; also `[B, T, H, P]`. Default 1.
        retain_value: kept fraction per value channel, `[B, T, H, V]` in [0, 1], beside retain. Default 1.
        floor: the least divisor of `normalizer="max"`, >= 0. Default 1.
        ridge: of readout `ridge`, >= 0; also `[B, T, H, P]`. Default `readout.ridge`.
        mix: of readout `ridge`, in [0, 1]. Default `readout.mix`.

    To readout `slots`, write is the token's code. erase and write need a linear memory, retain_value a matrix. Where
    erase and write differ, the transition is not normal: with |p| = 1, lr = write = 1 and erase in [0, 1] its
    eigenvalues 1 - lr sum_P erase write p^2 lie in [0, 1], but the norm of one reaches sqrt(4/3). `memory_step` takes
    gates without the T axis. [RULE-GATES-D1]
    """

    lr: Tensor | float | None = None
    retain: Tensor | float | None = None
    momentum: Tensor | float | None = None
    erase: Tensor | float | None = None
    write: Tensor | float | None = None
    retain_value: Tensor | None = None
    floor: Tensor | float | None = None
    ridge: Tensor | float | None = None
    mix: Tensor | float | None = None


class _MemoryFields(NamedTuple):
    memory: dict[str, Tensor]
    slots: dict[str, Tensor]
    anchor: dict[str, Tensor]
    pending: dict[str, Tensor]
    position: Tensor
    normalizer: MemoryState | None = None
    seen: Tensor | None = None
    readout: dict[str, Tensor] | None = None


class MemoryState(State, _MemoryFields):
    """Everything needed to go on: a pytree of tensors, one memory per sequence and head.

    Fields:
        memory: weights by name, `[B, H, ...]`; `{"weight": [B, H, V, P]}` for a matrix. Under a
            retention with a link (kl, lq, bounded, bregman) the dual state A that it carries, of which the weights are
            a function: `memory_weights`.
        slots: the algorithm's tensors by `name.weight`, of the weights' shapes, and those of its context by name.
        anchor: `memory` at the chunk's start, where gradients are taken; empty unless chunk > 1.
        pending: what an unfinished chunk has summed up: under `commit="chunk"` the lr-weighted
            gradients by weight name; and there, as where gradients see the decayed state of the chunk's start, the
            product of its retain gates as `"retain"`; where the step is normalised by what a chunk's writes do to one
            another, the last keys that were written as `"keys"`, `[B, H, K, P + 1]`, 1 behind each.
        position: tokens written since the chunk's start, `[B, H]` int64.
        normalizer: the state of the sum normaliser, or None.
        seen: tokens written since the start or the last reset, `[B]` int64, where the feature map
            needs positions; else None.
        readout: what the config's readout holds by name, `[B, H, ...]`; None where it holds nothing.
    """

    __slots__ = ()
    whole = (("position", torch.int64), ("seen", torch.int64))
    wide = ("memory", "slots", "anchor", "pending", "normalizer", "readout")

    def check(self, name: str = "memory") -> None:
        """Refuses a memory that is not finite: what earlier calls have put off is looked at first, by memory, batch
        row, head and token, then this state, by field, batch row and head. It waits for the device. [ENG-FINITE-D4]

        Raises:
            NonFiniteError: for the first that is found.
        """
        look(wait=True)
        for field in ("memory", "slots", "anchor", "pending", "readout"):
            for key, item in (getattr(self, field) or {}).items():
                for row, head, *_ in (~item.detach().isfinite()).nonzero()[:1].tolist():
                    where = f"state.{field}[{key!r}] at batch row {row}, head {head}"
                    cure = "on_nonfinite='raise' names the token on the way, and 'skip' leaves it out"
                    raise NonFiniteError(f"memory {name!r} is non-finite in {where}; {cure}")
        if self.normalizer is not None:
            self.normalizer.check(f"{name}, normaliser")


def memory_weights(config: MemoryConfig, state: MemoryState) -> dict[str, Tensor]:
    """The weights by name, `[B, H, ...]`, with which a state predicts and is read.

    They are `state.memory` itself, unless the retention carries a dual state: then its link maps that to the weights,
    feasible ones such as the distributions of kl, at the state that its `link_at` says. Gradients flow through it."""
    lead = state.position.shape
    memory = tuple(item.flatten(0, 1) for item in state.memory.values())
    if config.retention.links == "token":
        weights = config.rule.weights(memory)
    else:
        opens, retain = state.position.flatten() == 0, state.pending.get("retain")
        anchors = [item.flatten(0, 1) for item in state.anchor.values()]
        anchor = tuple(torch.where(over(opens, m), m, a) for m, a in zip(memory, anchors, strict=True))
        weights = config.rule.weights(anchor)
        if retain is not None:
            weights = config.rule.moved(memory, anchor, weights, retain.flatten(0, 1))
    return {name: item.unflatten(0, lead) for name, item in zip(state.memory, weights, strict=True)}


def slot_shapes(
    config: MemoryConfig, weights: dict[str, tuple[int, ...]], d_phi: int, d_v: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the `slots` of one memory with weights of these shapes, by name."""
    shapes = {
        f"{slot}.{name}": shape
        for name, weight in weights.items()
        for slot, shape in config.algorithm.slot_shapes(weight).items()
    }
    return shapes | config.algorithm.context_shapes(d_phi, d_v)
