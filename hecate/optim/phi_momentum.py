"""Momentum that accumulates features of the gradient: as rows, or in a matrix memory that the gradient reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import expect_choice
from hecate.errors import ConfigError, NonFiniteError
from hecate.optim.base import Group, MatrixOptimizer, MatrixView, NonNegative, OptimizerKind, Positive, Share, name_of
from hecate.optim.lift import PhiOptimizer, RowMap, Scale, by_number, learn_phi, learned_map, map_of, of_numbers
from hecate.optim.muon import MOMENTUM, orthogonalised, settings
from hecate.optim.tensors import Bulk, Pieces, State, Tensors, as_matrix, by_group, grouped, like, local, rows_are_whole
from hecate.phi import FeatureMap, Identity

LiftName = Literal["auto", "identity", "vjp", "pinv", "learned", "prefix"]
MEMORY = "memory"  # a key in a parameter's state
SQUARE, ROWS, COLUMNS = "square", "kronecker_rows", "kronecker_columns"
WIDEST = 8192  # the longest side of a matrix with kronecker factors
PRECONDITIONED = ("precondition", ("diagonal", "kronecker"))


def choose(feature_map: FeatureMap) -> LiftName:
    """Meaning of `lift="auto"`: identity if components keep their sign, pinv if features decode linearly or forget
    lengths (J_phi(x) x = 0, so that no update of vjp descends), otherwise vjp."""
    traits = feature_map.traits()
    if traits.rising == "everywhere":
        return "identity"
    return "pinv" if traits.decodes or traits.forgets_length else "vjp"


def resolve(group: Group, widths: list[int]) -> None:
    """Replaces `auto` in a group by the option it stands for; refuses a lift that the map does not allow at these row
    widths.

    input_scale becomes "none" if updates descend at gradients of any length, as with maps of degree 1 and with the lift
    identity of componentwise maps of bounded slope, or if phi is neither centred nor odd-lifted; otherwise "restored".
    """
    feature_map = map_of(group)
    traits = feature_map.traits()
    if group["lift"] == "auto":
        group["lift"] = choose(feature_map)
    lift = group["lift"]
    expect_choice(lift, "lift", ("identity", "vjp", "pinv", "learned", "prefix", "callable"))
    if group["input_scale"] == "auto":
        steady = lift == "identity" and traits.componentwise and traits.bounded_slope
        literal = not (group["center"] or group["odd"])
        group["input_scale"] = "none" if steady or traits.degree == 1 or literal else "restored"
    if group["ridge"] is None:
        group["ridge"] = 1e-6 if lift == "learned" else 0.0
    for width in widths:
        d_phi = feature_map.output_dim(width)
        if lift == "identity" and d_phi != width:
            needed = f"as many features as columns, {feature_map.kind!r} makes {d_phi} of {width}"
            raise ConfigError(f"lift 'identity' needs {needed}; use 'vjp', 'pinv' or 'learned'")
        if lift == "prefix" and traits.linear_at is None:
            needed = f"the features of degree 1 of a polynomial, got {feature_map.kind!r}"
            raise ConfigError(f"lift 'prefix' reads {needed}; use 'vjp' or 'pinv'")


class PhiMomentum(PhiOptimizer):
    r"""phi_momentum: m <- momentum m + P phi~(g), w <- (1 - lr weight_decay) w - lr m.

    Momentum that remembers features of gradients instead of gradients. phi is any feature map of the memories, applied
    to the rows of the gradient's matrix; phi~ is phi centred, phi(g) - phi(0), or odd-lifted, (phi(g) - phi(-g)) / 2,
    so that a gradient of zero moves nothing; the lift P takes features back. With `Identity` this is `torch.optim.SGD`
    with momentum, bit for bit; in half precision with `state_dtype="parameter"`, with weight_decay with
    `decoupled=False`. `form="hope"` is m <- momentum m - lr P phi~(g), w <- w + m, as printed; both agree while
    lr is constant.

    lift: `identity` (equal widths); `vjp`, J^T phi~(g) with the map's own derivative; `pinv`, a linear decoder fitted
    once to Gaussian rows; `learned`, the same fitted to the gradients seen, discounted by `forget`; `prefix`, a
    polynomial's features of degree 1; or a function of (features, rows). `auto` takes identity where components keep
    their sign, pinv for linear, random_fourier and maps that forget lengths (normalise), otherwise vjp; the group then
    says which.
    input_scale: what phi gets. `restored` gives it rows at length 1, multiplies features by the row's length, and
    divides what identity and vjp make of them by their gain on Gaussian rows: updates are about as long as gradients,
    at any length. It warns if they do not descend. `rms` and `unit` restore nothing: steps have one length for all
    gradients, and at `rms` phi sees numbers about 1. `none` leaves rows as they are: a smooth phi is linear at small
    gradients, with one warning if it is. `auto` is none for maps of degree 1, for the lift identity of maps with
    bounded slopes and for a phi neither centred nor odd-lifted, otherwise restored.
    space: where m lives. In `phi` it is `[rows, d_phi]` and is lifted when it is read; vjp then takes the Jacobian at
    the present gradient, which is another rule than `weight`.
    precondition: `diagonal` u / (sqrt(v) + eps) or `kronecker` L^(-1/4) u R^(-1/4), of the lifted update, statistics
    kept by `retain`.
    orthogonalize: Newton-Schulz on what moves the weights; True, or fields of its algorithm.
    guard: rows whose update climbs, <g, u> < 0: `skip` leaves them out, `flip` negates their update.
    phi_lr: learned parameters of phi descend |P phi~(g) - g|^2 / (2 |g|^2), per parameter.
    odd: None odd-lifts maps that centring would cut in half (relu and the like), and centres others.
    seed: for frozen draws and the decoder's calibration, which are made again rather than saved.
    decoupled: weight_decay shrinks weights by lr weight_decay; False adds it to gradients, as SGD.
    dampening: factor 1 - dampening on what is written, from the first step on.

    Formula: $m_t = \mu m_{t-1} + P \tilde\phi(g_t),\quad \tilde\phi(g) = \phi(g) - \phi(0) \ \text{or } \frac{1}{2}
    (\phi(g) - \phi(-g))$
    $w_t = (1 - \eta \lambda) w_{t-1} - \eta m_t$
    Shapes: see `MatrixOptimizer`; state per parameter: momentum like it (or `[rows, d_phi]`).
    Cost: identity and componentwise maps are memory-bound; others O(numel d_phi) a step. Sharded parameters are
    gathered only if rows are cut, or if phi_lr, a learned lift, kronecker or orthogonalize needs all of them.
    Warning: with `input_scale="none"` a lift serves gradients of the lengths it was made for: vjp through bounded maps
    vanishes for long rows, pinv through random Fourier features climbs.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 51. [OPT-PHI-D1]
    """

    class Options(OptimizerKind):
        kind: Literal["phi_momentum"] = "phi_momentum"
        momentum: Share = 0.9
        feature_map: FeatureMap = Identity()
        lift: LiftName = "auto"
        center: bool = True
        odd: bool | None = None
        form: Literal["torch", "hope"] = "torch"
        space: Literal["weight", "phi"] = "weight"
        input_scale: Literal["none", "rms", "unit"] | Literal["auto"] = "auto"
        precondition: Literal["diagonal", "kronecker"] | None = None
        orthogonalize: bool = False
        guard: Literal["none", "skip", "flip"] = "none"
        nesterov: bool = False
        dampening: Share = 0.0
        decoupled: bool = True
        phi_lr: NonNegative = 0.0
        forget: Share = 0.99
        ridge: NonNegative | None = None
        max_decode_error: NonNegative = 0.8
        retain: Share = 0.99
        eps: Positive = 1e-8
        seed: int = Field(0, ge=0, lt=1 << 63)
        matrix: MatrixView = "flatten"

    class Extras(MatrixOptimizer.Extras):
        lift: Any = "auto"
        input_scale: Scale | Literal["auto"] = "auto"
        orthogonalize: Any = False
        phi_params: Any = None

    _guarded: int | Tensor = 0
    held = (MOMENTUM,)
    positional = ("lr", "momentum", "feature_map", "lift", "center")
    structural: ClassVar[tuple[str, ...]] = (*PhiOptimizer.structural, "space", "precondition")
    carried: ClassVar[tuple[str, ...]] = (*PhiOptimizer.carried, "_guarded")
    only_with: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {
        "forget": ("lift", ("learned",)),
        "ridge": ("lift", ("pinv", "learned")),
        "max_decode_error": ("lift", ("pinv",)),
        "retain": PRECONDITIONED,
        "eps": PRECONDITIONED,
    }

    @property
    def stats(self) -> dict[str, int]:
        """`guarded`: the number of rows that the guard has changed so far."""
        return {"guarded": int(self._guarded)}

    def check(self, group: Group) -> None:
        group["orthogonalize"] = settings(group["orthogonalize"])
        super().check(group)
        if group["lift"] == "callable" and self._call is None:
            raise ConfigError("lift 'callable' needs the function itself: pass it as lift=")
        resolve(group, self.widths(group))
        hope, phi, guards = group["form"] == "hope", group["space"] == "phi", group["guard"] != "none"
        drawn = [self.drawn(group, width)["learned"] for width in self.widths(group)]
        refused = {
            "nesterov needs dampening 0; leave one of them out": group["nesterov"] and group["dampening"],
            "form 'hope' puts lr into the momentum, and orthogonalize (or precondition after space 'phi') would divide "
            "it out again; use form 'torch'": hope and (group["orthogonalize"] or (phi and group["precondition"])),
            "guard judges the update of one gradient, space 'phi' has only that of all; use space 'weight' or guard "
            "'none'": phi and guards,
            f"phi_lr trains learned parameters, {group['feature_map']['kind']!r} has none; leave it at 0": (
                group["phi_lr"] and drawn and not any(drawn)
            ),
            "eps must be above 0 with precondition 'diagonal': what never moved is divided by it": (
                group["precondition"] == "diagonal" and not group["eps"]
            ),
        }
        learned = {
            "phi_lr": group["phi_lr"],
            "lift 'learned'": group["lift"] == "learned",
            "precondition 'kronecker'": group["precondition"] == "kronecker",
        }
        for name, used in learned.items():
            sentence = f"differentiable=True does not reach through {name}; leave it out"
            refused[sentence] = group["differentiable"] and used
        for sentence, applies in refused.items():
            if applies:
                raise ConfigError(sentence)
        for p in group["params"]:
            sides = self.sides(p, group)
            if group["precondition"] == "kronecker" and max(sides) > WIDEST:
                factors = f"a square factor for each side of {name_of(group, p)}, {list(sides)}, and stops at {WIDEST}"
                raise ConfigError(f"precondition 'kronecker' keeps {factors}; give it a group with 'diagonal'")

    def gathers(self, group: Group, p: Tensor) -> bool:
        """True if a shard is not enough: rows are cut, or the step sums over rows."""
        learned = group["phi_lr"] or group["lift"] == "learned"
        if learned or group["orthogonalize"] or group["precondition"] == "kronecker":
            return True
        if group["space"] == "phi":
            return not _rows_first(p, group)
        return not (by_number(group) and group["guard"] == "none") and not rows_are_whole(p, group["matrix"])

    def fresh_state(self, p: Tensor, group: Group) -> State:
        state = super().fresh_state(p, group)
        height, width = self.sides(p, group)
        rows = local(state[MOMENTUM]).new_empty(0, width)
        state |= self.learning(group, rows)
        if group["space"] == "phi":
            features = rows.new_zeros(height, map_of(group).output_dim(width))  # on every process, unless placed as p
            placed = _rows_first(p, group)
            state[MOMENTUM] = like(p, features[: local(p).shape[0]]) if placed else features
        if group["precondition"] == "diagonal":
            state[SQUARE] = self.zeros(p, group)
        if group["precondition"] == "kronecker":
            state[ROWS], state[COLUMNS] = rows.new_zeros(height, height), rows.new_zeros(width, width)
        return state

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        momenta = [state[MOMENTUM] for state in states]
        bulk = Bulk(group, momenta)
        self.watch(group, lambda: [self.rows_of(g.to(m.dtype), group) for g, m in zip(grads, momenta, strict=True)])
        if self._at_once(group, bulk, params, grads, states):
            return
        rows = Rowwise(group, bulk, states, partial(self.row_map, group))
        momenta = rows.step(params, grads, momenta)
        self._guarded = self._guarded + rows.guarded
        bulk.put(states, MOMENTUM, momenta)

    def _at_once(self, group: Group, bulk: Bulk, params: Tensors, grads: Tensors, states: list[State]) -> bool:
        """Takes the step in one pass of a kernel, if an update needs no more than each number's phi, momentum and mean
        square and the length of its row; False if there is no kernel for it."""
        scale = group["input_scale"]
        decays = scale != "none" and group["weight_decay"] and not group["decoupled"]  # before lengths are taken
        mixes = group["orthogonalize"] or group["guard"] != "none" or group["precondition"] == "kronecker"
        if not bulk.foreach or decays or mixes or group["space"] != "weight" or not of_numbers(group):
            return False
        buffers = [[state[key] for state in states] for key in (MOMENTUM, *[SQUARE] * bool(group["precondition"]))]
        widths = None if scale == "none" else [as_matrix(p, group["matrix"]).shape[-1] for p in params]
        if (pieces := Pieces.of(params, grads, *buffers, widths=widths)) is None:
            return False
        maps = {width: self.row_map(group, buffers[0][0].new_empty(0, width)) for width in set(widths or [1])}
        if (written := next(iter(maps.values())).formula) is None:
            return False
        scales = {} if widths is None else {width: row_map.lengths(width) for width, row_map in maps.items()}
        *factors, decay, step, lr = _factors(group, bulk)
        squares = (group["retain"], 1 - group["retain"], group["eps"]) if group["precondition"] else ()
        hope, nesterov = group["form"] == "hope", group["nesterov"]
        pieces.move(written, (*factors, 1 - lr * decay, step, -lr, *squares), hope, nesterov, scales)
        return True


def _rows_first(p: Tensor, group: Group) -> bool:
    """True if the rows of p's matrix run along its first dimension, and none is cut."""
    first = p.ndim == 2 or (p.ndim > 2 and group["matrix"] == "flatten")
    return first and rows_are_whole(p, group["matrix"])


