"""The token loop of one memory after the other, state in cache, made of parts that it is given. [ENG-NUM-D8]

What a kernel is given beside its tensors: `rule`, whole numbers (see `Rule`), and the parts, compiled apart and called
by their address: `do`, each with its numbers, and `undo`. Of the tokens (`given`) `keys` are what predicts, `others`
what is written with, the same array where there is no other; an array of size 0 is "not given". Scratch space is each
worker's own. The loop is compiled twice: for matrices, and with a `graph` for memories made of linear layers, which
bring an activation in place of predict, and no descend, step and gain.

Backward, a segment of tokens is run forward once more and its states are kept, one slot a state: token i starts from
slot marks[i] and leaves slot marks[segment + i]. The cotangent of link(X) gathers in GM until the token that made X is
reached, so that a link is pulled back once a token.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import types
from numba.extending import overload

from hecate.engine.cpu import layers, plain
from hecate.engine.cpu.passes import added
from hecate.engine.cpu.vectors import OPTIONS, call, copy, fill, first_token, helper, inline, part


class Rule(NamedTuple):
    """Whole numbers that steer a kernel; yes is 1.

    heads: memories whose tokens lie side by side; length: tokens; blocks: parts of a memory, of as many rows each, that
    go one after the other; height, width: V of such a part and P, with padding; values, channels: of a memory, without;
    cells: of a part's state; row: values of a graph; record: numbers of a token for its reverse; segment: tokens
    between kept states; by_channel: retain per phi channel; decays: a retain gate; ahead: the gradient sees the decayed
    memory; before: reads come first; moving: slots, the last of which is the direction; linked: the memory is a link's;
    gains: keys are turned to gains; plain: writes are those of `plain`, which read, too; centred: steps go without the
    mean of a row; anchored: towards the start.
    """

    heads: int
    length: int
    blocks: int
    height: int
    width: int
    values: int
    channels: int
    cells: int
    row: int
    record: int
    segment: int
    by_channel: int
    decays: int
    ahead: int
    before: int
    moving: int
    linked: int
    gains: int
    plain: int
    centred: int
    anchored: int


@inline
def _last(rule):
    """The place of the direction among slots."""
    return max(rule.moving, 1) - 1


@inline
def _spread(rule, given, at, rv, rp):
    """Retain of a token, per row and per column."""
    _, _, _, _, retain, _, _, _, _, kept, _ = given
    if rule.by_channel and rule.decays:
        copy(part(retain, at, rule.width), rp)
    elif rule.decays:
        fill(rp, retain[at])
    if kept.size > 0:
        copy(part(kept, at, rule.height), rv)


# What walks do on matrices; `layers` does the same on graphs. do and undo hold addresses: a part is compiled apart, and
# the loop once for all of them.


@inline
def _read(rule, graph, do, W, q, y, x):
    """The prediction y of weights at q."""
    call(do[2], (W, q, y, rule.height, rule.width, x, do[3]))


@inline
def _read_back(rule, graph, do, undo, W, q, gy, GW, gq, x):
    """Its reverse."""
    call(undo[1], (W, q, gy, GW, gq, rule.height, rule.width, x, do[3]))


@inline
def _weigh(rule, graph, do, X, M, x):
    """Into M the weights of a state."""
    call(do[8], (X, M, rule.height, rule.width, rule.values, rule.channels, x, do[9]))


@inline
def _unweigh(rule, graph, do, undo, X, M, GM, G, x):
    """Hands the cotangent GM of a state's weights to G, that of the state, and clears it."""
    call(undo[4], (X, M, GM, G, rule.height, rule.width, rule.values, rule.channels, x, do[9]))
    fill(GM, 0.0)


@inline
def _decay(rule, graph, do, X, I, zero, rv, rp, Y, x):
    """Into Y the decayed state."""
    call(do[6], (X, zero, rv, rp, Y, rule.height, rule.width, rule.values, rule.channels, x, do[7]))


