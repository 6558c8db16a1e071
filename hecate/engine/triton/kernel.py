"""The kernels as differentiable blocks, and their trust: before use each must match the token loop in float64.
[ENG-TRITON-I1]"""

from __future__ import annotations

import importlib
import math
import os
from functools import cache, partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from hecate.engine.call import NO_PARAMS, Inputs
from hecate.engine.features import L2_NORM, featured, to_tokens
from hecate.engine.parallel import by_torch
from hecate.engine.tokens import VECTORS, Carry
from hecate.engine.triton.apart import tried
from hecate.engine.triton.parity import TRIAL, both_by_torch, both_ways, difference, here, judged, trial
from hecate.engine.triton.table import SEGMENT
from hecate.formula import algorithm_formula, algorithm_texts, bias_formula, map_nodes, retention_texts
from hecate.formula.printer import printed
from hecate.rule import MemoryConfig
from hecate.tape import ByHand, Tensors, execute, one, several

# Largest relative difference from float64, by the dtype of values: a trial's rounding in float32, or in 16 bits.
PARITY = {torch.float32: 2.0**-17, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-8}
PRECISION = {torch.float32: "tf32x3", torch.bfloat16: "bf16", torch.float16: "halves"}
SCALES = 0.3, 0.03  # of a trial's states, values and steps: the first that keeps a rule finite
# Flags of a verdict: loop kernels, narrow inputs, keys normalised before the kernel, packed documents, rows in parallel
# parts, one token in place.
LOOP, NARROW, L2, PACKED, PARTED, TOKEN = "loop", "narrow", "l2", "packed", "parted", "token"
GATES = "narrow gates"  # of the one-token kernel
BORDERS = (0, 70, 71, TRIAL)  # of the documents in a trial
NO_CARD = "no GPU is here to try its kernels on"
Flags = tuple[str, ...]  # optional inputs such as write, reset and phi_w; each set has a kernel


def interpreting() -> bool:
    """True if Triton interprets kernels on a CPU; the variable must be set before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def precision_of(config: MemoryConfig, dtype: torch.dtype, *, narrow: bool) -> str:
    """Precision of products in block kernels, by dtype: "tf32x3" for float32; "bf16" for bfloat16 keys as stored; else,
    for features and states that need more digits, two bfloat16 "halves". Plain TF32 will not do: tensor cores truncate
    instead of rounding, which adds up in a momentum and flips signs that a bias depends on."""
    exact = PRECISION[dtype]
    return exact if (narrow and config.forms.identity) or exact != "bf16" else "halves"


def _launch(name: str) -> Any:
    return getattr(importlib.import_module("hecate.engine.triton.launch"), name)


def _unit(x: Tensor | None) -> Tensors:
    rows = one((x,))
    wide = rows if rows.dtype == torch.float64 else rows.float()
    return (one(execute(L2_NORM, wide)).to(rows.dtype),)


# Normalises rows to unit length, in their own dtype.
NORM = ByHand(
    "l2_norm", lambda inputs, keeps: _launch("normed")(inputs), lambda *record: _launch("normed_vjp")(*record), _unit
)


def kernel_of(
    config: MemoryConfig, exact: str | None, *, raw: bool, borders: tuple[int, ...] | None = None, part: int = 0
) -> ByHand:
    """The block kernels in a precision, or with None the loop kernels. raw: kernels compute the features; borders: of
    packed documents, which replace reset; part: tokens per part if blocks run a row's parts in parallel, else 0."""
    if exact is None:
        call = partial(importlib.import_module("hecate.engine.triton.loops").Loop, config, borders)
    else:
        call = partial(_launch("Scan"), config, exact, raw, borders, part)

    def forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
        return call(inputs).forward(keeps)

    def vjp(inputs: Tensors, record: Tensors, cotangents: Any) -> Tensors:
        return call(inputs).backward(record, cotangents)

    def plain(*inputs: Tensor | None) -> Tensors:
        memory, at = one(inputs[:1]), 2 + len(config.algorithm.slots)
        wide = [x.to(memory.dtype) if x is not None and x.is_floating_point() else x for x in inputs]
        keys, queries, _, lr = several(tuple(wide[at : at + 4]))
        if raw:
            wide[at : at + 2] = featured(config, keys, queries, run=execute)
        # Plain torch wants the gates that the rule does not take; kernels do without.
        wide[at + 4 : at + 6] = [torch.ones_like(lr) if gate is None else gate for gate in wide[at + 4 : at + 6]]
        position = torch.zeros(len(memory), dtype=torch.int64, device=memory.device)
        like = Carry((memory,), several(tuple(wide[1 : at - 1])), (), (), (), (), position)
        y, *states = by_torch(config, like)(*wide)
        return one((y,)).to(one((inputs[at + 2],)).dtype), *states

    return ByHand("engine.triton", forward, vjp, plain)


