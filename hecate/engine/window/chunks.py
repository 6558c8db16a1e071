"""Chunks of the window engine: gradients at a remembered state, so that no token of a span waits for another's write.

A span is at most 64 tokens of one chunk. Its features R `[L, F]`, the c keys of the context and its own n, meet the
states in one product, and what leaves it is made of them in another; with A the memory at the chunk's start, which is
the present one where the span opens it, the errors of all its windows are known at once:

    e_(t,a) = grad ell(b_t A phi_r(t,a), v_r(t,a)),   b_t = 1, or with before_gradient what retain has left of A

`commit="token"`, a linear step: `M_t = a_t M + s_t S - sum_(s<=t) K[t,s] lr_s sum_a w_a e_(s,a) phi_r(s,a)^T`, batched
products. A step by the Gram matrix: S_t = s_t S + W_t R is a running sum of errors, so the Gram matrices of many
tokens, their gains Q_t, and from these

    M_t = a_t M + X_t S + Y_t R,   (X_t, Y_t) = retain_t (X, Y)_(t-1) - lr_t Q_t (s_t I, W_t)

are batched products too, `PIECE` tokens at once, made again in the backward pass.

`commit="chunk"`: `G' = G + sum_(t,a) lr_t w_a e_(t,a) phi_r(t,a)^T` waits in the state; the token that closes the chunk
takes the one step: S' = momentum S + G', and `M' = a M - S'`, or `a M - gain(S' S'^T) S'`. [ENG-WIN-D3, ENG-WIN-D4]

Where each memory's tokens lie, masks, resets and what is kept for the backward pass are the chunk engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hecate.engine.chunk.engine import LAST, PRODUCT, Step, anchor_of, chunked, closed, since_of
from hecate.engine.chunk.spans import Span, kept_rows
from hecate.engine.coefficients import coefficients, neutral, running_products, span_products
from hecate.engine.loop import committed_chunk, per_weight, select
from hecate.engine.tokens import CONCAT, NUMBERS, Carry, Tokens, cut, linear_block
from hecate.engine.window.rows import Kernels, Plan, Rows, inverse_length, kernels_of, left_behind, rows_of
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import Block, ByHand, Run, Tensors, by_hand, differentiable, formula_block, one, several
from hecate.tape.ops import over

SIZE = 64  # tokens of a span
PIECE = 8  # tokens whose Gram matrices are worked on at once
KEPT = 2**28  # bytes of tokens and states up to which no span runs twice


def in_chunks(
    plan: Plan, position: int | None, config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run
) -> tuple[Tensor, Carry]:
    """Runs tokens `[N, T, *]` from a place in a chunk, None where it is not one: outputs and the final carry."""
    lift, own = plan.lift, len(plan.form.inner.slots)
    wide = linear_block("window.spread", lift.spread, lift.gathered)
    back = linear_block("window.gathered", lambda x: lift.gathered(x).contiguous(), lift.spread)

    def mapped(block: Block, carry: Carry) -> Carry:
        kinds = carry.memory, carry.slots[: own + 1], carry.anchor, carry.pending
        memory, slots, anchor, pending = (per_weight(run, block, kind) for kind in kinds)
        slots = (*slots, *carry.slots[own + 1 :])
        return carry._replace(memory=memory, slots=slots, anchor=anchor, pending=pending)

    if tokens.reset is not None:
        initial = per_weight(run, wide, initial)
    steps = partial(_steps, _Spans(plan))
    y, new = chunked(
        config, tokens, mapped(wide, carry), initial, run=run, position=position, steps=steps, size=SIZE, kept=KEPT
    )
    return y, mapped(back, new)


def _steps(
    spans: _Spans, config: MemoryConfig, tokens: Tokens, sizes: list[int], run: Run
) -> tuple[Step, list[Tensors]]:
    """The step to take, and the row of each: kept, keys, queries, v, the gates and the mask."""
    columns = kept_rows(config, tokens.retain, sizes, run), cut((*tokens[:NUMBERS], tokens.write), sizes, run)
    step = spans.commit_chunk if config.commit == "chunk" else spans.commit_token
    return step, [(*kept, *row) for kept, row in zip(*columns, strict=True)]


class _Spans:
    """What spans run: the two products with features, by hand and with features made again, and what lies between."""

    def __init__(self, plan: Plan) -> None:
        inner, self.plan, self.config = plan.form.inner, plan, plan.config
        self.own, self.rooms = len(inner.slots), dict[str, Tensor]()
        self.mixes = inner.kernel_form() is None
        met, combined = partial(self.met, again=True), partial(self.combined, again=True)
        self.meet = ByHand("window.meet", lambda given, _: (met(*given), None), self.met_vjp, self.met).block()
        self.combine = ByHand(
            "window.combine", lambda given, _: (combined(*given), None), self.combined_vjp, self.combined
        ).block()
        self.outcome = recorded("window.outcome", self.out)
        self.sums = recorded("window.sums", self.summed)
        self.scaled = recorded("window.scaled", lambda y, x: (_factor(plan, x) * y,))
        self.step = recorded("window.step", self.stepped, again=True)

    def gain(self, gram: Tensor) -> Tensor:
        """Q of Gram matrices `[N, V, V]`."""
        form = self.plan.form.inner.gram_form()
        if form is None:
            raise TypeError(f"algorithm {self.plan.form.inner.kind!r} has no Gram form")
        return one(by_hand(form.gain(self.plan.shape)).forward(gram)[0])

    # Products with features.

    def features(self, x: Tensor, keys: Tensor | None, again: bool = False) -> Tensor:
        """`[N, c + n, F]`: the context's keys, that are features, and those of x; by hand, `again` and again, in one
        room: pages of fresh tensors cost as much as their products."""
        if not again:
            made = self.plan.lift.features(x)
            return made if keys is None else torch.cat((keys, made), 1)
        kept = 0 if keys is None else keys.shape[1]
        made = self.room("features", x, kept + x.shape[1])
        self.plan.lift.features(x, made[:, kept:])
        if keys is not None:
            made[:, :kept] = keys
        return made

    def room(self, name: str, like: Tensor, length: int) -> Tensor:
        """Space `[N, length, F]`."""
        shape, held = (len(like), length, self.plan.lift.width), self.rooms.get(name)
        if held is None or held.shape != shape:
            self.rooms[name] = held = like.new_empty(shape)
        return held

    def met(self, x: Tensor, keys: Tensor | None, *bases: Tensor, again: bool = False) -> Tensors:
        """Products `[N, c + n, *]` of the rows' features with base states and context."""
        made = self.features(x, keys, again)
        return (torch.cat([made @ base.mT for base in (*bases, *([] if keys is None else [keys]))], -1),)

    def met_vjp(self, inputs: Tensors, _: None, cotangents: Sequence[Tensor]) -> Tensors:
        """With P the products of features X and states B: g_B = g_P^T X, g_X = g_P B."""
        x, keys, *bases = inputs
        states = [*bases, *([] if keys is None else [keys])]
        made, shares = self.features(x, keys, again=True), cotangents[0].split([b.shape[1] for b in states], -1)
        own = [torch.bmm(share.mT, made) for share in shares]
        g = torch.bmm(shares[0], states[0], out=self.room("cotangents", made, made.shape[1]))
        for share, base in zip(shares[1:], states[1:], strict=True):
            g.baddbmm_(share, base)
        gx, gkeys = self.rows_back(x, keys, g)
        return gx, None if gkeys is None else own.pop() + gkeys, *own

    def combined(
        self, x: Tensor, keys: Tensor | None, weights: Tensor, across: Tensor | None, *rest: Tensor, again: bool = False
    ) -> Tensors:
        """States `[N, *, F]` from base states and combinations O of the rows' features: `O X + a B`, of all `terms`, and
        where rows are mixed what they have of S across to M. `rest` is the bases and O."""
        terms = self.terms
        count, made = 1 + max(base for _, base in terms), self.features(x, keys, again)
        found = [torch.bmm(item, made) for item in rest[count:]]
        for (state, base), weight in zip(terms, weights.unbind(-1), strict=True):
            found[state] = torch.addcmul(found[state], over(weight, rest[base]), rest[base])
        if across is not None:
            found[0] = torch.baddbmm(found[0], across, rest[1])
        return tuple(found)

    def combined_vjp(self, inputs: Tensors, _: None, cotangents: Sequence[Tensor]) -> Tensors:
        """With G the cotangents: g_O = G X^T, g_X = O^T G, g_a = <G, B>, g_B = a G."""
        x, keys, weights, across, *rest = inputs
        terms = self.terms
        count, made = 1 + max(base for _, base in terms), self.features(x, keys, again=True)
        gonto = [torch.bmm(g, made.mT) for g in cotangents]
        total = torch.bmm(rest[count].mT, cotangents[0], out=self.room("cotangents", made, made.shape[1]))
        for item, g in zip(rest[count + 1 :], cotangents[1:], strict=True):
            total.baddbmm_(item.mT, g)
        gweights: list[Tensor] = []
        gbases: dict[int, Tensor] = {}
        for (state, base), weight in zip(terms, weights.unbind(-1), strict=True):
            g, wide = cotangents[state], over(weight, rest[base])
            gweights.append(_inner(g, rest[base]))
            gbases[base] = gbases[base].addcmul_(wide, g) if base in gbases else wide * g
        gacross = None
        if across is not None:
            gacross = torch.bmm(cotangents[0], rest[1].mT)
            gbases[1].baddbmm_(across.mT, cotangents[0])
        own = [gbases[base] for base in range(count)]
        return *self.rows_back(x, keys, total), torch.stack(gweights, -1), gacross, *own, *gonto

    @property
    def terms(self) -> list[tuple[int, int]]:
        """Which states keep how much of which base states, in the order of their weights."""
        if self.config.commit == "chunk" or not self.own:
            return [(0, 0)]
        return [(0, 0), (1, 1)] if self.mixes else [(0, 0), (0, 1), (1, 1)]

    def rows_back(self, x: Tensor, keys: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """Cotangents of x and of the context's keys from those of `features`."""
        kept = 0 if keys is None else keys.shape[1]
        return self.plan.lift.pullback(x, g[:, kept:]), None if keys is None else g[:, :kept]

    # A step at each token.

    def commit_token(self, carry: Carry, row: Tensors, span: Span, run: Run) -> tuple[Tensor, Carry]:
        """Outputs of a span and the carry after it."""
        x_k, x_q, v, *gates = row[1:-1]
        since, anchor = since_of(carry, row[0], run), anchor_of(carry, span, run)
        slots, (keys, *context) = carry.slots[: self.own], self.context(carry)
        bases = (*carry.memory, *slots, *(() if span.opens is True else anchor))
        x = one(run(CONCAT, x_k, x_q))
        products = one(run(self.meet, x, keys, *bases))
        gram = one(run(_GRAM, *slots)) if self.mixes else None
        found = run(self.outcome, products, gram, x_k, x_q, v, *context, row[-1], since, *gates)
        y, weights, *found = several(found)
        across, count = (found.pop(0) if self.mixes else None), 1 + self.own + (keys is not None)
        new = several(run(self.combine, x_k, keys, weights, across, *bases[: 1 + self.own], *found[:count]))
        carry = carry._replace(memory=new[:1], slots=(*new[1:], *found[count:]), anchor=anchor)
        return y, closed(carry, since, span, run)

    def context(self, carry: Carry) -> tuple[Tensor | None, ...]:
        """Keys, values and marks of the context, None where the algorithm looks at its own token alone."""
        return carry.slots[self.own :] or (None, None, None)

    def out(
        self,
        products: Tensor,
        gram: Tensor | None,
        x_k: Tensor,
        x_q: Tensor,
        v: Tensor,
        values: Tensor | None,
        filled: Tensor | None,
        write: Tensor | None,
        since: Tensor | None,
        lr: Tensor,
        retain: Tensor,
        momentum: Tensor,
    ) -> Tensors:
        """What `commit_token` needs of a span: y; how much of M (of S) M' keeps, and S' of S; X; M', S' and the next
        keys as combinations of the rows; the context's values and marks."""
        plan, config, width = self.plan, self.config, v.shape[-1]
        rows = rows_of(plan, v[:, :0, 0] if filled is None else filled, v.shape[1], write, None)
        kernels = kernels_of(plan, products, x_k, x_q, width)
        anchor = kernels.facing[-1 if len(kernels.facing) > 1 + self.own else 0]
        errors = _errors(plan, rows, anchor, since, v if values is None else torch.cat((values, v), 1))
        if self.mixes:
            head, onto = self.mixed(rows, kernels, errors, one((gram,)), write, lr, retain, momentum)
        else:
            inner, ages = plan.form.inner.kernel_form(), len(plan.form.weights)
            after, before, slot = coefficients(config, retain, momentum, write, None, inner)
            states = after if config.read == "after" else before
            moves = -(lr.unsqueeze(-1) * rows.live).flatten(1).unsqueeze(-1) * errors
            y = (rows.picked(kernels.asked.mT).mT * states.writes.repeat_interleave(ages, 2)) @ moves
            for weight, held in zip(states.bases, kernels.read, strict=False):
                y = y + weight.unsqueeze(-1) * held
            kept = [weight[..., -1] for weight in after.bases]
            kept += [] if slot is None else [slot.bases[0][..., -1]]
            head, onto = [y, torch.stack(kept, -1)], []
            for last in (after.last, *([] if slot is None else [slot.last])):
                total = last.repeat_interleave(ages, 1).unsqueeze(-1) * moves
                onto.append(rows.summed(total, plan.kept + v.shape[1]).mT)
        return *head, *self.leaving(rows, kernels, onto, values, v)

    def leaving(
        self, rows: Rows, kernels: Kernels, onto: list[Tensor], values: Tensor | None, v: Tensor
    ) -> list[Tensor]:
        """Combinations of the features at their own length, and the context afterwards."""
        scale = kernels.lengths
        if scale is not None:
            onto = [item * scale.mT for item in onto]
        keys, left = left_behind(rows, scale, values, v)
        return onto if keys is None or left is None else [*onto, keys, left, rows.filled]

    def mixed(
        self,
        rows: Rows,
        kernels: Kernels,
        errors: Tensor,
        gram: Tensor,
        write: Tensor | None,
        lr: Tensor,
        retain: Tensor,
        momentum: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """y, weights and X, then Y and W, of a step by the Gram matrix, a piece after the other."""
        count, config = lr.shape[1], self.config
        retain = neutral(retain, write) if config.retention.uses_retain else torch.ones_like(retain)
        momentum = neutral(momentum, write)
        lr = lr if write is None else torch.where(write, lr, 0.0)
        pushed = errors.unflatten(1, (count, -1)) * rows.live.unsqueeze(-1)
        places = rows.places.view(-1, count, rows.live.shape[-1])
        hot = one_hot(places, kernels.pairs.shape[1]).to(errors.dtype).expand(len(errors), -1, -1, -1)
        seen = torch.cat((kernels.asked, kernels.read[1]), -1)
        height = errors.shape[-1]
        state = (gram.new_ones(len(gram), 1), gram.new_zeros(len(gram), height, kernels.pairs.shape[1]))
        state = (*state, gram.new_zeros(len(gram), height, seen.shape[-1]))
        block = recorded("window.piece", self.piece, again=True)
        met, reads = kernels.facing[1].mT, []
        for at in range(0, count, PIECE):
            part = [item[:, at : at + PIECE] for item in (pushed, hot, seen, lr, retain, momentum)]
            read, *state = several(block.forward(*part, gram, met, kernels.pairs, *state)[0])
            reads.append(read)
        kept = running_products(retain)
        held = kept if config.read == "after" else torch.nn.functional.pad(kept[:, :-1], (1, 0), value=1.0)
        s, w, both = state
        y = torch.cat(reads, 1) + held.unsqueeze(-1) * kernels.read[0]
        onto, across = both.split((w.shape[-1], height), -1)
        return [y, torch.cat((kept[:, -1:], s), -1), across], [onto, w]

    def piece(
        self,
        pushed: Tensor,
        hot: Tensor,
        seen: Tensor,
        lr: Tensor,
        retain: Tensor,
        momentum: Tensor,
        gram: Tensor,
        met: Tensor,
        pairs: Tensor,
        s: Tensor,
        w: Tensor,
        both: Tensor,
    ) -> Tensors:
        """Some tokens: errors `[N, b, W, V]`, where their rows are `[N, b, W, L]`, queries at rows and at S `[N, b, L +
        V]`, gates; of the span C = S S^T, S R^T and R R^T; s, W and [Y, X] before. Reads of [Y, X], and these after."""
        many = pushed.shape[:2]

        def running(gates: Tensor, before: Tensor, added: Tensor) -> Tensor:  # x_t = gate_t x_(t-1) + added_t
            spans = torch.bmm(span_products(gates), added.flatten(2)).view_as(added)
            return spans + running_products(gates)[..., None, None] * before.unsqueeze(1)

        w = running(momentum, w, pushed.mT @ hot)
        s = running_products(momentum) * s
        half = s[..., None, None] * met.unsqueeze(1)
        half = half + 0.5 * torch.bmm(w.flatten(1, 2), pairs).view_as(w)
        cross = half @ w.mT
        gram = s.square()[..., None, None] * gram.unsqueeze(1) + cross + cross.mT
        step = -lr[..., None, None] * self.gain(gram.flatten(0, 1)).unflatten(0, many)
        moved = torch.cat((step @ w, s[..., None, None] * step), -1)
        after = running(retain, both, moved)
        states = after if self.config.read == "after" else torch.cat((both.unsqueeze(1), after[:, :-1]), 1)
        read = (states @ seen.unsqueeze(-1)).squeeze(-1)
        return read, s[:, -1:], w[:, -1], after[:, -1]

    # One step a chunk.

    def commit_chunk(self, carry: Carry, row: Tensors, span: Span, run: Run) -> tuple[Tensor, Carry]:
        """Outputs of a span and the carry after it."""
        x_k, x_q, v, lr, retain, momentum = several(row[1:-1])
        since, (keys, *context) = since_of(carry, row[0], run), self.context(carry)
        products = one(run(self.meet, one(run(CONCAT, x_k, x_q)), keys, *carry.memory))
        y, *found = several(run(self.sums, products, x_k, x_q, v, *context, row[-1], since, lr))
        count = 1 + (keys is not None)
        whole = torch.ones_like(lr[:, :1])
        total, *others = several(run(self.combine, x_k, keys, whole, None, *carry.pending, *found[:count]))
        kept = one(run(PRODUCT, carry.pending_retain[0], retain))
        slots = (*carry.slots[: self.own], *others, *found[count:])
        waiting = carry._replace(slots=slots, pending=(total,), pending_retain=(kept,))
        if span.closes is False:
            return y, waiting
        new = self.committed(waiting, one(run(LAST, momentum)), run)
        if isinstance(span.closes, Tensor):
            new = select(span.closes, new, waiting, run)
        if self.config.read == "before":
            return y, new
        # The closing token alone sees the commit.
        sizes = [span.size - 1, 1]
        (early, _), (_, last) = (several(item) for item in zip(*cut((y, x_q), sizes, run), strict=True))
        answer = one(run(self.scaled, one(run(self.meet, last, None, *new.memory)), last))
        return one(run(CONCAT, early, answer)), new

    def summed(
        self,
        products: Tensor,
        x_k: Tensor,
        x_q: Tensor,
        v: Tensor,
        values: Tensor | None,
        filled: Tensor | None,
        write: Tensor | None,
        since: Tensor | None,
        lr: Tensor,
    ) -> Tensors:
        """y, the sum of a span's gradients and the next keys as combinations of the rows, the context's values and
        marks."""
        plan, count = self.plan, v.shape[1]
        rows = rows_of(plan, v[:, :0, 0] if filled is None else filled, count, write, None)
        kernels = kernels_of(plan, products, x_k, x_q, v.shape[-1])
        errors = _errors(plan, rows, kernels.facing[0], since, v if values is None else torch.cat((values, v), 1))
        moves = (lr.unsqueeze(-1) * rows.live).flatten(1).unsqueeze(-1) * errors
        return kernels.read[0], *self.leaving(rows, kernels, [rows.summed(moves, plan.kept + count).mT], values, v)

    def committed(self, carry: Carry, momentum: Tensor, run: Run) -> Carry:
        """The carry after the one step on a chunk's sum."""
        if not self.mixes:
            return committed_chunk(self.config, carry, momentum, run)
        new = several(run(self.step, *carry.memory, carry.slots[0], *carry.pending, *carry.pending_retain, momentum))
        (total,), (kept,) = carry.pending, carry.pending_retain
        none = total.new_zeros(1, 1, 1).expand_as(total)
        slots = (*new[1:], *carry.slots[1:])
        return carry._replace(memory=new[:1], slots=slots, pending=(none,), pending_retain=(torch.ones_like(kept),))

    def stepped(self, memory: Tensor, slot: Tensor, total: Tensor, kept: Tensor, momentum: Tensor) -> Tensors:
        """One step by the Gram matrix: the memory and S."""
        slot = torch.addcmul(total, over(momentum, slot), slot)
        step = -(self.gain(slot @ slot.mT) @ slot)
        return one(self.config.retention.block().forward(memory, step, kept)[0]), slot


def _errors(plan: Plan, rows: Rows, facing: Tensor, since: Tensor | None, target: Tensor) -> Tensor:
    """e of all windows `[N, n W, V]` at the anchor's answers to the rows, of which `since` is left."""
    target = rows.picked(target)
    if plan.config.forms.target:
        return -target
    base = rows.picked(facing)
    if since is not None:
        base = since.repeat_interleave(len(plan.form.weights), 1).unsqueeze(-1) * base
    bias = plan.config.bias.block()
    return one((bias if bias.vjp is None else by_hand(bias)).forward(base, target)[0])


def _factor(plan: Plan, x: Tensor) -> Tensor | float:
    """What the features of queries are multiplied by."""
    return inverse_length(plan, x) * plan.query if plan.normed else plan.query


# Between blocks.


class _Graph:
    """What autograd has recorded of a formula, until it is pulled back; one leaf to pytrees."""

    def __init__(self, *held: Any) -> None:
        self.held = held


def recorded(name: str, formula: Callable[..., Tensors], *, again: bool = False) -> Block:
    """A block whose derivative is autograd's, recorded as it runs, or in its backward pass if `again`."""

    def graph(inputs: Tensors) -> tuple[list[Tensor | None], Tensors]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() if x is not None and differentiable(x) else x for x in inputs]
            return leaves, formula(*leaves)

    def forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Any]:
        if again or not keeps:
            return formula(*inputs), _Graph()
        leaves, made = graph(inputs)
        return tuple([item.detach() for item in several(made)]), _Graph(leaves, made)

    def vjp(inputs: Tensors, record: _Graph, cotangents: Sequence[Tensor]) -> Tensors:
        (leaves, made), record.held = record.held or graph(inputs), ()
        pairs = [pair for pair in zip(several(made), cotangents, strict=True) if pair[0].requires_grad]
        own = {at: leaf for at, leaf in enumerate(leaves) if leaf is not None and leaf.requires_grad}
        outputs, given = zip(*pairs, strict=True)
        found = dict(zip(own, torch.autograd.grad(outputs, tuple(own.values()), given, allow_unused=True), strict=True))
        return tuple(map(found.get, range(len(leaves))))

    return ByHand(name, forward, vjp, formula).block()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> `[N]`."""
    return torch.bmm(a.reshape(len(a), 1, -1), b.reshape(len(b), -1, 1)).flatten()


_GRAM = formula_block("window.gram", lambda s: torch.bmm(s, s.mT), lambda s, g: torch.bmm(g + g.mT, s))
