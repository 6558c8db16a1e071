"""Memories that are not finite: the policies of `on_nonfinite`, and the search for the first token at which a memory or
an output is NaN or infinite.

On a CPU `"raise"` checks at once and names the token. On other devices a check would make the host wait in every call:
there sizes are computed on the device and read later, by the next call, by `MemoryState.check` or by the trainer after
each step. [ENG-FINITE-D4]
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from hecate import late
from hecate.engine.call import Call, carry_of
from hecate.engine.features import counting, faced, quotient, to_tokens
from hecate.engine.loop import select, token_step
from hecate.engine.tokens import Carry, Tokens, by_token, expand_to, fold_heads
from hecate.errors import NonFiniteError
from hecate.rule import MemoryConfig, MemoryState
from hecate.structure import Memory
from hecate.tape import Tensors, can_inspect, execute, is_traced, waits

CURE = "Lower lr, set key_norm='l2' or step='normalized' where neither is set, or choose on_nonfinite='skip'"


def check(call: Call, name: str, outputs: tuple[Tensor, ...]) -> None:
    """Refuses outputs or states that are not finite: at once on a CPU, else when a later call reads them."""
    if late._WAITING:
        late.look()
    free = not (call.traced or waits(outputs[0]))
    if not free and not can_inspect(*outputs):
        return
    floats = []
    for item in outputs:
        if item.is_floating_point():
            floats.append(item.detach())
    if late.HELD or (not free and waits(floats[0])):
        _put_off(name, floats)
        return
    # The sum is not finite if any number is not, and costs one pass; but finite numbers may overflow in it, too.
    if not math.isfinite(torch.stack(list(map(Tensor.sum, floats))).sum().item()) and not all(
        bool(item.isfinite().all()) for item in floats
    ):
        _raise_at_first(call, outputs[0], name)


def is_late(tensor: Tensor) -> bool:
    """True if a tensor's numbers are not checked at once."""
    return waits(tensor) or bool(late.HELD)


def check_late(name: str, y: Tensor, state: MemoryState) -> None:
    """Checks what earlier calls have put off, and puts off the check of these outputs `[B, T, H, V]` and this state."""
    late.look()
    counted = () if state.normalizer is None else carry_of(state.normalizer).flat
    _put_off(name, [item for item in (y, *carry_of(state).flat, *counted) if item.is_floating_point()])


def skip(call: Call) -> Call:
    """The call with a write mask that leaves out the tokens which would make a memory infinite or NaN."""
    good = _finite_writes(call)
    heads, written = call.inputs.v.shape[2], call.inputs.write
    good = good.unflatten(0, (-1, heads)).transpose(1, 2)
    return call.rewritten(good if written is None else good & expand_to(written, good))


class _Memory:
    """A memory of a scan, or its sum normaliser, run token by token."""

    def __init__(self, config: MemoryConfig, tokens: Tokens, initial: Memory, carry: Carry) -> None:
        self.config, self.initial, self.carry = config, initial, carry
        self.tokens = by_token(tokens, execute)

    def stepped(self, t: int, ok: Tensor | None = None) -> tuple[Tensor, Carry]:
        """The answer to the t-th token and the state after it; `ok` masks the write."""
        token = self.tokens[t]
        if ok is not None:
            token = token._replace(write=ok if token.write is None else ok & token.write)
        return token_step(self.config, token, self.carry, self.initial, run=execute)[:2]


def _memories(call: Call) -> list[_Memory]:
    tokens = to_tokens(call.config, call.inputs, call.params, call.plan.dtype, execute)
    tokens = fold_heads(faced(call.config, tokens, execute), execute)
    first, *counter = call.memories
    counters = [_Memory(call.config.counting, counting(tokens), *memory) for memory in counter]
    return [_Memory(call.config, tokens, *first), *counters]


@torch.no_grad()
def _finite_writes(call: Call) -> Tensor:
    """`[N, T]`: the tokens that leave every state finite, where tokens that do not are not written."""
    memories, good = _memories(call), []
    for t in range(call.length):
        tried = [memory.stepped(t)[1] for memory in memories]
        ok = _finite(tried)
        good.append(ok)
        for memory, carry in zip(memories, tried, strict=True):
            memory.carry = select(ok, carry, memory.stepped(t, ok)[1], execute)
    return torch.stack(good, 1)


def _finite(carries: list[Carry]) -> Tensor:
    """`[N]`: True for memories whose states are all finite."""
    items = [item for carry in carries for item in carry.flat if item.is_floating_point()]
    rows = (item.flatten(1) if item.dim() > 1 else item.unsqueeze(1) for item in items)
    return torch.stack([torch.isfinite(row).all(1) for row in rows]).all(0)


