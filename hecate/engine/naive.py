"""The recurrence of a memory, written to be read: what every engine computes, without regard for speed."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.algorithm import Token
from hecate.rule import MemoryConfig, TokenGates
from hecate.structure import Memory
from hecate.structure.bound import BLOCK, lengths
from hecate.tape import execute
from hecate.tape.ops import over


def naive(
    config: MemoryConfig,
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    gates: TokenGates,
    memory: Memory,
    *,
    phi_w: Tensor | None = None,
    retain_value: Tensor | None = None,
) -> tuple[Tensor, Memory]:
    """Outputs `[N, T, V]` of N memories, and what they carry at the end, from what they carry at first.

    With f the structure, ell the bias, link(X) the weights of what is carried (X itself but for a dual state) and A
    what was carried where the token's chunk began (X_t-1 with chunk=1), every token t takes

        W        = link(A), or with decay_order="before_gradient" link(A decayed by the chunk's retain gates up to t)
        G_t      = d ell(f(W, phi(k_t)), v_t) / d W, with the outer factor phi_w,t in place of phi(k_t) if given
        D_t, S_t = algorithm(G_t, lr_t, momentum_t, S_t-1)
        X_t      = retention(X_t-1, D_t, retain_t), towards the start plus (1 - retain_t) X_0
        y_t      = f(link(X_t), phi(q_t)), or at X_t-1 with read="before"

    where link(X_t) is W with the retention's link_at="chunk", and with "linear" X_t + a_t (W - A), a_t the product of
    the chunk's retain gates up to t: what comes of W under the steps of X.

    With commit="chunk" D, S and X follow once, where a chunk closes, from the sum of its lr_i G_i (lr_i of every
    weight, if given so), with lr = 1 and the product of its retain gates. phi, key_norm, query_scale, the step rule and
    the gates erase and write are in the arguments already: phi_k is erase phi(k), phi_w is write phi(k). retain_value
    is the retain of rows. Where f learns keys, W v stands against phi(k), y_t is link(X_t)^T phi(q_t) and retain_value
    that of columns. With step="normalized" of a deep memory, or in chunks, lr_t is lr_t c_t, c_t of
    `hecate.structure.bound` at W. A token of n writes is n tokens here, with retain 1 but at the first, of which one is
    read. Masks, resets and the sum normaliser are not here. [ENG-NAIVE-D1]

    Shapes: phi_q, phi_k, phi_w `[N, T, P]`, v, retain_value `[N, T, V]`, gates `[N, T]` (retain also `[N, T, P]`, lr
    `[N, T, W]`), weights `[N, ...]`.
    """
    structure, bias, retention, algorithm = config.structure, config.bias, config.retention, config.algorithm

    def linked(x: Memory) -> Memory:
        return tuple(retention.weights(weight) for weight in x)

    def read_weights(x: Memory, anchor: Memory, decay: Tensor) -> Memory:
        if retention.links == "token":
            return linked(x)
        w = linked(anchor)
        return w if retention.links == "chunk" else config.rule.moved(x, anchor, w, decay)

    def stepped(x: Memory, s: list[Memory], g: Memory, *gates: Tensor) -> tuple[Memory, list[Memory]]:
        lr, retain, momentum = gates
        new = [algorithm.direction(gi, lr, momentum, *si) for gi, si in zip(g, s, strict=True)]
        moved = tuple(retention.step(xi, d, retain) for xi, (d, *_) in zip(x, new, strict=True))
        return regained(moved, retain), [si[1:] for si in new]

    def regained(x: Memory, retain: Tensor) -> Memory:
        if not retention.anchored:
            return x
        return tuple(xi + over(1 - retain, xi) * start for xi, start in zip(x, memory, strict=True))

    def zeros(shapes: dict[str, tuple[int, ...]]) -> Memory:
        return tuple(v.new_zeros(v.shape[0], *shape) for shape in shapes.values())

    x, outputs = memory, [v[:, :0]]
    if structure.transposed:
        phi_k, v = v, phi_k
        if retain_value is not None:
            gates, retain_value = gates._replace(retain=gates.retain.unsqueeze(-1) * retain_value), None
    s = [zeros(algorithm.slot_shapes(tuple(weight.shape[1:]))) for weight in memory]
    context = zeros(algorithm.context_shapes(phi_k.shape[-1], v.shape[-1]))
    for t in range(v.shape[1]):
        q, p, target, lr, retain, momentum = (tensor[:, t] for tensor in (phi_q, phi_k, v, *gates))
        if retain_value is not None:
            retain = retain_value[:, t, :, None] * retain.reshape(len(retain), 1, -1)
        if t % config.chunk == 0:
            anchor, decay, total = x, torch.ones_like(retain), tuple(torch.zeros_like(weight) for weight in x)
        before, old, at, decay = x, decay, anchor, decay * retain
        if config.decay_order == "before_gradient":
            at = regained(tuple(retention.step(weight, torch.zeros_like(weight), decay) for weight in anchor), decay)
        w = linked(at)
        if config.blocks:  # the last keys, as many as a chunk has but at most `BLOCK`, and this one
            near = phi_k[:, max(0, t + 1 - min(config.chunk, BLOCK)) : t + 1]
            flagged = torch.nn.functional.pad(near[:, :-1], (0, 1), value=1.0)
            (c,) = execute(lengths(structure.graph(), config.blocks), p.unsqueeze(1), None, flagged, *w)
            lr = lr * c.squeeze(1)  # type: ignore[union-attr]
        if phi_w is not None:
            g = structure.pullback(w, phi_w[:, t], bias.grad(structure.predict(w, p), target))
        elif algorithm.takes_any_gradient():  # d ell / d W, unless the structure names another
            g, _ = structure.gradient(bias.block(), w, p, target)
        else:  # the algorithm chooses another gradient, by its context
            slots = [slot for group in s for slot in group]
            g, carried = config.rule.descended(w, Token(p, target, lr), (*slots, *context))
            context = carried[len(slots) :]
        if config.commit == "token":
            x, s = stepped(x, s, g, lr, retain, momentum)
        else:
            each = lr.unbind(-1) if lr.dim() > 1 else (lr,) * len(g)
            total = tuple(so_far + over(rate, gi) * gi for so_far, rate, gi in zip(total, each, g, strict=True))
            if (t + 1) % config.chunk == 0:
                x, s = stepped(x, s, total, torch.ones_like(momentum), decay, momentum)
        answers = read_weights(x, anchor, decay) if config.read == "after" else read_weights(before, anchor, old)
        outputs.append(structure.read(answers, q).unsqueeze(1))
    return torch.cat(outputs, 1), x
