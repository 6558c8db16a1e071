"""The exact GPU engine: Triton kernels (extra `gpu`) for matrix memories with any bias that can be printed.

There are two kernel families. Block kernels process chunks of tokens under gradient descent or momentum, with retention
none or decay; decay per phi channel goes with gradient descent only. Loop kernels go token by token for every other
rule with a printed form. [ENG-TRITON-D5]

A forward pass takes two or three launches, a backward pass four to six (more if a long row runs in parts). Nothing
waits for the device, and every run gives the same bits.
Products of float32 values take three TF32 products, which give float32's precision; 16-bit values use bfloat16, in two
halves where that matters (ENG-TRITON-D10). The state is float32. Before its first use for a rule, dtype and widths, a
kernel must match the token loop in float64 on random tokens within `PARITY`: outputs, final state and gradients.
Otherwise it is refused and the difference logged once. Verdicts are saved on disk. Second derivatives and batched
cotangents go through the torch engines.

With TRITON_INTERPRET=1 in the environment, kernels run on a CPU in Triton's interpreter, for tests. [ENG-TRITON-D1]
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

WIDEST, CELLS = 256, 1 << 14  # largest side of a state; most cells where one program holds all
# Fewest tokens of a row that is split, and of a part; programs that a card runs at once. By operation counts; on an
# H200 three walks over parts took .53 ms, one over whole rows 1.62, at 32,768 tokens of 8 heads of 128.
LONGEST, PART, PROGRAMS = 8192, 1024, 132
FEW, LONG = 8, 8 * SEGMENT  # documents of any length; or their mean length in the loop


def _raw(plan: Plan | Call) -> bool:
    """True if the kernels read raw keys and queries, and compute the features themselves."""
    config = plan.config
    plain = config.step == "raw" and config.normalizer == "none" and config.forms.cheap
    return plain and not plan.general and not _loops(plan)


def _borders(plan: Plan | Call) -> tuple[int, ...] | None:
    """Borders of documents packed into one row, if the host knows them and the documents are few or long: they run in
    parallel. The memory for their states grows with their number, in the loop by a segment of states each."""
    if plan.steps is not None or "reset" not in plan.masks:  # a sketch has no borders
        return None
    borders: tuple[int, ...] | None = BORDERS.get(plan.tensors.inputs.reset)
    most = max(FEW, plan.length // (LONG if _loops(plan) else SEGMENT))
    return borders if borders is not None and len(borders) - 1 <= most else None


def _part(plan: Plan | Call) -> int:
    """Tokens per part if memories are too few for a card and long rows run in parallel parts; 0 if rows run whole.
    Parts add two walks for their local states and transfer matrices, three with momentum, so there must be at least
    twice as many parts as walks. Kernels trusted only for whole rows run them whole."""
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
    """Triton kernels on a GPU that keep the state in registers."""

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
        """Refuses traced calls, other dtypes or devices, large states, a missing Triton and untrusted kernels."""
        return _unfit(plan, _loops(plan))

    def cost(self, plan: Plan) -> float:
        """Ranks ahead of torch blocks on a GPU and behind a kernel of `fla`. The loop has a latency per token. The
        interpreter is never chosen unasked."""
        if plan.device != "cuda":
            return math.inf
        return 100.0 + (60.0 if _loops(plan) else 20.0) * plan.length

    def outputs(self, call: Call, run: Run) -> Tensors:
        """Takes the short path if an earlier call of the same signature has left one. [ENG-TRITON-D12]"""
        if run is execute and call.given is not None:
            q, k, v, gates, _, state, initial, *_ = call.given
            results: Tensors = call.plan.short(q, k, v, gates, state, initial)
            return results
        results = super().outputs(call, run)
        if run is execute and call.plan.short is None and not call.traced:
            q, k, *_ = call.inputs
            call.plan.short = _raw(call) and is_short(call) and Short(call, _exact(call, q, k), _part(call))
        return results

    def run(self, call: Call, run: Run = execute) -> Tensors:
        """Passes raw inputs in their own dtype to kernels that compute features; else runs like every token engine."""
        if not _raw(call):
            return super().run(call, run)
        inputs = call.inputs
        q, k, *gates = cast_inputs(call.config, inputs, call.plan.dtype, run, narrow=True)
        masks = [None if mask is None else by_head(mask, inputs.v.shape[2]) for mask in (inputs.write, inputs.reset)]
        ((initial, carry),) = call.memories
        y, carry = self._scan(call, Tokens(k, q, *gates, *masks), carry, initial, run, raw=True)
        return y, *carry.flat

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """Runs the kernels, with heads in the caller's layout."""
        return self._scan(call, tokens, carry, initial, run, raw=False)

    @staticmethod
    def _scan(
        call: Call, tokens: Tokens, carry: Carry, initial: Memory, run: Run, *, raw: bool
    ) -> tuple[Tensor, Carry]:
        exact = None if _loops(call) else _exact(call, tokens.phi_q, tokens.phi_k, raw=raw)
        if call.traced:
            from hecate.engine.triton.ops import scanned  # deferred, as torch registers operators slowly

            return scanned(call.config, exact, raw, tokens, carry, initial[0])
        kernel = kernel_of(call.config, exact, raw=raw, borders=_borders(call), part=_part(call))
        return run_by_hand(kernel, tokens, carry, initial, run=run)


