"""Readouts: maps of a query, before the memory answers it, by a state of the keys so far: a ridge regression on all
that was written, as in MesaNet and Gated KalmaNet, or a bounded number of slots, as in gated slot attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Depth
from hecate.tape import Block, Run, Tensors, by_hand, can_inspect, checkpoint, formula_block, one, several
from hecate.variant import Variant

Held = dict[str, Tensor]


class Asked(NamedTuple):
    """Inputs of a readout: features q and k `[B, T, H, P]`; the gates lr `[B, T, H]` and retain (also per phi channel);
    its own gates `[B, T, H, *]` in the order of `Readout.gates`, None for those not given; masks `[B, T]` or None."""

    q: Tensor
    k: Tensor
    lr: Tensor
    retain: Tensor
    gates: tuple[Tensor | None, ...]
    write: Tensor | None
    reset: Tensor | None


class Means(NamedTuple):
    """Functions with which a readout runs over tokens.

    Fields:
        run: executes blocks.
        spans: `(block, inputs, held) -> (outputs, held)` cuts inputs `[B, T, ...]` or None into spans and runs the
            block (*inputs, held) -> (output, held) on one after the other; only the states `held` between spans are
            kept.
        recall: `(q, k, codes, lr, retain, held) -> (answers, held)` of a linear memory K of codes, K' = diag(retain) K
            + lr code k^T with a retain per code; its state `held` is `[B, H, P, codes]`.
        late: whether a token is read after it is written.
    """

    run: Run
    spans: Callable[..., tuple[Tensor, Tensor]]
    recall: Callable[..., tuple[Tensor, Tensor]]
    late: bool


class Turned(NamedTuple):
    """The query, the key and the retain gate for the memory itself, and the readout's state after the last token."""

    q: Tensor
    k: Tensor
    retain: Tensor
    held: Held


class Readout(Variant, family="readout"):
    """A map of every query to another one, which the memory answers, by a second state that is built from keys alone,
    under the memory's own gates.

    That state starts and restarts at zero, and a token that is not written leaves it. The memory stays linear in its
    writes, so every engine that runs the plain memory runs it with a readout, too. A variant defines `turned` and the
    shapes of its state.

    Shapes: q and k `[B, T, H, P]`; state `[B, H, ...]` by name.
    """

    plain: ClassVar[bool] = False  # whether queries stay as they are
    gates: ClassVar[tuple[str, ...]] = ()  # those of `hecate.rule.Gates` that it takes besides lr and retain
    channels: ClassVar[bool] = False  # whether retain may differ between phi channels
    _formulas = ("turned", "state_shapes")

    def state_shapes(self, d_phi: int) -> dict[str, tuple[int, ...]]:
        """Shapes of its state for one memory, by name."""
        return {}

    def refusals(self, config: Any) -> Iterator[str]:
        """Reasons why the memory of a `MemoryConfig` cannot be read this way."""
        if self.plain:
            return
        if not config.forms.target:
            yield f"bias {config.bias.kind!r} corrects what is stored, which this read-out does itself; use bias 'dot'"
        if not config.structure.linear or config.structure.diagonal:
            yield f"{config.structure.named} is no linear map of phi(k); use structure 'matrix'"
        if config.retention.gate_form.channels and not self.channels:
            yield "retention.channels decays keys unevenly, and what is held of them would not stay symmetric"
        if not config.retention.linear:
            yield f"retention {config.retention.kind!r} is not linear; use retention 'none' or 'decay'"
        if config.algorithm.kernel_form() is None or config.algorithm.slots:
            yield f"algorithm {config.algorithm.kind!r} is no plain sum of writes; use algorithm 'gd'"
        for name, plain in (("writes", 1), ("chunk", 1), ("commit", "token"), ("normalizer", "none"), ("step", "raw")):
            if (setting := getattr(config, name)) != plain:
                yield f"it knows no {name}={setting!r}; use {plain!r}"
        if config.feature_map.needs_position:
            yield f"feature_map {config.feature_map.kind!r} counts tokens; use another"
        if config.on_nonfinite == "skip":
            yield "on_nonfinite='skip' may leave out tokens, whose keys it would hold; use 'raise'"

    def turned(self, asked: Asked, state: Held, means: Means) -> Turned:
        """Tensors that the memory is queried and written with."""
        raise NotImplementedError(f"{type(self).__name__} defines no turned")


