"""Blocks with hand-written derivatives, the tape that records them, and its bridge to autograd."""

from hecate.tape.bridge import Autodiff, ByHand, by_hand, can_inspect, differentiate, is_recorded, is_traced, waits
from hecate.tape.exact import STEADY, exact, steady
from hecate.tape.tape import Block, Run, Tape, Tensors, checkpoint, differentiable, execute, formula_block, one, several

__all__ = [
    "STEADY",
    "Autodiff",
    "Block",
    "ByHand",
    "Run",
    "Tape",
    "Tensors",
    "by_hand",
    "can_inspect",
    "checkpoint",
    "differentiable",
    "differentiate",
    "exact",
    "execute",
    "formula_block",
    "is_recorded",
    "is_traced",
    "one",
    "several",
    "steady",
    "waits",
]
