"""The exact engine of our own kernels on a GPU, in Triton (the extra `gpu`): matrix memories of any printed bias.

There are two ways. Chunks of tokens serve none or decay, under gradient descent of each phi channel too, and momentum;
the loop goes token by token for what else has a form. [ENG-TRITON-D5]

Forward two or three launches, backward four to six (more where a long row goes in parts), nothing waits for the
device, and the same bits every run.
Products of values given in float32 are made of three of TF32's, which is float32's precision; those of 16 bits of
bfloat16's, in halves where that tells (ENG-TRITON-D10). The state is float32. Before a kernel is
used for the first time for a rule with a dtype and widths, it has to reproduce the token loop in float64 on random
tokens, outputs, final state and gradients, within `PARITY`; otherwise it is refused with the difference found, and the
log told once. Verdicts are kept on disk. Second derivatives and batched cotangents go through the torch engines
instead.

With TRITON_INTERPRET=1 in the environment, kernels run on a CPU in Triton's interpreter: to test them.
[ENG-TRITON-D1]
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hecate.algorithm import GD, Momentum
from hecate.engine.arguments import BORDERS
from hecate.engine.call import GENERAL, RATES, TRACED, Call, Plan, keep
from hecate.engine.engine import Engine, TokenEngine, chunk_refusal, one_retain, untold
from hecate.engine.features import cast_inputs
from hecate.engine.tokens import Carry, Tokens, by_head, run_by_hand
from hecate.engine.triton.kernel import (
    GATES,
    L2,
    LOOP,
    NARROW,
    NORM,
    PACKED,
    PARTED,
    PRECISION,
    TOKEN,
    interpreting,
    kernel_of,
    precision_of,
    verdict,
)
from hecate.engine.triton.short import Short, is_short
from hecate.engine.triton.table import SEGMENT
from hecate.errors import install_line
from hecate.retention import Decay, NoRetention
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import Run, Tensors, execute

WIDEST, CELLS = 256, 1 << 14  # of a state: its sides, and its numbers where one program holds all
# Tokens from which a row is parted, and of a part at least, and programs that a card runs at once. By the algebra's
# operations; an H200 took .53 ms of three walks for 1.62 of one, at 32,768 tokens of 8 heads of 128.
LONGEST, PART, PROGRAMS = 8192, 1024, 132
FEW, LONG = 8, 8 * SEGMENT  # documents of any length; tokens of one in the loop, on average


def _raw(plan: Plan | Call) -> bool:
    """True if kernels read keys and queries as they lie, and make the features themselves."""
    config = plan.config
    plain = config.step == "raw" and config.normalizer == "none" and config.forms.cheap
    return plain and not plan.general and not _loops(plan)


def _borders(plan: Plan | Call) -> tuple[int, ...] | None:
    """Borders of documents packed into one row, where the host knows them and they are few or long: they are walked
    side by side. The room for their states grows with their number, in the loop by a whole segment of them."""
    if plan.steps is not None or "reset" not in plan.masks:  # a sketch does not tell
        return None
    found: tuple[int, ...] | None = BORDERS.get(plan.tensors.inputs.reset)
    most = max(FEW, plan.length // (LONG if _loops(plan) else SEGMENT))
    return found if found is not None and len(found) - 1 <= most else None


def _part(plan: Plan | Call) -> int:
    """Tokens of the parts of a long row that are walked side by side where memories are too few for a card; 0 where
    rows are walked whole. Of states and of what parts make of states there are two walks more, three beside a momentum,
    and at least twice as many parts as walks in all. Kernels that are trusted for whole rows alone walk them whole."""
    linear = plan.config.forms.target or plan.config.forms.error
    if plan.length < LONGEST or plan.steps is not None or plan.traced or _loops(plan) or not linear:
        return 0
    if "reset" in plan.masks:
        return 0
    batch, _, heads, height = plan.tensors.inputs.v.shape
    programs, walks = batch * heads * -(-height // SEGMENT), 3 + len(plan.config.algorithm.slots)
    parts = min(plan.length // PART, PROGRAMS // programs) if programs else 0
    if parts < 2 * walks or not (interpreting() or _trusted(plan, loops=False, parted=True) is None):
        return 0
    return -(-plan.length // parts // SEGMENT) * SEGMENT


class Triton(TokenEngine):
    """Kernels of our own on a GPU, the state in registers."""

    name = "triton"
    reason = "a kernel keeps the state in registers, and has passed its parity test"
    takes = GENERAL
    l2_norm = NORM.block()

    def refuses(self, config: MemoryConfig) -> str | None:
        """Refuses configs without a kernel."""
        rule = config.rule
        if (reason := chunk_refusal(config)) is not None:
            return reason
        if not rule.structure.linear or rule.structure.diagonal:
            return f"structure {rule.structure.kind!r} has no kernel"
        if config.forms.unprinted is not None:
            return config.forms.unprinted
        algorithm, descent, retention = config.forms.tokens[0], config.forms.descent, config.forms.retention
        if isinstance(retention, str):
            return f"retention {rule.retention.kind!r} as configured has no kernel: {retention}"
        if retention.single.gate is None:
            return f"retention {rule.retention.kind!r} has no kernel: the cotangent of retain is no sum over cells"
        if isinstance(descent, str):
            return f"algorithm {rule.algorithm.kind!r} as configured has no kernel: {descent}"
        if len(rule.algorithm.slots) > 1:
            return f"algorithm {rule.algorithm.kind!r} has several slots, and kernels hold one beside the memory"
        if rule.algorithm.uses_momentum and not rule.algorithm.slots:
            return f"algorithm {rule.algorithm.kind!r} has a momentum without a slot, which has no kernel"
        if algorithm is not None and algorithm.ridge is not None:
            return f"algorithm {rule.algorithm.kind!r} carries a matrix of keys, which has no kernel"
        if config.dtype == torch.float64:
            return "its kernels keep a float32 state, not state_dtype='float64'"
        return None

    def unfit(self, plan: Plan) -> str | None:
        """Torch looking on, another dtype or device, a large state, no Triton, or a kernel that is not trusted."""
        return _unfit(plan, _loops(plan))

    def cost(self, plan: Plan) -> float:
        """Ahead of blocks in torch on a GPU, behind a kernel of `fla`; the loop has a latency for every token. The
        interpreter is for who asks for it."""
        if plan.device != "cuda":
            return math.inf
        return 100.0 + (60.0 if _loops(plan) else 20.0) * plan.length

    def outputs(self, call: Call, run: Run) -> Tensors:
        """By the short way, where a call that looked the same has left one. [ENG-TRITON-D12]"""
        if run is execute and call.given is not None:
            q, k, v, gates, _, state, initial, *_ = call.given
            found: Tensors = call.plan.short(q, k, v, gates, state, initial)
            return found
        found = super().outputs(call, run)
        if run is execute and call.plan.short is None and not call.traced:
            q, k, *_ = call.inputs
            call.plan.short = _raw(call) and is_short(call) and Short(call, _exact(call, q, k), _part(call))
        return found

    def run(self, call: Call, run: Run = execute) -> Tensors:
        """From what is given where kernels make features of it, narrow numbers as narrow as they are; else as all
        engines for tokens."""
        if not _raw(call):
            return super().run(call, run)
        inputs = call.inputs
        q, k, *gates = cast_inputs(call.config, inputs, call.plan.dtype, run, narrow=True)
        masks = [None if mask is None else by_head(mask, inputs.v.shape[2]) for mask in (inputs.write, inputs.reset)]
        ((initial, carry),) = call.memories
        y, carry = self._scan(call, Tokens(k, q, *gates, *masks), carry, initial, run, raw=True)
        return y, *carry.flat

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """In the kernels, heads as they lie."""
        return self._scan(call, tokens, carry, initial, run, raw=False)

    @staticmethod
    def _scan(
        call: Call, tokens: Tokens, carry: Carry, initial: Memory, run: Run, *, raw: bool
    ) -> tuple[Tensor, Carry]:
        exact = None if _loops(call) else _exact(call, tokens.phi_q, tokens.phi_k, raw=raw)
        if call.traced:
            from hecate.engine.triton.ops import scanned  # torch takes its time to register operators

            return scanned(call.config, exact, raw, tokens, carry, initial[0])
        kernel = kernel_of(call.config, exact, raw=raw, borders=_borders(call), part=_part(call))
        return run_by_hand(kernel, tokens, carry, initial, run=run)


def _exact(call: Call, q: Tensor, k: Tensor, *, raw: bool = True) -> str:
    """The precision of block kernels that read such queries and keys."""
    return precision_of(call.config, call.values, narrow=raw and q.dtype == k.dtype == call.values)


def raw_token(config: MemoryConfig) -> bool:
    """True if the kernel of one token makes features of keys and queries, as they lie."""
    return config.step == "raw" and config.forms.cheap and not config.forms.dampens


def no_step(plan: Plan | Call) -> str | None:
    """Reason why the kernel of one token cannot take a token in place; None if it can."""
    if RATES in plan.general:
        return "its kernels take one lr of a token, not one of each weight"
    return Engine.registry["triton"].excludes(plan.config) or _unfit(plan, loops=True, token=True)


def _unfit(plan: Plan | Call, loops: bool, *, token: bool = False) -> str | None:
    if plan.traced and not torch.compiler.is_compiling():
        return TRACED
    if plan.values not in PRECISION:
        return f"its kernels are for {', '.join(map(str, PRECISION))}, the values are {plan.values}"
    if plan.dtype != torch.float32:
        return f"its kernels keep a float32 state, q, k or v make it {plan.dtype}"
    if loops and (reason := one_retain(plan)) is not None:
        return reason
    if max(plan.shape) > WIDEST or (loops and math.prod(plan.shape) > CELLS):
        most = f"{CELLS} numbers in a loop" if loops else f"{WIDEST} x {WIDEST}"
        return f"its kernels hold states of up to {most}, not {' x '.join(map(str, plan.shape))}"
    if plan.device != "cuda" and not interpreting():
        return f"its kernels run on a GPU, the tensors are on {plan.device}"
    if plan.traced:  # the operators ask when they run
        return untold(plan.config)
    if find_spec("triton") is None:
        return f"it needs triton: {install_line('gpu')}"
    return None if interpreting() else _trusted(plan, loops, token=token)


def _loops(plan: Plan | Call) -> bool:
    """True if a call is for the loop kernels: blocks know retention none and decay, under gradient descent of each phi
    channel too, and momentum."""
    forms, channels = plan.config.forms, plan.channels
    if "retain_value" in plan.general or not forms.plain:
        return True
    return forms.algorithm is None or forms.algorithm.nesterov or (channels and forms.algorithm.momentum)


def _trusted(plan: Plan | Call, loops: bool, *, parted: bool = False, token: bool = False) -> str | None:
    """Reason why the kernel of a call, of rows walked whole or parted or of one token in place, is not trusted."""
    config = plan.config
    raw = raw_token(config) if token else _raw(plan)
    judged = config.launches.get(("judged", raw, loops))
    if judged is None:
        judged = _judged(config, raw, loops)
        keep(config.launches, ("judged", raw, loops), judged)
    there = {
        "write": "write" in plan.masks or config.on_nonfinite == "skip",  # which leaves tokens out by a mask
        "reset": "reset" in plan.masks,
        "phi_w": "erase" in plan.general or "write" in plan.general,
        "retain_value": "retain_value" in plan.general,
        "channels": plan.channels,
        LOOP: loops,
        NARROW: raw and plan.values.itemsize < plan.dtype.itemsize,
        L2: config.key_norm == "l2" and not raw and not token,
        PACKED: _borders(plan) is not None,
        PARTED: parted,
        TOKEN: token,
        GATES: token and plan.tensors.inputs.lr.itemsize < plan.dtype.itemsize,
    }
    flags = tuple(name for name, given in there.items() if given)
    return verdict(judged, flags, plan.values, plan.device, plan.shape)


def _judged(config: MemoryConfig, raw: bool, loops: bool) -> MemoryConfig:
    """The part of a config that its kernels compute, of which a verdict is."""
    own: dict[str, Any] = {"bias": config.bias, "decay_order": config.decay_order, "read": config.read}
    if raw:
        own |= {"feature_map": config.feature_map, "key_norm": config.key_norm, "query_scale": config.query_scale}
    if loops:
        own |= {"retention": config.retention, "algorithm": config.algorithm}
    else:
        own["retention"] = Decay() if config.retention.uses_retain else NoRetention()
        own["algorithm"] = Momentum() if config.algorithm.slots else GD()
    return MemoryConfig(**own)