class Rowwise:
    """A step with its two maps, into the momentum and out of it, for any phi, lift, preconditioner and space.

    They take matrices `[rows, columns]`. Gradients of one width go through phi together, unless each parameter learns
    its own lift or phi. `guarded` counts rows that the guard has changed.
    """

    def __init__(self, group: Group, bulk: Bulk, states: list[State], map_for: Callable[[Tensor], RowMap]) -> None:
        self.group, self.bulk, self.states, self.map_for = group, bulk, states, map_for
        self.in_phi = group["space"] == "phi"
        self.guarded: Tensor | int = 0
        self.shapes: list[torch.Size] = []
        self.together: list[list[int]] = []
        self.lifts: dict[int, Callable[[Tensor], Tensor]] = {}  # at the gradients' rows, by index of the first gradient

    def step(self, params: Tensors, grads: Tensors, momenta: Tensors) -> Tensors:
        """One step in place; the new momentum, which under autograd is not the old tensor."""
        group, bulk = self.group, self.bulk
        momentum, gain, coupled, decay, step, lr = _factors(group, bulk)
        if grads[0].dtype != momenta[0].dtype:
            grads = [g.to(m.dtype) for g, m in zip(grads, momenta, strict=True)]
        if coupled:
            grads = bulk.sum(grads, params, coupled)
        written = self.enter(grads)
        momenta = bulk.add(bulk.decay(momenta, momentum), written, gain)
        ahead = momenta
        if group["nesterov"]:
            ahead = bulk.sum([-lr * x for x in written] if group["form"] == "hope" else written, momenta, momentum)
        bulk.move(params, self.leave(ahead), lr, decay, step=-step)
        return momenta

    def enter(self, grads: Tensors) -> Tensors:
        """phi~(g) `[rows, d_phi]` in phi-space, else the preconditioned P phi~(g)."""
        self.shapes = [g.shape for g in grads]
        if not self.in_phi and self.group["guard"] == "none" and by_number(self.group):  # in any shape, cut or not
            return self._updates(list(map(self.map_for(grads[0].new_empty(0, 1)), grads)))
        matrices = [as_matrix(g, self.group["matrix"]) for g in grads]
        alone = self.group["phi_lr"] or self.group["lift"] == "learned"
        self.together = grouped(i if alone else matrix.shape[-1] for i, matrix in enumerate(matrices))
        written = self._jointly(self._written, matrices)
        return written if self.in_phi else self._updates(written)

    def leave(self, momenta: Tensors) -> Tensors:
        """Updates from momenta: lifted and preconditioned if momenta live in phi-space, then orthogonalised."""
        if self.in_phi:
            momenta = self._updates(self._jointly(lambda first, rows: self.lifts[first](rows), momenta))
        return [orthogonalised(u, self.group) for u in momenta]

    def _jointly(self, f: Callable[[int, Tensor], Tensor], matrices: Tensors) -> Tensors:
        """f of the rows that go through phi together, as one matrix per gradient."""

        def joined(members: list[int]) -> Sequence[Tensor]:
            some = [matrices[i] for i in members]
            rows = f(members[0], some[0] if len(some) == 1 else torch.cat(some))
            return rows.split([len(matrix) for matrix in some])

        return by_group(self.together, joined)

    def _written(self, first: int, rows: Tensor) -> Tensor:
        state, mode = self.states[first], self.group["guard"]
        row_map, written, residuals = learned_map(self.map_for(rows), state, rows, self.group)
        self.lifts[first] = lambda features: row_map.back(features, rows, residuals)
        if not self.in_phi:
            written = self.lifts[first](written)
        if mode != "none":
            climbs = (written * rows).sum(-1, keepdim=True) < 0
            self.guarded = self.guarded + climbs.sum()
            written = torch.where(climbs, 0 if mode == "skip" else -written, written)
        if self.group["phi_lr"]:
            learn_phi(row_map, state, rows, self.group["phi_lr"])
        return written

    def _updates(self, lifted: Tensors) -> Tensors:
        """Preconditioned updates in the shapes of gradients."""
        updates = [m.reshape(shape) for m, shape in zip(lifted, self.shapes, strict=True)]
        name, retain, eps = (self.group[k] for k in ("precondition", "retain", "eps"))
        if name == "diagonal":
            updates, squares = diagonal(self.bulk, [state[SQUARE] for state in self.states], updates, retain, eps)
            self.bulk.put(self.states, SQUARE, squares)
        elif name == "kronecker":
            for i, (u, state) in enumerate(zip(updates, self.states, strict=True)):
                matrix = as_matrix(u, self.group["matrix"])
                conditioned, *sides = kronecker(state[ROWS], state[COLUMNS], matrix, retain, eps)
                updates[i] = conditioned.reshape(u.shape)
                for key, side in zip((ROWS, COLUMNS), sides, strict=True):
                    self.bulk.put([state], key, [side])
        return updates


