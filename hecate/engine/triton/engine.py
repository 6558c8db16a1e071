"""The exact engine of our own kernels on a GPU, in Triton (the extra `gpu`): matrix memories of any bias with a form.

There are two kernels. Blocks of tokens serve none or decay under gradient descent or momentum; the loop goes token by
token for every other retention and algorithm with a form and for retain per phi channel or value. [ENG-TRITON-D5]

Forward one launch, backward four to six, nothing waits for the device, and the same bits every run. Products of values
given in float32 are made of three of TF32's, which is float32's precision; those of bfloat16 and float16 of one, with a
float32 state. Before a kernel is used for the first time for a rule with a dtype and widths, it has to reproduce the
token loop in float64 on random tokens, outputs, final state and gradients, within `PARITY`; otherwise it is refused
with the difference found, and the log told once. Verdicts are kept on disk. Second derivatives and batched cotangents
go through the torch engines instead.

With TRITON_INTERPRET=1 in the environment, kernels run on a CPU in Triton's interpreter: to test them.
[ENG-TRITON-D1]
"""

from __future__ import annotations

import importlib
import math
import os
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hecate.algorithm import GD, Momentum
from hecate.engine.call import GENERAL, TRACED, Call
from hecate.engine.engine import Engine, TokenEngine, chunk_refusal
from hecate.engine.features import L2_NORM
from hecate.engine.parallel import by_torch, run_by_hand
from hecate.engine.parity import TRIAL, both_by_torch, both_ways, difference, trial
from hecate.engine.tokens import Carry, Tokens
from hecate.engine.verdict import here, judged
from hecate.phi import Identity
from hecate.retention import Decay, NoRetention, StepForm
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import ByHand, Run, Tensors, execute, one

# Largest relative difference from float64: float32's rounding over a trial, and that of TF32.
PARITY = {"tf32x3": 2.0**-17, "tf32": 2.0**-8}
PRECISION = {torch.float32: "tf32x3", torch.bfloat16: "tf32", torch.float16: "tf32"}
WIDEST, CELLS = 256, 1 << 14  # of a state: its sides, and its numbers where one program holds all
SCALES = 0.3, 0.03  # of a trial's states, values and steps: the first that lets a rule stay finite
LOOP, NARROW, L2 = "loop", "narrow", "l2"  # among the flags of a verdict: loop kernels, narrow inputs, l2 norm
Flags = tuple[str, ...]  # which of write, reset and phi_w there are: a kernel of its own each


def _launch(name: str) -> Any:
    return getattr(importlib.import_module("hecate.engine.triton.launch"), name)


_L2 = ByHand(
    "l2_norm",
    lambda *inputs: _launch("normed")(*inputs),
    lambda *record: _launch("normed_vjp")(*record),
    lambda x: (one(execute(L2_NORM, x if x.dtype == torch.float64 else x.float())),),
)


class Triton(TokenEngine):
    """Kernels of our own on a GPU, the state in registers."""

    name = "triton"
    takes = GENERAL
    l2_norm = _L2.block()

    def widens(self, call: Call) -> bool:
        """Where nothing but the norm comes between: kernels widen numbers as they load them."""
        return _widens(call)

    def refuses(self, config: MemoryConfig) -> str | None:
        """What has no kernel."""
        rule = config.rule
        if (reason := chunk_refusal(config)) is not None:
            return reason
        if not rule.structure.linear or rule.structure.diagonal:
            return f"structure {rule.structure.kind!r} has no kernel"
        for name, variant in (("bias", rule.bias), ("retention", rule.retention), ("algorithm", rule.algorithm)):
            if variant.token_form() is None:
                return f"{name} {variant.kind!r} as configured has no kernel"
        if rule.algorithm.token_form().ridge is not None:
            return f"algorithm {rule.algorithm.kind!r} carries a matrix of keys, which has no kernel"
        if config.dtype == torch.float64:
            return "its kernels keep a float32 state, not state_dtype='float64'"
        return None

    def unfit(self, call: Call) -> str | None:
        """Torch looking on, another dtype or device, a large state, no Triton, or a kernel that is not trusted."""
        return _unfit(call, _loops(call))

    def cost(self, call: Call) -> float:
        """Ahead of blocks in torch on a GPU, behind a kernel of `fla`; the loop has a latency for every token. The
        interpreter is for who asks for it."""
        if call.device != "cuda":
            return math.inf
        return 100.0 + (60.0 if _loops(call) else 20.0) * call.length

    def about(self, call: Call) -> str:
        """Where the state is."""
        return "a kernel keeps the state in registers, and has passed its parity test"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """In the kernels, heads as they lie."""
        exact = None if _loops(call) else PRECISION[call.values]
        return run_by_hand(_kernel(call.config, carry, exact), tokens, carry, initial, run=run)