@inline
def _write(rule, graph, do, given, at, v, X, M, S, C, I, rv, rp, O, D, C2, record, g, x, y):
    """The state O, D, C2 after X, S, C and the value v, the gradient taken at M, and a record of the token: its u and
    prediction. The last of D is the direction. A plain write leaves its read in y; without one it is a replay, whose
    prediction is known."""
    if rule.plain:
        plain.write(rule, do, given, at, v, X, S, C, rp, O, D, C2, record, g, x, y)
        return
    learn, bc, predict, pc, descend, dc, step, sc, _, _, gain, gc = do
    keys, _, _, lr, _, momentum, _, _, others, _, _ = given
    V, P = rule.height, rule.width
    k, w, u, p = part(keys, at, P), part(others, at, P), part(record, 0, V), part(record, 1, V)
    # The order of the token loop: predict, learn, the key's gain, descend, step.
    call(predict, (M, k, p, V, P, x, pc))
    call(learn, (p, v, u, v.size, bc))
    if rule.gains:
        call(gain, (C, k, g, C2, P, rule.channels, x, gc))
        w = g
    call(descend, (M, S, u, w, lr[at], momentum[at], D, V, P, rule.values, rule.channels, x, dc))
    call(step, (X, part(D, _last(rule), V * P), rv, rp, O, V, P, rule.values, rule.channels, x, sc))


@inline
def _write_back(rule, graph, do, undo, given, at, v, A, W, S, direction, C, near, own, more, GA, record, rows, to, x):
    """The reverse of `_write`."""
    if rule.plain:
        plain.write_back(rule, do, undo, given, at, v, A, S, C, near, own, record, rows, to, x)
        return
    keys, _, _, lr, _, momentum, _, _, others, _, _ = given
    _, bc, _, pc, descend, dc, _, sc, _, _, gain, gc = do
    learn_back, predict_back, descend_back, step_back, _, gain_back = undo
    (_, GY, Y, YM, _, zero, D), (rv, rp, g, spare), (G, H, GC, _, _) = more, near, own
    (gu, gp, grv, gg, grp, out), (gk, gv, gw, _, _) = rows, to
    V, P, p, o = rule.height, rule.width, rule.channels, at - at
    k, w, u = part(keys, at, P), part(others, at, P), part(record, 0, V)
    if rule.ahead:
        # The gradient met the decayed state Y, not A: what it sends there goes through the decay below.
        fill(GY, 0.0)
        if not rule.linked:
            GA = GY
    if rule.gains:
        # The new matrix is not wanted: it goes where the next token's cotangents are cleared.
        call(gain, (C, k, g, spare, P, p, x, gc))
        fill(gg, 0.0)
        w, gw = g, gg
    # Without a momentum the direction is not kept, and made once more.
    if not rule.moving:
        call(descend, (W, S, u, w, lr[at], momentum[at], D, V, P, rule.values, p, x, dc))
    GD = part(H, _last(rule), V * P)
    call(step_back, (A, direction, rv, rp, G, GD, grv, grp, rule.moving, V, P, rule.values, p, x, sc))
    fill(out, 0.0)
    call(descend_back, (W, S, u, w, lr[at], momentum[at], H, GA, gu, gw, out, V, P, rule.values, p, x, dc))
    if rule.gains:
        call(gain_back, (C, k, GC, gg, gk, P, p, x, gc))
    call(learn_back, (part(record, 1, V), v, u, gu, gp, gv, v.size, bc))
    call(predict_back, (W, k, gp, GA, gk, V, P, x, pc))
    if rule.ahead:
        if rule.linked:
            unweigh(rule, graph, do, undo, Y, YM, GA, GY, x)
        call(step_back, (A, zero, rv, rp, GY, D, grv, grp, 0, V, P, rule.values, p, x, sc))
        added(GY, o, G, o, G.size)


def _chosen(matrix, layers):
    """A function that is compiled as the first where there is no graph, or else as the second."""

    def stub(rule, graph, *rest): ...

    @overload(stub, strict=False, jit_options=OPTIONS | {"forceinline": True})
    def choose(rule, graph, *rest):
        return (matrix if isinstance(graph, types.NoneType) else layers).py_func

    return stub


read, read_back = _chosen(_read, layers.read), _chosen(_read_back, layers.read_back)
weigh, unweigh = _chosen(_weigh, layers.weigh), _chosen(_unweigh, layers.unweigh)
decay, write_token, write_token_back = (
    _chosen(_decay, layers.decay), _chosen(_write, layers.write), _chosen(_write_back, layers.write_back),
)  # fmt: skip


@inline
def _ahead(rule, graph, do, X, I, zero, rv, rp, Y, YM, x):
    """The weights of a decayed state Y."""
    decay(rule, graph, do, X, I, zero, rv, rp, Y, x)
    # W is what predicts: of the decayed state, or of its link.
    if rule.linked:
        weigh(rule, graph, do, Y, YM, x)
        return YM
    return Y


