"""Layers whose memory is a small network, or whose step is more than a gradient: Titans, TTT, MIRAS, ATLAS, LaCT.

Inner gradients are those of `torch.func`, token by token or of a whole chunk at one state.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import gelu, normalize, silu, softplus

from tests.reference.layers.parts import Layer, Weights, asked, lr_gate, out, outer, qkv, sigmoid_gate, start, unit
from tests.reference.layers.sums import turned
from tests.reference.papers_deep import LACT, QUINTIC

Memory = tuple[Tensor, ...]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "silu": silu, "tanh": torch.tanh}


def starts(x: Tensor, w: Weights) -> Memory:
    """The weights `[B, H, ...]` of a network before the first token, in their order."""
    names = [name for name in w if name.startswith("initial.")]
    return tuple([start(x, w, name.removeprefix("initial.")) for name in names])


def layered(x: Tensor) -> Tensor:
    """A layer norm without gain and offset."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-6)


def perceptron(w: Weights) -> Callable[[Memory, Tensor], Tensor]:
    """f(weights, x [B, H, P]) of the configuration: W_2 act(W_1 x), biases, x + LN(.)."""
    own = w.config["structure"]
    active, each = ACTIVATIONS[own["activation"]], 2 if own["bias"] else 1

    def f(weights: Memory, x: Tensor) -> Tensor:
        z = x
        for at in range(0, len(weights), each):
            z = asked(weights[at], active(z) if at else z)
            z = z + weights[at + 1].squeeze(-1) if own["bias"] else z
        z = layered(z) if own["norm"] == "layer" else z
        return x + z if own["residual"] else z

    return f


def matrix(weights: Memory, x: Tensor) -> Tensor:
    return asked(weights[0], x)


def residual(weights: Memory, x: Tensor) -> Tensor:
    return x + layered(asked(weights[0], x))