def _factors(group: Group, bulk: Bulk) -> tuple[Any, ...]:
    """Factors of a step: of the momentum, of what is written into it, of the weights that are added to gradients, of
    the weights' own decay, of the momentum that is added to weights; and lr."""
    lr, momentum, decay = (bulk.number(group[name]) for name in ("lr", "momentum", "weight_decay"))
    gain, decays = 1 - group["dampening"], (0.0, decay) if group["decoupled"] else (decay, 0.0)
    written, step = (-lr * gain, 1.0) if group["form"] == "hope" else (gain, -lr)
    return momentum, written, *decays, step, lr


def diagonal(bulk: Bulk, squares: Tensors, updates: Tensors, retain: float, eps: float) -> tuple[Tensors, Tensors]:
    """v <- retain v + (1 - retain) u^2, u / (sqrt(v) + eps): the updates, then the v.

    v is overwritten, unless the group is differentiable. [OPT-PRE-D1]
    """
    squares = bulk.decay(squares, retain)
    if bulk.differentiable:
        squares = [v + (1 - retain) * u * u for v, u in zip(squares, updates, strict=True)]
        return [u / (v.sqrt() + eps) for u, v in zip(updates, squares, strict=True)], squares
    bulk.apply("addcmul_", squares, updates, updates, value=1 - retain)
    roots = bulk.apply("add_", bulk.apply("sqrt", squares), eps)
    return list(bulk.apply("div", updates, roots)), squares