@cache
def verdict(config: MemoryConfig, flags: Flags, dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> str | None:
    """Reason why a kernel is not trusted, judged once on this machine."""
    if device == "cuda" and not torch.cuda.is_available():
        return NO_CARD
    formula = bias_formula(config.bias)
    bias = {"bias": f"{config.bias.kind} {formula.digest}"}  # its constants are kernel arguments
    rule = config.model_dump(mode="json", exclude_defaults=True) | bias
    whole = config.model_dump(mode="json") | bias  # defaults may change between versions
    # Kernels are printed from these too, and a class may be redefined under the same name.
    texts = retention_texts(config.retention)
    if not isinstance(algorithm_formula(config.algorithm), str):
        texts += algorithm_texts(config.algorithm)
    if not isinstance(nodes := map_nodes(config.feature_map), str):
        texts.append(printed("phi", "xg", nodes))
    whole["texts"] = sha256("".join(text.source for text in texts).encode()).hexdigest()[:24]
    facts = {"rule": rule, "whole": whole, "beside": flags, "dtype": str(dtype), "widths": shape, **here(device)}
    with_numbers = {"rule": {**rule, "numbers": formula.psi.numbers + formula.pull.numbers}}
    return judged(facts, partial(tried, distrust, config, flags, dtype, device, shape), with_numbers)


@torch.inference_mode(False)
def distrust(config: MemoryConfig, flags: Flags, dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> str | None:
    """Reason why a kernel is not trusted, by comparison with the token loop in float64. Links can be ill-conditioned,
    so loop kernels may err eight times as much as plain torch in float32, on inputs that keep the rule finite."""
    loops = LOOP in flags
    slots, exact = len(config.algorithm.slots), None if loops else precision_of(config, dtype, narrow=NARROW in flags)
    if torch.is_autocast_enabled(device):  # verdicts are shared with callers without autocast
        with torch.autocast(device, enabled=False):
            return distrust(config, flags, dtype, device, shape)
    if TOKEN in flags:
        return distrust_token(config, flags, dtype, device, shape)
    if L2 in flags and (reason := distrust_norm(torch.float32, device, shape)) is not None:
        return reason
    borders, part = BORDERS if PACKED in flags else None, SEGMENT * (PARTED in flags)
    kernel = kernel_of(config, exact, raw=not loops, borders=borders, part=part)
    for scale in SCALES if loops else (_stable(config, shape[1]), *SCALES):
        inputs, cotangents = trial(dtype, device, shape, slots=slots, flags=flags, scale=scale, adverse=not loops)
        if PACKED in flags:
            reset = one((inputs[slots + 9],))
            reset.zero_()[:, list(BORDERS[:-1])] = True
        if NARROW in flags:
            tokens = (x.to(dtype) if x is not None and x.is_floating_point() else x for x in inputs[slots + 2 :])
            inputs = (*inputs[: slots + 2], *tokens)
        wide = tuple(x.double() if x is not None and x.is_floating_point() else x for x in inputs)
        right = both_by_torch(kernel, wide, [item.double() for item in cotangents])
        if all(item is None or bool(item.isfinite().all()) for item in right):
            break
    return difference(
        partial(both_ways, kernel, inputs, cotangents), lambda: right,
        slots=slots, bound=PARITY[torch.float32 if loops else dtype], against="the token loop in float64", dtype=dtype,
        shape=shape,
        plain=partial(both_by_torch, kernel, inputs, cotangents) if loops else None, times=8.0,
    )  # fmt: skip


def distrust_token(
    config: MemoryConfig, flags: Flags, dtype: torch.dtype, device: str, shape: tuple[int, ...]
) -> str | None:
    """Reason why the one-token kernel is not trusted, by comparison of a trial, token by token from raw inputs, with
    the token loop in float64. States have the bound of loop kernels, outputs that of their dtype."""
    slots = len(config.algorithm.slots)
    for scale in (min(scale, _stable(config, shape[1])) for scale in SCALES):
        inputs, _ = trial(dtype, device, shape, slots=slots, flags=flags, scale=scale)
        states, tokens = several(inputs[: 1 + slots]), list(inputs[slots + 2 :])
        if config.key_norm != "none":  # unit keys would hide a missing normalisation
            tokens[0] = one((tokens[0],)) * one((tokens[1],)).norm(dim=-1, keepdim=True)
        for at, x in enumerate(tokens):
            if x is not None and (NARROW if at < VECTORS else GATES) in flags:
                tokens[at] = x.to(dtype)
        k, q, v, lr, retain, momentum, _, _, keys, value = tokens
        sizes = None if keys is None else keys * math.sqrt(shape[1])
        gates = (None, None) if sizes is None else (sizes.sigmoid(), (-sizes).sigmoid())
        arguments = (q, k, v, lr, retain, momentum, *gates, value)
        right = _tokens_by_torch(config, torch.float64, states, arguments)
        if all(bool(item.isfinite().all()) for item in right):
            break
    used = config.retention.uses_retain, slots > 0
    taken = (q, k, v, lr, *(x if there else None for x, there in zip((retain, momentum), used, strict=True)))
    outcome = cache(lambda: _token_by_token(config, states, (*taken, *gates, value), dtype))
    options: dict[str, Any] = {"against": "the token loop in float64", "dtype": dtype, "shape": shape}
    return difference(
        lambda: outcome()[:1], lambda: right[:1], bound=PARITY[dtype], names=("y",), **options
    ) or difference(
        lambda: outcome()[1:], lambda: right[1:], bound=PARITY[torch.float32], times=8.0,
        names=("state", *["slot"] * slots),
        plain=lambda: _tokens_by_torch(config, torch.float32, states, arguments)[1:], **options,
    )  # fmt: skip


def _tokens_by_torch(config: MemoryConfig, dtype: torch.dtype, states: Tensors, given: Tensors) -> tuple[Tensor, ...]:
    """y and the last states for a sequence of raw inputs, by plain torch in a dtype."""
    names = (*Inputs._fields[:6], *Inputs._fields[9:12])
    inputs = Inputs(**dict(zip(names, given, strict=True)))  # type: ignore[arg-type]
    first = several(tuple(x.to(dtype) for x in several(states)))
    tokens = to_tokens(config, inputs, {"learned": {}, "frozen": {}}, dtype, execute)
    return several(kernel_of(config, None, raw=False).plain(*first, first[0], *tokens))


def _token_by_token(config: MemoryConfig, states: Tensors, given: Tensors, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same by the one-token kernel, y in a dtype."""
    buffers = [x.unsqueeze(0).clone() for x in several(states)]
    outputs = torch.empty_like(one(given[2:3]), dtype=dtype)
    y = outputs[:, 0].clone()
    tokens = [[None if x is None else x[:, at] for x in given] for at in range(outputs.shape[1])]
    launch = importlib.import_module("hecate.engine.triton.loops").OneToken(config, True, buffers, tokens[0], y)
    for at, token in enumerate(tokens):
        launch([y if x is None else x for x in token])
        outputs[:, at] = y
    return outputs, *(x.squeeze(0) for x in buffers)


def _stable(config: MemoryConfig, width: int) -> float:
    """A step size at which no memory diverges on features of unit keys."""
    if config.forms.identity or config.key_norm != "none":
        return 1.0
    keys = torch.randn(TRIAL, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    features, _ = config.feature_map.forward(torch.nn.functional.normalize(keys, dim=-1), NO_PARAMS)
    return min(1.0, 1 / (2 * float(features.square().sum(-1).max())))


@cache
@torch.inference_mode(False)
def distrust_norm(dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> str | None:
    """Reason why the norm of keys is not trusted, by comparison with float64."""
    if device == "cuda" and not torch.cuda.is_available():
        return NO_CARD
    keys, g = torch.randn(2, 1, TRIAL, 2, shape[1], generator=torch.Generator().manual_seed(0)).to(device)
    keys = keys.to(dtype)
    return difference(
        partial(both_ways, NORM, (keys,), [g]),
        partial(both_by_torch, NORM, (keys.double(),), [g.double()]),
        names=("keys at unit length", "their cotangents"), bound=PARITY[dtype], against="float64",
        dtype=dtype, shape=shape,
    )  # fmt: skip
