"""Weighted sums of values, y_t = sum_s (p_t.k_s) v_s: running, over everything, from both sides.

Keys k `[B, S, G, P]` and values v `[B, S, G, V]` are features and what they stand for; queries
`[B, T r, G, P]` come with the r queries of a key head's group side by side. The sums of a causal pass run in a memory
with bias dot, whose engines keep states of a few tokens and make the others again in the backward pass.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hecate.engine import EngineName, memory_scan
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import Autodiff

Read = Literal["after", "before"]
Retention = Literal["none", "decay"]

# They do not look at values: as in other attention, what is not finite shows in the outputs.
MEMORIES: dict[tuple[Read, Retention], MemoryConfig] = {
    (read, retention): MemoryConfig(bias="dot", read=read, retention=retention, on_nonfinite="propagate")
    for read in ("after", "before")
    for retention in ("none", "decay")
}


class Pass(NamedTuple):
    """What all sums of a call share: masks `[B, S]`, what is kept per token `[B, S, G]`, and how memories are run."""

    write: Tensor | None
    reset: Tensor | None
    retain: Tensor | None = None
    engine: EngineName = "auto"
    autodiff: Autodiff = "auto"
    name: str = "attention"


def running(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, how: Pass, *, read: Read = "after"
) -> tuple[Tensor, Tensor]:
    """Sums over the tokens up to each one, and the state `[B, G, V, P]` after the last.

    The r queries of a group are r tokens to the memory, of which one is written. With `retain` a token j written tokens
    away weighs retain^j; a memory decays as it is written, so to who reads it without or before a write the last token
    is one nearer than it should be.
    """
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    write, reset, retain = how.write, how.reset, how.retain
    written = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if write is None else write
    if retain is not None:
        nearer = (written if read == "before" else ~written).unsqueeze(-1)
        decay = torch.where(nearer, retain, 1.0).repeat_interleave(group, 1)
        q, retain = q * decay.unsqueeze(-1), retain.repeat_interleave(group, 1)
    if group > 1:
        # Who reads before the write comes before the writer.
        writer = 0 if read == "after" else group - 1
        k, v, write = (_at(x, writer, group) for x in (k, v, written))
        reset = None if reset is None else _at(reset, 0, group)
    state = None
    if start is not None:
        place = torch.zeros(len(k), k.shape[2], dtype=torch.int64, device=k.device)
        state = MemoryState({"weight": start}, {}, {}, {}, place)
    options: dict[str, Any] = {"write_mask": write, "reset_mask": reset, "state": state}
    options |= {"engine": how.engine, "autodiff": how.autodiff, "name": how.name}
    config = MEMORIES[read, "none" if retain is None else "decay"]
    y, after = memory_scan(config, q, k, v, Gates(retain=retain), **options)
    return y, after.memory["weight"]


def over_all(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, how: Pass) -> tuple[Tensor, Tensor]:
    """Sums over all written tokens, the same for every query: O((T + S) P V)."""
    if how.write is not None:
        k = torch.where(how.write[..., None, None], k, 0.0)
    held = torch.einsum("bsgv,bsgp->bgvp", v, k)
    held = held if start is None else held + start
    return torch.einsum("btgp,bgvp->btgv", q, held), held


def from_both_sides(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, how: Pass) -> tuple[Tensor, Tensor]:
    """Sums over the whole document of each token: what runs up to it, and what runs back to it."""
    y, after = running(q, k, v, start, how)
    reset = how.reset
    if reset is not None:  # backwards a document starts with its last token
        reset = torch.cat([reset[:, 1:], torch.ones_like(reset[:, :1])], 1)
    back = how._replace(write=_flipped(how.write), reset=_flipped(reset), retain=_flipped(how.retain))
    later, _ = running(q.flip(1), k.flip(1), v.flip(1), None, back, read="before")
    return y + later.flip(1), after


def _flipped(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flip(1)


def _at(x: Tensor, place: int, group: int) -> Tensor:
    """`[B, S, ...]` as `[B, S * group, ...]`: every token at one place of its group, else 0."""
    zero = torch.zeros_like(x)
    parts = [x if index == place else zero for index in range(group)]
    return torch.stack(parts, 2).flatten(1, 2)