class Direct(Readout):
    r"""direct: y = M phi(q).

    Formula: $y_t = f(M_t, \phi(q_t))$
    Shapes: no state.
    Origin: the plain read of a memory. [ENG-READ-D1]
    """

    kind: Literal["direct"] = "direct"
    plain: ClassVar[bool] = True

    def turned(self, asked: Asked, state: Held, means: Means) -> Turned:
        return Turned(asked.q, asked.k, asked.retain, state)


ReadoutKind = Readout


class Ridge(Readout):
    r"""ridge: y = G (q + mix (x - q)), (H + diag(ridge + relative |H|_F)) x = q.

    H = retain H + lr k k^T gathers the keys as the memory G = retain G + lr v k^T gathers values, so that G x is W q
    for the W that minimises sum_i c_i |W k_i - v_i|^2 + sum_p ridge_p |W e_p|^2, c_i the lr of a token times the retain
    since then. Unlike algorithm `rls` with its discount, the ridge does not fade. The gates `ridge`, per head or per
    phi channel, and `mix` in [0, 1] take precedence over the fields.

    `exact` factors the matrix. `cg` takes `iterations` steps of conjugate gradients from q over its diagonal,
    `chebyshev` as many of Chebyshev's iteration for a spectrum in [least ridge, largest ridge + |H|_F]: relative errors
    of 0.07 and 2.5e-4 after 10 and 30 where the ridge is 0.02 |H|_F.

    Formula: $y_t = M_t \left(q_t + \mathrm{mix}_t (x_t - q_t)\right),\quad \left(H_t + \mathrm{diag}(\mathrm{ridge}_t +
    \mathrm{relative}\, \Vert H_t \Vert_F)\right) x_t = q_t$
    $H_t = \alpha_t H_{t-1} + \eta_t k_t k_t^\top,\quad M_t = \alpha_t M_{t-1} + \eta_t v_t k_t^\top$
    Shapes: q, k, x `[B, T, H, P]`; H `[B, H, P, P]`, in the state `keys`.
    VJP: by the implicit function theorem, g_q = A^-1 g and g_A = -g_q x^T, with the same solver: as near to the
    derivative as the solver comes to the solution. Spans of 16 tokens are computed again, so that only the matrices
    between spans are kept.
    Cost: P^3/3 per token for `exact`, P^2 per iteration for the others: on a CPU `exact` is the cheapest up to P = 90.
    References: MesaNet (von Oswald et al., 2025, arXiv 2506.05233); Gated KalmaNet (2025, arXiv 2511.21016).
    [READ-RIDGE-D1]
    """

    kind: Literal["ridge"] = "ridge"
    ridge: float = Field(1.0, ge=0, description="where no gate is given")
    relative: float = Field(0.0, ge=0, description="of |H|_F, added to it")
    solver: Literal["exact", "cg", "chebyshev"] = "exact"
    iterations: Depth = Field(30, ge=1, description="of cg and chebyshev")
    mix: float = Field(1.0, ge=0, le=1, description="where no gate is given")
    gates: ClassVar[tuple[str, ...]] = ("ridge", "mix")

    def state_shapes(self, d_phi: int) -> dict[str, tuple[int, ...]]:
        return {"keys": (d_phi, d_phi)}

    def refusals(self, config: Any) -> Iterator[str]:
        yield from super().refusals(config)
        if not self.ridge and not self.relative:
            yield "without ridge and relative an empty H has no inverse; give one"

    def turned(self, asked: Asked, state: Held, means: Means) -> Turned:
        inputs = (asked.q, asked.k, asked.lr, asked.retain, *asked.gates, asked.write, asked.reset)
        q, keys = means.spans(self._block(means.late), inputs, state["keys"])
        return Turned(q, asked.k, asked.retain, {"keys": keys})

    def _block(self, late: bool) -> Block:
        """A span of tokens: (q, k, lr, retain, ridge, mix, write, reset, H) -> (the new queries, H)."""
        states, solve = _LATE if late else _EARLY, self._solve_block()

        def program(run: Run, *inputs: Tensor | None) -> Tensors:
            q, k, lr, retain, ridge, mix, write, reset, gram = inputs
            each, gram = several(run(states, k, lr, retain, write, reset, gram))
            matrix, least = several(run(self._matrix_block, each, ridge))
            x = one(run(solve, matrix, q, least))
            if mix is not None:
                x = one(run(_MIX, q, x, mix))
            elif self.mix != 1:
                x = one(run(_MIX, q, x, torch.full_like(x[..., 0], self.mix)))
            return x, gram

        return by_hand(checkpoint("readout.ridge", program))

    @property
    def _matrix_block(self) -> Block:
        """(H, ridge) -> A, and bounds `[..., 2]` of its spectrum; the ridge is 1 where it would be 0."""

        def formula(each: Tensor, ridge: Tensor | None) -> tuple[Tensor, Tensor]:
            if ridge is None:
                ridge = torch.full_like(each[..., :1, 0], self.ridge)
            elif ridge.dim() < each.dim() - 1:
                ridge = ridge.unsqueeze(-1)
            size = _size(each).unsqueeze(-1) if self.relative or self.solver == "chebyshev" else torch.zeros_like(ridge)
            total = ridge + self.relative * size
            total = torch.where(total > 0, total, 1.0)
            ends = torch.stack((total.amin(-1), total.amax(-1) + size.amax(-1)), -1)
            return each + torch.diag_embed(total.expand(each.shape[:-1])), ends

        return formula_block("readout.ridge.matrix", formula)

    def _solve_block(self) -> Block:
        """(A, q, ends of its spectrum) -> x."""

        def forward(matrix: Tensor, q: Tensor, ends: Tensor) -> tuple[Tensors, Any]:
            ready = self._factor(matrix)
            x = self._solve(ready, q, ends)
            return (x,), (ready, ends, x)

        def vjp(residuals: tuple[Tensor, Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor, None]:
            ready, ends, x = residuals
            g = self._solve(ready, g, ends)
            return -g.unsqueeze(-1) * x.unsqueeze(-2), g, None

        def plain(*inputs: Tensor | None) -> Tensors:
            matrix, q, ends = several(inputs)
            if self.solver == "exact":  # differentiated as the solution of a system, not through a factorisation
                return (torch.linalg.solve(matrix, q.unsqueeze(-1)).squeeze(-1),)
            return (self._solve(matrix, q, ends.detach()),)

        return by_hand(Block(f"readout.ridge.{self.solver}", forward, vjp), plain)

    def _factor(self, matrix: Tensor) -> Tensor:
        if self.solver != "exact":
            return matrix
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if can_inspect(failed, free=True) and not failed.any():
            return factor
        return torch.where(failed[..., None, None] > 0, torch.nan, factor)

    def _solve(self, matrix: Tensor, q: Tensor, ends: Tensor) -> Tensor:
        if self.solver == "exact":
            return torch.cholesky_solve(q.unsqueeze(-1), matrix).squeeze(-1)
        if self.solver == "cg":
            return conjugate_gradients(matrix, q, self.iterations)
        low, high = ends.unsqueeze(-2).unbind(-1)
        return chebyshev(matrix, q, low, high, self.iterations)


def conjugate_gradients(matrix: Tensor, q: Tensor, steps: int) -> Tensor:
    """A^-1 q by `steps` steps of conjugate gradients from q over the diagonal of A."""
    x = q / torch.diagonal(matrix, dim1=-2, dim2=-1)
    r = q - _times(matrix, x)
    p, size = r, r.square().sum(-1, keepdim=True)
    for _ in range(steps):
        image = _times(matrix, p)
        gain = _over(size, (p * image).sum(-1, keepdim=True))
        x, r = x + gain * p, r - gain * image
        size, before = r.square().sum(-1, keepdim=True), size
        p = r + _over(size, before) * p
    return x


def chebyshev(matrix: Tensor, q: Tensor, low: Tensor, high: Tensor, steps: int) -> Tensor:
    """A^-1 q by `steps` steps of Chebyshev's iteration, with the spectrum of A in [low, high]."""
    scale, rho = 2 / (low + high), ((high - low) / (high + low)).square() / 4
    x, before, omega = scale * q, torch.zeros_like(q), 2.0 * torch.ones_like(low)
    for _ in range(steps):
        omega = 1 / (1 - rho * omega)
        r = _times(matrix, x) - q
        x, before = omega * x - scale * omega * r - (omega - 1) * before, x
    return x


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, or 0 where b is not positive."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)


def _size(each: Tensor) -> Tensor:
    """|H|_F `[...]`, with the derivative 0 at 0."""
    square = each.square().sum((-2, -1))
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)


