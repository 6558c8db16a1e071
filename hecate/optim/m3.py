"""Orthogonalised momentum on two time scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hecate.errors import ConfigError
from hecate.optim.base import MatrixOptimizer, State, put, zeros_like_state
from hecate.optim.options import (
    Group,
    MatrixView,
    OnNonfinite,
    StateDtype,
    check_choice,
    check_count,
    common_options,
    name_of,
)
from hecate.optim.orthogonal import AdjustLr, Polynomial, adjustment, check_muon_steps, muon_steps
from hecate.optim.tensors import Bulk, as_matrix

FAST, SLOW, UPDATE, WINDOW, SQUARE, STEP = (
    "fast", "slow", "slow_update", "slow_window", "square", "step",
)  # fmt: skip


class M3(MatrixOptimizer):
    """m3: w <- (1 - lr weight_decay) w - lr a (NS(m1) + slow NS(m2)), m2 moved once a slow_period.

    accumulate: `ema_mean`, m1 <- momentum m1 + (1 - momentum) g and at the end of a period m2 <- slow_momentum m2 + (1
    - slow_momentum) s with s the mean of its gradients, `slow_period` many; `ema_last`, the same with s the last one
    alone; `sum`, as printed, without decay: m1 <- m1 + momentum g, m2 <- m2 + slow_momentum (sum of a period's), v <- v
    + retain g^2. At a
    period's end m2 is moved before m1, by a window that ends with the present gradient.
    second_moment: `none`; `before`, NS(m / (sqrt(v) + eps)); `after`, as printed, (NS(m1) + slow NS(m2)) / (sqrt(v) +
    eps), which gives up the equal singular values that NS made. v <- retain v + (1 - retain) g^2; averages are divided
    by 1 - retain^t where their scale matters.
    vectors: parameters of fewer than 2 dimensions take `adam`, (m1 + slow m2) / (sqrt(v) + eps), or `row`, NS of one
    row: its direction.
    a by `adjust_lr_fn`: see `Muon`, which this is with slow=0 (nesterov=False), bit for bit.

    Shapes: see `MatrixOptimizer`. State: fast, slow, slow_update (NS of slow), step; slow_window unless `ema_last`;
    square where v is used.
    Cost: 1 + 1 / slow_period times that of `Muon`. Sharded parameters are gathered.
    Warning: `sum` never forgets a gradient and swings about a minimum like an undamped spring.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Algorithm 1. [OPT-M3-D1]"""

    structural: ClassVar[tuple[str, ...]] = (
        *MatrixOptimizer.structural, "accumulate", "second_moment", "vectors", "slow_period",
    )  # fmt: skip

    numbers: ClassVar[Mapping[str, float]] = {
        **MatrixOptimizer.numbers, "momentum": 1, "slow_momentum": 1, "retain": 1, "slow": math.inf,
    }  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float | Tensor = 0.95,
        slow_momentum: float | Tensor = 0.9,
        slow: float | Tensor = 0.5,
        slow_period: int = 8,
        *,
        accumulate: Literal["sum", "ema_mean", "ema_last"] = "ema_mean",
        second_moment: Literal["none", "before", "after"] = "none",
        vectors: Literal["adam", "row"] = "adam",
        retain: float = 0.99,
        weight_decay: float = 0.0,
        ns_coefficients: Polynomial = "quintic",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = "original",
        ns_dtype: str | torch.dtype | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        on_nonfinite: OnNonfinite = "raise",
        state_dtype: StateDtype = "full",
        matrix: MatrixView = "flatten",
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, common_options(**locals()))

    def check(self, group: Group) -> None:
        """Refuses options that mean nothing."""
        super().check(group)
        check_count(group, "slow_period")
        check_choice(group, "accumulate", ("sum", "ema_mean", "ema_last"))
        check_choice(group, "second_moment", ("none", "before", "after"))
        check_choice(group, "vectors", ("adam", "row"))
        check_muon_steps(group)
        scaled = [p for p in group["params"] if _keeps_square(p, group)]
        if scaled and group["accumulate"] != "sum" and group["retain"] == 1:
            raise ConfigError(
                f"retain 1 never writes the second moment of {name_of(group, scaled[0])}; choose one below 1"
            )

    def gathers(self, group: Group, p: Tensor) -> bool:
        """Always: the whole matrix has a part in every row."""
        return True

    def fresh_state(self, p: Tensor, group: Group) -> State:
        """Zero averages and a step of 0."""
        names = [FAST, SLOW, UPDATE]
        names += [WINDOW] if group["accumulate"] != "ema_last" else []
        names += [SQUARE] if _keeps_square(p, group) else []
        state = {name: zeros_like_state(p, group) for name in names}
        return state | {STEP: torch.zeros((), dtype=torch.int64)}

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Moves both averages, orthogonalises what moved, and moves the weights."""
        bulk = Bulk(group["foreach"], group["differentiable"], states[0][FAST].dtype)
        lr, slow = bulk.number(group["lr"]), bulk.number(group["slow"])
        grads = [g.to(state[FAST].dtype) for g, state in zip(grads, states, strict=True)]
        for state in states:
            put(group, state, STEP, state[STEP] + 1)
        self._second(group, bulk, grads, states)
        self._slow(group, bulk, grads, states)
        self._write(group, bulk, states, FAST, grads, group["momentum"])
        fast = self._outputs(group, states, FAST, [int(state[STEP]) for state in states])
        updates = bulk.sum(fast, [state[UPDATE] for state in states], slow)
        after = group["second_moment"] == "after"
        updates = [
            u / self._root(group, state) if after or _as_vector(u, group) else u
            for u, state in zip(updates, states, strict=True)
        ]
        ratios = [_ratio(p, group) for p in params]
        bulk.move(params, updates, lr, group["weight_decay"], ratios)

    def _write(self, group: Group, bulk: Bulk, states: list[State], key: str, ys: list[Tensor], rate: Any) -> None:
        """x <- x + rate y (`sum`), else x <- rate x + (1 - rate) y."""
        xs, rate = [state[key] for state in states], bulk.number(rate)
        summed = group["accumulate"] == "sum"
        for state, x in zip(states, bulk.add(xs, ys, rate) if summed else bulk.lerp(xs, ys, 1 - rate), strict=True):
            put(group, state, key, x)

    def _second(self, group: Group, bulk: Bulk, grads: list[Tensor], states: list[State]) -> None:
        held = [(_square(g), state) for g, state in zip(grads, states, strict=True) if SQUARE in state]
        if held:
            squares, kept = [s for s, _ in held], [state for _, state in held]
            self._write(group, bulk, kept, SQUARE, squares, group["retain"])

    def _slow(self, group: Group, bulk: Bulk, grads: list[Tensor], states: list[State]) -> None:
        """Adds to the window; at its end moves the slow average and orthogonalises it."""
        period, how = group["slow_period"], group["accumulate"]
        windows = grads
        if how != "ema_last":
            windows = bulk.add([state[WINDOW] for state in states], grads)
            for state, window in zip(states, windows, strict=True):
                put(group, state, WINDOW, window)
        due = [i for i, state in enumerate(states) if int(state[STEP]) % period == 0]
        if not due:
            return
        ended = [states[i] for i in due]
        written = [windows[i] / period if how == "ema_mean" else windows[i] for i in due]
        self._write(group, bulk, ended, SLOW, written, group["slow_momentum"])
        counts = [int(state[STEP]) // period for state in ended]
        for state, u in zip(ended, self._outputs(group, ended, SLOW, counts), strict=True):
            put(group, state, UPDATE, u)
            if how != "ema_last":
                put(group, state, WINDOW, torch.zeros_like(state[WINDOW]))

    def _outputs(self, group: Group, states: list[State], key: str, counts: list[int]) -> list[Tensor]:
        """What an average adds to the update, after its `counts`-th write."""
        found, inputs = dict[int, Tensor](), dict[int, Tensor]()
        rate = group["momentum" if key == FAST else "slow_momentum"]
        for i, (state, count) in enumerate(zip(states, counts, strict=True)):
            held = state[key]
            if _as_vector(held, group):
                scale = 1 if group["accumulate"] == "sum" or rate == 1 else 1 - rate**count
                found[i] = held / scale
            else:
                if group["second_moment"] == "before":
                    held = held / self._root(group, state)
                inputs[i] = as_matrix(held, group["matrix"])
        for i, u in zip(inputs, muon_steps(list(inputs.values()), group), strict=True):
            found[i] = u.reshape(states[i][key].shape)
        return [found[i] for i in range(len(states))]

    def _root(self, group: Group, state: State) -> Tensor:
        """sqrt(v) + eps, v corrected for its start at 0."""
        summed = group["accumulate"] == "sum"
        scale = 1 if summed else 1 - group["retain"] ** int(state[STEP])
        return (state[SQUARE] / scale).sqrt() + group["eps"]


def _square(g: Tensor) -> Tensor:
    """g^2, at most the largest number: an average with infinity would be NaN from then on."""
    return (g * g).clamp(max=torch.finfo(g.dtype).max)


def _as_vector(p: Tensor, group: Group) -> bool:
    """Whether a parameter takes the rule for vectors."""
    return p.ndim < 2 and group["vectors"] == "adam"


def _ratio(p: Tensor, group: Group) -> float:
    if _as_vector(p, group):
        return 1.0
    return adjustment(group["adjust_lr_fn"], *as_matrix(p, group["matrix"]).shape)


def _keeps_square(p: Tensor, group: Group) -> bool:
    return _as_vector(p, group) or group["second_moment"] != "none"
