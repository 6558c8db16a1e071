"""Triton kernels of flash-linear-attention (the extra `gpu`), for the rules that they compute.

| bias | retention | kernel |
|---|---|---|
| dot | none, decay | `fla.ops.simple_gla` |
| dot | decay per phi channel | `fla.ops.gla` |
| l2 | none | `fla.ops.delta_rule` |
| l2 | decay, before_gradient | `fla.ops.gated_delta_rule` |
| l2 | decay per phi channel, before_gradient | `fla.ops.kda` |

They compute in the dtype of v with a float32 state. Before a kernel is used for the first time with a dtype and widths,
it has to reproduce float64 on random tokens, outputs, final state and gradients, within `PARITY` or twice the error of
the token loop in its dtype; otherwise it is refused with the difference found. Documents packed into one row go to it
as `cu_seqlens`. [ENG-FLA-D1]

The package takes itself out of graphs; under torch.compile its kernels are operators of torch, which run the forward
pass once more for the backward: only who asks for them by name gets them there. [ENG-FLA-D2]
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hecate.engine.arguments import BORDERS
from hecate.engine.call import TRACED, Call, Plan
from hecate.engine.engine import TokenEngine, untold
from hecate.engine.fla.kernel import PARITY, by_kernel, kernel_of, verdict
from hecate.engine.tokens import Carry, Tokens, by_head, cast, run_by_hand
from hecate.engine.triton.kernel import NORM, interpreting
from hecate.retention import Decay, NoRetention
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import Run, Tensors, execute, one

__all__ = ["Fla"]

_UNIT = NORM.block()


class Fla(TokenEngine):
    """Kernels of flash-linear-attention on a GPU, for what they have been found to compute."""

    name = "fla"

    def refuses(self, config: MemoryConfig) -> str | None:
        """Refuses configs without a kernel."""
        if config.on_nonfinite == "skip":
            return "its kernels take no masks, and on_nonfinite='skip' leaves tokens out by one"
        if config.dtype == torch.float64:
            return "its kernels keep a float32 state, not state_dtype='float64'"
        kernel = kernel_of(config, channelwise=False)
        return kernel if isinstance(kernel, str) else None

    def unfit(self, plan: Plan) -> str | None:
        """Masks, tracing, another dtype or device, a kernel that cannot be imported, or one that is not trusted."""
        config = plan.config
        compiling = torch.compiler.is_compiling()
        if plan.masked and compiling:
            return "under torch.compile its kernels take no masks: where documents end is not known on the host"
        if plan.masked and not _by_documents(plan):
            return "its kernels take neither write nor reset masks, but documents packed into one row, as cu_seqlens"
        if not compiling and plan.traced:
            return TRACED
        if plan.values not in PARITY:
            return f"its kernels are for {', '.join(map(str, PARITY))}, the values are {plan.values}"
        if plan.dtype != torch.float32:
            return f"its kernels keep a float32 state, q, k or v make it {plan.dtype}"
        if plan.device != "cuda":
            return f"its kernels run on a GPU, the tensors are on {plan.device}"
        if compiling:  # the operators ask when they run
            return untold(config)
        kernel: Any = kernel_of(config, channelwise=plan.channels)
        gated = kernel.takes_gate
        plain = MemoryConfig(
            bias=config.bias,
            retention=Decay() if gated else NoRetention(),
            decay_order=config.decay_order if gated else "with_step",
            key_norm="l2" if config.key_norm == "l2" and config.step == "raw" else "none",
        )
        return verdict(plain, plan.channels, plan.values, plan.device, plan.shape)

    def cost(self, plan: Plan) -> float:
        """Its products of float32 are rounded more than ours, and its operators take its forward pass twice: only who
        asks for it by name gets those."""
        return math.inf if plan.values == torch.float32 or plan.traced else 90.0 + 20.0 * plan.length

    def about(self, plan: Plan) -> str:
        """Tells of its rounding of float32, or of its second forward pass under torch.compile."""
        if plan.values == torch.float32:
            return "its products of float32 are rounded more than ours"
        if plan.traced:
            return "under torch.compile its backward pass runs the forward once more"
        return "a kernel of flash-linear-attention that has passed its parity test"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """In the kernel, heads as they lie."""
        if torch.compiler.is_compiling():
            from hecate.engine.fla.ops import scanned  # torch takes its time to register operators

            return scanned(call.config, call.values, tokens, carry)
        borders = _borders(call.inputs.reset) if call.masked else None
        return run_by_hand(by_kernel(call.config, carry, call.values, borders), tokens, carry, initial, run=run)

    def run(self, call: Call, run: Run = execute) -> Tensors:
        """Tokens that a kernel takes as they are, or at unit length, go to it as they lie; else by way of their
        features."""
        config, inputs, traits = call.config, call.inputs, call.config.feature_map.traits()
        units = config.key_norm == "l2" and (inputs.k.is_cuda or interpreting())
        direct = (units or config.key_norm == "none") and config.step == "raw" and config.query_scale == "none"
        direct = direct and inputs.erase is inputs.write_gate is inputs.retain_value is inputs.floor is None
        # A multiple of x is rounded once, whatever the dtype.
        if not (direct and traits.componentwise and traits.degree == 1 and traits.parity == "odd"):
            return super().run(call, run)
        block, tensors = config.feature_map.block(call.params)
        phi_k, phi_q = (one(run(block, x, *tensors, label="phi")) for x in (inputs.k, inputs.q))
        if units:
            phi_k, phi_q = (one(run(_UNIT, x, label="key_norm")) for x in (phi_k, phi_q))
        lr, retain, momentum = (
            gate if gate.dtype == call.dtype else one(run(cast(call.dtype), gate, label="inputs"))
            for gate in (inputs.lr, inputs.retain, inputs.momentum)
        )
        reset = None if inputs.reset is None else by_head(inputs.reset, inputs.v.shape[2])
        tokens = Tokens(phi_k, phi_q, inputs.v, lr, retain, momentum, None, reset)
        ((initial, carry),) = call.memories
        y, carry = self.scan(call, tokens, carry, initial, run=run)
        return y, *carry.flat


def _by_documents(plan: Plan) -> bool:
    """True if the masks of a call are the borders of documents and nothing else."""
    # A sketch has no masks.
    return plan.steps is None and plan.masks == ("reset",) and plan.tensors.inputs.reset in BORDERS


def _borders(reset: Tensor | None) -> tuple[int, ...] | None:
    if reset is None:
        return None
    borders = BORDERS.get(reset)
    # A mask that came back from autograd may be another tensor of the same numbers.
    return (*reset[0].nonzero().flatten().tolist(), reset.shape[1]) if borders is None else borders