@torch.no_grad()
def _raise_at_first(call: Call, y: Tensor, name: str) -> None:
    """Raises `NonFiniteError` for the first token that breaks a memory or an output.

    It runs the scan again, token by token, because an engine's blocks may spoil outputs before that token, too. y
    `[B, T, H, V]` has the number of heads and the dtype of the outputs.
    """
    memories, floor = _memories(call), call.inputs.floor
    for t in range(y.shape[1]):
        answers = []
        for memory in memories:
            answer, memory.carry = memory.stepped(t)
            answers.append(answer)
        least = None if floor is None else floor[:, t].flatten()
        read, *sums = answers
        if sums:
            read = quotient(call.config, read, sums[0], execute, least)
        finite = _finite([memory.carry for memory in memories])
        broken = (~(finite & torch.isfinite(read.to(y.dtype)).all(1))).nonzero()
        if broken.numel():
            row, token = int(broken[0]), memories[0].tokens[t]
            place = f"batch row {row // y.shape[2]}, head {row % y.shape[2]}, token {t}"
            step = _step_of(call.config, token, row)
            if not bool(finite[row]):
                raise NonFiniteError(f"memory {name!r} became non-finite at {place}: {step}")
            reason = "the query or its features overflow"
            if bool(torch.isfinite(token.phi_q[row]).all()):
                reason = f"it overflows {y.dtype}, {step}"
            raise NonFiniteError(
                f"an output of memory {name!r} is non-finite at {place}, while the memory itself is finite: {reason}"
            )
    raise NonFiniteError(
        f"memory {name!r} became non-finite in the engine's block products, although token by token it stays finite; "
        "use engine='sequential'"
    )


def _step_of(config: MemoryConfig, token: Tokens, row: int) -> str:
    inputs = ("phi_k", "v", "lr", "retain", "momentum")
    if bad := [name for name in inputs if not bool(getattr(token, name)[row].isfinite().all())]:
        return f"{', '.join(bad)} came with NaN or infinity; mend what makes them, or choose on_nonfinite='skip'"
    size, lr = float(token.phi_k[row].square().sum()), float(token.lr[row].max())
    summed = f", where as here writes of {config.chunk} tokens add up, for their sum" if config.chunk > 1 else ""
    return (
        f"lr={lr:.4g}, |phi(k)|^2={size:.4g}, lr * |phi(k)|^2={lr * size:.4g} (a delta-type memory "
        f"diverges beyond {config.algorithm.limits()}{summed}). {CURE}"
    )


# Looks that are put off.


def _put_off(name: str, floats: list[Tensor]) -> None:
    """Sends the largest number to the host: not finite where any is. The largest of each token of y `[B, T, H, V]` and
    of each state `[N, ...]` stay on the device until then, to find the place by."""
    y, *states = floats
    sizes = [_largest(y, -1).flatten(), *(_largest(item.reshape(len(item), -1), -1) for item in states)]
    joined = torch.cat(sizes)
    most = joined.amax() if joined.numel() else joined.sum()
    late.put_off(most, partial(_raise_late, name, tuple(y.shape[:3]), joined))


def _largest(item: Tensor, dim: int) -> Tensor:
    """The largest absolute value along an axis, NaN if there is a NaN, in one pass."""
    return torch.linalg.vector_norm(item, math.inf, dim) if item.shape[dim] else item.sum(dim)


def _raise_late(name: str, shape: tuple[int, ...], sizes: Tensor, largest: Tensor) -> None:
    if math.isfinite(largest.item()):
        return
    batch, length, heads = shape
    bad = ~sizes.isfinite().cpu()
    answers, held = bad.split((math.prod(shape), len(bad) - math.prod(shape)))
    outputs, states = answers.view(shape).transpose(0, 1), held.view(-1, batch * heads)
    rows = states.any(0).nonzero().flatten().tolist()
    places = outputs.flatten().nonzero().flatten().tolist()
    token, row = divmod(places[0], batch * heads) if places else (length - 1, rows[0])
    place = f"batch row {row // heads}, head {row % heads}, token {token}"
    what = f"memory {name!r} became" if rows else f"an output of memory {name!r} became"
    raise NonFiniteError(
        f"{what} non-finite at {place}, by what it answers. On {sizes.device.type} this is found late, not in the call "
        f"that did it, lest every call wait for the device. {CURE}"
    )


# Gradients that reach a memory from what follows it.


def watch_cotangents(name: str, y: Tensor, state: MemoryState, traced: bool) -> None:
    """Registers a hook that checks the gradients of y and of the state, as `on_nonfinite="raise"` checks their values:
    one that is not finite raises an error with its place, and goes no further. On a CPU only. [ENG-FINITE-V1]"""
    if traced or waits(y) or late.HELD:
        return
    tensors = {"outputs": y}
    for field in ("memory", "slots"):
        for key, item in getattr(state, field).items():
            tensors[f"state.{field}[{key!r}]"] = item
    for block, item in tensors.items():
        if item.grad_fn is not None:
            item.grad_fn.register_prehook(partial(_look, name, block, item.output_nr))


def _look(name: str, block: str, index: int, cotangents: Tensors) -> None:
    g = cotangents[index]
    # The sum is one pass; a second one follows only if it is not finite, which an overflow may cause, too.
    if g is None or is_traced(g) or math.isfinite(g.detach().sum().item()):
        return
    bad = (~g.detach().isfinite()).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        names = ("batch row", "token", "head") if block == "outputs" else ("batch row", "head")
        place = ", ".join(f"{what} {number}" for what, number in zip(names, at, strict=False))
        raise NonFiniteError(
            f"the gradient that reaches memory {name!r} at {block} is {float(g[at]):g} at {place}: it comes from what "
            "follows the memory, the loss perhaps. Mend that, or choose on_nonfinite='propagate' to let it through"
        )
