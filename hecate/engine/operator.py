"""A scan as one operator of torch: a node under torch.compile, forward and backward, whatever the length.

Engines that go on from token to token, or from chunk to chunk, would be unrolled there, which takes minutes to hours. A
compiler may keep graphs on disk, so a config is passed as text. What a forward pass keeps is more than tensors, so the
backward operator runs that pass again. [ENG-COMPILE-D1]
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hecate.engine.call import Call, Plan
from hecate.engine.engine import Engine
from hecate.engine.triton.ops import config_of, unshared
from hecate.tape import Tape, Tensors, execute, several
from hecate.tape.bridge import full_precision
from hecate.tape.tape import Program


def scanned(engine: str, call: Call) -> list[Tensor]:
    """Outputs of `Engine.outputs`, by the operator."""
    plan, flat, at = call.plan, call.flat, call.plan.first
    carried: list[int] = []
    for counts in [each.counts for each in (plan, plan.counter) if each is not None]:
        at += counts[0]
        carried += range(at, at + sum(counts) + 1)
        at += sum(counts) + 1
    there, given = [item is not None for item in flat], [item for item in flat if item is not None]
    place, (learned, frozen) = -1 if plan.place is None else plan.place, plan.names
    return engine_scan(engine, plan.config.text, " ".join(learned), " ".join(frozen), place, there, carried, given)


def _program(
    engine: str, rule: str, learned: str, frozen: str, place: int, there: Sequence[bool], tensors: Sequence[Tensor]
) -> tuple[Program, Tensors]:
    """The scan as a function of `Call.flat`, and that."""
    rest = iter(tensors)
    flat = tuple(next(rest) if has else None for has in there)
    plan = Plan.around(config_of(rule), flat, (tuple(learned.split()), tuple(frozen.split())))
    for each in (plan, plan.counter):
        if each is not None:
            each.place = None if place < 0 else place
    return partial(Engine.registry[engine].program, plan), flat


def _alike(there: Sequence[bool], carried: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that look like the outputs: v, and the states that go in."""
    return [tensors[2], *(tensors[sum(there[:at])] for at in carried)]


@torch.library.custom_op("hecate::engine_scan", mutates_args=())
def engine_scan(
    engine: str, rule: str, learned: str, frozen: str, place: int, there: Sequence[bool], carried: Sequence[int],
    tensors: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """y and the new states' tensors, by an engine. rule: the config as text; learned, frozen: names of phi's
    parameters; place: tokens since the chunk's start, -1 if that is not known; there: which tensors of `Call.flat` are
    given; carried: where in it the states are."""
    program, flat = _program(engine, rule, learned, frozen, place, there, tensors)
    with torch.no_grad(), full_precision(flat):
        return unshared(several(program(execute, *flat)), tensors)


@engine_scan.register_fake
def _(
    engine: str, rule: str, learned: str, frozen: str, place: int, there: Sequence[bool], carried: Sequence[int],
    tensors: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    return [item.new_empty(item.shape) for item in _alike(there, carried, tensors)]


@torch.library.custom_op("hecate::engine_scan_backward", mutates_args=())
def engine_scan_backward(
    engine: str, rule: str, learned: str, frozen: str, place: int, there: Sequence[bool], tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Cotangents of the tensors, empty for integers and masks, from those of all outputs."""
    program, flat = _program(engine, rule, learned, frozen, place, there, tensors)
    with torch.inference_mode(False), torch.no_grad(), full_precision(flat):
        grads = Tape().replay(program, flat, cotangents)
    found = []
    for x, g in zip(flat, grads, strict=True):
        if x is not None:
            found.append((torch.zeros_like(x) if g is None else g) if x.is_floating_point() else x.new_empty(0))
    return unshared(found, (*tensors, *cotangents))


@engine_scan_backward.register_fake
def _(
    engine: str, rule: str, learned: str, frozen: str, place: int, there: Sequence[bool], tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    return [item.new_empty(item.shape if item.is_floating_point() else (0,)) for item in tensors]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *ctx.facts, ctx.carried, tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    pairs = zip(_alike(ctx.facts[-1], ctx.carried, tensors), cotangents, strict=True)
    given = [torch.zeros_like(item) if g is None else g for item, g in pairs]
    grads = engine_scan_backward(*ctx.facts, list(tensors), given)
    return *[None] * 7, [g if x.is_floating_point() else None for g, x in zip(grads, tensors, strict=True)]


engine_scan.register_autograd(_backward, setup_context=_setup)
