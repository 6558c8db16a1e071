"""Launches of the loop kernels: constants of a config, tensor arguments, and the record from forward to backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hecate.engine.triton.launch import SAME, Given, phi_of
from hecate.engine.triton.loop import backward, forward, one_token
from hecate.engine.triton.table import SEGMENT, Documents
from hecate.engine.triton.tiles import Steps, Tiles, descent_of, steps_of, tiles_of
from hecate.formula import algorithm_formula, printable
from hecate.rule import MemoryConfig
from hecate.tape import Tensors, one, several

CELLS, TILE = 512, 64  # cells of a state per warp; values per tile if they are independent
# Values per tile for one token. A program then has more threads than a key has channels, and sums need no barrier.
ONE_TILE = 32


class Formulas(NamedTuple):
    """A config as the kernels take it: bias, retention, compile-time constants, the pullback of a printed algorithm,
    constants of the algorithm and of its pullback, and whether values are independent (apart)."""

    bias: Tiles
    steps: Steps
    flags: dict[str, Any]
    descend_back: Any
    numbers: tuple[tuple[float, ...], tuple[float, ...]]
    apart: bool


def formulas(config: MemoryConfig, *, single: bool) -> Formulas:
    """The formulas of a config that the engine accepts; `single`: retain is one number per token."""
    bias, steps = tiles_of(config.bias), steps_of(config.retention, single=single)
    form = config.forms.tokens[0]
    if form is not None and form.erase is not None:
        how, descend, descend_back = "stable" if form.bounded else "erase", None, None
        numbers: Any = ((form.erase,), (form.erase,))
    else:
        how, (descend, descend_back, numbers) = "printed", descent_of(printable(algorithm_formula(config.algorithm)))
    flags = {
        "PSI": bias.psi, "MOVES": bias.moves, "STEP": steps.step, "LINK": steps.link, "DUAL": steps.link is not None,
        "ALGORITHM": how, "DESCEND": descend, "SLOT": bool(config.algorithm.slots),
        "DECAYED": config.decay_order == "before_gradient", "EARLY_READ": config.read == "before",
    }  # fmt: skip
    apart = bias.apart and steps.apart and how == "printed"
    return Formulas(bias, steps, flags, descend_back, numbers, apart)


def warps(tile: int, width: int) -> int:
    """Warps of a program that holds `tile` x `width` cells of a state."""
    return max(1, min(16, triton.next_power_of_2(tile * width // CELLS)))


def rounded(size: int) -> int:
    """A width padded to the side of a tile."""
    return max(16, triton.next_power_of_2(size))


def gate_of(retain: Tensor | None, axes: int) -> str:
    """The kind of retain: "none", "one" number per token, or "channels" (one per phi channel, with an axis more)."""
    return "none" if retain is None else "channels" if retain.dim() > axes else "one"


class Loop(Given):
    """The inputs of one call of the loop kernels."""

    def __init__(self, config: MemoryConfig, borders: tuple[int, ...] | None, inputs: Tensors) -> None:
        super().__init__(config, borders, inputs)
        _, _, kw, v, lr, retain, _, write, reset, value = self.given
        gate, self.length = gate_of(retain, one((lr,)).dim()), one((v,)).shape[1]
        self.formulas = formulas(config, single=gate != "channels" and value is None)
        self.count, self.height, self.width = self.memory.shape
        self.documents = Documents.of(borders, self.length, SEGMENT, self.memory)
        self.flags: dict[str, Any] = {
            "P": self.width, "V": self.height, "BP": rounded(self.width), **self.formulas.flags, "RETAIN": gate,
            "VALUE": value is not None, "MASK": write is not None, "RESET": reset is not None,
            "APART": kw is not None, "DOCS": borders is not None,
        }  # fmt: skip

    def forward(self, keeps: bool) -> tuple[Tensors, Tensors]:
        """Outputs and final states; and the record for `backward` if it keeps one."""
        memory, slot = self.memory, self.slot
        y, last = torch.empty_like(self.arguments[3]), torch.empty_like(memory)
        last_slot = last if slot is None else torch.empty_like(slot)
        shape = self.documents.segments, self.count, self.height, self.width
        states = memory.new_empty(shape) if keeps else memory
        slots = memory.new_empty(shape) if keeps and slot is not None else states
        steps = self.formulas.steps
        tile = min(rounded(self.height), TILE) if self.formulas.apart else rounded(self.height)
        forward[(self.documents.programs * self.count, -(-self.height // tile))](
            *self.arguments, self.documents.docs, memory, memory if slot is None else slot,
            self.restart, y, states, slots, last, last_slot, self.length,
            self.heads, SEGMENT, self.formulas.bias.cu, self.formulas.numbers[0], steps.numbers[0],
            steps.numbers[2],
            BV=tile, KEEPS=keeps, num_warps=warps(tile, self.flags["BP"]), **self.flags,
        )  # fmt: skip
        finals = (last,) if slot is None else (last, last_slot)
        return (y, *finals), (states, slots) if keeps else ()

    def backward(self, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
        """Cotangents of memory, slots, initial memory and the tokens."""
        kept, kept_S = several(record)
        gy, *finals = (item.contiguous() for item in cotangents)
        g1, y1 = finals[0], finals[-1]
        g0, y0 = (g1.new_empty(self.documents.programs * self.count, *g1.shape[1:]) for _ in range(2))
        gz = torch.zeros_like(g0) if self.flags["RESET"] else g0
        scratch = self.memory.new_empty(len(g0), SEGMENT, self.height, self.width)
        scratch_S = scratch if self.slot is None else torch.empty_like(scratch)
        new = torch.empty_like if self.given[7] is None else torch.zeros_like  # masked tokens store nothing
        grads = [None if x is None else new(x) for x in (*self.given[:7], self.given[9])]
        to = [gy if x is None else x for x in grads]  # placeholders, never written
        tile, bias, steps = rounded(self.height), self.formulas.bias, self.formulas.steps
        backward[(len(g0),)](
            *self.arguments, self.documents.docs, self.restart, kept, kept_S, gy, g1,
            y1, scratch, scratch_S, *to, g0, y0, gz, self.length, self.heads, SEGMENT, bias.cu, bias.cg,
            *self.formulas.numbers, *steps.numbers, BV=tile, num_warps=warps(tile, self.flags["BP"]), PULL=bias.pull,
            STEP_BACK=steps.step_back, LINK_BACK=steps.link_back, DESCEND_BACK=self.formulas.descend_back,
            **self.flags,
        )  # fmt: skip
        g0, y0, gz = self.documents.met(g0, y0, gz)
        g_states = (g0,) if self.slot is None else (g0, y0)
        q, k, w, v, lr, retain, momentum, value = grads
        return (*g_states, gz if self.restarts else None, k, q, v, lr, retain, momentum, None, None, w, value)


class OneToken:
    """The launch of one token onto a state in place, for tensors `[B, H, *]` of known shapes, dtypes and strides."""

    def __init__(
        self, config: MemoryConfig, raw: bool, states: Sequence[Tensor], given: Sequence[Tensor | None], y: Tensor
    ) -> None:
        """given: q, k, v, lr, retain, momentum, erase, write and retain_value, None if absent; raw: q and k are not
        features yet; memory and slots `[B, H, V, P]` and y `[B, H, V]` are contiguous."""
        (*_, retain, _, erase, write, value), (height, width) = given, states[0].shape[-2:]
        gate = gate_of(retain, 2)
        functions = formulas(config, single=gate != "channels" and value is None)
        tile = min(rounded(height), ONE_TILE) if functions.apart else rounded(height)
        self.grid = len(y) * -(-height // tile), y.shape[1], 1
        places: list[int] = []
        for x in given:
            places += (0, 0, 0) if x is None else (*x.stride(), 0)[:3]
        numbers = functions.bias.cu, functions.numbers[0], functions.steps.numbers[0], functions.steps.numbers[2]
        self.rest = (states[0], states[-1], y, *places, *numbers)
        constants: dict[str, Any] = {
            "P": width, "V": height, "BP": rounded(width), "BV": tile,
            "PHI": phi_of(config, width) if raw else SAME, **functions.flags, "RETAIN": gate,
            "VALUE": value is not None, "KEYS": erase is not None and write is not None,
        }  # fmt: skip
        self.flags = {name: constants[name] for name in one_token.arg_names if name in constants}
        self.warps = warps(tile, rounded(width))
        self.made: Any = None

    def __call__(self, given: Sequence[Tensor]) -> None:
        """Launches the kernel; any tensor stands in for an absent one."""
        if self.made is None:  # always so in the interpreter
            self.made = one_token[self.grid](*given, *self.rest, num_warps=self.warps, **self.flags)
        else:  # the compiled kernel, without Triton's lookup
            self.made[self.grid](*given, *self.rest, *self.flags.values())
