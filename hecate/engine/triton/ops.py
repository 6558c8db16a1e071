"""The kernels as custom operators of torch: one graph node forward and one backward under torch.compile, at any length.

A compiler may cache its graphs on disk, so a rule is passed as text. An operator checks when it runs whether the
kernels are trusted; where they are not, it runs plain torch. [ENG-TRITON-D8]
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hecate.engine.tokens import Carry, Tokens
from hecate.engine.triton.kernel import LOOP, NARROW, interpreting, kernel_of, verdict
from hecate.engine.triton.table import SEGMENT, chunks_of
from hecate.rule import MemoryConfig
from hecate.tape import ByHand, Tensors, is_recorded, one
from hecate.variant import Variant


def rule_of(config: MemoryConfig, exact: str | None, raw: bool) -> str:
    """The part of a config that the kernels compute, as text; raw: with the feature map."""
    bias, retention, algorithm, phi = config.forms.texts
    if exact is not None:  # block kernels depend on no more
        retention = '"decay"' if config.retention.uses_retain else '"none"'
        algorithm = '"momentum"' if config.algorithm.slots else '"gd"'
    features = ""
    if raw:
        features = f', "feature_map": {phi}, "key_norm": "{config.key_norm}", "query_scale": "{config.query_scale}"'
    return (
        f'{{"bias": {bias}, "retention": {retention}, "algorithm": {algorithm}, '
        f'"decay_order": "{config.decay_order}", "read": "{config.read}"{features}}}'
    )


def scanned(
    config: MemoryConfig, exact: str | None, raw: bool, tokens: Tokens, carry: Carry, initial: Tensor
) -> tuple[Tensor, Carry]:
    """Outputs and the new state, through the operators."""
    (memory,), slot = carry.memory, carry.slots[0] if carry.slots else None
    inputs = (memory, slot, initial, *tokens)
    y, last, last_slot, *_ = matrix_scan(rule_of(config, exact, raw), exact, is_recorded(inputs), *inputs)
    return y, carry._replace(memory=(last,), slots=() if slot is None else (last_slot,))


def config_of(rule: str) -> MemoryConfig:
    """The config of such a text; variants are looked up by their kinds."""
    families = (family._registry.values() for family in Variant.__subclasses__() if "_registry" in vars(family))
    return _config_of(rule, tuple(chain.from_iterable(families)))


@lru_cache(256)
def _config_of(rule: str, classes: tuple[type[Variant], ...]) -> MemoryConfig:
    return MemoryConfig.model_validate_json(rule)


def _kernel(rule: str, exact: str | None, inputs: Sequence[Tensor | None]) -> tuple[ByHand, Tensors, bool]:
    """The kernel, its inputs as `Scan` and `Loop` take them, and whether it is trusted."""
    config, (memory, slot, initial, *tokens) = config_of(rule), inputs
    weights, values, retain, slots = one((memory,)), one((tokens[2],)), tokens[4], [] if slot is None else [slot]
    there = {
        "write": tokens[6] is not None, "reset": tokens[7] is not None, "phi_w": tokens[8] is not None,
        "retain_value": tokens[9] is not None, "channels": retain is not None and retain.dim() == values.dim(),
        LOOP: exact is None, NARROW: values.itemsize < weights.itemsize,
    }  # fmt: skip
    flags = tuple(name for name, has in there.items() if has)
    # Narrow values that were widened have the precision of narrow ones.
    dtype = torch.bfloat16 if exact == "halves" and values.dtype == torch.float32 else values.dtype
    trusted = interpreting() or (
        find_spec("triton") is not None
        and verdict(config, flags, dtype, values.device.type, tuple(weights.shape[1:])) is None
    )
    return kernel_of(config, exact, raw=exact is not None), (memory, *slots, initial, *tokens), trusted


def _record_shapes(
    rule: str, exact: str | None, keeps: bool, memory: Tensor, slot: Tensor | None, v: Tensor, retain: Tensor
) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """Shapes and dtypes of predictions or u, and of the states at every segment's start; empty if no cotangent needs
    them."""
    # Flat: torch.compile would specialise an axis of one segment into a graph of its own.
    forms, segment, dtype = config_of(rule).forms, SEGMENT, memory.dtype
    if exact is not None:
        linear = forms.target or forms.error
        chunks = chunks_of(memory.shape[-1], exact, linear=linear)
        segment, dtype = chunks.segment, torch.bfloat16 if chunks.narrow and not interpreting() else dtype
    saved = (memory.numel() * -(-v.shape[1] // segment),)
    moves = keeps and exact is not None and not forms.target
    states = [(saved if keeps and there else (0,), dtype) for there in (True, slot is not None)]
    return [(tuple(v.shape) if moves else (0,), memory.dtype), *states]


@torch.library.custom_op("hecate::matrix_scan", mutates_args=())
def matrix_scan(
    rule: str, exact: str | None, keeps: bool, memory: Tensor, slot: Tensor | None, initial: Tensor, phi_k: Tensor,
    phi_q: Tensor, v: Tensor, lr: Tensor, retain: Tensor, momentum: Tensor, write: Tensor | None, reset: Tensor | None,
    phi_w: Tensor | None, retain_value: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the last memory and slot, and if it keeps them the predictions and the states at every segment's start."""
    tensors = (memory, slot, initial, phi_k, phi_q, v, lr, retain, momentum, write, reset, phi_w, retain_value)
    kernel, inputs, trusted = _kernel(rule, exact, tensors)
    shapes = _record_shapes(rule, exact, keeps, memory, slot, v, retain)
    record: Any = ()
    if trusted:
        outputs, record = kernel.forward(inputs, keeps)
    else:
        outputs = kernel.plain(*inputs)
    y, last, last_slot = (*outputs, memory.new_empty(0))[:3]
    preds, states, slots = (
        memory.new_zeros(shape, dtype=dtype) if item is None or shape == (0,) else item.view(shape)
        for item, (shape, dtype) in zip([None] * (3 - len(record)) + list(record), shapes, strict=True)
    )
    return one((y,)), one((last,)), one((last_slot,)), preds, states, slots