def interpreting() -> bool:
    """Whether Triton runs kernels on a CPU, as it is told before it is loaded."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def no_step(call: Call) -> str | None:
    """Why the loop kernels cannot take a token in place; None if they can."""
    return Engine.registry["triton"].excludes(call.config) or _unfit(call, loops=True)


def _unfit(call: Call, loops: bool) -> str | None:
    if call.traced:
        return TRACED
    if call.values not in PRECISION:
        return f"its kernels are for {', '.join(map(str, PRECISION))}, the values are {call.values}"
    if call.dtype != torch.float32:
        return f"its kernels keep a float32 state, q, k or v make it {call.dtype}"
    if max(call.shape) > WIDEST or (loops and math.prod(call.shape) > CELLS):
        most = f"{CELLS} numbers in a loop" if loops else f"{WIDEST} x {WIDEST}"
        return f"its kernels hold states of up to {most}, not {' x '.join(map(str, call.shape))}"
    if call.device != "cuda" and not interpreting():
        return f"its kernels run on a GPU, the tensors are on {call.device}"
    if find_spec("triton") is None:
        return 'it needs triton: pip install "hecate[gpu]"'
    return None if interpreting() else _trusted(call, loops)


def _loops(call: Call) -> bool:
    """Whether a call is for the loop kernels: blocks know none and decay, gradient descent and momentum, and one retain
    gate a token."""
    forms, channels = call.config.forms, call.retain is not None and call.retain.dim() == 4
    if channels or "retain_value" in call.general or forms.retention != StepForm():
        return True
    return forms.algorithm is None or forms.algorithm.nesterov


def _widens(call: Call) -> bool:
    config = call.config
    plain = config.step == "raw" and config.normalizer == config.query_scale == "none" and not call.general
    same = config.feature_map == Identity() and config.key_norm in ("none", "l2")
    return plain and same and call.values.itemsize < call.dtype.itemsize and not _loops(call)


def _kernel(config: MemoryConfig, carry: Carry, exact: str | None) -> ByHand:
    """The block kernels in a precision, or with None the loop kernels."""
    if exact is None:
        call = partial(importlib.import_module("hecate.engine.triton.loops").Loop, config)
    else:
        call = partial(_launch("Scan"), config, exact)

    def forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
        return call(inputs).forward(keeps)

    def vjp(inputs: Tensors, record: Tensors, cotangents: Any) -> Tensors:
        return call(inputs).backward(record, cotangents)

    def plain(*inputs: Tensor | None) -> Tensors:
        dtype, values = carry.memory[0].dtype, one((inputs[len(carry.slots) + 4],))
        wide = (x.to(dtype) if x is not None and x.is_floating_point() else x for x in inputs)
        y, *states = by_torch(config, carry)(*wide)
        return one((y,)).to(values.dtype), *states

    return ByHand("engine.triton", forward, vjp, plain)


def _trusted(call: Call, loops: bool) -> str | None:
    """Why the kernel of a call is not trusted."""
    config = call.config
    own: dict[str, Any] = {"bias": config.bias, "decay_order": config.decay_order, "read": config.read}
    if loops:
        own |= {"retention": config.retention, "algorithm": config.algorithm}
    else:
        own["retention"] = Decay() if config.retention.uses_retain else NoRetention()
        own["algorithm"] = Momentum() if config.algorithm.slots else GD()
    there = {
        "write": "write" in call.masks or config.on_nonfinite == "skip",  # which leaves tokens out by a mask
        "reset": "reset" in call.masks,
        "phi_w": "erase" in call.general or "write" in call.general,
        "retain_value": "retain_value" in call.general,
        "channels": call.retain is not None and call.retain.dim() == 4,
        LOOP: loops,
        NARROW: _widens(call),
        L2: config.key_norm == "l2",
    }
    flags = tuple(name for name, given in there.items() if given)
    return _verdict(MemoryConfig(**own), flags, call.values, call.device, call.shape)


@cache
def _verdict(config: MemoryConfig, flags: Flags, dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> str | None:
    """Why a kernel is not trusted, as it was found once on this machine."""
    if device == "cuda" and not torch.cuda.is_available():
        return "no GPU is here to try its kernels on"
    rule = config.model_dump(mode="json", exclude_defaults=True)
    whole = config.model_dump(mode="json")  # what is at its default may be so for a version only
    facts = {"rule": rule, "whole": whole, "beside": flags, "dtype": str(dtype), "widths": shape, **here(device)}
    return judged(facts, partial(distrust, config, flags, dtype, device, shape))


@torch.inference_mode(False)
def distrust(config: MemoryConfig, flags: Flags, dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> str | None:
    """Why a kernel is not trusted: what it computes beside the token loop in float64. The loop kernels, whose links may
    be ill-conditioned, may be as far from it as eight times plain torch in float32, on numbers that let it stay
    finite."""
    loops = LOOP in flags
    slots, exact = len(config.algorithm.slots), None if loops else PRECISION[dtype]

    def kernel(numbers: Tensors) -> ByHand:
        states = tuple(item for item in numbers[: 1 + slots] if item is not None)
        carry = Carry(states[:1], states[1:], (), (), (), torch.zeros(2, dtype=torch.int64, device=device))
        return _kernel(config, carry, exact)

    if L2 in flags and (reason := _distrust_norm(dtype, device, shape)) is not None:
        return reason
    for scale in SCALES if loops else (1.0,):
        inputs, cotangents = trial(
            dtype, device, shape, channelwise="channels" in flags, slots=slots, flags=flags, scale=scale
        )
        if NARROW in flags:
            tokens = (x.to(dtype) if x is not None and x.is_floating_point() else x for x in inputs[slots + 2 :])
            inputs = (*inputs[: slots + 2], *tokens)
        wide = tuple(x.double() if x is not None and x.is_floating_point() else x for x in inputs)
        right = both_by_torch(kernel(wide), wide, [item.double() for item in cotangents])
        if all(item is None or bool(item.isfinite().all()) for item in right):
            break
    return difference(
        partial(both_ways, kernel(inputs), inputs, cotangents), lambda: right,
        slots=slots, bound=PARITY[exact or "tf32x3"], against="the token loop in float64", dtype=dtype, shape=shape,
        plain=partial(both_by_torch, kernel(inputs), inputs, cotangents) if loops else None, times=8.0,
    )  # fmt: skip


def _distrust_norm(dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> str | None:
    keys, g = torch.randn(2, 1, TRIAL, 2, shape[1], generator=torch.Generator().manual_seed(0)).to(device)
    keys = keys.to(dtype)
    return difference(
        partial(both_ways, _L2, (keys,), [g]),
        partial(both_by_torch, _L2, (keys.double(),), [g.double()]),
        names=("keys at unit length", "their cotangents"), bound=PARITY[PRECISION[dtype]], against="float64",
        dtype=dtype, shape=shape,
    )  # fmt: skip