def _states(
    late: bool, k: Tensor, lr: Tensor, retain: Tensor, write: Tensor | None, reset: Tensor | None, gram: Tensor
) -> tuple[Tensor, Tensor]:
    """H of every token of a span `[B, C, H, P, P]`, after its write or before, and the last."""
    if write is not None:
        lr, retain = torch.where(write.unsqueeze(-1), lr, 0.0), torch.where(write.unsqueeze(-1), retain, 1.0)
    if reset is not None:
        retain = torch.where(reset.unsqueeze(-1), 0.0, retain)
    k, lr, retain = k.transpose(1, 2), lr.mT, retain.mT  # `[B, H, C, *]`
    count, lost = k.shape[2], None
    if can_inspect(k):
        k, lr, retain, gram, lost = _apart(k, lr, retain, gram, reset)
    # R[t, i], the product of retain over i < l <= t.
    later = torch.ones(count, count, dtype=torch.bool, device=k.device).tril(-1)
    spans = torch.where(later, retain.unsqueeze(-1), 1.0).cumprod(-2).tril()
    writes, first = (k.unsqueeze(-1) * k.unsqueeze(-2)).flatten(-2), retain.cumprod(-1)[..., None, None]
    written = ((spans * lr.unsqueeze(-2)) @ writes).unflatten(-1, k.shape[-1:] * 2)
    each = torch.addcmul(written, first, gram.unsqueeze(2))
    if lost is not None:
        each = torch.where(lost[..., None, None], torch.nan, each)
    last = each[:, :, -1]
    if not late:
        each = torch.cat((gram.unsqueeze(2), each[:, :, :-1]), 2)
        if reset is not None:
            each = torch.where(reset[:, None, :, None, None], 0.0, each)
    return each.transpose(1, 2), last