@matrix_scan.register_fake
def _(
    rule: str, exact: str | None, keeps: bool, memory: Tensor, slot: Tensor | None, initial: Tensor, phi_k: Tensor,
    phi_q: Tensor, v: Tensor, lr: Tensor, retain: Tensor, *rest: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    empty = memory.new_empty
    record = [empty(shape, dtype=dtype) for shape, dtype in _record_shapes(rule, exact, keeps, memory, slot, v, retain)]
    return v.new_empty(v.shape), empty(memory.shape), empty(0) if slot is None else empty(slot.shape), *record


@torch.library.custom_op("hecate::matrix_scan_backward", mutates_args=())
def matrix_scan_backward(
    rule: str, exact: str | None, memory: Tensor, slot: Tensor | None, initial: Tensor, phi_k: Tensor, phi_q: Tensor,
    v: Tensor, lr: Tensor, retain: Tensor, momentum: Tensor, write: Tensor | None, reset: Tensor | None,
    phi_w: Tensor | None, retain_value: Tensor | None, record: Sequence[Tensor], cotangents: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Cotangents of all inputs that are tensors; an empty tensor where there is none."""
    tensors = (memory, slot, initial, phi_k, phi_q, v, lr, retain, momentum, write, reset, phi_w, retain_value)
    kernel, inputs, trusted = _kernel(rule, exact, tensors)
    if trusted:
        grads = list(kernel.vjp(inputs, tuple(record[1:] if exact is None else record), tuple(cotangents)))
    else:
        with recorded():
            grads = list(kernel.by_autograd(inputs, tuple(cotangents)))
    if slot is None:
        grads.insert(1, None)
    there = _moved(rule, tensors)
    return [item if item is not None and has else memory.new_zeros(0) for item, has in zip(grads, there, strict=True)]


def unshared(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that share no storage with inputs, as operators require, and are contiguous like their fakes."""
    storages = {item.untyped_storage().data_ptr() for item in inputs}
    return [
        item.clone(memory_format=torch.contiguous_format)
        if item.untyped_storage().data_ptr() in storages
        else item.contiguous()
        for item in outputs
    ]


@contextmanager
def recorded() -> Iterator[None]:
    """Leaves inference mode within an operator, where autograd would record nothing. A separate thread would deadlock:
    a card's backward passes run in one thread, which would be waiting here."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _moved(rule: str, own: Sequence[Tensor | None]) -> list[bool]:
    """True for each input that has a cotangent."""
    config, reset = config_of(rule), own[10] is not None
    uses = (True, True, reset, True, True, True, True, config.retention.uses_retain, bool(config.algorithm.slots))
    return [has and item is not None for has, item in zip((*uses, False, False, True, True), own, strict=True)]


@matrix_scan_backward.register_fake
def _(rule: str, exact: str | None, memory: Tensor, *given: Any) -> list[Tensor]:
    tensors = (memory, *given[:-2])
    pairs = zip(tensors, _moved(rule, tensors), strict=True)
    return [item.new_empty(item.shape) if has else memory.new_empty(0) for item, has in pairs]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    ctx.rule, ctx.exact, _, *tensors = inputs
    ctx.save_for_backward(*tensors, *output[3:])


def _backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    tensors, record = ctx.saved_tensors[:13], ctx.saved_tensors[13:]
    finals = cotangents[: 2 if tensors[1] is None else 3]
    grads = matrix_scan_backward(ctx.rule, ctx.exact, *tensors, list(record), list(finals))
    return None, None, None, *(g if has else None for g, has in zip(grads, _moved(ctx.rule, tensors), strict=True))


matrix_scan.register_autograd(_backward, setup_context=_setup)
