"""The exact compiled engine for matrix memories on a CPU: token by token, the state in cache.

The recurrence of the token loop in numba kernels, forward and backward (the extra `cpu`). The forward keeps the
predictions `[N, T, V]` and the state of every max(64, sqrt(T))-th token; the backward writes the states of one such
segment again and walks it in reverse. Memories are shared out over `torch.get_num_threads()` threads, each computed by
one, so results do not depend on their number. Subnormal numbers are kept unless `torch.set_flush_denormal` says
otherwise.

Second derivatives and batched cotangents go through the torch engines instead. [ENG-NUM-D1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hecate.engine.by_hand import ByHand
from hecate.engine.call import TRACED, Call
from hecate.engine.coordinates import by_coordinate
from hecate.engine.cpu.launch import load_kernels, scan, scan_vjp
from hecate.engine.loop import sequential
from hecate.engine.parallel import parallel, parallel_refusal
from hecate.engine.prepare import in_folds
from hecate.engine.tokens import Carry, Tokens
from hecate.rule import MemoryConfig
from hecate.rule.rule import several
from hecate.structure import Memory
from hecate.tape import Run, Tensors, execute


def compiled_refusal(config: MemoryConfig) -> str | None:
    """Why the compiled engine cannot run a config exactly; None if it can."""
    rule = config.rule
    if config.chunk > 1 or config.commit == "chunk":
        return f"chunk={config.chunk}, commit={config.commit!r} take gradients at a remembered state"
    algorithm = rule.algorithm.kernel_form()
    if not rule.structure.linear:
        return f"structure {rule.structure.kind!r} has no kernel"
    if algorithm is None:
        return f"algorithm {rule.algorithm.kind!r} has no kernel"
    if algorithm.nesterov:
        return "its kernels know momentum without nesterov"
    if rule.bias.kernel_form() is None:
        return f"bias {rule.bias.kind!r} as configured has no kernel"
    step = rule.retention.kernel_form()
    if step is None:
        return f"retention {rule.retention.kind!r} as configured has no kernel"
    if step.threshold is not None and config.decay_order == "before_gradient":
        return f"retention {rule.retention.kind!r} ahead of the gradient has no kernel"
    return None


def compiled_unfit(_: MemoryConfig, call: Call) -> str | None:
    """Why the compiled engine cannot run a call here; None if it can."""
    if call.traced:
        return TRACED
    if call.device != "cpu":
        return f"its kernels run on the CPU, the tensors are on {call.device}"
    if call.dtype not in (torch.float32, torch.float64):
        return f"its kernels are for float32 and float64, the state is {call.dtype}"
    if load_kernels() is None:
        return 'it needs numba: pip install "hecate[cpu]"'
    return None


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
        engine = sequential if parallel_refusal(config) else parallel
        memory, *slots = several(inputs[:states])
        own = like._replace(memory=(memory,), slots=tuple(slots))
        rest = Tokens(*inputs[states + 1 :])  # type: ignore[arg-type]
        start = several(inputs[states : states + 1])
        y, new = in_folds(engine, config, rest, own, start, run=execute)
        return (y, *new.memory, *new.slots)

    return plain


def run_kernel(kernel: ByHand, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
    """Runs a sequence in a kernel: outputs shaped like the values and the final carry."""
    block = kernel.block(keeps=run is not execute)
    y, memory, *slots = several(run(block, *carry.memory, *carry.slots, *initial, *tokens, label="tokens"))
    return y, carry._replace(memory=(memory,), slots=tuple(slots))
