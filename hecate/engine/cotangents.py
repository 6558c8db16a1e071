"""Gradients that come to a memory from outside: one that is not finite is named, not spread."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hecate.errors import NonFiniteError
from hecate.rule import MemoryState
from hecate.tape import can_inspect, is_traced


def watch_cotangents(name: str, y: Tensor, state: MemoryState) -> None:
    """Lets the backward pass look at what reaches y and the state, as `on_nonfinite="raise"` does ahead of it: on a
    CPU, and where values may steer. [ENG-FINITE-V1]"""
    if not can_inspect(y, free=True):
        return
    held = {"outputs": y}
    for field in ("memory", "slots"):
        named = getattr(state, field).items()
        held |= {f"state.{field}[{key!r}]": item for key, item in named}
    for block, item in held.items():
        if item.grad_fn is not None:
            item.grad_fn.register_prehook(partial(_look, name, block, item.output_nr))


def _look(name: str, block: str, index: int, cotangents: tuple[Tensor | None, ...]) -> None:
    g = cotangents[index]
    # The sum is one pass; only what is not finite, or overflows in it, needs another.
    if g is None or is_traced(g) or bool(g.detach().sum().isfinite()):
        return
    bad = (~g.detach().isfinite()).nonzero()
    if len(bad):
        at = tuple(int(index) for index in bad[0])
        names = ("batch row", "token", "head") if block == "outputs" else ("batch row", "head")
        place = ", ".join(f"{what} {number}" for what, number in zip(names, at, strict=False))
        raise NonFiniteError(
            f"the gradient that reaches memory {name!r} at {block} is {float(g[at]):g} at {place}: "
            "it comes from what follows the memory, the loss perhaps. Mend that, or choose "
            "on_nonfinite='propagate' to let it through"
        )
