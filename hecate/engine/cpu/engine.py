"""The compiled engine for matrix and slot memories on a CPU: exact, token by token, the state in cache.

The recurrence of the token loop in numba kernels, forward and backward (the extra `cpu`). The forward keeps the
predictions `[N, T, V]` and the state of every max(64, sqrt(T))-th token; the backward writes the states of one such
segment again and walks it in reverse. Memories are shared out over `torch.get_num_threads()` threads, each computed by
one, so results do not depend on their number. Subnormal numbers are kept unless `torch.set_flush_denormal` says
otherwise.

Second derivatives and batched cotangents go through plain torch (`hecate.engine.parallel`) instead. [ENG-NUM-D1]
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import chain, repeat
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hecate.engine.call import GENERAL, Call, Plan
from hecate.engine.cpu.arrays import BYTES, LOADING, NO_MASK, ROWS, arrays, padded, share_out
from hecate.engine.cpu.family import refusal, walked, walked_vjp
from hecate.engine.engine import TokenEngine, chunk_refusal, one_retain, untold
from hecate.engine.parallel import by_coordinate, by_torch
from hecate.engine.tokens import NUMBERS, Carry, Tokens, in_folds, run_by_hand
from hecate.errors import install_line
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import ByHand, Run, Tensors

# Measured by `python -m studies cost-engines`, forward and backward together: from TOKENS on kernels are worth loading,
# and under l2 they beat block products for states of up to LARGE bytes (128 x 128 in float32); under dot, whose rows
# are cut into tiles, for 256 x 256 at least.
TOKENS = 16
LARGE = 1 << 16
_LOG = logging.getLogger("hecate.engine")
# The most vectors in a row that stays in registers, and in a tile of dot's wider rows. Four rows go together: with
# eight vectors each, registers spill, and rows of 128 numbers take 1.1 to 1.5 times as long as from cache.
VECTORS = 4
NUMBA = importlib.util.find_spec("numba") is not None
SEGMENT = 64  # least number of tokens between kept states


class Compiled(TokenEngine):
    """Kernels of numba on a CPU, the state in cache, for matrix and slot memories of formulas that have a form."""

    name = "compiled"
    counts_along = steady = True
    traceable = False
    takes = GENERAL

    def refuses(self, config: MemoryConfig) -> str | None:
        """Refuses configs without a kernel."""
        return None if _fits_registers(config) else refusal(config)

    def unfit(self, plan: Plan) -> str | None:
        """Another device, another dtype, no numba."""
        return one_retain(plan) or no_kernels(plan, "walk")

    def cost(self, plan: Plan) -> float:
        """Less than blocks, except for large states under l2; infinite below `TOKENS`, so that nothing loads numba."""
        if plan.length < TOKENS:
            return math.inf
        size = math.prod(plan.shape) * plan.dtype.itemsize
        general = plan.general not in ((), ("floor",))
        if general or not _fits_registers(plan.config):
            whole = general or not plan.config.forms.apart
            large = size > LARGE // 2 if plan.config.bias.linear else whole and size > LARGE
        else:
            large = plan.config.forms.error and size > LARGE
        return (80.0 if large else 30.0) * plan.length

    def about(self, plan: Plan) -> str:
        """A word on whether the call is long enough for its kernels."""
        if plan.length < TOKENS:
            return f"its kernels are worth loading from {TOKENS} tokens on"
        return "a kernel keeps the state in cache"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """In the kernels."""
        scan: Any = _compiled
        if torch.compiler.is_compiling():
            from hecate.engine.cpu.operator import scanned  # torch takes its time to register operators

            scan = partial(scanned, self.name)
        elif carry.memory[0].dim() == 3:
            return run_by_hand(kernel_of(call.config, tokens, carry), tokens, carry, initial, run=run)
        if carry.memory[0].dim() == 2:
            scan = partial(in_folds, partial(by_coordinate, scan))
        return scan(call.config, tokens, carry, initial, run=run)

    def kernel(self, config: MemoryConfig, inputs: Tensors) -> ByHand:
        """The kernels for these inputs, as the operator for torch.compile calls them."""
        return kernel_of(config, Tokens(*inputs[-len(Tokens._fields) :]), None)  # type: ignore[arg-type]


def no_kernels(plan: Plan, module: str) -> str | None:
    """Reason why no kernel of a module can run calls of a plan: another device or dtype, no numba."""
    if plan.device != "cpu":
        return f"its kernels run on the CPU, the tensors are on {plan.device}"
    if plan.dtype not in (torch.float32, torch.float64):
        return f"its kernels are for float32 and float64, the state is {plan.dtype}"
    if not plan.shape[-1]:
        return "its kernels take keys of at least one number"
    if plan.traced and (reason := untold(plan.config)) is not None:
        return reason
    missing = not NUMBA if plan.traced else load_kernels(module) is None  # not traceable
    return f"it needs numba: {install_line('cpu')}" if missing else None


def _fits_registers(config: MemoryConfig) -> bool:
    """True if the kernels of `registers` can run a config where rows are narrow. Everything that a row needs stays in
    registers there, so they know fewer forms than `family`."""
    forms = config.forms
    plain = forms.algorithm is not None and not forms.algorithm.nesterov and forms.plain
    return plain and (forms.target or forms.error) and config.structure.linear and chunk_refusal(config) is None


@cache
def load_kernels(name: str = "registers") -> ModuleType | None:
    """A module of kernels, imported; None without numba."""
    try:
        with LOADING:
            _tell()
            return importlib.import_module(f"hecate.engine.cpu.{name}")
    except ImportError:
        return None


@cache
def _tell() -> Any:
    """Registers a listener that logs what numba compiles of this package from now on. [ENG-NUM-D9]"""
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        def __init__(self) -> None:
            self.depth, self.warned = 0, False

        def on_start(self, happening: event.Event) -> None:
            self.depth += 1
            kernel = happening.data["dispatcher"]
            if self.depth > 1 or not kernel.py_func.__module__.startswith(__package__):
                return
            if not self.warned:
                where = "kept on disk" if kernel.stats.cache_path else "not kept, for want of a folder"
                _LOG.warning("compiling kernels, maybe for minutes, %s; `hecate doctor --warm` does it ahead", where)
            self.warned = True
            _LOG.info("compiling %s", kernel.py_func.__qualname__)

        def on_end(self, happening: event.Event) -> None:
            self.depth -= 1

    listener = Listener()
    event.register("numba:compile", listener)
    return listener


def _compiled(config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
    return run_by_hand(kernel_of(config, tokens, carry), tokens, carry, initial, run=run)


def kernel_of(config: MemoryConfig, tokens: Tokens, like: Any) -> ByHand:
    """Kernels as a `ByHand` of (memory, *slots, initial, *tokens); like: a carry of that layout, for plain torch."""
    known: dict[Any, Any] = config.refusals
    if _fits_registers not in known:
        known[_fits_registers] = _fits_registers(config)
    plain = known[_fits_registers] and tokens.phi_w is None and tokens.retain_value is None
    there, back = partial(walked, config), partial(walked_vjp, config)
    # Of a row, or of a tile of it where rows need not be whole.
    vectors = -(-tokens.phi_k.shape[-1] * tokens.phi_k.element_size() // BYTES)
    if config.forms.target:
        vectors = min(vectors, VECTORS)
    if plain and vectors <= VECTORS:
        vectors = 1 << max(vectors - 1, 0).bit_length()
        there, back = partial(_scan, config, vectors), partial(_scan_vjp, config, vectors)
    return ByHand("engine.compiled", there, back, lambda *x: by_torch(config, like)(*x))


class Scan:
    """The inputs of one call for `registers`: states `[N, V, P]` (slot None without momentum) and tokens in either
    layout, `[B, T, H, *]` or `[N, T, *]`.

    Attributes:
        vectors: number of vectors in a row that stays in registers, or in a tile of it where u does not depend on the
            memory.
        height, width: V and P padded to whole fours of rows and to whole tiles.
        heads: memories whose tokens are neighbours in memory, 1 for `[N, T, *]`.
        channels: whether retain is a gate per phi channel.
        sizes: padded shapes of a token's phi_k, phi_q, v, lr, retain and momentum.
        segment: tokens between states that are kept for the backward pass.
    """

    def __init__(self, config: MemoryConfig, vectors: int, inputs: Tensors) -> None:
        """From memory, slots, initial memory and the fields of `Tokens`, flat."""
        states: Any = inputs[: 1 + len(config.algorithm.slots)]
        initial, *rest = inputs[len(states) :]
        memory, *slots = states
        tokens = Tokens(*rest)  # type: ignore[arg-type]
        self.config, self.vectors = config, vectors
        self.memory, self.slot, self.initial, self.tokens = memory, slots[0] if slots else None, initial, tokens
        (self.count, height, width), size = memory.shape, memory.element_size()
        self.tile = vectors * BYTES // size
        self.height, self.width = self.whole = -(-height // ROWS) * ROWS, -(-width // self.tile) * self.tile
        self.heads = tokens.lr.shape[2] if tokens.lr.dim() == 3 else 1
        self.channels = tokens.retain.dim() > tokens.lr.dim()
        retain = (self.width,) if self.channels else ()
        self.sizes = ((self.width,), (self.width,), (self.height,), (), retain, ())
        self.length = tokens.v.shape[1]
        self.segment = max(SEGMENT, math.isqrt(self.length))

    def launch(self, kernel: str, beside: Sequence[Tensor | None], scratch: Sequence[int | None]) -> None:
        """Runs a kernel over all memories, on the inputs and the tensors `beside`; each thread has its own scratch."""
        config, tokens, none = self.config, self.tokens, self.memory.new_empty(0)
        if not config.retention.uses_retain:
            tokens = tokens._replace(retain=None)  # type: ignore[arg-type]
        write = NO_MASK if tokens.write is None else tokens.write
        reset, initial, whole = tokens.reset, self.initial, self.whole
        if reset is None:
            reset, initial, whole = NO_MASK, none, ()  # type: ignore[assignment]
        tensors = (*tokens[:NUMBERS], write, reset, initial, *beside)
        rows = arrays(tensors, chain(self.sizes, ((), (), whole), repeat(())))
        arguments = (
            self.heads, self.length, self.height, self.width, *rows, self.segment,
            None if config.forms.target else True,
            self.channels or None, config.decay_order == "before_gradient", config.read == "before",
            (0,) * self.vectors,
        )  # fmt: skip
        run = getattr(load_kernels(), kernel)

        def work(lo: int, hi: int) -> None:
            space: list[Tensor | None] = []
            for size in scratch:  # no comprehension, which is a frame in every call
                space.append(None if size is None else none.new_empty(size))
            run(lo, hi, *arguments, *arrays(space))

        share_out(work, self.count, self.count * self.length * self.height * self.width)

    def cut(self, *states: Tensor | None) -> list[Tensor]:
        """The states that are not None, without their padding."""
        (_, height, width), whole = self.memory.shape, []
        for state in states:
            if state is not None:
                whole.append(state[:, :height, :width].contiguous())
        return whole


def _scan(config: MemoryConfig, vectors: int, inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
    """Outputs and final states, and the record for `_scan_vjp`, empty unless `keeps`."""
    call = Scan(config, vectors, inputs)
    *shape, v = call.tokens.v.shape
    new = call.memory.new_empty
    # Padded copies, which the kernel overwrites with the last state.
    memory = padded(call.memory, *call.whole).clone()
    slot = None if call.slot is None else padded(call.slot, *call.whole).clone()
    y = new(*shape, call.height)
    states = new(call.count, -(-call.length // call.segment), call.height, call.width) if keeps else new(0)
    record = (new(y.shape if keeps else 0), states, None if slot is None else states.clone())
    call.launch("forward", (memory, slot, y, *record), [])
    return (y[..., :v], *call.cut(memory, slot)), record


def _scan_vjp(
    config: MemoryConfig, vectors: int, inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]
) -> Tensors:
    """Cotangents of all inputs."""
    call = Scan(config, vectors, inputs)
    tokens, height, segment = call.tokens, call.height, call.segment
    gy, *finals = cotangents
    memory = padded(finals[0], *call.whole).clone()
    slot = None if call.slot is None else padded(finals[1], *call.whole).clone()
    shape, zeros = tokens.v.shape[:-1], call.memory.new_zeros
    new = zeros if tokens.write is not None else call.memory.new_empty  # kernels skip masked tokens
    initial = zeros(memory.shape if tokens.reset is not None else 0)
    grads = []
    for size in call.sizes:
        grads.append(new(*shape, *size))
    grads[Tokens._fields.index("lr")].zero_()  # the kernel adds to that of lr
    states, sums = segment * ROWS * call.tile, segment * BYTES // call.memory.element_size()
    scratch = [states, None if slot is None else states, ROWS * segment, sums, sums]
    call.launch("backward", (*record, padded(gy, height), memory, slot, initial, *grads), scratch)
    pulled: list[Tensor | None] = call.cut(memory, slot)  # type: ignore[assignment]
    pulled += call.cut(initial) if tokens.reset is not None else [None]
    for grad, item, needed in zip(grads, tokens[:NUMBERS], (True, True, True, *config.forms.gates), strict=True):
        pulled.append(grad[..., : item.shape[-1]] if needed else None)  # type: ignore[union-attr]
    return (*pulled, *(None,) * (len(Tokens._fields) - NUMBERS))