def forward(
    lo, hi, rule, graph, keys, q, v, lr, retain, momentum, write, reset, others, kept, initial, X, S, C, y, keep_X,
    keep_S, keep_C, keep_p, states, rows, learn, bc, predict, pc, descend, dc, step, sc, link, lc, gain, gc,
):  # fmt: skip
    """Outputs y and, in place, the final X, S and C; with keep_X given, the state of every segment's first token, and
    the predictions of plain writes."""
    do = (learn, bc, predict, pc, descend, dc, step, sc, link, lc, gain, gc)
    given = (keys, q, v, lr, retain, momentum, write, reset, others, kept, initial)
    heads, T, V, P, segment, linked = rule.heads, rule.length, rule.height, rule.width, rule.segment, rule.linked
    # Scratch space is one array, cut up here: a kernel allocates nothing.
    cells, square, segments = rule.cells, P * P, (T + segment - 1) // segment
    M, zero, Y, YM = (
        part(states, 0, cells), part(states, 1, cells), part(states, 2, cells), part(states, 3, cells)
    )  # fmt: skip
    # Of these states a plain write needs none.
    loose, x = part(states, 4, cells), states[5 * (1 - rule.plain) * cells :]
    record, wide = part(rows, 0, rule.record), rows[rule.record :]
    g, rp, rv = part(wide, 0, P), part(wide, 1, P), wide[2 * P :]
    fill(rv, 1.0)
    fill(rp, 1.0)
    for n in range(lo, hi):
        first, known, own = first_token(n, heads, T), False, part(C, n, square)
        I = part(initial, n, cells) if rule.anchored else initial[:0]
        # Rows of a memory that never meet go through a segment part by part, each from the first cache.
        for job in range(segments * rule.blocks):
            index, b = job // rule.blocks, job % rule.blocks
            m, place = n * rule.blocks + b, n * segments * rule.blocks + job
            mine = min(rule.values - b * V, V)  # values but for padding
            A, D = part(X, m, cells), part(S, m, rule.moving * cells) if rule.moving else loose
            if keep_X.size > 0:
                _keep(rule, X, S, C, m, keep_X, keep_S, keep_C, place)
            for t in range(index * segment, min(T, (index + 1) * segment)):
                at = first + t * heads
                row = at * rule.blocks + b
                if reset.size > 0 and reset[at]:
                    known = False
                    _restart(rule, initial, m, A, D, own)
                # Once a memory and after restarts; every write leaves the link of its own state.
                if linked and not known:
                    weigh(rule, graph, do, A, M, x)
                    known = True
                W, writes = M if linked else A, write.size == 0 or write[at]
                answer = part(y, row, V)
                if (rule.before and not rule.plain) or not writes:
                    read(rule, graph, do, W, part(q, at, P), answer, x)
                if not writes:
                    continue
                _spread(rule, given, at, rv, rp)
                if rule.ahead and not rule.plain:
                    W = _ahead(rule, graph, do, A, I, zero, rv, rp, Y, YM, x)
                # In place: every part has read a number before it writes it, and M of a linked state is apart.
                value = part(part(v, row, V), 0, mine)
                write_token(rule, graph, do, given, at, value, A, W, D, own, I, rv, rp, A, D, own, record, g, x, answer)
                if keep_p.size > 0:
                    copy(part(record, 1, V), part(keep_p, row, V))
                if linked:
                    weigh(rule, graph, do, A, M, x)
                if not (rule.before or rule.plain):
                    read(rule, graph, do, M if linked else A, part(q, at, P), answer, x)


@helper
def _keep(rule, X, S, C, n, Y, T, D, m):
    """Copies a state, the n-th of some, to the m-th of others."""
    copy(part(X, n, rule.cells), part(Y, m, rule.cells))
    if rule.moving:
        copy(part(S, n, rule.moving * rule.cells), part(T, m, rule.moving * rule.cells))
    if rule.gains:
        copy(part(C, n, rule.width**2), part(D, m, rule.width**2))


@helper
def _restart(rule, initial, n, A, D, own):
    """The state of a memory that starts anew."""
    copy(part(initial, n, A.size), A)
    if rule.moving:
        fill(D, 0.0)
    if rule.gains:
        fill(own, 0.0)