def three_gates(x: Tensor, w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """lr, retain and momentum."""
    return lr_gate(x, w), sigmoid_gate(x, w, "retain"), sigmoid_gate(x, w, "momentum")


def half_square(error: Tensor) -> Tensor:
    return (error**2).sum() / 2


def wide(gate: Tensor) -> Tensor:
    return gate[..., None, None]


# Titans and what descends with momentum.


def titans(x: Tensor, w: Weights) -> Tensor:
    """Titans (arXiv 2501.00663): S <- eta S - theta grad |M(k) - v|^2 / 2, M <- (1 - alpha) M + S, a matrix or a
    network of two layers. Where the config says so, values are of unit length, theta is dampened by 1 - eta and divided
    by a bound of the curvature, and what is forgotten goes back to the start."""
    q, k, v = qkv(x, w)
    own, f = w.config, perceptron(w) if w.config["structure"]["kind"] == "mlp" else matrix
    q, k = unit(q), unit(k)
    theta, keep, eta = three_gates(x, w)
    if own["algorithm"].get("dampening") and "dampened" not in w.published:
        theta = theta * (1 - eta)
    first = m = starts(x, w)
    s, ys = tuple(torch.zeros_like(a) for a in m), []
    for t in range(x.shape[1]):
        found = grad(lambda m, t=t: half_square(f(m, k[:, t]) - v[:, t]))(m)
        step = theta[:, t]
        if own["step"] == "normalized" and "bounded" not in w.published:
            step = step / (0.01 + bound(m, k[:, t]))
        s = tuple(wide(eta[:, t]) * a - wide(step) * g for a, g in zip(s, found, strict=True))
        m = tuple(wide(keep[:, t]) * a + b for a, b in zip(m, s, strict=True))
        if own["retention"].get("towards") == "start" and "towards" not in w.published:
            m = tuple(a + wide(1 - keep[:, t]) * b for a, b in zip(m, first, strict=True))
        ys.append(f(m, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def bound(m: Memory, k: Tensor) -> Tensor:
    """Of |J|^2, J the derivative of W_2 tanh(W_1 k) by both weights: |h|^2 + |k|^2 |W_2 diag(tanh')|_F^2."""
    h = torch.tanh(asked(m[0], k))
    inner = ((1 - h**2) ** 2 * (m[1] ** 2).sum(-2)).sum(-1)
    return (1 + 1e-6) * (h**2).sum(-1) + (inner + 1e-6) * (k**2).sum(-1)


def delta_momentum(x: Tensor, w: Weights) -> Tensor:
    """Nested Learning (arXiv 2512.24695), Eq 49 as the step of a matrix memory: S <- S (eta I - c G^T G) - theta G, c =
    e / (1 + e |G|^2)."""
    return stepped(x, w, lambda s, g, theta, eta: s @ (wide(eta) * eye(g) - erased(w, g) * g.mT @ g) - wide(theta) * g)


def erased(w: Weights, g: Tensor) -> Tensor:
    e = w.config["algorithm"]["erase"]
    return e / (1 + e * wide((g**2).sum((-2, -1))))


def eye(g: Tensor) -> Tensor:
    return torch.eye(g.shape[-1], dtype=g.dtype)


def stepped(x: Tensor, w: Weights, step: Callable[..., Tensor]) -> Tensor:
    """A matrix memory in the layer of Titans, M <- alpha M + S, S what a step makes of S and the gradient."""
    q, k, v = qkv(x, w)
    q, k, (theta, keep, eta) = unit(q), unit(k), three_gates(x, w)
    m, ys = start(x, w), []
    s = torch.zeros_like(m)
    for t in range(x.shape[1]):
        s = step(s, outer(asked(m, k[:, t]) - v[:, t], k[:, t]), theta[:, t], eta[:, t])
        m = wide(keep[:, t]) * m + s
        ys.append(asked(m, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def deep_momentum(x: Tensor, w: Weights) -> Tensor:
    """Eq 50 with the objective of descent: n(g) = W_2 tanh(W_1 g) learns -g at every write, row by row, and steps by
    what it then says; W_1 starts at a fixed draw, to which momentum pulls it back."""
    q, k, v = qkv(x, w)
    q, k, (theta, keep, eta) = unit(q), unit(k), three_gates(x, w)
    width, rate = w.config["algorithm"]["width"], w.config["algorithm"]["rate"]
    draw = torch.randn((width, k.shape[-1]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = draw / k.shape[-1] ** 0.5
    m, ys = start(x, w), []
    w1, w2 = first.expand(*m.shape[:2], -1, -1), m.new_zeros(*m.shape[:2], k.shape[-1], width)

    def told(nets: Memory, g: Tensor) -> Tensor:
        return torch.tanh(g @ nets[0].mT) @ nets[1].mT

    for t in range(x.shape[1]):
        g = outer(asked(m, k[:, t]) - v[:, t], k[:, t])
        size = (torch.tanh(g @ w1.mT) ** 2).sum((-2, -1)) + (w2**2).sum((-2, -1)) * (g**2).sum((-2, -1))
        c = wide(rate / (1 + rate * size))
        d1, d2 = grad(lambda nets, g=g: half_square(told(nets, g) + g))((w1, w2))
        w1, w2 = first + wide(eta[:, t]) * (w1 - first) - c * d1, wide(eta[:, t]) * w2 - c * d2
        m = wide(keep[:, t]) * m + wide(theta[:, t]) * told((w1, w2), g)
        ys.append(asked(m, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


# ATLAS.


def features(x: Tensor) -> Tensor:
    """1, x and the products of pairs, whose inner products are 1 + z + z^2 / 2, at unit length."""
    d = x.shape[-1]
    rows, columns = torch.tril_indices(d, d)
    weight = torch.where(rows == columns, 0.5, 1.0).sqrt().to(x)
    pairs = weight * x[..., rows] * x[..., columns]
    return unit(torch.cat([torch.ones_like(x[..., :1]), x, pairs], -1))


def omeganet(x: Tensor, w: Weights) -> Tensor:
    """ATLAS (arXiv 2505.23735), OmegaNet: M descends the loss of the last tokens, weighted by powers of a constant."""
    return windowed(x, w, lambda s, g, eta: (s, g))


def atlas(x: Tensor, w: Weights) -> Tensor:
    """ATLAS with Newton-Schulz: S <- theta S + G, M <- alpha M - eta NS(S)."""

    def step(s: Tensor, g: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        s = wide(theta) * s + g
        return s, newton_schulz(s, QUINTIC)

    return windowed(x, w, step)


def windowed(x: Tensor, w: Weights, step: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    q, k, v = qkv(x, w)
    own, q, k = w.config["algorithm"], features(unit(q)), features(unit(k))
    eta, keep = lr_gate(x, w), sigmoid_gate(x, w, "retain")
    theta = sigmoid_gate(x, w, "momentum") if "momentum.weight" in w else eta
    m, ys = start(x, w), []
    s = torch.zeros_like(m)
    for t in range(x.shape[1]):
        g = torch.zeros_like(m)
        for age in range(min(own["window"], t + 1)):
            g = g + own["decay"] ** age * outer(asked(m, k[:, t - age]) - v[:, t - age], k[:, t - age])
        s, direction = step(s, g, theta[:, t])
        m = wide(keep[:, t]) * m - wide(eta[:, t]) * direction
        ys.append(asked(m, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def newton_schulz(s: Tensor, steps: list[tuple[float, float, float]]) -> Tensor:
    """A polynomial a step in X X^T, from s over its length."""
    x = s / wide(torch.sqrt((s**2).sum((-2, -1)) + 1e-14))
    for a, b, c in steps:
        gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
        p = a * eye(gram) + b * gram + c * gram @ gram
        x = p @ x if x.shape[-2] <= x.shape[-1] else x @ p
    return x


# MIRAS: two layers, x + LN(W_2 gelu(W_1 x)).


def miras(
    x: Tensor, w: Weights, loss: Callable[[Tensor], Tensor], link: Callable[[Tensor], Tensor], first: Any
) -> Tensor:
    """What is carried is A, the memory link(A): A <- alpha A - eta grad loss(M(k) - v); `first` makes A of the weights
    at the start."""
    q, k, v = qkv(x, w)
    q, k, eta, keep, f = unit(q), unit(k), lr_gate(x, w), sigmoid_gate(x, w, "retain"), perceptron(w)
    a, ys = tuple(first(m) for m in starts(x, w)), []
    back = starts(x, w) if w.config["retention"].get("towards") == "start" and "towards" not in w.published else ()
    for t in range(x.shape[1]):
        found = grad(lambda m, t=t: loss(f(m, k[:, t]) - v[:, t]))(tuple(map(link, a)))
        a = tuple(wide(keep[:, t]) * one - wide(eta[:, t]) * g for one, g in zip(a, found, strict=True))
        a = tuple(one + wide(1 - keep[:, t]) * m for one, m in zip(a, back, strict=True)) if back else a
        ys.append(f(tuple(map(link, a)), q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def moneta(x: Tensor, w: Weights) -> Tensor:
    """Moneta (arXiv 2504.13173): |e|_3^3 / 3 and the link of q = 4, B |B|_4^2 with B = A^(1/3)."""
    eps = w.config["retention"]["eps"]

    def root(a: Tensor) -> Tensor:
        b = a * a.abs().clamp(min=eps) ** (-2 / 3)
        return b * wide((b**4).sum((-2, -1)) ** 0.5)

    def first(m: Tensor) -> Tensor:
        b = m / wide((m**4).sum((-2, -1)) ** (1 / 6))
        return b * b.abs().clamp(min=eps ** (1 / 3)) ** 2

    return miras(x, w, lambda e: (e.abs() ** 3).sum() / 3, root, first)


def yaad(x: Tensor, w: Weights) -> Tensor:
    """Yaad: |e|^2 / 2 within delta, delta |e|_1 beyond, sqrt(e^2 + eps^2) for |e|."""
    delta, eps = w.config["bias"]["delta"], w.config["bias"]["eps"]

    def loss(e: Tensor) -> Tensor:
        inside = (e**2).sum(-1) / 2
        beyond = delta * torch.sqrt(e**2 + eps**2).sum(-1)
        return torch.where(e.detach().norm(dim=-1) <= delta, inside, beyond).sum()

    return miras(x, w, loss, lambda a: a, lambda m: m)


def memora(x: Tensor, w: Weights) -> Tensor:
    """Memora: rows are c softmax(A)."""
    scale = w.config["retention"]["scale"]
    return miras(x, w, half_square, lambda a: scale * torch.softmax(a, -1), lambda m: m)


# Few slots.


def lattice(x: Tensor, w: Weights) -> Tensor:
    """Lattice (arXiv 2504.05646): a slot `[V]` for each coordinate of a key, on the sphere; the error steps it along
    what is across it."""
    q, k, v = qkv(x, w)
    q, k, eta, keep = unit(q), unit(k), lr_gate(x, w), sigmoid_gate(x, w, "retain")
    rows = start(x, w)
    s = normalize(rows + torch.eye(*rows.shape[-2:], dtype=x.dtype), dim=-2)
    ys = []
    for t in range(x.shape[1]):
        error = asked(s, k[:, t]) - v[:, t]
        across = error.unsqueeze(-1) - s * torch.einsum("bhvp,bhv->bhp", s, error).unsqueeze(2)
        s = normalize(wide(keep[:, t]) * s - wide(eta[:, t]) * k[:, t].unsqueeze(2) * across, dim=-2)
        ys.append(asked(s, q[:, t]))
    return out(x, torch.stack(ys, 1), w)


def trellis(x: Tensor, w: Weights) -> Tensor:
    """Trellis (arXiv 2512.23852): the keys' pass learns codes, f(W_1 k) -> a, the values' pass W_2 a -> v, y = W_2
    f(W_1 q), f = SiLU at unit length; a is a linear map of the key at unit length."""
    q, k, v = qkv(x, w)
    q, k = unit(q), unit(k)
    a = torch.einsum("bthp,hpc->bthc", k, w["phi.1.weight"])
    q, k, a = unit(q), unit(k), unit(a)
    eta, keep, (keys, values), ys = lr_gate(x, w), sigmoid_gate(x, w, "retain"), starts(x, w), []

    def code(z: Tensor) -> Tensor:
        z = silu(z)
        return z / torch.sqrt((z**2).sum(-1, keepdim=True) + 1e-6)

    for t in range(x.shape[1]):
        g = grad(lambda m, t=t: half_square(code(asked(m, k[:, t])) - a[:, t]))(keys)
        error = asked(values, a[:, t]) - v[:, t]
        keys = wide(keep[:, t]) * keys - wide(eta[:, t]) * g
        values = wide(keep[:, t]) * values - wide(eta[:, t]) * outer(error, a[:, t])
        ys.append(asked(values, code(asked(keys, q[:, t]))))
    return out(x, torch.stack(ys, 1), w)


# Chunks.


def ttt(x: Tensor, w: Weights) -> Tensor:
    """TTT (arXiv 2407.04620): gradients of |f(k) - v|^2 / 2 at the weights of a block's start, f(x) = x + LN(.), or a
    plain matrix. The released layer, that of its Mamba backbone, convolves q and k alone (`v_conv`), leaves them their
    length and divides steps by their width (`lengths`), turns them within the block (`turned`), divides the sum of a
    block's steps by their number (`mean`), and has a layer norm of all heads behind the memory (`post_norm`)."""
    q, k, v = qkv(x, w, active=False)
    own, lr = w.config, lr_gate(x, w)
    if "lengths" in w.published:
        lr = lr / k.shape[-1]
    else:
        q, k = unit(q), unit(k)
    chunk, size = own["chunk"], x.shape[1]
    if "turned" in w.published:
        q, k = (torch.cat([turned(item[:, at : at + chunk]) for at in range(0, size, chunk)], 1) for item in (q, k))
    f = matrix if own["structure"]["kind"] == "matrix" else perceptron(w)
    if "residual" in w.published:
        f = residual
    m, ys = starts(x, w), []
    for at in range(0, size, chunk):
        total = tuple(torch.zeros_like(item) for item in m)
        for t in range(at, min(at + chunk, size)):
            found = grad(lambda m, t=t: half_square(f(m, k[:, t]) - v[:, t]))(m)
            total = tuple(a + wide(lr[:, t]) * g for a, g in zip(total, found, strict=True))
            share = 1 / (t - at + 1) if "mean" in w.published else 1.0
            now = tuple(a - share * b for a, b in zip(m, total, strict=True))
            ys.append(f(now, q[:, t]))
        m = now
    y = torch.stack(ys, 1)
    if "post_norm" in w.published:
        y = layered(y.flatten(-2)).unflatten(-1, (w.heads, -1))
        w = Weights(w, w.heads, w.config, {*w.published, "norm"})
    return out(x, y, w)


def large_chunk_ttt(x: Tensor, w: Weights) -> Tensor:
    """LaCT (arXiv 2505.23884): a chunk reads W_2 (silu(W_1 q) * (W_3 q)), then takes one step along Newton-Schulz of
    its momentum, the mean gate of the chunk times what was plus the sum of lr-weighted gradients of -<f(k), v>, lr of
    each matrix by softplus; rows keep the length they start with. q, k and v come from SiLU, without a convolution. The
    released one turns q and k by their position (`turned`) and gates its answers per head (`head_gate`)."""
    q, k, v = (silu(item) for item in qkv(x, w))
    q, k = unit(unit(q)), unit(unit(k))  # the layer's and the scan's, of which the second mends what eps takes
    if "turned" in w.published:
        q, k = turned(q), turned(k)
    lr = softplus(torch.einsum("btd,whd->bthw", x, w["lr.weight"]) + w["lr.bias"].mT)
    momentum, chunk = sigmoid_gate(x, w, "momentum"), w.config["chunk"]
    m, ys = starts(x, w), []
    sizes, slots = [item.norm(dim=-1, keepdim=True) for item in m], [torch.zeros_like(item) for item in m]

    def f(m: Memory, x: Tensor) -> Tensor:
        return asked(m[1], silu(asked(m[0], x)) * asked(m[2], x))

    for at in range(0, x.shape[1], chunk):
        end = min(at + chunk, x.shape[1])
        ys += [f(m, q[:, t]) for t in range(at, end)]
        if end < at + chunk:
            break
        mean = wide(momentum[:, at:end].mean(1))
        total = [mean * item for item in slots]
        for t in range(at, end):
            found = grad(lambda m, t=t: -(f(m, k[:, t]) * v[:, t]).sum())(m)
            total = [a + wide(lr[:, t, :, i]) * g for i, (a, g) in enumerate(zip(total, found, strict=True))]
        slots = total
        moved = [a - newton_schulz(s, LACT) for a, s in zip(m, slots, strict=True)]
        m = tuple(a / a.norm(dim=-1, keepdim=True) * size for a, size in zip(moved, sizes, strict=True))
    y = torch.stack(ys, 1)
    if "head_gate" in w.published:
        gates = w["g.weight"].unflatten(0, (w.heads, -1))[:, :1].expand(-1, y.shape[-1], -1)
        return out(x, y, Weights({**w, "g.weight": gates.flatten(0, 1)}, w.heads, w.config))
    return out(x, y, w)


def in_place_ttt(x: Tensor, w: Weights) -> Tensor:
    """In-Place TTT (arXiv 2604.06169): z = silu(W_gate k) * (W_up k), y = W_down z by the weights of the chunk's start,
    to which the chunk then adds eta v z^T, v a convolution of the chunk's values with two taps ahead. The published one
    is the MLP of a block: its key and query are one (`one_key`), of their own length (`units`), without convolution,
    norm and gate."""
    q, k, v = qkv(x, w, active=False)
    q = k if "one_key" in w.published else q
    q, k = (q, k) if "units" in w.published else (unit(q), unit(k))
    chunk, eta, size = w.config["chunk"], w.config["algorithm"]["lr"], x.shape[1]
    taps, ahead = w["conv"], w.config["gating"]["ahead"]

    def hidden(item: Tensor) -> Tensor:
        gate, up = (torch.einsum("bthp,hpf->bthf", item, w[f"phi.{name}"]) for name in ("w_gate", "w_up"))
        return silu(gate) * up

    keys, queries, m, ys = hidden(k), hidden(q), start(x, w), []
    for at in range(0, size, chunk):
        end = min(at + chunk, size)
        ys += [asked(m, queries[:, t]) for t in range(at, end)]
        for t in range(at, end) if end == at + chunk else ():
            near = [(o, t + o) for o in range(ahead + 1 - len(taps), ahead + 1) if at <= t + o < end]
            target = sum(taps[len(taps) - 1 - ahead + o] * v[:, s] for o, s in near)
            m = m + eta * outer(target, keys[:, t])
    return out(x, torch.stack(ys, 1), w)


LAYERS: dict[str, Layer] = {
    "titans_linear": titans,
    "titans": titans,
    "delta_momentum": delta_momentum,
    "deep_momentum": deep_momentum,
    "omeganet": omeganet,
    "atlas": atlas,
    "moneta": moneta,
    "yaad": yaad,
    "memora": memora,
    "lattice": lattice,
    "trellis": trellis,
    "ttt_linear": ttt,
    "ttt_linear_norm": ttt,
    "ttt_mlp": ttt,
    "large_chunk_ttt": large_chunk_ttt,
    "in_place_ttt": in_place_ttt,
}