def kronecker(rows: Tensor, columns: Tensor, update: Tensor, retain: float, eps: float) -> tuple[Tensor, ...]:
    """L <- retain L + (1 - retain) U U^T, R alike with U^T U, L^(-1/4) U R^(-1/4): update, L, R.

    Shapes: U `[r, c]`, L `[r, r]`, R `[c, c]`.
    References: Shampoo (Gupta et al., 2018, arXiv 1802.09568). [OPT-PRE-D2]
    """
    rows = retain * rows + (1 - retain) * (update @ update.mT)
    columns = retain * columns + (1 - retain) * (update.mT @ update)
    return root(rows, eps) @ update @ root(columns, eps), rows, columns


def root(factor: Tensor, eps: float) -> Tensor:
    """(A + eps max(eigenvalue))^(-1/4) of a positive semi-definite A."""
    try:
        values, vectors = torch.linalg.eigh(factor.to(torch.promote_types(factor.dtype, torch.float32)))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        reason = f"squares of an update left {factor.dtype}, or a NaN came by on_nonfinite='propagate'"
        met = f"statistics without eigenvalues, {list(factor.shape)}: {reason}"
        cure = "clip gradients, or use precondition 'diagonal'"
        raise NonFiniteError(f"precondition 'kronecker' met {met}; {cure}") from None
    values = values.clamp(min=0)
    damped = values + eps * values[-1:] + torch.finfo(values.dtype).tiny
    return ((vectors * damped.pow(-0.25)) @ vectors.mT).to(factor)