@helper
def _replay(rule, graph, do, given, n, b, start, end, states, keep_p, more, near, marks, records, x):
    """The states of a segment, from that in the first slot."""
    _, _, v, _, _, _, write, reset, _, _, initial = given
    states_X, states_S, states_C, states_M = states
    segment, cells, square = rule.segment, rule.cells, rule.width**2
    slots = rule.moving * cells
    _, _, Y, YM, _, zero, D = more
    rv, rp, g, spare = near
    s, first, m = 0, first_token(n, rule.heads, rule.length), n * rule.blocks + b
    mine = min(rule.values - b * rule.height, rule.height)
    I = part(initial, n, cells) if rule.anchored else initial[:0]
    if rule.linked:
        weigh(rule, graph, do, part(states_X, 0, cells), part(states_M, 0, cells), x)
    for i in range(end - start):
        at = first + (start + i) * rule.heads
        row = at * rule.blocks + b
        if reset.size > 0 and reset[at]:
            s += 1
            A = part(states_X, s, cells)
            _restart(rule, initial, m, A, part(states_S, s, slots), part(states_C, s, square))
            if rule.linked:
                weigh(rule, graph, do, A, part(states_M, s, cells), x)
        # A masked token leaves the slot it starts from: both marks are the same.
        marks[i] = s
        if write.size == 0 or write[at]:
            _spread(rule, given, at, rv, rp)
            A, S, C, O, C2 = part(states_X, s, cells), zero, spare, part(states_X, s + 1, cells), spare
            if rule.gains:
                C, C2 = part(states_C, s, square), part(states_C, s + 1, square)
            W, N = A, D
            if rule.moving:
                S, N = part(states_S, s, slots), part(states_S, s + 1, slots)
            if rule.linked:
                W = part(states_M, s, cells)
            if rule.ahead and not rule.plain:
                W = _ahead(rule, graph, do, A, I, zero, rv, rp, Y, YM, x)
            s += 1
            record, unread = part(records, i, rule.record), x[:0]
            value = part(part(v, row, rule.height), 0, mine)
            if keep_p.size > 0:
                copy(part(keep_p, row, rule.height), part(record, 1, rule.height))
            write_token(rule, graph, do, given, at, value, A, W, S, C, I, rv, rp, O, N, C2, record, g, x, unread)
            if rule.linked:
                weigh(rule, graph, do, O, part(states_M, s, cells), x)
        marks[segment + i] = s


@inline
def _unwrite(rule, graph, do, undo, given, at, value, a, b, states, more, near, own, record, rows, to, x):
    """The reverse of a token's write, between its reads."""
    states_X, states_S, states_C, states_M = states
    GM, _, Y, YM, _, zero, D = more
    (rv, rp, _, spare), (G, _, _, I, _), (_, _, grv, _, grp, _) = near, own, rows
    cells, square, slots = rule.cells, rule.width**2, rule.moving * rule.cells
    A, S, direction, C = part(states_X, a, cells), zero, D, spare
    if rule.moving:
        S, direction = part(states_S, a, slots), part(part(states_S, b, slots), _last(rule), cells)
    if rule.gains:
        C = part(states_C, a, square)
    W, GA = A, G
    # Every read and prediction of this state has been gathered in GM by now.
    if rule.linked:
        unweigh(rule, graph, do, undo, part(states_X, b, cells), part(states_M, b, cells), GM, G, x)
        W, GA = part(states_M, a, cells), GM
    _spread(rule, given, at, rv, rp)
    if rule.ahead and not rule.plain:
        W = _ahead(rule, graph, do, A, I, zero, rv, rp, Y, YM, x)
    if not rule.plain:
        fill(grv, 0.0)
        fill(grp, 0.0)
    write_token_back(
        rule, graph, do, undo, given, at, value, A, W, S, direction, C, near, own, more, GA, record, rows, to, x
    )


@helper
def _to_gates(rule, at, rv, rp, grv, grp, out, glr, gr, gm, gkept):
    """Adds to the cotangents of a token's gates."""
    V, P = rule.height, rule.width
    glr[at] += out[0]
    if gm.size > 0:
        gm[at] += out[1]
    if rule.by_channel:
        added(grp, at - at, gr, at * P, P)
    elif rule.plain:
        gr[at] += grv[0]
    else:  # sums over rows alone, of one number for all columns
        whole = out[0] * 0
        for r in range(V):
            whole += rv[r] * grv[r]
            grv[r] *= rp[0]
        gr[at] += whole
    if gkept.size > 0:
        copy(grv, part(gkept, at, V))


@helper
def _restart_back(rule, g_initial, G, H, own):
    """The cotangents of a memory that starts anew, to those of its start."""
    o = rule.heads - rule.heads  # a literal would be compiled for
    added(G, o, g_initial, o, G.size)
    fill(G, 0.0)
    if rule.moving:
        fill(H, 0.0)
    if rule.gains:
        fill(own, 0.0)


