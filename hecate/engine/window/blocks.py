"""Blocks of tokens of the window engine, which need no state's width: the rows of keys that writes move and their
kernels, and steps that are linear in a window's gradients, or mixed by the momentum's Gram matrix.

A block's rows are the c keys of the context, oldest first, then its own n keys. Write (t, a) of token t moves the row
of the token a writes before t; with masks each memory has rows of its own.

Where steps are linear in the gradients a block is one triangular system. Where they are D = -lr Q S', Q a function of
the momentum's Gram matrix, it goes token by token, without a state. Within a block, over the features R of its rows,

    S_t = s_t S_0 + W_t R,    M_t = a_t M_0 + i_t M_init + X_t S_0 + Y_t R

with s, a, i numbers, X `[V, V]` and W, Y `[V, L]`. With the errors U_t `[V, W]` of the window's rows K_t = R^T R_t

    U   = (a M_0 R_t + i M_init R_t + X S_0 R_t + Y K_t - V_t) weights      (times retain where the gradient decays)
    H   = momentum (s S_0 R_t + W K_t) + U R_t^T R_t / 2
    C'  = momentum^2 C + H U^T + U H^T            the Gram matrix S S^T
    W'  = momentum W + U at the window's rows,    s' = momentum s
    Q   = -lr gain(C')
    X', Y', a', i' = retain (X, Y, a, i) + (s' Q, Q W', 0, 0)

so a token costs the gain and products of V, W and L, whatever the width of the features. The backward pass goes through
the same lines in reverse; what one block keeps for it is made again from the block's start. [ENG-WIN-D2, ENG-WIN-V2]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.algorithm import WindowForm
from hecate.engine.coefficients import coefficients, faced_states, neutral
from hecate.engine.implicit import implicit_gradients
from hecate.engine.tokens import constants
from hecate.phi.base import PowerForm
from hecate.rule import MemoryConfig
from hecate.tape import Block, ByHand, Tensors, one, several

SIZE = 64  # tokens of a block
AGAIN = 16  # tokens whose steps are held at once in the backward pass


# Inputs of a block: products of features with states, keys and queries `[N, n, d]`, values, the context's values or
# None, gates `[N, n]`.
Leaves = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]


class Settings(NamedTuple):
    """Settings of a config's run in blocks.

    Fields:
        config: the memory's.
        form: the window of its algorithm.
        lift: features, and the kernel by which tokens meet.
        normed: whether the features are to be brought to length 1.
        query: what phi(q) is multiplied by.
        shape: (V, P) of the memory.
    """

    config: MemoryConfig
    form: WindowForm
    lift: PowerForm
    normed: bool
    query: float
    shape: tuple[int, ...]

    @property
    def context(self) -> int:
        """Tokens in the context."""
        return len(self.form.weights) if self.form.remembers else 0

    def gain(self) -> Block:
        """Q of Gram matrices `[N, V, V]`."""
        form: Any = self.form.inner.gram_form()  # the engine refuses algorithms without one
        return form.gain(self.shape)


class Rows(NamedTuple):
    """`places` `[N, n W]`: the row of every write, its token's own first; `live` `[N, n, W]`: the write's weight, 0
    where there is no such token; `context` `[N, c, c + n]`: which rows are the context afterwards, as ones in zeros;
    `filled` `[N, c]`: the context's marks then."""

    places: Tensor
    live: Tensor
    context: Tensor
    filled: Tensor

    def picked(self, x: Tensor) -> Tensor:
        """`[N, c + n, *]` -> `[N, n W, *]`: the row of every write."""
        return x.gather(1, self.places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def summed(self, x: Tensor, count: int) -> Tensor:
        """`[N, n W, V]` -> `[N, count, V]`: writes added up on their rows."""
        total = x.new_zeros(len(x), count, x.shape[-1])
        return total.scatter_add(1, self.places.unsqueeze(-1).expand_as(x), x)


@torch.no_grad()
def rows_of(settings: Settings, filled: Tensor, count: int, write: Tensor | None, reset: Tensor | None) -> Rows:
    """The rows of a block of `count` tokens; filled `[N, c]`, masks `[N, count]` or None."""
    context, device = settings.context, filled.device
    weights = constants(tuple(settings.form.weights), filled.dtype, device)
    ages = torch.arange(len(weights), device=device)
    if write is None:
        write = filled.new_ones(len(filled), count, dtype=torch.bool)
    ordinal = write.cumsum(1)
    written = torch.argsort((~write).to(torch.int8), dim=1, stable=True) + context
    old_rows = torch.arange(context, device=device).expand(len(write), context)
    order = torch.cat((old_rows, written), 1)
    at = (ordinal.unsqueeze(-1) - 1 + context - ages).clamp(min=0)
    index = order.gather(1, at.flatten(1)).view_as(at)
    last = order.gather(1, ordinal[:, -1:] + torch.arange(context, device=device))
    marks = torch.cat((filled, filled.new_ones(len(filled), count)), 1)
    live = marks.gather(1, index.flatten(1)).view_as(index) * write.unsqueeze(-1) * weights
    selection = (last.unsqueeze(-1) == torch.arange(context + count, device=device)).to(filled.dtype)
    still = marks.gather(1, last)
    if reset is not None:
        document = reset.cumsum(1)
        segment = torch.cat((document.new_zeros(len(filled), context), document), 1)
        live = live * (segment.gather(1, index.flatten(1)).view_as(live) == document.unsqueeze(-1))
        same = segment.gather(1, last) == document[:, -1:]
        still, selection = still * same, selection * same.unsqueeze(-1)
    return Rows(index.flatten(1), live, selection, still)


class Kernels(NamedTuple):
    """Products of the rows and queries of a block with one another and with its base states (first M, first S, initial
    M, where they exist), all of unit length where the features are to be."""

    pairs: Tensor  # [N, L, L]: rows with rows
    asked: Tensor  # [N, n, L]: queries with rows
    facing: list[Tensor]  # [N, L, V] each: base states at the rows
    read: list[Tensor]  # [N, n, V] each: base states at the queries
    lengths: Tensor | None  # [N, L, 1]: by what the rows' features are to be multiplied


def kernels_of(settings: Settings, products: Tensor, x_k: Tensor, x_q: Tensor, width: int) -> Kernels:
    """From the products `[N, L + n, bases V + c]` of the features of rows and queries with base states and context, and
    from the keys and queries themselves."""
    context, count, kernel = settings.context, x_k.shape[1], settings.lift.kernel
    rows, queries = products.split((context + count, count), 1)
    states = products.shape[-1] - context
    facing, old = rows.split((states, context), -1)
    read, old_q = queries.split((states, context), -1)
    pairs = torch.cat((old, torch.cat((old[:, context:].mT, kernel(x_k @ x_k.mT)), 1)), 2)
    asked = torch.cat((old_q, kernel(x_q @ x_k.mT)), 2)
    lengths = None
    if settings.normed:
        lengths = torch.cat((torch.ones_like(x_k[:, :1, :1]).expand(-1, context, 1), inverse_length(settings, x_k)), 1)
        scale = inverse_length(settings, x_q) * settings.query
        pairs, asked = lengths * pairs * lengths.mT, scale * asked * lengths.mT
        facing, read = lengths * facing, scale * read
    elif settings.query != 1:
        asked, read = settings.query * asked, settings.query * read
    return Kernels(pairs, asked, list(facing.split(width, -1)), list(read.split(width, -1)), lengths)


def inverse_length(settings: Settings, x: Tensor) -> Tensor:
    """1 / |phi(x)| `[..., 1]`, 1 of a zero."""
    square = settings.lift.kernel(x.square().sum(-1, keepdim=True))
    return torch.where(square > 0, square, 1.0).rsqrt()


class Outcome(NamedTuple):
    """Results of a block: outputs, and the states after it as combinations.

    Fields:
        y: `[N, n, V]`.
        memory, slot, keys: `[N, V or c, *]`: the next memory, momentum and context keys as combinations of the rows'
            features, then of the first S where there are more; None where there is no such state.
        bases: `[N, b]`: how much of each base state the memory keeps besides.
        slot_base: `[N]`: how much of the first S the next one keeps.
        values: `[N, c, V]`: those of the context.
    """

    y: Tensor
    memory: Tensor
    slot: Tensor | None
    keys: Tensor | None
    bases: Tensor
    slot_base: Tensor | None
    values: Tensor | None


def left_behind(rows: Rows, lengths: Tensor | None, values: Tensor | None, v: Tensor) -> tuple[Tensor | None, ...]:
    """The context's keys, as combinations of the rows' features, and its values after a block."""
    if values is None:
        return None, None
    keys = rows.context if lengths is None else rows.context * lengths.mT
    return keys, rows.context @ torch.cat((values, v), 1)


def linear_block(
    settings: Settings, rows: Rows, masks: tuple[Tensor | None, Tensor | None], leaves: Leaves, record: None = None
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
            weight.repeat_interleave(ages, 1).unsqueeze(-1) * rows.picked(state)
            for weight, state in zip(faced.bases, kernels.facing, strict=True)
        )
        cross = rows.picked(rows.picked(kernels.pairs).mT).mT
        coupling = faced.writes.repeat_interleave(ages, 1).repeat_interleave(ages, 2)
        lower = coupling * cross * step.unsqueeze(1)
        if config.forms.error:
            right = (base - target).mT
            errors = torch.linalg.solve_triangular(lower.mT, right, upper=True, left=False, unitriangular=True).mT
        else:
            errors = implicit_gradients(config.bias, base, lower, target)
    moves = -step.unsqueeze(-1) * errors

    attend = rows.picked(kernels.asked.mT).mT * states.writes.repeat_interleave(ages, 2)
    y = attend @ moves
    for weight, state in zip(states.bases, kernels.read, strict=True):
        y = y + weight.unsqueeze(-1) * state

    def onto(weights: Tensor) -> Tensor:
        total = rows.summed(weights.repeat_interleave(ages, 1).unsqueeze(-1) * moves, settings.context + count)
        return (total if kernels.lengths is None else kernels.lengths * total).mT

    keys, values = left_behind(rows, kernels.lengths, values, v)
    bases = torch.stack([weight[..., -1] for weight in after.bases], -1)
    moved, kept = (None, None) if slot is None else (onto(slot.last), slot.bases[0][..., -1])
    return Outcome(y, onto(after.last), moved, keys, bases, kept, values), None


class _Operands(NamedTuple):
    """Of every token: base states at its rows and at its query `[N, n, V, W]`, `[N, n, V, 1]`, values, kernels of all
    rows with its own `[N, n, L, W]`, of these with each other, of all with its query `[N, n, L, 1]`, gates `[N, n, 1,
    1]`; and the first Gram matrix."""

    memory: Tensor
    slot: Tensor
    initial: Tensor | None
    memory_q: Tensor
    slot_q: Tensor
    initial_q: Tensor | None
    values: Tensor
    hit: Tensor
    mutual: Tensor
    asked: Tensor
    lr: Tensor
    retain: Tensor
    momentum: Tensor
    gram: Tensor


class _State(NamedTuple):
    """s, a, i `[N, 1, 1]`, X, Y, W and the Gram matrix."""

    s: Tensor
    a: Tensor
    i: Tensor
    x: Tensor
    y: Tensor
    w: Tensor
    gram: Tensor


def gram_block(
    settings: Settings, rows: Rows, masks: tuple[Tensor | None, Tensor | None], leaves: Leaves, record: Any = None
) -> tuple[Outcome, Any]:
    """As `linear_block`; the products hold those of the first S's rows with the base states at their end.

    The second result is the `record` for the same call in the backward pass, so that the tokens need not run again."""
    products, x_k, x_q, v, values, *gates = leaves
    width = v.shape[-1]
    kernels = kernels_of(settings, products[:, :-width], x_k, x_q, width)
    gram = products[:, -width:, width : 2 * width]
    target = v if values is None else torch.cat((values, v), 1)
    outputs, starts = mixed(settings, rows, masks, kernels, gram, target, gates, record=record)
    y, x, onto, slot, s, a, i = several(outputs)
    keys, values = left_behind(rows, kernels.lengths, values, v)
    if kernels.lengths is not None:
        onto, slot = onto * kernels.lengths.mT, slot * kernels.lengths.mT
    bases = (a, torch.zeros_like(a), i)[: len(kernels.facing)]
    combined = torch.cat((onto, x), -1), slot, keys, torch.cat(bases, -1).squeeze(1), s.flatten()
    return Outcome(y, *combined, values), (outputs, starts)


def mixed(
    settings: Settings, rows: Rows, masks: tuple[Tensor | None, Tensor | None], kernels: Kernels, gram: Tensor,
    target: Tensor, gates: Sequence[Tensor], *, errors: Tensor | None = None, record: Any = None,
) -> tuple[Tensors, Any]:  # fmt: skip
    """y, X, Y, W, s, a and i of a block's tokens, and what the backward pass begins with; `errors` `[N, n W, V]` are
    those of all writes where they do not depend on the present memory."""
    (write, reset), (lr, retain, momentum), (count, ages) = masks, gates, rows.live.shape[1:]

    def windows(x: Tensor) -> Tensor:  # [N, L, *] -> [N, n, *, W]
        return rows.picked(x).unflatten(1, (count, ages)).mT

    def asked(x: Tensor) -> Tensor:  # [N, n, *] -> [N, n, *, 1]
        return x.unsqueeze(-1)

    hit = windows(kernels.pairs)
    index = rows.places.view(-1, count, 1, ages).expand(-1, -1, ages, -1)
    keep, carried = (neutral(gate, write).unsqueeze(-1).unsqueeze(-1) for gate in (retain, momentum))
    if not settings.config.retention.uses_retain:
        keep = torch.ones_like(keep)
    initial = errors is None and len(kernels.facing) > 2
    faced = windows(kernels.facing[0]) if errors is None else errors.unflatten(1, (count, ages)).mT
    operands = _Operands(
        faced, windows(kernels.facing[1]), windows(kernels.facing[2]) if initial else None,
        asked(kernels.read[0]), asked(kernels.read[1]), asked(kernels.read[2]) if initial else None,
        windows(target), hit, hit.gather(2, index.mT), asked(kernels.asked), lr.unsqueeze(-1).unsqueeze(-1), keep,
        carried, gram,
    )  # fmt: skip
    return _Loop(settings, rows, reset, kernels.pairs.shape[1]).run(operands, record)


class _Loop:
    """The tokens of one block; `run` is differentiable, by hand where torch need not see it."""

    def __init__(self, settings: Settings, rows: Rows, reset: Tensor | None, length: int) -> None:
        self.gain = settings.gain()
        count = rows.live.shape[1]
        self.early = settings.config.read == "before"
        self.frozen = settings.config.chunk > 1  # the errors are given, as what the memory predicts of values of 0
        # Under dot no write depends on what the memory predicts.
        self.asks = self.frozen or not settings.config.forms.target
        self.decayed = settings.config.decay_order == "before_gradient" and not self.frozen
        self.live = rows.live.unsqueeze(2).unbind(1)
        hot = torch.nn.functional.one_hot(rows.places.view(-1, count, rows.live.shape[-1]), length)
        self.hot = hot.to(rows.live.dtype).unbind(1)
        self.reset = None if reset is None else reset.view(*reset.shape, 1, 1).unbind(1)

    def run(self, operands: _Operands, record: Any = None) -> tuple[Tensors, list[_State]]:
        """(y `[N, n, V]`, X, Y, W, s, a, i), and the states at every `AGAIN` tokens; `record` is what it returned
        before, if it has run, to be pulled back by hand."""
        if record is None and not torch.is_grad_enabled():
            return self.forward(operands)
        hand = ByHand(
            "engine.window.gram",
            lambda inputs, keeps: record or self.forward(_Operands(*inputs)),  # type: ignore[arg-type]
            lambda inputs, starts, cotangents: self.backward(_Operands(*inputs), starts, cotangents),  # type: ignore[arg-type]
            lambda *inputs: self.forward(_Operands(*inputs))[0],
        )
        return hand.block().forward(*operands)[0], record and record[1]

    def forward(self, operands: _Operands) -> tuple[Tensors, list[_State]]:
        """Token by token."""
        state, outputs, starts = self._first(operands), [], []
        for t, token in enumerate(_tokens(operands)):
            if t % AGAIN == 0:
                starts.append(state)
            state, read, _ = self._step(t, token, self._entered(t, state))
            outputs.append(read)
        return (torch.cat(outputs, -1).mT, state.x, state.y, state.w, state.s, state.a, state.i), starts

    def _entered(self, t: int, state: _State) -> _State:
        """The state that a token finds, after its reset."""
        return state if self.reset is None else _where(self.reset[t], self._blank(state), state)

    def _first(self, operands: _Operands) -> _State:
        one = torch.ones_like(operands.lr[:, 0])
        across = torch.zeros_like(operands.gram)
        wide = operands.hit.new_zeros(len(one), across.shape[-1], operands.hit.shape[2])
        return _State(one, one, torch.zeros_like(one), across, wide, wide, operands.gram)

    def _blank(self, state: _State) -> _State:
        return _State(*(torch.zeros_like(item) for item in state))._replace(i=torch.ones_like(state.i))

    def _step(self, t: int, token: _Operands, before: _State) -> tuple[_State, Tensor, tuple[Any, ...]]:
        s, a, i, x, y, w, gram = before
        pred = token.memory
        if not self.frozen:
            pred = torch.baddbmm(torch.baddbmm(a * pred, x, token.slot), y, token.hit)
            if token.initial is not None:
                pred = pred + i * token.initial
        prediction = token.retain * pred if self.decayed else pred
        u = (prediction - token.values if self.asks else -token.values) * self.live[t]
        reached = torch.baddbmm(s * token.slot, w, token.hit)
        h = torch.baddbmm(token.momentum * reached, u, token.mutual, alpha=0.5)
        both = torch.bmm(h, u.mT)
        gram = torch.addcmul(both + both.mT, token.momentum.square(), gram)
        w = torch.baddbmm(token.momentum * w, u, self.hot[t])
        s = token.momentum * s
        outputs, of_gain = self.gain.apply((gram,))
        q = one(outputs)
        step = -token.lr * q
        after = _State(
            s, token.retain * a, token.retain * i, torch.addcmul(token.retain * x, s, step),
            torch.baddbmm(token.retain * y, step, w), w, gram,
        )  # fmt: skip
        read = self._read(token, before if self.early else after)
        return after, read, (before, after, pred, u, reached, h, q, step, of_gain)

    def _read(self, token: _Operands, state: _State) -> Tensor:
        read = torch.baddbmm(torch.baddbmm(state.a * token.memory_q, state.x, token.slot_q), state.y, token.asked)
        return read if token.initial_q is None else read + state.i * token.initial_q

    def backward(self, operands: _Operands, starts: list[_State], cotangents: Any) -> Tensors:
        """Cotangents of what was given; steps are made again, a few tokens at once."""
        gread, gx, gy, gw, gs, ga, gi = cotangents
        later = _State(gs, ga, gi, gx, gy, gw, torch.zeros_like(operands.gram))
        shares: list[_Operands] = []
        reads = gread.mT.split(1, -1)
        tokens = _tokens(operands)
        for first in reversed(range(0, len(tokens), AGAIN)):
            state, steps = starts[first // AGAIN], []
            for t in range(first, min(first + AGAIN, len(tokens))):
                state, _, past = self._step(t, tokens[t], self._entered(t, state))
                steps.append(past)
            for t in reversed(range(first, first + len(steps))):
                share, later = self._back(t, tokens[t], steps.pop(), reads[t], later)
                if self.reset is not None:
                    later = _where(self.reset[t], _State(*map(torch.zeros_like, later)), later)
                shares.append(share)
        stacked = [
            None if column[0] is None else torch.stack(column[::-1], 1)
            for column in zip(*(share[:-1] for share in shares), strict=True)
        ]
        return *stacked, later.gram

    def _back(self, t: int, token: _Operands, past: Any, g: Tensor, later: _State) -> tuple[_Operands, _State]:
        before, after, pred, u, reached, h, q, step, of_gain = past
        asked, read = self._read_back(token, before if self.early else after, g)
        if not self.early:  # the query meets the state after the token
            later = _sum(later, read)
        gs, ga, gi, gx, gy, gw, ggram = later
        # X', Y', a', i'
        gretain = _inner(gx, before.x) + _inner(gy, before.y) + ga * before.a + gi * before.i
        gstep = torch.baddbmm(after.s * gx, gy, after.w.mT)
        gs = gs + _inner(gx, step)
        gw = torch.baddbmm(gw, step.mT, gy)
        ggram = ggram + one(tuple(self.gain.pullback(of_gain, [-token.lr * gstep])))
        # W', s', C'
        gmomentum = gs * before.s + _inner(gw, before.w) + 2 * token.momentum * _inner(ggram, before.gram)
        gboth = ggram + ggram.mT
        gh = torch.bmm(gboth, u)
        gu = torch.baddbmm(torch.bmm(gw, self.hot[t].mT), gboth.mT, h)
        gu = torch.baddbmm(gu, gh, token.mutual.mT, alpha=0.5)
        gmomentum = gmomentum + _inner(gh, reached)
        greached = token.momentum * gh
        gs, gw, ggram = token.momentum * gs, token.momentum * gw, token.momentum.square() * ggram
        # S_0 R_t + W K_t, U
        gs = gs + _inner(greached, token.slot)
        gw = torch.baddbmm(gw, greached, token.hit.mT)
        gseen = gu * self.live[t]
        gpred = gseen if self.asks and not self.frozen else torch.zeros_like(gseen)
        if self.decayed and self.asks:
            gretain, gpred = gretain + _inner(gseen, pred), token.retain * gseen
        ga, gi = token.retain * ga + _inner(gpred, token.memory), token.retain * gi
        if token.initial is not None:
            gi = gi + _inner(gpred, token.initial)
        share = _Operands(  # type: ignore[call-arg]
            gseen if self.frozen else before.a * gpred,
            torch.baddbmm(before.s * greached, before.x.mT, gpred),
            None if token.initial is None else before.i * gpred,
            *asked[:3],  # type: ignore[arg-type]
            -gseen,
            torch.baddbmm(torch.bmm(before.w.mT, greached), before.y.mT, gpred),
            0.5 * torch.bmm(u.mT, gh),
            asked[3],
            -_inner(gstep, q),
            gretain,
            gmomentum,
            gpred,
        )
        gx = torch.baddbmm(token.retain * gx, gpred, token.slot.mT)
        gy = torch.baddbmm(token.retain * gy, gpred, token.hit.mT)
        new = _State(gs, ga, gi, gx, gy, gw, ggram)
        return share, _sum(new, read) if self.early else new

    def _read_back(
        self, token: _Operands, state: _State, g: Tensor
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """Cotangents of what the query meets, and of the state that it is read from."""
        initial = token.initial_q
        share = (
            None, _inner(g, token.memory_q), None if initial is None else _inner(g, initial),
            torch.bmm(g, token.slot_q.mT), torch.bmm(g, token.asked.mT), None, None,
        )  # fmt: skip
        met = (
            state.a * g, torch.bmm(state.x.mT, g), None if initial is None else state.i * g, torch.bmm(state.y.mT, g)
        )  # fmt: skip
        return met, share


def _sum(state: _State, more: tuple[Tensor | None, ...]) -> _State:
    return _State(*(x if e is None else x + e for x, e in zip(state, more, strict=True)))


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)


def _tokens(operands: _Operands) -> list[_Operands]:
    """Inputs of each token."""
    columns = [[None] * operands.lr.shape[1] if item is None else item.unbind(1) for item in operands[:-1]]
    return [_Operands(*token, operands.gram) for token in zip(*columns, strict=True)]  # type: ignore[call-arg]


def _where(mask: Tensor, yes: _State, no: _State) -> _State:
    return _State(*(torch.where(mask, a, b) for a, b in zip(yes, no, strict=True)))