class KernelMomentum(PhiOptimizer):
    r"""kernel_momentum: S <- momentum S + sum_j g_j phi~(g_j)^T, w_j <- w_j - lr S phi~(g_j).

    The accumulator is a matrix memory whose keys and values are the columns g_j of the gradient (`keys="rows"`: its
    rows). Each step writes the gradient, then reads with it: u_j = sum_(s, i) momentum^(t-s) k(g_i^s, g_j) g_i^s, so
    that past gradients count by their similarity to the present one, k(x, y) = phi~(x).phi~(y). phi~ is centred or
    odd-lifted as in `PhiMomentum`, of the key scaled by `input_scale`; values keep their length.

    Formula: $S_t = \mu S_{t-1} + \sum_j g_j \tilde\phi(g_j)^\top,\quad w_{j,t} = (1 - \eta \lambda) w_{j,t-1} - \eta
    S_t \tilde\phi(g_j)$
    Shapes: gradient `[r, c]`, S `[r, d_phi]` (`keys="rows"`: `[c, d_phi]`).
    Traits: the first step descends, <g, u> >= 0, for every phi: it is the sum of the product of
    two positive semi-definite matrices. A gradient of zero reads nothing.
    Cost: O(r c d_phi) a step.
    Warning: similar columns add up; start from a smaller lr than that of plain momentum. A parameter of one dimension
    is one row: choose `keys="rows"` for it. Sharded parameters are gathered, and every process keeps S.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eqs. 50 and 51. [OPT-KERNEL-D1]
    """

    structural: ClassVar[tuple[str, ...]] = (*PhiOptimizer.structural, "keys")

    class Options(OptimizerKind):
        kind: Literal["kernel_momentum"] = "kernel_momentum"
        momentum: Share = 0.9
        feature_map: FeatureMap = Identity()
        center: bool = True
        keys: Literal["columns", "rows"] = "columns"
        odd: bool | None = None
        input_scale: Literal["none", "rms", "unit"] = "unit"
        seed: int = Field(0, ge=0, lt=1 << 63)
        matrix: MatrixView = "flatten"

    class Extras(MatrixOptimizer.Extras):
        phi_params: Any = None

    positional = ("lr", "momentum", "feature_map", "center")

    def rows_of(self, x: Tensor, group: Group) -> Tensor:
        """Keys as rows `[n, key width]`."""
        matrix = as_matrix(x, group["matrix"])
        return matrix.mT if group["keys"] == "columns" else matrix

    def may_be_linear(self, group: Group) -> bool:
        """True if, besides, keys have as many features as numbers: otherwise the kernel is not that of identity."""
        alike = all(map_of(group).output_dim(width) == width for width in self.widths(group))
        return alike and super().may_be_linear(group)

    def fresh_state(self, p: Tensor, group: Group) -> State:
        _, width = self.sides(p, group)
        memory = self.zeros(p, group, width, map_of(group).output_dim(width))
        return {MEMORY: memory, **self.learning(group, memory.new_empty(0, width))}

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        memories = [state[MEMORY] for state in states]
        bulk = Bulk(group, memories)
        lr, decay = bulk.number(group["lr"]), group["weight_decay"]
        keys = [self.rows_of(g.to(m.dtype), group) for g, m in zip(grads, memories, strict=True)]
        self.watch(group, lambda: keys)
        features = [self.row_map(group, rows)(rows) for rows in keys]
        written = [rows.mT @ phi for rows, phi in zip(keys, features, strict=True)]
        memories = bulk.add(bulk.decay(memories, bulk.number(group["momentum"])), written)
        read = [phi @ memory.mT for phi, memory in zip(features, memories, strict=True)]
        if group["keys"] == "columns":
            read = [u.mT for u in read]
        bulk.move(params, [u.reshape(p.shape) for u, p in zip(read, params, strict=True)], lr, decay)
        bulk.put(states, MEMORY, memories)
