"""Momentum that overwrites what it knows of a gradient's direction."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hecate.errors import ConfigError, StabilityWarning
from hecate.optim.base import MatrixOptimizer, State, put
from hecate.optim.muon import HELD, orthogonalised, settings
from hecate.optim.options import Group, MatrixView, NonNegative, OptimizerKind, Share, name_of, warn
from hecate.optim.tensors import Bulk, as_matrix, tamed
from hecate.tape.bridge import can_inspect


class DeltaMomentum(MatrixOptimizer):
    """delta_momentum: m <- m (momentum I - c g^T g) + g, w <- (1 - lr weight_decay) w - lr m.

    The momentum as a delta-rule memory of gradients: what it holds along the present gradient is erased before that is
    added. Eq. 49 puts -lr g into m and adds m to w: the same while lr is constant. Its g^T g lacks the factor that
    descent gives it; here it is `erase`, a number or `"lr"`.

    reading: what g^T g is. `matrix`, of all rows; `rows`, each row of m erases along its own row of g; `scalar`, the
    number |g|^2 of the whole gradient, m <- max(0, momentum - erase |g|^2) m + g. The last two, with `erase="lr"`, beat
    tuned momentum on two thirds of eq. 53's surfaces.
    form: `stable`, c = erase / (1 + erase |g|^2) with |g| of the matrix or row, so that no eigenvalue of the bracket
    leaves [momentum - 1, momentum]; for `scalar` the max. `hope`, c = erase and no max, as printed: refused
    (`beyond="raise"`) or warned of (`"warn"`) at a gradient with erase |g|_2^2 > 1 + momentum, where m grows.
    orthogonalize: Newton-Schulz on m before it moves the weights; True, or fields of its algorithm.

    Shapes: see `MatrixOptimizer`; momentum like the parameter.
    Cost: `matrix` two products of min(r, c)^2 max(r, c); others memory-bound. Sharded parameters are gathered.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eqs. 48 and 49. [OPT-DELTA-D1]
    """

    class Options(OptimizerKind):
        """Fields of a file, and arguments of the constructor."""

        kind: Literal["delta_momentum"] = "delta_momentum"
        momentum: Share = 0.9
        erase: NonNegative | Literal["lr"] = 1.0
        reading: Literal["matrix", "rows", "scalar"] = "matrix"
        form: Literal["stable", "hope"] = "stable"
        beyond: Literal["raise", "warn"] = "raise"
        orthogonalize: bool = False
        matrix: MatrixView = "flatten"

    class Extras(MatrixOptimizer.Extras):
        """Arguments of the constructor alone, or of wider types there."""

        orthogonalize: Any = False

    held = (HELD,)
    positional = ("lr", "momentum", "erase")

    def check(self, group: Group) -> None:
        """Makes `orthogonalize` plain, and refuses options that mean nothing."""
        group["orthogonalize"] = settings(group["orthogonalize"])
        super().check(group)

    def examine(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        """Refuses, or warns of, gradients beyond the bound of the printed form."""
        if group["form"] == "stable" or not can_inspect(*grads):
            return
        bound = 1 + float(group["momentum"])
        for p, g in zip(params, grads, strict=True):
            largest = float(_erase(group) * _spectral(g, group))
            if largest > bound:
                message = (
                    f"erase |g|^2 = {largest:.3g} for {name_of(group, p)}, and form 'hope' grows beyond 1 + momentum = "
                    f"{bound:.3g}; lower erase, clip gradients, or use form 'stable'"
                )
                if group["beyond"] == "raise":
                    raise ConfigError(message)
                warn(message, StabilityWarning)

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Erases, adds, and moves the weights."""
        held = [state[HELD] for state in states]
        bulk = Bulk(group, held)
        grads = [g.to(m.dtype) for g, m in zip(grads, held, strict=True)]
        erased = [self._erased(group, m, g) for m, g in zip(held, grads, strict=True)]
        held = bulk.add(bulk.decay(held, bulk.number(group["momentum"])), grads)
        held = bulk.add(held, erased, -1)
        updates = [orthogonalised(m, group) for m in held]
        bulk.move(params, updates, bulk.number(group["lr"]), group["weight_decay"])
        put(group, states, HELD, held)

    def _erased(self, group: Group, held: Tensor, grad: Tensor) -> Tensor:
        """What the gradient takes out of the momentum."""
        m, g = (as_matrix(x, group["matrix"]) for x in (held, grad))
        erase, stable = _erase(group), group["form"] == "stable"
        rows = group["reading"] == "rows"
        g, size = tamed(g, -1 if rows else (-2, -1), g.dtype)
        weight = erase * size * size
        square = (g * g).sum(-1, keepdim=True) if rows else (g * g).sum()
        if group["reading"] == "scalar":
            momentum = torch.as_tensor(group["momentum"]).to(square)
            factor = weight * square
            out = (torch.minimum(factor, momentum) if stable else factor) * m
        else:
            c = weight
            if stable:
                weight = weight.clamp(max=torch.finfo(g.dtype).max ** 0.75)  # c is at its limit
                c = weight / (1 + weight * square)
            if rows:
                out = c * (m * g).sum(-1, keepdim=True) * g
            elif len(g) > g.shape[-1]:
                out = m @ (c * (g.mT @ g))
            else:
                out = (c * (m @ g.mT)) @ g
        return out.reshape(held.shape)


def _erase(group: Group) -> Any:
    return group["lr"] if group["erase"] == "lr" else group["erase"]


def _spectral(grad: Tensor, group: Group) -> Tensor:
    """The largest eigenvalue of what the bracket subtracts, over erase."""
    g = as_matrix(grad, group["matrix"]).to(torch.promote_types(grad.dtype, torch.float32))
    if group["reading"] == "matrix":
        return torch.linalg.matrix_norm(g, 2).square()
    square = (g * g).sum(-1)
    return square.max() if group["reading"] == "rows" else square.sum()