def _exact(call: Call, q: Tensor, k: Tensor, *, raw: bool = True) -> str:
    """The precision of block kernels for such queries and keys."""
    return precision_of(call.config, call.values, narrow=raw and q.dtype == k.dtype == call.values)


def raw_token(config: MemoryConfig) -> bool:
    """True if the one-token kernel computes the features of keys and queries itself."""
    return config.step == "raw" and config.forms.cheap and not config.forms.dampens


def no_step(plan: Plan | Call) -> str | None:
    """Reason why the one-token kernel cannot take a token in place; None if it can."""
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
    if plan.traced:  # operators check trust when they run
        return untold(plan.config)
    if find_spec("triton") is None:
        return f"it needs triton: {install_line('gpu')}"
    return None if interpreting() else _trusted(plan, loops, token=token)


def _loops(plan: Plan | Call) -> bool:
    """True if a call needs the loop kernels; the module says what blocks handle."""
    forms, channels = plan.config.forms, plan.channels
    if "retain_value" in plan.general or not forms.plain:
        return True
    return forms.algorithm is None or forms.algorithm.nesterov or (channels and forms.algorithm.momentum)


def _trusted(plan: Plan | Call, loops: bool, *, parted: bool = False, token: bool = False) -> str | None:
    """Reason why the kernel of a call is not trusted; parted: for rows in parts, token: for one token in place."""
    config = plan.config
    raw = raw_token(config) if token else _raw(plan)
    judged = config.launches.get(("judged", raw, loops))
    if judged is None:
        judged = _judged(config, raw, loops)
        keep(config.launches, ("judged", raw, loops), judged)
    there = {
        "write": "write" in plan.masks or config.on_nonfinite == "skip",  # skip masks tokens out
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
    flags = tuple(name for name, present in there.items() if present)
    return verdict(judged, flags, plan.values, plan.device, plan.shape)


def _judged(config: MemoryConfig, raw: bool, loops: bool) -> MemoryConfig:
    """The part of a config that its kernels compute; verdicts are keyed by it."""
    fields: dict[str, Any] = {"bias": config.bias, "decay_order": config.decay_order, "read": config.read}
    if raw:
        fields |= {"feature_map": config.feature_map, "key_norm": config.key_norm, "query_scale": config.query_scale}
    if loops:
        fields |= {"retention": config.retention, "algorithm": config.algorithm}
    else:
        fields["retention"] = Decay() if config.retention.uses_retain else NoRetention()
        fields["algorithm"] = Momentum() if config.algorithm.slots else GD()
    return MemoryConfig(**fields)