def backward(
    lo, hi, rule, graph, keys, q, v, lr, retain, momentum, write, reset, others, kept, initial, keep_X, keep_S, keep_C,
    keep_p, gy, GX, GS, GC, g_initial, gk, gq, gv, glr, gr, gm, gw, gkept, states_X, states_S, states_C, states_M, many,
    spare, rows, marks, learn, bc, predict, pc, descend, dc, step, sc, link, lc, gain, gc, learn_back, predict_back,
    descend_back, step_back, link_back, gain_back,
):  # fmt: skip
    """Cotangents of all inputs from those of y (gy) and, in place, of the final X, S and C (GX, GS, GC)."""
    do = (learn, bc, predict, pc, descend, dc, step, sc, link, lc, gain, gc)
    undo = (learn_back, predict_back, descend_back, step_back, link_back, gain_back)
    given = (keys, q, v, lr, retain, momentum, write, reset, others, kept, initial)
    states = (states_X, states_S, states_C, states_M)
    heads, T, V, P, segment = rule.heads, rule.length, rule.height, rule.width, rule.segment
    cells, square, segments = rule.cells, P * P, (T + segment - 1) // segment
    GM, loose = part(many, 0, cells), part(many, 4, cells)
    more = (
        GM, part(many, 1, cells), part(many, 2, cells), part(many, 3, cells), loose, part(many, 5, cells),
        part(many, 6, cells),
    )  # fmt: skip
    x, wide = many[(0 if rule.plain else 7) * cells :], rows[4 * V :]
    rv, gu, gp, grv = part(rows, 0, V), part(rows, 1, V), part(rows, 2, V), part(rows, 3, V)
    rp, g, gg, grp, rest = part(wide, 0, P), part(wide, 1, P), part(wide, 2, P), part(wide, 3, P), wide[4 * P :]
    out, records, near = part(rest, 0, 2), rest[2:], (rv, rp, g, spare)
    fill(rv, 1.0)
    fill(rp, 1.0)
    for n in range(lo, hi):
        first, GC_n = first_token(n, heads, T), part(GC, n, square)
        I, GI = (part(initial, n, cells), part(g_initial, n, cells)) if rule.anchored else (initial[:0], g_initial[:0])
        if rule.linked:
            fill(GM, 0.0)
        for job in range(segments * rule.blocks - 1, -1, -1):
            index, part_of = job // rule.blocks, job % rule.blocks
            start, end, m = index * segment, min(T, (index + 1) * segment), n * rule.blocks + part_of
            place, mine = n * segments * rule.blocks + job, min(rule.values - part_of * V, V)
            G, H = part(GX, m, cells), part(GS, m, rule.moving * cells) if rule.moving else loose
            GW, weights = (GM, states_M) if rule.linked else (G, states_X)
            _keep(rule, keep_X, keep_S, keep_C, place, states_X, states_S, states_C, 0)
            _replay(rule, graph, do, given, n, part_of, start, end, states, keep_p, more, near, marks, records, x)
            # The reverse of the token loop: read after the write, write, read before it, restart.
            for i in range(end - start - 1, -1, -1):
                at, a, b = first + (start + i) * heads, marks[i], marks[segment + i]
                row = at * rule.blocks + part_of
                writes, query = write.size == 0 or write[at], part(q, at, P)
                gquery, gout = part(gq, at, P), part(gy, row, V)
                if writes:
                    if not (rule.before or rule.plain):
                        read_back(rule, graph, do, undo, part(weights, b, cells), query, gout, GW, gquery, x)
                    key = part(gk, at, P)
                    to = (key, part(gv, row, V), part(gw, at, P) if gw.size > 0 else key, gquery, gout)
                    _unwrite(
                        rule, graph, do, undo, given, at, part(part(v, row, V), 0, mine), a, b, states, more, near,
                        (G, H, GC_n, I, GI), part(records, i, rule.record), (gu, gp, grv, gg, grp, out), to, x,
                    )  # fmt: skip
                    _to_gates(rule, at, rv, rp, grv, grp, out, glr, gr, gm, gkept)
                if (rule.before and not rule.plain) or not writes:
                    read_back(rule, graph, do, undo, part(weights, a, cells), query, gout, GW, gquery, x)
                if reset.size > 0 and reset[at]:
                    if rule.linked:
                        unweigh(rule, graph, do, undo, part(states_X, a, cells), part(states_M, a, cells), GM, G, x)
                    _restart_back(rule, part(g_initial, m, cells), G, H, GC_n)
            if rule.linked:
                unweigh(rule, graph, do, undo, part(states_X, 0, cells), part(states_M, 0, cells), GM, G, x)
