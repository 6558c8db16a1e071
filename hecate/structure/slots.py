"""Unit slots."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hecate.structure.base import Memory, Structure, matvec, outer

EPS = 1e-6


class Slots(Structure):
    """slots: pred = sum_i p_i s_i / |s_i|, one slot s_i for each coordinate of phi.

    A matrix whose columns are read by direction: phi says how much of each slot a key asks for. The gradient by a slot
    is orthogonal to it, p_i (u - n_i (n_i.u)) / |s_i| with n_i = s_i / |s_i|: a write turns slots instead of growing
    them. With retention `sphere` every slot also stays on its sphere, which is Lattice's memory. |s| is sqrt(s.s +
    eps^2), eps = 1e-6.

    Shapes: weight `[N, V, P]`, p `[N, P]`, u `[N, V]`.
    VJP: with c_i the cotangent of G_i, b_i = c_i.u - (c_i.n_i)(n_i.u) and w_i = p_i / |s_i|: g_p = b_i / |s_i|, g_u =
    sum_i w_i (c_i - n_i (c_i.n_i)), g_s from both n_i and |s_i|.
    Cost: 3 V P per read and per write.
    Warning: slots that start alike stay alike; `init` draws unit slots from a fixed seed.
    References: Lattice (2025, arXiv 2504.05646); circulating code divides by the norm of all slots together.
    [STR-SLOTS-D1]
    """

    kind: Literal["slots"] = "slots"

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d_v, d_phi)}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator, **place: Any) -> Tensor:
        draw = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return (draw / draw.norm(dim=1, keepdim=True)).to(**place)

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        return matvec(_unit(memory)[0], p)

    def predict_vjp(self, memory: Memory, p: Tensor, u: Tensor) -> tuple[Memory, Tensor]:
        return self.pullback(memory, p, u), matvec(_unit(memory)[0].mT, u)

    def pullback(self, memory: Memory, p: Tensor, u: Tensor) -> Memory:
        unit, norm = _unit(memory)
        return (_across(unit, outer(u, p)) / norm,)

    def pullback_vjp(self, memory: Memory, p: Tensor, u: Tensor, cotangents: Memory) -> tuple[Memory, Tensor, Tensor]:
        unit, norm = _unit(memory)
        (c,) = cotangents
        along, seen = (c * unit).sum(1), matvec(unit.mT, u)
        b = matvec(c.mT, u) - along * seen
        weight = (p / norm.squeeze(1)).unsqueeze(1)
        gunit = -weight * (c * seen.unsqueeze(1) + outer(u, along))
        gweight = _across(unit, gunit) / norm - weight * (b.unsqueeze(1) / norm) * unit
        return (gweight,), b / norm.squeeze(1), matvec(c - along.unsqueeze(1) * unit, weight[:, 0])


def _unit(memory: Memory) -> tuple[Tensor, Tensor]:
    norm = (memory[0].square().sum(1, keepdim=True) + EPS**2).sqrt()
    return memory[0] / norm, norm


def _across(unit: Tensor, slots: Tensor) -> Tensor:
    """Each column without its part along the unit slot."""
    return slots - unit * (unit * slots).sum(1, keepdim=True)
