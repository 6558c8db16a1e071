"""Momentum that accumulates features of the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hecate.errors import ConfigError
from hecate.optim.base import State, zeros_like_state
from hecate.optim.internal import fresh_lift, fresh_phi
from hecate.optim.lift import LIFTS, Call, Scale, choose, choose_scale, refuse_lift
from hecate.optim.options import (
    Group,
    MatrixView,
    OnNonfinite,
    StateDtype,
    check_choice,
    check_number,
    check_used,
    common_options,
    name_of,
)
from hecate.optim.orthogonal import settings
from hecate.optim.passes import Numberwise, Rowwise, acts_on_numbers, move, number_by_number
from hecate.optim.phi_rows import PhiOptimizer, map_of
from hecate.optim.precondition import COLUMNS, ROWS, SQUARE, WIDEST
from hecate.optim.sharding import is_spread, like, local, rows_are_whole
from hecate.optim.tensors import BLOCK, CACHE, Bulk, as_matrix, blocks, outline
from hecate.phi import FeatureMap, Identity, Params

HELD = "momentum"
PRECONDITIONED = ("precondition", ("diagonal", "kronecker"))
ONLY_WITH = {
    "forget": ("lift", ("learned",)),
    "ridge": ("lift", ("pinv", "learned")),
    "retain": PRECONDITIONED,
    "eps": PRECONDITIONED,
}


class PhiMomentum(PhiOptimizer):
    """phi_momentum: m <- momentum m + P phi~(g), w <- w - lr m.

    Momentum that remembers features of gradients instead of gradients. phi is any feature map of the memories, applied
    to the rows of the gradient's matrix; phi~ is phi centred, phi(g) - phi(0), or odd-lifted, (phi(g) - phi(-g)) / 2,
    so that a gradient of zero moves nothing; the lift P takes features back. With `Identity` this is `torch.optim.SGD`
    with momentum, bit for bit; in half precision with `state_dtype="parameter"`, with weight_decay with
    `decoupled=False`. `form="hope"` is m <- momentum m - lr P phi~(g), w <- w + m, as printed; both agree while
    lr is constant.

    lift: `identity` (equal widths); `vjp`, J^T phi~(g) with the map's own derivative; `pinv`, a linear decoder fitted
    once to Gaussian rows; `learned`, the same fitted to the gradients seen, discounted by `forget`; `prefix`, a
    polynomial's features of degree 1; or a function of (features, rows). `auto` takes identity where components keep
    their sign, pinv for linear, random_fourier and what forgets lengths (normalise), else vjp; the group then says
    which.
    input_scale: what phi gets. `restored` gives it rows at length 1, multiplies features by the row's length, and
    divides what identity and vjp make of them by their gain on Gaussian rows: updates are about as long as gradients,
    at any length. It warns where they do not descend. `rms`
    and `unit` restore nothing: steps have one length for all gradients. `none` leaves rows as they are. `auto` is
    restored, but none for maps of degree 1, for identity through bounded slopes,
    and for literal phi.
    space: where m lives. `phi` holds `[rows, d_phi]` and lifts what it holds; with vjp by the Jacobian at the present
    gradient, which is another rule than `weight`.
    precondition: `diagonal` u / (sqrt(v) + eps) or `kronecker` L^(-1/4) u R^(-1/4), of the lifted update, statistics
    kept by `retain`.
    orthogonalize: Newton-Schulz on what moves the weights; True, or fields of its algorithm.
    guard: rows whose update climbs, <g, u> < 0: `skip` leaves them out, `flip` turns them.
    phi_lr: learned parameters of phi descend |P phi~(g) - g|^2 / (2 |g|^2), per parameter.
    odd: None odd-lifts what centring would cut in half (relu and its kin), else centres.
    seed: of frozen draws and of the decoder's calibration; they are made again, not saved.
    decoupled: weight_decay shrinks weights by lr weight_decay; False adds it to gradients, as SGD.
    dampening: factor 1 - dampening on what is written, from the first step on.

    Shapes: see `MatrixOptimizer`; state per parameter: momentum like it (or `[rows, d_phi]`).
    Cost: identity and componentwise maps are memory-bound; others O(numel d_phi) a step. Sharded parameters are
    gathered only where rows are cut, or phi_lr, a learned lift, kronecker or orthogonalize need all of them.
    Warning: with `input_scale="none"` a lift serves gradients of the lengths it was made for: vjp through bounded maps
    vanishes for long rows, pinv through random Fourier features climbs.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 51. [OPT-PHI-D1]
    """

    structural: ClassVar[tuple[str, ...]] = (*PhiOptimizer.structural, "space", "precondition")
    carried: ClassVar[tuple[str, ...]] = (*PhiOptimizer.carried, "_guarded")
    numbers: ClassVar[Mapping[str, float]] = {
        **PhiOptimizer.numbers,
        **dict.fromkeys(("momentum", "dampening", "forget", "retain"), 1),
        **dict.fromkeys(("phi_lr", "eps"), math.inf),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float | Tensor = 0.9,
        feature_map: FeatureMap | Mapping[str, Any] | str = Identity(),  # noqa: B008 - frozen
        lift: str | Call = "auto",
        center: bool = True,
        *,
        odd: bool | None = None,
        form: Literal["torch", "hope"] = "torch",
        space: Literal["weight", "phi"] = "weight",
        input_scale: Scale | Literal["auto"] = "auto",
        precondition: Literal["diagonal", "kronecker"] | None = None,
        orthogonalize: bool | Mapping[str, Any] = False,
        guard: Literal["none", "skip", "flip"] = "none",
        nesterov: bool = False,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        phi_lr: float = 0.0,
        phi_params: Mapping[int, Params] | None = None,
        forget: float = 0.99,
        ridge: float | None = None,
        max_decode_error: float = 0.8,
        retain: float = 0.99,
        eps: float = 1e-8,
        seed: int | torch.Generator = 0,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        on_nonfinite: OnNonfinite = "raise",
        state_dtype: StateDtype = "full",
        matrix: MatrixView = "flatten",
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = common_options(**locals())
        if callable(lift):
            defaults["lift"] = "callable"
        self._guarded: int | Tensor = 0
        given = dict(defaults)
        super().__init__(params, defaults, phi_params, lift if callable(lift) else None)
        check_used(type(self), given, self.param_groups, ONLY_WITH)

    @property
    def stats(self) -> dict[str, int]:
        """`guarded`: how many rows the guard has changed so far."""
        return {"guarded": int(self._guarded)}

    def check(self, group: Group) -> None:
        """Refuses options that mean nothing, or nothing together."""
        group["orthogonalize"] = settings(group["orthogonalize"])
        super().check(group)
        self._check_lift(group)
        check_choice(group, "form", ("torch", "hope"))
        check_choice(group, "space", ("weight", "phi"))
        check_choice(group, "guard", ("none", "skip", "flip"))
        check_choice(group, "precondition", (None, "diagonal", "kronecker"))
        if group["nesterov"] and group["dampening"]:
            raise ConfigError("nesterov needs dampening 0; leave one of them out")
        hope, phi = group["form"] == "hope", group["space"] == "phi"
        if hope and (group["orthogonalize"] or (phi and group["precondition"])):
            raise ConfigError(
                "form 'hope' puts lr into the momentum, and orthogonalize (or precondition after "
                "space 'phi') would divide it out again; use form 'torch'"
            )
        if phi and group["guard"] != "none":
            raise ConfigError(
                "guard judges the update of one gradient, space 'phi' has only that of all; "
                "use space 'weight' or guard 'none'"
            )
        self._check_learning(group)

    def _check_lift(self, group: Group) -> None:
        feature_map = map_of(group)
        if group["lift"] == "auto":
            group["lift"] = choose(feature_map)
        if group["input_scale"] == "auto":
            printed = not (group["center"] or group["odd"])
            group["input_scale"] = "none" if printed else choose_scale(feature_map, group["lift"])
        check_choice(group, "input_scale", ("none", "rms", "unit", "restored"))
        if group["ridge"] is None:
            group["ridge"] = 1e-6 if group["lift"] == "learned" else 0.0
        check_choice(group, "lift", LIFTS)
        check_number(group, "ridge")
        check_number(group, "max_decode_error")
        if group["lift"] == "callable" and self._call is None:
            raise ConfigError("lift 'callable' needs the function itself: pass it as lift=")
        for width in self.widths(group):
            refuse_lift(feature_map, group["lift"], width)

    def _check_learning(self, group: Group) -> None:
        drawn = [self.drawn(group, width)["learned"] for width in self.widths(group)]
        if group["phi_lr"] and drawn and not any(drawn):
            raise ConfigError(
                f"phi_lr trains learned parameters, {group['feature_map']['kind']!r} has none; leave it at 0"
            )
        inner = [
            name
            for name, used in (
                ("phi_lr", group["phi_lr"]),
                ("lift 'learned'", group["lift"] == "learned"),
                ("precondition 'kronecker'", group["precondition"] == "kronecker"),
            )
            if used
        ]
        if inner and group["differentiable"]:
            raise ConfigError(f"differentiable=True does not reach through {inner[0]}; leave it out")
        for p in group["params"]:
            sides = as_matrix(outline(p), group["matrix"]).shape
            if group["precondition"] == "kronecker" and max(sides) > WIDEST:
                raise ConfigError(
                    f"precondition 'kronecker' keeps a square factor for each side of "
                    f"{name_of(group, p)}, {list(sides)}, and stops at {WIDEST}; give it a group "
                    "with 'diagonal'"
                )

    def gathers(self, group: Group, p: Tensor) -> bool:
        """Where parts of a spread parameter do not suffice: rows cut apart, or sums over rows."""
        if not is_spread(p):
            return False
        sums = group["orthogonalize"] or group["precondition"] == "kronecker"
        if sums or group["phi_lr"] or group["lift"] == "learned":
            return True
        if group["space"] == "phi":
            return not _rows_first(p, group)
        if acts_on_numbers(group) and group["guard"] == "none":
            return False
        return not rows_are_whole(p, group["matrix"])

    def fresh_state(self, p: Tensor, group: Group) -> State:
        """Zero momentum, and what the lift, phi and the preconditioner learn."""
        state = {HELD: zeros_like_state(p, group)}
        height, width = as_matrix(outline(p), group["matrix"]).shape
        rows = local(state[HELD]).new_empty(0, width)
        d_phi = map_of(group).output_dim(width)
        row_map = self.row_map(group, rows)  # draws and calibrates now, not in a step
        if group["space"] == "phi":
            features = rows.new_zeros(height, d_phi)  # on every process, unless placed as p
            placed = _rows_first(p, group)
            state[HELD] = like(p, features[: local(p).shape[0]]) if placed else features
        if group["lift"] == "learned":
            state |= fresh_lift(d_phi, width, rows.device)
        if group["phi_lr"]:
            state |= fresh_phi(row_map.params)
        if group["precondition"] == "diagonal":
            state[SQUARE] = zeros_like_state(p, group)
        if group["precondition"] == "kronecker":
            state[ROWS], state[COLUMNS] = (rows.new_zeros(height, height), rows.new_zeros(width, width))
        return state

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Writes phi~ of the gradients into the momentum and moves the weights by it."""
        held = [state[HELD] for state in states]
        bulk = Bulk(group["foreach"], group["differentiable"], held[0].dtype)
        if number_by_number(group):
            self._by_number(group, bulk, params, grads, states)
            return
        rows = Rowwise(group, bulk, states, lambda like: self.row_map(group, like))
        held = move(group, bulk, rows, params, grads, held)
        self._guarded = self._guarded + rows.guarded
        for state, value in zip(states, held, strict=True):
            state[HELD] = value

    def _by_number(
        self, group: Group, bulk: Bulk, params: list[Tensor], grads: list[Tensor], states: list[State]
    ) -> None:
        """In blocks that stay in the cache from phi to the weights, where nothing needs a graph."""
        row_map = self.row_map(group, states[0][HELD].new_empty(0, 1))
        keys = [HELD, SQUARE] if group["precondition"] else [HELD]
        kept = [[state[key] for state in states] for key in keys]
        if bulk.foreach:
            plain = isinstance(row_map.feature_map, Identity) and len(keys) == 1
            for some, slopes, held, *rest in blocks((params, grads, *kept), BLOCK if plain else CACHE):
                numbers = Numberwise(group, bulk, row_map, rest[0] if rest else [])
                move(group, bulk, numbers, some, slopes, held)
            return
        numbers = Numberwise(group, bulk, row_map, kept[1] if kept[1:] else [])
        held = move(group, bulk, numbers, params, grads, kept[0])
        for key, values in zip(keys, (held, numbers.squares), strict=False):
            for state, value in zip(states, values, strict=True):
                state[key] = value


def _rows_first(p: Tensor, group: Group) -> bool:
    """Whether the rows of p's matrix are those of its first dimension, and none is cut."""
    first = p.ndim == 2 or (p.ndim > 2 and group["matrix"] == "flatten")
    return first and rows_are_whole(p, group["matrix"])
