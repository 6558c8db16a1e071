"""Levels of an outer optimiser, written out: plain float64 torch, one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[list[Tensor], int], Tensor]
Rule = Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]


def train(
    loss: Loss, weights: list[Tensor], periods: list[int], rule: Rule, steps: int, reduce: str
) -> list[list[Tensor]]:
    """The weights after every step; level l steps at t = 0 mod C_l, t counted from 1."""
    weights = [weight.detach().clone() for weight in weights]
    seen: list[list[Tensor]] = [[] for _ in weights]
    slots: list[dict[str, Tensor]] = [{} for _ in weights]
    history = []
    for t in range(1, steps + 1):
        leaves = [weight.clone().requires_grad_() for weight in weights]
        grads = torch.autograd.grad(loss(leaves, t), leaves)
        for level, period in enumerate(periods):
            seen[level].append(grads[level])
            if t % period == 0:
                window = seen[level][-period:]  # t = i - C + 1 .. i
                total = window[0].clone()
                for grad in window[1:]:
                    total = total + grad
                total = total / period if reduce == "mean" else total
                weights[level] = rule(weights[level], total, slots[level], t // period)
        history.append([weight.clone() for weight in weights])
    return history


def sgd(lr: float, momentum: float, decay: float) -> Rule:
    def rule(w: Tensor, g: Tensor, slots: dict[str, Tensor], n: int) -> Tensor:
        g = g.add(w, alpha=decay)
        slots["m"] = g if n == 1 else slots["m"].mul(momentum).add(g)
        return w.add(slots["m"], alpha=-lr)

    return rule


def adamw(lr: float, b1: float, b2: float, eps: float, decay: float) -> Rule:
    def rule(w: Tensor, g: Tensor, slots: dict[str, Tensor], n: int) -> Tensor:
        w = w.mul(1 - lr * decay)
        m, v = (slots.get(name, torch.zeros_like(w)) for name in "mv")
        slots["m"] = m = m.lerp(g, 1 - b1)
        slots["v"] = v = v.mul(b2).addcmul(g, g, value=1 - b2)
        root = v.sqrt().div(math.sqrt(1 - b2**n)).add(eps)
        return w.addcdiv(m, root, value=-lr / (1 - b1**n))

    return rule
