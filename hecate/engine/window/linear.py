"""A block whose steps are linear in the gradients of a window: one triangular system."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.engine.coefficients import coefficients, faced_states
from hecate.engine.parallel import implicit_gradients
from hecate.engine.window.rows import Leaves, Outcome, Rows, Settings, kernels_of, left_behind

SIZE = 64


def linear_block(
    settings: Settings, rows: Rows, masks: tuple[Tensor | None, Tensor | None], leaves: Leaves, found: None = None
) -> tuple[Outcome, None]:
    """One block of n tokens with W writes each, from what does not need a state's width.

    With kappa the kernel and F the coefficients of `hecate.engine.coefficients` of the states that the gradients face,
    the errors e of token t's write a at row r(t, a) solve

        e_(t,a) = sum_b F_b[t] B_b phi_r(t,a) - sum_(s,c) F[t,s] lr_s w_c kappa(r(t,a), r(s,c)) u_(s,c) - v_r(t,a)

    over s < t. For l2 u = e, elsewhere u is the gradient of the bias at the prediction: n W unknowns of width V.
    """
    products, x_k, x_q, v, values, lr, retain, momentum = leaves
    config, (write, reset), count, width = settings.config, masks, v.shape[1], v.shape[-1]
    inner = settings.form.inner.kernel_form()
    after, before, slot = coefficients(config, retain, momentum, write, reset, inner)
    faced = faced_states(config, after, before, retain, write)
    states = after if config.read == "after" else before
    kernels = kernels_of(settings, products, x_k, x_q, width)
    ages = len(settings.form.weights)
    step = (lr.unsqueeze(-1) * rows.live).flatten(1)
    target = rows.picked(v if values is None else torch.cat((values, v), 1))

    errors = -target
    if not config.forms.target:
        base: Tensor = sum(  # type: ignore[assignment]
            weight.repeat_interleave(ages, 1).unsqueeze(-1) * rows.picked(held)
            for weight, held in zip(faced.bases, kernels.facing, strict=True)
        )
        cross = rows.picked(rows.picked(kernels.pairs).mT).mT
        seen = faced.writes.repeat_interleave(ages, 1).repeat_interleave(ages, 2)
        lower = seen * cross * step.unsqueeze(1)
        if config.forms.error:
            right = (base - target).mT
            errors = torch.linalg.solve_triangular(lower.mT, right, upper=True, left=False, unitriangular=True).mT
        else:
            errors = implicit_gradients(config.bias, base, lower, target)
    moves = -step.unsqueeze(-1) * errors

    attend = rows.picked(kernels.asked.mT).mT * states.writes.repeat_interleave(ages, 2)
    y = attend @ moves
    for weight, held in zip(states.bases, kernels.read, strict=True):
        y = y + weight.unsqueeze(-1) * held

    def onto(weights: Tensor) -> Tensor:
        total = rows.summed(weights.repeat_interleave(ages, 1).unsqueeze(-1) * moves, settings.kept + count)
        return (total if kernels.lengths is None else kernels.lengths * total).mT

    keys, values = left_behind(rows, kernels.lengths, values, v)
    outcome = Outcome(
        y,
        onto(after.last),
        None if slot is None else onto(slot.last),
        keys,
        torch.stack([weight[..., -1] for weight in after.bases], -1),
        None if slot is None else slot.bases[0][..., -1],
        values,
    )
    return outcome, None
