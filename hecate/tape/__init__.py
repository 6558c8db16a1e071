"""Blocks with hand-written derivatives, the tape that records them, and its bridge to autograd."""

from hecate.tape.block import Block, Program, Run, Tensors, differentiable, execute, formula_block, one, several
from hecate.tape.bridge import Autodiff, ByHand, can_inspect, differentiate, is_recorded, is_traced, without_autocast
from hecate.tape.tape import Call, CotangentNorm, Tape, checkpoint

__all__ = [
    "Autodiff",
    "Block",
    "ByHand",
    "Call",
    "CotangentNorm",
    "Program",
    "Run",
    "Tape",
    "Tensors",
    "can_inspect",
    "checkpoint",
    "differentiable",
    "differentiate",
    "execute",
    "formula_block",
    "is_recorded",
    "is_traced",
    "one",
    "several",
    "without_autocast",
]
