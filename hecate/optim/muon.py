"""Orthogonalised updates: the Newton-Schulz iteration of the memories, Muon, and M3 on two time scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm import Algorithm, NewtonSchulz
from hecate.algorithm.momenta import POLYNOMIALS, Coefficients, polynomials, too_many_steps
from hecate.checks import Count, expect_choice
from hecate.errors import ConfigError
from hecate.optim.base import Group, MatrixOptimizer, MatrixView, NonNegative, OptimizerKind, Positive, Share, name_of
from hecate.optim.tensors import Bulk, State, as_matrix, by_group, tamed, together

MOMENTUM = "momentum"
FAST, SLOW, UPDATE, WINDOW, SQUARE, STEP = "fast", "slow", "slow_update", "slow_window", "square", "step"


def newton_schulz(matrix: Tensor, steps: tuple[Coefficients, ...], eps: float, dtype: Any = None) -> Tensor:
    """NS(U) `[..., r, c]`: singular values of U / max(|U|_F, eps) towards 1. [OPT-ORTH-D1]

    Zero stays zero. `steps` has the coefficients of each step; `dtype` is that of the iteration, by default the
    matrix's own. It takes whole matrices: on the rows of a shard it would be another algorithm.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    dtype = dtype or matrix.dtype
    x = tamed(matrix, (-2, -1), dtype)[0].to(dtype)
    x = x.mT if tall else x
    # One matrix takes its norm as `torch.optim.Muon` does, bit for bit.
    length = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / length.clamp(min=eps)
    fused = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in steps:
        gram = x @ x.mT
        x = fused(x, fused(gram, gram, gram, beta=b, alpha=c) if c else b * gram, x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


def settings(option: bool | Mapping[str, Any] | Algorithm | None) -> dict[str, Any] | None:
    """An option `orthogonalize` as plain values: None, or the fields of `NewtonSchulz`."""
    if option is None or option is False:
        return None
    if not (option is True or isinstance(option, Mapping | Algorithm)):
        raise ConfigError(f"orthogonalize must be a bool or fields of NewtonSchulz, got {option!r}")
    algorithm = NewtonSchulz(**({} if option is True else dict(option)))
    for name in ("lr", "momentum"):
        if getattr(algorithm, name) != NewtonSchulz.model_fields[name].default:
            raise ConfigError(f"orthogonalize has no {name}, got {getattr(algorithm, name)}; set the optimiser's own")
    return algorithm.model_dump()


def orthogonalised(u: Tensor, group: Group) -> Tensor:
    """NS of u's matrix by a group's `orthogonalize`, with `rescale` at the matrix's length; u itself without it."""
    options = group["orthogonalize"]
    if not options:
        return u
    matrix = as_matrix(u, group["matrix"])
    orthogonal = newton_schulz(matrix, polynomials(options["polynomial"], options["steps"]), options["eps"])
    if options["rescale"]:
        small, size = tamed(matrix, (-2, -1), matrix.dtype)
        orthogonal = orthogonal * (size * (small.norm() / math.sqrt(min(matrix.shape))))
    return orthogonal.reshape(u.shape)


class SpectralOptimizer(MatrixOptimizer):
    """An optimiser of whole matrices, whose steps `muon_steps` makes and `ratio` scales."""

    class Options(OptimizerKind):
        ns_coefficients: Literal["quintic", "cubic", "schedule"] = "quintic"
        ns_steps: int = Field(5, ge=1, le=99)
        ns_dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
        eps: Positive = 1e-7
        adjust_lr_fn: Literal["original", "match_rms_adamw", "none"] = "original"
        matrix: MatrixView = "flatten"

    class Extras(MatrixOptimizer.Extras):
        ns_coefficients: Any = "quintic"

    def check(self, group: Group) -> None:
        if isinstance(group["ns_dtype"], torch.dtype):
            group["ns_dtype"] = str(group["ns_dtype"]).removeprefix("torch.")
        group["adjust_lr_fn"] = group["adjust_lr_fn"] or "original"
        super().check(group)
        option = group["ns_coefficients"]
        numbers = [x for x in option if isinstance(x, int | float)] if isinstance(option, tuple | list) else []
        if isinstance(option, str):
            expect_choice(option, "ns_coefficients", tuple(POLYNOMIALS))
            if (beyond := too_many_steps(option, group["ns_steps"])) is not None:
                raise ConfigError(f"ns_steps: {beyond}")
        elif len(numbers) != 3 or len(option) != 3 or not all(map(math.isfinite, numbers)):
            raise ConfigError(f"ns_coefficients must be three numbers or one of {list(POLYNOMIALS)}, got {option}")
        if not group["eps"]:
            raise ConfigError("eps must be above 0: a zero matrix is divided by it")


def muon_steps(updates: list[Tensor], group: Group) -> list[Tensor]:
    """NS of each update's matrix by a group's `ns_coefficients`, `ns_steps`, `eps` and `ns_dtype`."""
    matrices = [as_matrix(u, group["matrix"]) for u in updates]
    coefficients = group["ns_coefficients"]
    count = group["ns_steps"]
    steps = polynomials(coefficients, count) if isinstance(coefficients, str) else (tuple(coefficients),) * count
    dtype = getattr(torch, group["ns_dtype"]) if group["ns_dtype"] else None
    arguments = steps, group["eps"], dtype

    def joined(members: list[int]) -> Iterable[Tensor]:
        if len(members) == 1:
            return [newton_schulz(matrices[members[0]], *arguments)]
        return newton_schulz(torch.stack([matrices[i] for i in members]), *arguments)

    orthogonal = by_group(together(matrices, group), joined)
    return [x.reshape(u.shape) for x, u in zip(orthogonal, updates, strict=True)]


def ratio(u: Tensor, group: Group) -> float:
    """Factor of lr by `adjust_lr_fn`: sqrt(max(1, rows / columns)), 0.2 sqrt(max(rows, columns)), or 1."""
    rows, columns = as_matrix(u, group["matrix"]).shape
    if group["adjust_lr_fn"] == "original":
        return math.sqrt(max(1, rows / max(1, columns)))
    return 0.2 * math.sqrt(max(rows, columns)) if group["adjust_lr_fn"] == "match_rms_adamw" else 1.0


class Muon(SpectralOptimizer):
    """muon: m <- momentum m + (1 - momentum) g, w <- (1 - lr weight_decay) w - lr a NS(u).

    u is m, or with `nesterov` momentum m + (1 - momentum) g. NS pushes the singular values of u's matrix towards 1, so
    that a step has about the same length along every direction. a, by `adjust_lr_fn`: `original` sqrt(max(1, rows /
    columns)), `match_rms_adamw` 0.2 sqrt(max(rows, columns)), `none` 1. With `ns_dtype="bfloat16"` and
    `state_dtype="parameter"` this is `torch.optim.Muon`, bit for bit on matrices of 2^14 numbers or more, or with
    `foreach=False`; the default iterates in the dtype of the state, float32 or better.

    Shapes: see `MatrixOptimizer`; parameters of fewer than 2 dimensions are refused.
    Cost: ns_steps x 3 products of min(r, c)^2 max(r, c). Sharded parameters are gathered.
    References: Muon (Jordan et al., 2024); Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 42.
    [OPT-MUON-D1]
    """

    class Options(SpectralOptimizer.Options):
        momentum: Share = 0.95
        nesterov: bool = True

    class Extras(SpectralOptimizer.Extras):
        weight_decay: NonNegative = 0.1

    held = (MOMENTUM,)
    positional = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")

    def check(self, group: Group) -> None:
        super().check(group)
        for p in group["params"]:
            if p.ndim < 2:
                cure = "give it a group of AdamW, or use M3, which has a rule for vectors"
                raise ConfigError(f"Muon orthogonalises matrices, {name_of(group, p)} is none; {cure}")

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        momenta = [state[MOMENTUM] for state in states]
        bulk = Bulk(group, momenta)
        lr, momentum = bulk.number(group["lr"]), bulk.number(group["momentum"])
        grads = [g.to(m.dtype) for g, m in zip(grads, momenta, strict=True)]
        momenta = ahead = bulk.lerp(momenta, grads, 1 - momentum)
        if group["nesterov"]:
            ahead = [g.lerp(m, momentum) for g, m in zip(grads, momenta, strict=True)]
        ratios = [ratio(u, group) for u in ahead]
        bulk.move(params, muon_steps(ahead, group), lr, group["weight_decay"], ratios=ratios)
        bulk.put(states, MOMENTUM, momenta)


class M3(SpectralOptimizer):
    """m3: w <- (1 - lr weight_decay) w - lr a (NS(m1) + slow NS(m2)), m2 moved once a slow_period.

    accumulate: `ema_mean`, m1 <- momentum m1 + (1 - momentum) g and at the end of a period m2 <- slow_momentum m2 + (1
    - slow_momentum) s with s the mean of its `slow_period` gradients; `ema_last`, the same with s the last of them;
    `sum`, as printed, without decay: m1 <- m1 + momentum g, m2 <- m2 + slow_momentum (sum of a period's), v <- v +
    retain g^2. A window ends with the present gradient. slow_from: `close`, a new m2 acts from the step that closes its
    period, in which it is updated before m1; `next`, from the step after that, as Algorithm 1 prints it.
    second_moment: `none`; `before`, NS(m / (sqrt(v) + eps)); `after`, as printed, (NS(m1) + slow NS(m2)) / (sqrt(v) +
    eps), which gives up the equal singular values that NS made. v <- retain v + (1 - retain) g^2; averages are divided
    by 1 - retain^t where their scale matters.
    vectors: parameters of fewer than 2 dimensions take `adam`, (m1 + slow m2) / (sqrt(v) + eps), or `row`, NS of one
    row: its direction.
    a by `adjust_lr_fn`: see `Muon`. With slow=0 this is `Muon` with nesterov=False, bit for bit.

    Shapes: see `MatrixOptimizer`. State: fast, slow, slow_update (NS of slow), step; slow_window unless `ema_last`;
    square where v is used.
    Cost: 1 + 1 / slow_period times that of `Muon`. Sharded parameters are gathered.
    Warning: `sum` never forgets a gradient and swings about a minimum like an undamped spring.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Algorithm 1. [OPT-M3-D1]
    """

    class Options(SpectralOptimizer.Options):
        momentum: Share = 0.95
        slow_momentum: Share = 0.9
        slow: NonNegative = 0.5
        slow_period: Count = Field(8, ge=1)
        slow_from: Literal["close", "next"] = "close"
        accumulate: Literal["sum", "ema_mean", "ema_last"] = "ema_mean"
        second_moment: Literal["none", "before", "after"] = "none"
        retain: Share = 0.99

    class Extras(SpectralOptimizer.Extras):
        vectors: Literal["adam", "row"] = "adam"

    positional = ("lr", "momentum", "slow_momentum", "slow", "slow_period")
    structural = (*MatrixOptimizer.structural, "accumulate", "second_moment", "vectors", "slow_period")

    def check(self, group: Group) -> None:
        super().check(group)
        first = next((p for p in group["params"] if _keeps_square(p, group)), None)
        if first is not None and group["accumulate"] != "sum" and group["retain"] == 1:
            raise ConfigError(f"retain 1 never writes the second moment of {name_of(group, first)}; choose one below 1")

    def fresh_state(self, p: Tensor, group: Group) -> State:
        names = [FAST, SLOW, UPDATE]
        names += [WINDOW] if group["accumulate"] != "ema_last" else []
        names += [SQUARE] if _keeps_square(p, group) else []
        state = {name: self.zeros(p, group) for name in names}
        return state | {STEP: torch.zeros((), dtype=torch.int64, device="cpu")}

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        bulk = Bulk(group, [states[0][FAST]])
        lr, slow = bulk.number(group["lr"]), bulk.number(group["slow"])
        grads = [g.to(state[FAST].dtype) for g, state in zip(grads, states, strict=True)]
        bulk.put(states, STEP, [state[STEP] + 1 for state in states])
        if squared := [(g, state) for g, state in zip(grads, states, strict=True) if SQUARE in state]:
            # An infinite square would make the average NaN at the next step.
            squares = [(g * g).clamp(max=torch.finfo(g.dtype).max) for g, _ in squared]
            self._write(group, bulk, [state for _, state in squared], SQUARE, squares, group["retain"])
        if group["slow_from"] == "close":
            self._slow(group, bulk, grads, states)
        self._write(group, bulk, states, FAST, grads, group["momentum"])
        fast = self._outputs(group, states, FAST, [int(state[STEP]) for state in states])
        updates = bulk.sum(fast, [state[UPDATE] for state in states], slow)
        if group["slow_from"] == "next":
            self._slow(group, bulk, grads, states)
        after = group["second_moment"] == "after"
        updates = [
            u / self._root(group, state) if after or _as_vector(u, group) else u
            for u, state in zip(updates, states, strict=True)
        ]
        ratios = [1.0 if _as_vector(p, group) else ratio(p, group) for p in params]
        bulk.move(params, updates, lr, group["weight_decay"], ratios=ratios)

    def _write(self, group: Group, bulk: Bulk, states: list[State], key: str, ys: list[Tensor], rate: Any) -> None:
        """x <- x + rate y (`sum`), else x <- rate x + (1 - rate) y."""
        xs, rate = [state[key] for state in states], bulk.number(rate)
        summed = group["accumulate"] == "sum"
        bulk.put(states, key, bulk.add(xs, ys, rate) if summed else bulk.lerp(xs, ys, 1 - rate))

    def _slow(self, group: Group, bulk: Bulk, grads: list[Tensor], states: list[State]) -> None:
        """Adds to the window; at its end moves the slow average and orthogonalises it."""
        period, how = group["slow_period"], group["accumulate"]
        windows = grads
        if how != "ema_last":
            windows = bulk.add([state[WINDOW] for state in states], grads)
            bulk.put(states, WINDOW, windows)
        due = [i for i, state in enumerate(states) if int(state[STEP]) % period == 0]
        if not due:
            return
        ended = [states[i] for i in due]
        written = [windows[i] / period if how == "ema_mean" else windows[i] for i in due]
        self._write(group, bulk, ended, SLOW, written, group["slow_momentum"])
        counts = [int(state[STEP]) // period for state in ended]
        bulk.put(ended, UPDATE, self._outputs(group, ended, SLOW, counts))
        if how != "ema_last":
            bulk.put(ended, WINDOW, [torch.zeros_like(state[WINDOW]) for state in ended])

    def _outputs(self, group: Group, states: list[State], key: str, counts: list[int]) -> list[Tensor]:
        """Contributions of an average to the updates, after its `counts`-th write."""
        rate = group["momentum" if key == FAST else "slow_momentum"]
        outputs = [state[key] for state in states]
        for i, (state, count) in enumerate(zip(states, counts, strict=True)):
            if _as_vector(outputs[i], group):
                outputs[i] = outputs[i] / (1 if group["accumulate"] == "sum" or rate == 1 else 1 - rate**count)
            elif group["second_moment"] == "before":
                outputs[i] = outputs[i] / self._root(group, state)
        matrices = [i for i, x in enumerate(outputs) if not _as_vector(x, group)]
        for i, u in zip(matrices, muon_steps([outputs[i] for i in matrices], group), strict=True):
            outputs[i] = u
        return outputs

    def _root(self, group: Group, state: State) -> Tensor:
        """sqrt(v) + eps, v corrected for its start at 0."""
        summed = group["accumulate"] == "sum"
        scale = 1 if summed else 1 - group["retain"] ** int(state[STEP])
        return (state[SQUARE] / scale).sqrt() + group["eps"]


def _as_vector(p: Tensor, group: Group) -> bool:
    """True if a parameter takes the update rule for vectors."""
    return p.ndim < 2 and group["vectors"] == "adam"


def _keeps_square(p: Tensor, group: Group) -> bool:
    return _as_vector(p, group) or group["second_moment"] != "none"
