"""A block whose steps are D = -lr Q S', Q a function of the momentum's Gram matrix: token by token, without a state.

Within a block, over the features R of its rows,

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

from hecate.engine.coefficients import neutral
from hecate.engine.window.rows import Kernels, Leaves, Outcome, Rows, Settings, kernels_of, left_behind
from hecate.tape import ByHand, Tensors, one, several

SIZE = 64
AGAIN = 16  # tokens whose steps are held at once in the backward pass


class _Given(NamedTuple):
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
    own: Tensor
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
    settings: Settings, rows: Rows, masks: tuple[Tensor | None, Tensor | None], leaves: Leaves, found: Any = None
) -> tuple[Outcome, Any]:
    """As `linear_block`; the products hold those of the first S's rows with the base states at their end.

    Beside the outcome stands what the same call takes as `found`, lest the tokens run again."""
    products, x_k, x_q, v, values, *gates = leaves
    width = v.shape[-1]
    kernels = kernels_of(settings, products[:, :-width], x_k, x_q, width)
    gram = products[:, -width:, width : 2 * width]
    target = v if values is None else torch.cat((values, v), 1)
    outputs, starts = mixed(settings, rows, masks, kernels, gram, target, gates, found=found)
    y, x, onto, slot, s, a, i = several(outputs)
    keys, left = left_behind(rows, kernels.lengths, values, v)
    if kernels.lengths is not None:
        onto, slot = onto * kernels.lengths.mT, slot * kernels.lengths.mT
    bases = (a, torch.zeros_like(a), i)[: len(kernels.facing)]
    combined = torch.cat((onto, x), -1), slot, keys, torch.cat(bases, -1).squeeze(1), s.flatten()
    return Outcome(y, *combined, left), (outputs, starts)


def mixed(
    settings: Settings, rows: Rows, masks: tuple[Tensor | None, Tensor | None], kernels: Kernels, gram: Tensor,
    target: Tensor, gates: Sequence[Tensor], *, errors: Tensor | None = None, found: Any = None,
) -> tuple[Tensors, Any]:  # fmt: skip
    """y, X, Y, W, s, a and i of a block's tokens, and what the backward pass begins with; `errors` `[N, n W, V]` are
    those of all writes where they do not depend on the present memory."""
    (write, reset), (lr, retain, momentum), (count, ages) = masks, gates, rows.live.shape[1:]

    def windows(x: Tensor) -> Tensor:  # [N, L, *] -> [N, n, *, W]
        return rows.picked(x).unflatten(1, (count, ages)).mT

    def asked(x: Tensor) -> Tensor:  # [N, n, *] -> [N, n, *, 1]
        return x.unsqueeze(-1)

    hit = windows(kernels.pairs)
    index = rows.places.view(-1, count, 1, ages).expand(len(target), -1, ages, -1)
    keep, carried = (neutral(gate, write).unsqueeze(-1).unsqueeze(-1) for gate in (retain, momentum))
    if not settings.config.retention.uses_retain:
        keep = torch.ones_like(keep)
    initial = errors is None and len(kernels.facing) > 2
    faced = windows(kernels.facing[0]) if errors is None else errors.unflatten(1, (count, ages)).mT
    given = _Given(
        faced, windows(kernels.facing[1]), windows(kernels.facing[2]) if initial else None,
        asked(kernels.read[0]), asked(kernels.read[1]), asked(kernels.read[2]) if initial else None,
        windows(target), hit, hit.gather(2, index.mT), asked(kernels.asked), lr.unsqueeze(-1).unsqueeze(-1), keep,
        carried, gram,
    )  # fmt: skip
    return _Loop(settings, rows, reset, kernels.pairs.shape[1]).run(given, found)


class _Loop:
    """The tokens of one block; `run` is differentiable, by hand where torch need not see it."""

    def __init__(self, settings: Settings, rows: Rows, reset: Tensor | None, length: int) -> None:
        form = settings.form.inner.gram_form()
        if form is None:
            raise TypeError(f"algorithm {settings.form.inner.kind!r} has no Gram form")
        self.gain = form.gain(settings.shape)
        count = rows.live.shape[1]
        self.early = settings.config.read == "before"
        self.frozen = settings.config.chunk > 1  # the errors are given, as what the memory predicts of values of 0
        # Under dot no write depends on what the memory predicts.
        self.asks = self.frozen or not settings.config.forms.target
        self.decayed = settings.config.decay_order == "before_gradient" and not self.frozen
        self.live = rows.live.unsqueeze(2).unbind(1)
        hot = torch.nn.functional.one_hot(rows.places.view(-1, count, rows.live.shape[-1]), length)
        self.hot = hot.to(rows.live.dtype).expand(len(rows.live), -1, -1, -1).unbind(1)
        self.reset = None if reset is None else reset.view(*reset.shape, 1, 1).unbind(1)

    def run(self, given: _Given, found: Any = None) -> tuple[Tensors, list[_State]]:
        """(y `[N, n, V]`, X, Y, W, s, a, i), and the states at every `AGAIN` tokens; `found` is what it returned
        before, if it has run, to be pulled back by hand."""
        if found is None and not torch.is_grad_enabled():
            return self.forward(given)
        hand = ByHand(
            "engine.window.gram",
            lambda inputs, keeps: found or self.forward(_Given(*inputs)),  # type: ignore[arg-type]
            lambda inputs, starts, cotangents: self.backward(_Given(*inputs), starts, cotangents),  # type: ignore[arg-type]
            lambda *inputs: self.forward(_Given(*inputs))[0],
        )
        return hand.block().forward(*given)[0], found and found[1]

    def forward(self, given: _Given) -> tuple[Tensors, list[_State]]:
        """Token by token."""
        state, outputs, starts = self._first(given), [], []
        for t, token in enumerate(_tokens(given)):
            if t % AGAIN == 0:
                starts.append(state)
            state, read, _ = self._step(t, token, self._entered(t, state))
            outputs.append(read)
        return (torch.cat(outputs, -1).mT, state.x, state.y, state.w, state.s, state.a, state.i), starts

    def _entered(self, t: int, state: _State) -> _State:
        """The state that a token finds, after its reset."""
        return state if self.reset is None else _where(self.reset[t], self._blank(state), state)

    def _first(self, given: _Given) -> _State:
        one = torch.ones_like(given.lr[:, 0])
        across = torch.zeros_like(given.gram)
        wide = given.hit.new_zeros(len(one), across.shape[-1], given.hit.shape[2])
        return _State(one, one, torch.zeros_like(one), across, wide, wide, given.gram)

    def _blank(self, state: _State) -> _State:
        return _State(*(torch.zeros_like(item) for item in state))._replace(i=torch.ones_like(state.i))

    def _step(self, t: int, token: _Given, before: _State) -> tuple[_State, Tensor, tuple[Any, ...]]:
        s, a, i, x, y, w, gram = before
        pred = token.memory
        if not self.frozen:
            pred = torch.baddbmm(torch.baddbmm(a * pred, x, token.slot), y, token.hit)
            if token.initial is not None:
                pred = pred + i * token.initial
        seen = token.retain * pred if self.decayed else pred
        u = (seen - token.values if self.asks else -token.values) * self.live[t]
        reached = torch.baddbmm(s * token.slot, w, token.hit)
        h = torch.baddbmm(token.momentum * reached, u, token.own, alpha=0.5)
        both = torch.bmm(h, u.mT)
        gram = torch.addcmul(both + both.mT, token.momentum.square(), gram)
        w = torch.baddbmm(token.momentum * w, u, self.hot[t])
        s = token.momentum * s
        made, kept = self.gain.apply((gram,))
        q = one(made)
        step = -token.lr * q
        after = _State(
            s, token.retain * a, token.retain * i, torch.addcmul(token.retain * x, s, step),
            torch.baddbmm(token.retain * y, step, w), w, gram,
        )  # fmt: skip
        return (
            after,
            self._read(token, before if self.early else after),
            (before, after, pred, u, reached, h, q, step, kept),
        )

    def _read(self, token: _Given, state: _State) -> Tensor:
        read = torch.baddbmm(torch.baddbmm(state.a * token.memory_q, state.x, token.slot_q), state.y, token.asked)
        return read if token.initial_q is None else read + state.i * token.initial_q

    def backward(self, given: _Given, starts: list[_State], cotangents: Any) -> Tensors:
        """Cotangents of what was given; steps are made again, a few tokens at once."""
        gread, gx, gy, gw, gs, ga, gi = cotangents
        later = _State(gs, ga, gi, gx, gy, gw, torch.zeros_like(given.gram))
        found: list[_Given] = []
        reads = gread.mT.split(1, -1)
        tokens = _tokens(given)
        for first in reversed(range(0, len(tokens), AGAIN)):
            state, steps = starts[first // AGAIN], []
            for t in range(first, min(first + AGAIN, len(tokens))):
                state, _, kept = self._step(t, tokens[t], self._entered(t, state))
                steps.append(kept)
            for t in reversed(range(first, first + len(steps))):
                own, later = self._back(t, tokens[t], steps.pop(), reads[t], later)
                if self.reset is not None:
                    later = _where(self.reset[t], _State(*map(torch.zeros_like, later)), later)
                found.append(own)
        stacked = [
            None if column[0] is None else torch.stack(column[::-1], 1)
            for column in zip(*(own[:-1] for own in found), strict=True)
        ]
        return *stacked, later.gram

    def _back(self, t: int, token: _Given, kept: tuple[Any, ...], g: Tensor, later: _State) -> tuple[_Given, _State]:
        before, after, pred, u, reached, h, q, step, of_gain = kept
        asked, later, earlier = self._read_back(token, before, after, g, later)
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
        gu = torch.baddbmm(gu, gh, token.own.mT, alpha=0.5)
        gmomentum = gmomentum + _inner(gh, reached)
        greached = token.momentum * gh
        gs, gw, ggram = token.momentum * gs, token.momentum * gw, token.momentum.square() * ggram
        # S_0 R_t + W K_t, U
        gs = gs + _inner(greached, token.slot)
        gw = torch.baddbmm(gw, greached, token.hit.mT)
        gseen = gu * self.live[t]
        gpred = gseen if self.asks else torch.zeros_like(gseen)
        gfrozen, gpred = (gpred, torch.zeros_like(gpred)) if self.frozen else (None, gpred)
        if self.decayed and self.asks:
            gretain, gpred = gretain + _inner(gseen, pred), token.retain * gseen
        ga, gi = token.retain * ga + _inner(gpred, token.memory), token.retain * gi
        if token.initial is not None:
            gi = gi + _inner(gpred, token.initial)
        own = _Given(  # type: ignore[call-arg]
            before.a * gpred if gfrozen is None else gfrozen,
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
        if earlier is not None:
            new = _State(*(x if e is None else x + e for x, e in zip(new, earlier, strict=True)))
        return own, new

    def _read_back(
        self, token: _Given, before: _State, after: _State, g: Tensor, later: _State
    ) -> tuple[tuple[Tensor | None, ...], _State, tuple[Tensor | None, ...] | None]:
        """Cotangents of what the query meets, and of the state that it is read from: added to those of the state after
        the token, or apart."""
        state = before if self.early else after
        initial = token.initial_q
        share = (
            None, _inner(g, token.memory_q), None if initial is None else _inner(g, initial),
            torch.bmm(g, token.slot_q.mT), torch.bmm(g, token.asked.mT), None, None,
        )  # fmt: skip
        met = (
            state.a * g, torch.bmm(state.x.mT, g), None if initial is None else state.i * g, torch.bmm(state.y.mT, g)
        )  # fmt: skip
        if self.early:
            return met, later, share
        return met, _State(*(x if e is None else x + e for x, e in zip(later, share, strict=True))), None


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)


def _tokens(given: _Given) -> list[_Given]:
    """Inputs of each token."""
    columns = [[None] * given.lr.shape[1] if item is None else item.unbind(1) for item in given[:-1]]
    return [_Given(*token, given.gram) for token in zip(*columns, strict=True)]  # type: ignore[call-arg]


def _where(mask: Tensor, yes: _State, no: _State) -> _State:
    return _State(*(torch.where(mask, a, b) for a, b in zip(yes, no, strict=True)))
