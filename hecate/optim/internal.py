"""What an optimiser learns by an objective of its own: the lift, and the parameters of phi.

Both read gradients as data: the lift and phi shall tell the gradient back, P phi~(g) = g. They live in the state of
each parameter, and a gradient of zero leaves them as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.optim.lift import RowMap
from hecate.optim.tensors import tamed
from hecate.phi import Params

GRAM, CROSS, PHI = "lift_gram", "lift_cross", "phi."


def fresh_lift(d_phi: int, width: int, device: torch.device) -> dict[str, Tensor]:
    """The statistics of a learned lift before any gradient, in float64."""
    zeros = {GRAM: (d_phi, d_phi), CROSS: (d_phi, width)}
    return {k: torch.zeros(s, dtype=torch.float64, device=device) for k, s in zeros.items()}


def learn_lift(state: dict[str, Tensor], features: Tensor, rows: Tensor, forget: float, ridge: float) -> Tensor:
    """P = argmin sum_s forget^(t-s) |phi~(g_s) P - g_s|^2 + ridge tr(A)/d_phi |P|^2, `[d_phi, c]`.

    Recursive least squares by its normal equations: A <- forget A + Phi^T Phi, B <- forget B + Phi^T G, P = (A + ridge
    tr(A)/d_phi)^(-1) B. A step whose features are all zero forgets nothing. [OPT-LIFT-D4]
    """
    gram, cross = state[GRAM], state[CROSS]
    features, rows = features.to(gram.dtype), rows.to(gram.dtype)
    kept = torch.where((features != 0).any(), forget, 1.0)
    gram.mul_(kept).add_(features.mT @ features)
    cross.mul_(kept).add_(features.mT @ rows)
    size = gram.shape[0]
    floor = torch.finfo(gram.dtype).tiny
    damping = ridge * gram.diagonal().sum() / size + floor
    return torch.linalg.solve(gram + damping * torch.eye(size).to(gram), cross)


def fresh_phi(params: Params) -> dict[str, Tensor]:
    """A parameter's own copy of phi's learned parameters."""
    return {f"{PHI}{name}": value.clone() for name, value in params["learned"].items()}


def own_phi(row_map: RowMap, state: dict[str, Tensor], like: Tensor) -> RowMap:
    """The map with the learned parameters that this state holds."""
    learned = {name.removeprefix(PHI): value for name, value in state.items() if name.startswith(PHI)}
    return row_map.with_params({**row_map.params, "learned": learned}, like)


def learn_phi(row_map: RowMap, state: dict[str, Tensor], g: Tensor, lr: float) -> None:
    """One step of phi's learned parameters down |P phi~(g) - g|^2 / (2 |g|^2), P held fixed.

    [OPT-PHI-D4]
    """
    target, size = tamed(row_map.target(g), (-2, -1), g.dtype)
    power = target.square().sum()
    power = torch.where(power > 0, power, 1)

    def loss(learned: dict[str, Tensor]) -> Tensor:
        told = row_map.with_params({**row_map.params, "learned": learned}, g)(g)
        return (told / size - target).square().sum() / (2 * power)

    grads = torch.func.grad(loss)(row_map.params["learned"])
    for name, grad in grads.items():
        state[f"{PHI}{name}"].sub_(grad, alpha=lr)
