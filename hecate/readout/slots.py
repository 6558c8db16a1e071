"""Reads by attention over a bounded number of slots: gated slot attention, attention with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hecate.readout.base import Asked, Held, Means, Readout, Turned
from hecate.tape import formula_block, one


class Slots(Readout):
    r"""slots: y = V softmax(K q), P slots with K' = diag(r) K + s k^T and V' = V diag(r) + v s^T.

    Each slot holds a key and a value, both means of those that were written to it: a token goes to the slots by its
    code s, the gate `write`, and slot i keeps the share r_i of what it had, the gate retain per phi channel. Where no
    write is given s = 1 - r. There are as many slots as phi(k) has channels, and phi(k) itself is what K holds; the
    memory V is written with the code in its place. lr scales s in both.

    Formula: $y_t = V_t\, \mathrm{softmax}(K_t q_t)$
    $K_t = \mathrm{diag}(\alpha_t) K_{t-1} + \eta_t s_t k_t^\top,\quad V_t = V_{t-1} \mathrm{diag}(\alpha_t) + \eta_t
    v_t s_t^\top,\quad s_t = \mathrm{write}_t \ \text{or } 1 - \alpha_t$
    Shapes: q, k `[B, T, H, P]`, s and r `[B, T, H, P]`; K `[B, H, P, P]`, its slots last, held as `keys`.
    VJP: that of two linear memories and a softmax.
    Cost: that of two memories, each with a retain per channel.
    References: Gated Slot Attention (Zhang et al., 2024, arXiv 2409.07146); ABC (Peng et al., 2021, arXiv 2110.02488).
    [READ-SLOTS-D1]
    """

    kind: Literal["slots"] = "slots"
    gates: ClassVar[tuple[str, ...]] = ("write",)
    channels: ClassVar[bool] = True

    def state_shapes(self, d_phi: int) -> dict[str, tuple[int, ...]]:
        return {"keys": (d_phi, d_phi)}

    def refusals(self, config: Any) -> Iterator[str]:
        yield from super().refusals(config)
        if not config.retention.uses_retain:
            yield f"retention {config.retention.kind!r} has no retain gate for slots to forget by; use 'decay'"

    def turned(self, asked: Asked, held: Held, means: Means) -> Turned:
        (code,) = asked.gates
        retain = one(means.run(_WIDE, asked.retain, asked.k, label="slots"))
        code = one(means.run(_REST, retain) if code is None else means.run(_WIDE, code, asked.k))
        scores, keys = means.recall(asked.q, asked.k, code, asked.lr, retain, held["keys"])
        return Turned(one(means.run(_SOFTMAX, scores, label="slots")), code, retain, {"keys": keys})


def _wide(gate: Tensor, like: Tensor) -> Tensor:
    return gate if gate.dim() == like.dim() else gate.unsqueeze(-1).expand_as(like)


_WIDE = formula_block("readout.slots.wide", _wide)
_REST = formula_block("readout.slots.code", lambda retain: 1 - retain)
_SOFTMAX = formula_block("readout.slots.softmax", lambda scores: torch.softmax(scores, -1))
