"""The exact compiled engine for matrix memories on a CPU: token by token, the state in cache.

The recurrence of the token loop in numba kernels, forward and backward (the extra `cpu`). The forward keeps the
predictions `[N, T, V]` and the state of every max(64, sqrt(T))-th token; the backward writes the states of one such
segment again and walks it in reverse. Memories are shared out over `torch.get_num_threads()` threads, each computed by
one, so results do not depend on their number. Subnormal numbers are kept unless `torch.set_flush_denormal` says
otherwise.

Second derivatives and batched cotangents go through the torch engines instead. [ENG-NUM-D1]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hecate.engine.call import TRACED, Call
from hecate.engine.coordinates import by_coordinate
from hecate.engine.cpu.launch import load_kernels, scan, scan_vjp
from hecate.engine.engine import Engine, TokenEngine
from hecate.engine.loop import sequential
from hecate.engine.parallel import parallel
from hecate.engine.tokens import Carry, Tokens, form_of, in_folds
from hecate.rule import MemoryConfig
from hecate.rule.rule import several
from hecate.structure import Memory
from hecate.tape import ByHand, Run, Tensors, execute

# Measured by `python -m studies cost-engines`: from this length on kernels are worth loading, and up to this size of a
# l2 state (128 x 128 in float32) they beat block products, forward and backward together; with dot, whose rows go in
# tiles, up to 256 x 256 at least.
TOKENS = 32
BYTES = 1 << 16


class Compiled(TokenEngine):
    """Kernels of numba on a CPU, the state in cache, for matrix memories whose formulas have a form that they know."""

    name = "compiled"
    counts_along = True

    def refuses(self, config: MemoryConfig) -> str | None:
        """What has no kernel."""
        rule = config.rule
        if config.chunk > 1 or config.commit == "chunk":
            return f"chunk={config.chunk}, commit={config.commit!r} take gradients at a remembered state"
        algorithm, step = rule.algorithm.kernel_form(), rule.retention.kernel_form()
        if not rule.structure.linear:
            return f"structure {rule.structure.kind!r} has no kernel"
        if algorithm is None:
            return f"algorithm {rule.algorithm.kind!r} has no kernel"
        if algorithm.nesterov:
            return "its kernels know momentum without nesterov"
        if rule.bias.kernel_form() is None:
            return f"bias {rule.bias.kind!r} as configured has no kernel"
        if step is None:
            return f"retention {rule.retention.kind!r} as configured has no kernel"
        if step.threshold is not None and config.decay_order == "before_gradient":
            return f"retention {rule.retention.kind!r} ahead of the gradient has no kernel"
        return None

    def unfit(self, call: Call) -> str | None:
        """Another device, another dtype, torch looking on, no numba."""
        if call.traced:
            return TRACED
        if call.device != "cpu":
            return f"its kernels run on the CPU, the tensors are on {call.device}"
        if call.dtype not in (torch.float32, torch.float64):
            return f"its kernels are for float32 and float64, the state is {call.dtype}"
        if load_kernels() is None:
            return 'it needs numba: pip install "hecate[cpu]"'
        return None

    def cost(self, call: Call) -> float:
        """Less than blocks, but for large states of l2, and only from `TOKENS` on, before which nothing loads numba."""
        if call.length < TOKENS:
            return math.inf
        large = form_of(call.config.bias) == "error" and math.prod(call.shape) * call.dtype.itemsize > BYTES
        return (80.0 if large else 30.0) * call.length

    def about(self, call: Call) -> str:
        """Whether the call is long enough."""
        if call.length < TOKENS:
            return f"its kernels are worth loading from {TOKENS} tokens on"
        return "a kernel keeps the state in cache"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """In the kernels."""
        return compiled(call.config, tokens, carry, initial, run=run)


def compiled(config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
    """Runs a sequence in the kernels: outputs shaped like the values and the final carry."""
    if carry.memory[0].dim() == 2:
        folded = partial(by_coordinate, compiled)
        return in_folds(folded, config, tokens, carry, initial, run=run)

    def forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
        return scan(config, inputs, keeps=keeps)

    def vjp(inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
        return scan_vjp(config, inputs, record, cotangents)

    kernel = ByHand("engine.compiled", forward, vjp, by_torch(config, carry))
    return run_kernel(kernel, tokens, carry, initial, run=run)


def by_torch(config: MemoryConfig, like: Carry) -> Callable[..., Tensors]:
    """What a kernel computes of (memory, *slots, initial, *tokens), in plain torch."""
    states = 1 + len(like.slots)

    def plain(*inputs: Tensor | None) -> Tensors:
        engine = sequential if Engine.registry["parallel"].refuses(config) else parallel
        memory, *slots = several(inputs[:states])
        own = like._replace(memory=(memory,), slots=tuple(slots))
        rest = Tokens(*inputs[states + 1 :])  # type: ignore[arg-type]
        start = several(inputs[states : states + 1])
        y, new = in_folds(engine, config, rest, own, start, run=execute)
        return (y, *new.memory, *new.slots)

    return plain


def run_kernel(kernel: ByHand, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
    """Runs a sequence in a kernel: outputs shaped like the values and the final carry."""
    block = kernel.block()
    y, memory, *slots = several(run(block, *carry.memory, *carry.slots, *initial, *tokens, label="tokens"))
    return y, carry._replace(memory=(memory,), slots=tuple(slots))
