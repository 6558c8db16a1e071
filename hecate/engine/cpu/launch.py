"""Calls of the kernels: torch tensors in, padded to whole vectors, shared out over threads."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hecate.bias import KernelForm
from hecate.engine.tokens import Tokens
from hecate.retention import StepForm
from hecate.rule import MemoryConfig
from hecate.tape import Tensors, one

BYTES, ROWS = 64, 4  # of a vector, and rows that go together: widths are padded to these
FORMS = {"target": None, "error": 1, "clip": 2, "power": 3, "sign": 4}  # as psi and slope know them
VECTORS, TILE = 8, 4  # of the widest row that stays in registers, and of a tile of a wider one
SEGMENT = 64  # least number of tokens between kept states
SHARE = 1 << 20  # tokens x cells that are worth a thread of their own


@cache
def load_kernels(name: str = "wide") -> ModuleType | None:
    """A module of kernels; None without numba."""
    try:
        return importlib.import_module(f"hecate.engine.cpu.{name}")
    except ImportError:
        return None


class Scan(NamedTuple):
    """The inputs of one call: states `[N, V, P]` (slot None without momentum) and tokens.

    Tokens `[B, T, H, *]` are read as they lie; `[N, T, *]` are those of one head.
    """

    config: MemoryConfig
    form: KernelForm  # of the bias
    step: StepForm  # of the retention
    memory: Tensor
    slot: Tensor | None
    initial: Tensor
    tokens: Tokens

    @classmethod
    def of(cls, config: MemoryConfig, inputs: Tensors) -> Scan:
        """From memory, slots, initial memory and the fields of `Tokens`, flat."""
        form, step = config.bias.kernel_form(), config.retention.kernel_form()
        if form is None or step is None:
            raise TypeError("the engine was chosen without its refusal being asked")
        states = 1 + len(config.algorithm.slots)
        slot = inputs[1] if states > 1 else None
        tokens = Tokens(*inputs[states + 1 :])  # type: ignore[arg-type]
        return cls(config, form, step, one(inputs[:1]), slot, one(inputs[states : states + 1]), tokens)

    @property
    def vectors(self) -> int | None:
        """Vectors of what stays in registers, None if nothing does: a row or, where u does not look at the memory, a
        tile of it."""
        vectors = -(-self.memory.shape[2] * self.memory.element_size() // BYTES)
        if self.form.name == "target":
            vectors = min(vectors, TILE)
        return 1 << (vectors - 1).bit_length() if vectors <= VECTORS else None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """N, and V and P in whole fours and tiles."""
        count, height, width = self.memory.shape
        tile = (self.vectors or 1) * BYTES // self.memory.element_size()
        return count, -(-height // ROWS) * ROWS, -(-width // tile) * tile

    @property
    def heads(self) -> int:
        """Memories whose tokens lie side by side."""
        return self.tokens.lr.shape[2] if self.tokens.lr.dim() == 3 else 1

    @property
    def channels(self) -> bool:
        """Whether retain is a gate per phi channel."""
        return self.tokens.retain.dim() > self.tokens.lr.dim()

    @property
    def segment(self) -> int:
        """Tokens between kept states."""
        return max(SEGMENT, math.isqrt(self.tokens.v.shape[1]))

    def padded(self, tensor: Tensor, *, rows: bool = False, columns: bool = False) -> Tensor:
        """A copy of a tensor `[..., V]`, `[..., P]` or `[N, V, P]` in whole fours and vectors."""
        _, height, width = self.sizes
        shape = list(tensor.shape)
        if columns:
            shape[-1] = width
        if rows:
            shape[-2 if columns else -1] = height
        wide = torch.zeros(shape, dtype=tensor.dtype)
        wide[tuple(slice(size) for size in tensor.shape)] = tensor.detach()
        return wide

    def fitting(self, tensor: Tensor, *, rows: bool = False, columns: bool = False) -> Tensor:
        """The same, but the tensor itself where it fits already."""
        _, height, width = self.sizes
        if tensor.shape[-1] == (width if columns else height if rows else tensor.shape[-1]):
            return tensor.detach().contiguous()
        return self.padded(tensor, rows=rows, columns=columns)

    def arguments(self) -> list[Any]:
        """What both kernels take first."""
        tokens = self.tokens
        none = torch.empty(0, dtype=self.memory.dtype)
        given = (
            self.fitting(tokens.phi_k, columns=True),
            self.fitting(tokens.phi_q, columns=True),
            self.fitting(tokens.v, rows=True),
            tokens.lr,
            self.fitting(tokens.retain, columns=self.channels) if self.config.retention.uses_retain else None,
            tokens.momentum,
            none.bool() if tokens.write is None else tokens.write,
            none.bool() if tokens.reset is None else tokens.reset,
            none if tokens.reset is None else self.padded(self.initial, rows=True, columns=True),
        )
        return [
            self.heads,
            tokens.v.shape[1],
            *self.sizes[1:],
            *(item if item is None else flat(item) for item in given),
        ]

    def choices(self) -> list[Any]:
        """What both kernels take last, before their scratch space."""
        config, number = self.config, flat(self.memory[:0]).dtype.type
        return [
            self.segment,
            FORMS[self.form.name],
            number(self.form.a),
            number(self.form.b),
            None if self.step.threshold is None else number(self.step.threshold),
            self.channels or (None if self.vectors else False),
            config.decay_order == "before_gradient",
            config.read == "before",
        ]

    def launch(self, kernel: str, arguments: Sequence[Any], scratch: Sequence[int | None]) -> None:
        """Runs a kernel over all memories, each worker with scratch space of its own."""
        (count, height, width), length = self.sizes, self.tokens.v.shape[1]
        run = getattr(load_kernels("registers" if self.vectors else "wide"), kernel)
        if self.vectors:
            arguments = [*arguments, (0,) * self.vectors]
        workers = min(torch.get_num_threads(), count, 1 + count * length * height * width // SHARE)
        borders = [count * index // workers for index in range(workers + 1)]

        def work(index: int) -> None:
            own = [size and flat(torch.empty(size, dtype=self.memory.dtype)) for size in scratch]
            run(borders[index], borders[index + 1], *arguments, *own)

        _share(work, workers)


def scan(config: MemoryConfig, inputs: Tensors, *, keeps: bool) -> tuple[Tensors, Tensors]:
    """Outputs and final states; and the record for `scan_vjp` if asked for."""
    call = Scan.of(config, inputs)
    (count, height, width), (*shape, v) = call.sizes, call.tokens.v.shape
    new = call.memory.new_empty
    memory = call.padded(call.memory, rows=True, columns=True)
    slot = None if call.slot is None else call.padded(call.slot, rows=True, columns=True)
    y = new(*shape, height)
    segments = -(-shape[1] // call.segment)
    kept = new(count, segments, height, width) if keeps else new(0)
    record = (new(y.shape if keeps else 0), kept, None if slot is None else kept.clone())
    buffers = [None if item is None else flat(item) for item in (memory, slot, y, *record)]
    call.launch("forward", [*call.arguments(), *buffers, *call.choices()], [] if call.vectors else [2 * width])
    states = [item for item in (memory, slot) if item is not None]
    return (y[..., :v], *(_cut(state, call.memory) for state in states)), record


def scan_vjp(config: MemoryConfig, inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    """Cotangents of all inputs."""
    call = Scan.of(config, inputs)
    (_, height, width), tokens = call.sizes, call.tokens
    gy, *finals = cotangents
    memory, *slots = (call.padded(g, rows=True, columns=True) for g in finals)
    *shape, v = tokens.v.shape
    zeros = call.memory.new_zeros
    new = zeros if tokens.write is not None else call.memory.new_empty  # masked: left as they are
    initial = zeros(memory.shape if tokens.reset is not None else 0)
    out = [
        new(*shape, width),
        new(*shape, width),
        new(*shape, height),
        zeros(*shape),
        new(*shape, width) if call.channels else new(*shape),
        new(*shape),
    ]
    slot = slots[0] if slots else None
    given = (*record, call.fitting(gy, rows=True), memory, slot, initial, *out)
    buffers = [None if item is None else flat(item) for item in given]
    states = (call.segment + 2) * height * width
    scratch = [7 * width, 2 * height, states, states if slots else None]
    if call.vectors:
        per_vector = BYTES // call.memory.element_size()
        states = call.segment * ROWS * call.vectors * per_vector
        scratch = [
            states,
            states if slots else None,
            None if call.step.threshold is None else states,
            ROWS * call.segment,
            *[per_vector * call.segment] * 2,
        ]
    call.launch("backward", [*call.arguments(), *buffers, *call.choices()], scratch)
    own = [_cut(state, call.memory) for state in (memory, *slots)]
    first = _cut(initial, call.memory) if tokens.reset is not None else None
    p = call.memory.shape[2]
    gates = [
        out[3],
        (out[4][..., :p] if call.channels else out[4]) if config.retention.uses_retain else None,
        out[5] if slots else None,
    ]
    return (*own, first, out[0][..., :p], out[1][..., :p], out[2][..., :v], *gates, None, None)


def flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The numbers of a tensor in a row; shared with it if it is contiguous."""
    return tensor.numpy(force=True).reshape(-1)


def _cut(state: Tensor, like: Tensor) -> Tensor:
    return state[:, : like.shape[1], : like.shape[2]].contiguous()


def _share(work: Callable[[int], None], workers: int) -> None:
    if workers == 1:
        work(0)
        return
    # Threads that live as long as the call: none are left behind for a fork to lose.
    with ThreadPoolExecutor(workers - 1) as pool:
        others = [pool.submit(work, index) for index in range(1, workers)]
        work(0)
    for other in others:
        other.result()