def _apart(
    k: Tensor, lr: Tensor, retain: Tensor, gram: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The inputs with zeros for numbers that are not finite, which a product of all tokens would carry to earlier ones;
    and a mask of the tokens `[B, H, C]` whose H they reach, None if there are none."""
    fine, held_fine = (lr * k.abs().amax(-1).square() + retain).isfinite(), gram.isfinite().all(-1).all(-1)
    if can_inspect(fine, free=True) and fine.all() and held_fine.all():
        return k, lr, retain, gram, None
    starts = torch.zeros_like(fine[:, 0]) if reset is None else reset
    count = starts.cumsum(-1).unsqueeze(1)
    reached = (count.unsqueeze(-1) == count.unsqueeze(-2)).tril() & ~fine.unsqueeze(-2)
    lost = reached.any(-1) | ((count == 0) & ~held_fine.unsqueeze(-1))
    clean = k.where(fine.unsqueeze(-1), 0), lr.where(fine, 0), retain.where(fine, 0)
    return *clean, gram.where(held_fine[..., None, None], 0), lost


_LATE = formula_block("readout.ridge.states", lambda *inputs: _states(True, *inputs))
_EARLY = formula_block("readout.ridge.states", lambda *inputs: _states(False, *inputs))
_MIX = formula_block("readout.ridge.mix", lambda q, x, mix: q + mix.unsqueeze(-1) * (x - q))


class Slots(Readout):
    r"""slots: y = V softmax(K q), P slots with K' = diag(r) K + s k^T and V' = V diag(r) + v s^T.

    Each slot holds a key and a value, both means of those that were written to it: a token goes to the slots by its
    code s, the gate `write`, and slot i keeps the share r_i of what it had, the gate retain per phi channel. Where no
    write is given s = 1 - r. There are as many slots as phi(k) has channels. K holds phi(k) itself; the memory V is
    written with the code in its place. lr scales s in both.

    Formula: $y_t = V_t\, \mathrm{softmax}(K_t q_t)$
    $K_t = \mathrm{diag}(\alpha_t) K_{t-1} + \eta_t s_t k_t^\top,\quad V_t = V_{t-1} \mathrm{diag}(\alpha_t) + \eta_t
    v_t s_t^\top,\quad s_t = \mathrm{write}_t \ \text{or } 1 - \alpha_t$
    Shapes: q, k `[B, T, H, P]`, s and r `[B, T, H, P]`; K `[B, H, P, P]`, its slots last, in the state `keys`.
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

    def turned(self, asked: Asked, state: Held, means: Means) -> Turned:
        (code,) = asked.gates
        retain = one(means.run(_WIDE, asked.retain, asked.k, label="slots"))
        code = one(means.run(_REST, retain) if code is None else means.run(_WIDE, code, asked.k))
        scores, keys = means.recall(asked.q, asked.k, code, asked.lr, retain, state["keys"])
        return Turned(one(means.run(_SOFTMAX, scores, label="slots")), code, retain, {"keys": keys})


def _wide(gate: Tensor, like: Tensor) -> Tensor:
    return gate if gate.dim() == like.dim() else gate.unsqueeze(-1).expand_as(like)


_WIDE = formula_block("readout.slots.wide", _wide)
_REST = formula_block("readout.slots.code", lambda retain: 1 - retain)
_SOFTMAX = formula_block("readout.slots.softmax", lambda scores: torch.softmax(scores, -1))
