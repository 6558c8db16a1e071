"""Blocks with hand-written derivatives, the tape that records them, and its bridge to autograd."""

from hecate.tape.block import Block, Program, Run, Tensors, differentiable, execute, formula_block, one, several
from hecate.tape.bridge import Autodiff, differentiate
from hecate.tape.tape import Call, CotangentNorm, Tape, checkpoint

__all__ = [
    "Autodiff",
    "Block",
    "Call",
    "CotangentNorm",
    "Program",
    "Run",
    "Tape",
    "Tensors",
    "checkpoint",
    "differentiable",
    "differentiate",
    "execute",
    "formula_block",
    "one",
    "several",
]
