"""Every named rule on random inputs beside the transcription of its paper, in float64.

A trial is what `memory_scan` is given, in numpy for one sequence and head, and what it has to
return: outputs and the final state by name. Raw keys and queries go in; the transcription gets
them as the paper prepares them. Settings of a rule are read from its configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from hecate import MemoryConfig
from tests.reference import bounded, papers, papers_deep, papers_steps
from tests.reference import gates_2026 as heads
from tests.reference import papers_2025 as older
from tests.reference import papers_2026 as newer
from tests.reference.memory import elu
from tests.reference.phi import polynomial

Array = np.ndarray
Move = Callable[[int, Array], Array]


class Draws:
    """Random numbers; `move`, of the number of a draw and what was drawn, may change them."""

    move: Move = staticmethod(lambda number, drawn: drawn)

    def __init__(self, seed: int) -> None:
        self._rng, self._number = np.random.default_rng(seed), itertools.count()

    def normal(self, size: Any) -> Array:
        return self.move(next(self._number), self._rng.normal(size=size))

    def uniform(self, low: float = 0.0, high: float = 1.0, *, size: Any) -> Array:
        return self.move(next(self._number), self._rng.uniform(low, high, size))


class Inputs:
    """Random q, k, v and gates, and weights to start from."""

    def __init__(self, length: int, width: int = 3, d: int = 4, seed: int = 0) -> None:
        self.rng = Draws(seed)
        self.q, self.k, self.v = (self.rng.normal(size=(length, n)) for n in (d, d, width))
        self.lr, self.momentum = (self.rng.uniform(0.1, 0.95, size=length) for _ in range(2))
        self.retain = self.rng.uniform(0.8, 1.0, size=length)
        self.channels = self.rng.uniform(0.7, 1.0, size=(length, d))
        self.unit_q, self.unit_k = unit(self.q), unit(self.k)

    def weights(self, *shape: int) -> Array:
        return self.rng.normal(size=shape) / np.sqrt(shape[-1])


class Trial(NamedTuple):
    """Inputs beside q, k, v, and the truth; states by `part.name`, of the memory without."""

    inputs: Inputs
    y: Array
    state: dict[str, Array]
    gates: dict[str, Array | float] = {}  # noqa: RUF012 - never written to
    initial: dict[str, Array] | None = None
    learned: dict[str, Array] | None = None


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def matrix(function: Callable[..., Any], *, normalise: bool, **gates: str) -> Any:
    """A rule of one matrix: `function(q, k, v, gates...)` returns outputs and the weight."""

    def trial(config: MemoryConfig, length: int) -> Trial:
        x = Inputs(length)
        given = {gate: getattr(x, name) for gate, name in gates.items()}
        q, k = (x.unit_q, x.unit_k) if normalise else (x.q, x.k)
        y, weight = function(q, k, x.v, *given.values())
        return Trial(x, y, {"weight": weight}, {"lr": 1.0, **given})

    return trial


def linear_attention(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    k = elu(x.k)
    y = papers.linear_attention(elu(x.q), k, x.v)
    state = {"weight": x.v.T @ k, "normalizer.weight": k.sum(0)[None]}
    return Trial(x, y, state, {"lr": 1.0})


def retnet(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    y, weight = papers.retnet(x.q, x.k, x.v, 1 - 2**-5)
    return Trial(x, y, {"weight": weight}, {"lr": 1.0})


def mamba2(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    y, weight = papers.mamba2(x.v, x.k, x.q, x.lr, 0.3)
    return Trial(x, y, {"weight": weight}, {"lr": x.lr, "retain": np.exp(-0.3 * x.lr)})


def mesa(config: MemoryConfig, length: int) -> Trial:
    x, ridge = Inputs(length), config.algorithm.ridge
    y, weight, inverse = papers.mesa(x.unit_q, x.unit_k, x.v, ridge, x.lr)
    state = {"weight": weight, "slots.inverse": inverse - np.eye(len(inverse)) / ridge}
    return Trial(x, y, state, {"lr": x.lr})


def titans_linear(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    y, weight, slot = papers.titans_linear(x.unit_q, x.unit_k, x.v, x.lr, 1 - x.retain, x.momentum)
    return Trial(x, y, {"weight": weight, "slots.momentum.weight": slot}, gates(x))


def titans(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    w1, w2 = x.weights(8, 4), x.weights(3, 8)
    given = gates(x)
    y, *state = papers_deep.titans(x.unit_q, x.unit_k, x.v, given["lr"], x.retain, x.momentum, w1, w2)
    names = ("w1", "w2", "slots.momentum.w1", "slots.momentum.w2")
    return Trial(x, y, dict(zip(names, state, strict=True)), given, {"w1": w1, "w2": w2})


def ttt_linear(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    lr = 0.3 * x.lr
    y, weight = papers.ttt_linear(x.unit_q, x.unit_k, x.v, lr, config.chunk)
    return Trial(x, y, {"weight": weight}, {"lr": lr})


def ttt(shapes: dict[str, tuple[int, ...]], gelu: Any) -> Any:
    """A column of biases is a vector in the paper."""

    def trial(config: MemoryConfig, length: int) -> Trial:
        x = Inputs(length, width=4)
        initial = {name: x.weights(*shape) for name, shape in shapes.items()}
        lr = 0.1 * x.lr
        params = [w[:, 0] if w.shape[1] == 1 else w for w in initial.values()]
        y, final = papers.ttt(x.q, x.k, x.v, lr, config.chunk, params, gelu)
        state = {name: item.reshape(initial[name].shape) for name, item in zip(shapes, final, strict=True)}
        return Trial(x, y, state, {"lr": lr}, initial)

    return trial


def miras(function: Callable[..., Any], scale_v: float = 1.0, **settings: str) -> Any:
    """A rule of MIRAS: two layers, and settings read from the configuration."""

    def trial(config: MemoryConfig, length: int) -> Trial:
        x = Inputs(length, width=4)
        x.v = scale_v * x.v
        w1, w2 = x.weights(16, 4), x.weights(4, 16)
        # Near 1: the norm has nothing to divide by in a memory that has forgotten everything.
        lr, retain = config.algorithm.lr / scale_v * x.lr, 0.9 + 0.1 * x.retain
        own = {name: attrgetter(path)(config) for name, path in settings.items()}
        y, *final = function(x.unit_q, x.unit_k, x.v, lr, retain, w1, w2, **own)
        state = dict(zip(("w1", "w2"), final, strict=True))
        return Trial(x, y, state, {"lr": lr, "retain": retain}, {"w1": w1, "w2": w2})

    return trial


def large_chunk(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    hidden, lr = 4 * config.structure.expansion, x.rng.uniform(0.1, 0.95, size=(length, 3))
    shapes = {"w1": (hidden, 4), "w2": (3, hidden), "w3": (hidden, 4)}
    initial = {name: x.weights(*shape) for name, shape in shapes.items()}
    y, *final = papers_deep.large_chunk(x.unit_q, x.unit_k, x.v, lr, x.momentum, list(initial.values()), config.chunk)
    state = {
        prefix + name: item
        for prefix, items in zip(("", "slots.momentum.", "pending."), final, strict=True)
        for name, item in zip(shapes, items, strict=True)
    }
    return Trial(x, y, state, {"lr": lr, "momentum": x.momentum}, initial)


def features(x: Inputs) -> tuple[Array, Array]:
    """1, x and the products of pairs, scaled to the kernel 1 + z + z^2 / 2, of length 1."""
    q, k = (unit(np.stack([polynomial(row, [1, 1, 0.5]) for row in item])) for item in (x.q, x.k))
    return q, k


def window(config: MemoryConfig, x: Inputs, k: Array) -> dict[str, Array]:
    size = config.algorithm.window
    return {"slots.keys": k[-size:], "slots.values": x.v[-size:]}


def omeganet(config: MemoryConfig, length: int) -> Trial:
    x, omega = Inputs(length), config.algorithm
    q, k = features(x)
    lr = omega.lr * x.lr
    y, weight = papers_steps.omeganet(q, k, x.v, lr, x.retain, omega.window, omega.decay)
    return Trial(x, y, {"weight": weight, **window(config, x, k)}, {"lr": lr, "retain": x.retain})


def atlas(config: MemoryConfig, length: int) -> Trial:
    x, omega = Inputs(length), config.algorithm
    q, k = features(x)
    given = gates(x, lr=0.1)
    y, weight, slot = papers_steps.atlas(q, k, x.v, *given.values(), omega.window, omega.decay)
    state = {"weight": weight, "slots.momentum.weight": slot, **window(config, x, k)}
    return Trial(x, y, state, given)


def lattice(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    weight = x.weights(3, 4)
    start = unit(weight.T + np.eye(3)[np.arange(4) % 3])
    lr = 0.5 * x.lr
    y, slots = bounded.lattice(start, x.unit_k, x.unit_q, x.v, lr, x.retain, True)
    return Trial(x, y, {"weight": slots.T}, {"lr": lr, "retain": x.retain}, {"weight": weight})


def trellis(config: MemoryConfig, length: int) -> Trial:
    x, codes = Inputs(length), config.structure.codes
    keys, values, to_code = x.weights(codes, 4), x.weights(3, codes), x.weights(4, codes)
    q, k, a = (item / np.sqrt((item**2).sum(1) + 1e-12)[:, None] for item in (x.q, x.k, x.k @ to_code))
    y, *final = bounded.trellis("silu", keys, values, k, a, q, x.v, x.lr, x.retain)
    state = dict(zip(("w_key", "w_value"), final, strict=True))
    initial = {"w_key": keys, "w_value": values}
    given = {"lr": x.lr, "retain": x.retain}
    return Trial(x, y, state, given, initial, {"1.weight": to_code})


def delta_momentum(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    given = gates(x, lr=0.5)
    y, weight, slot = papers_steps.delta_momentum(x.unit_q, x.unit_k, x.v, *given.values(), config.algorithm.erase)
    return Trial(x, y, {"weight": weight, "slots.momentum.weight": slot}, given)


def deep_momentum(config: MemoryConfig, length: int) -> Trial:
    x, algorithm = Inputs(length), config.algorithm
    # The rule's own constant draw, which no other program can repeat.
    start = algorithm._start(torch.zeros(1, 3, 4, dtype=torch.float64)).numpy()
    y, weight, *slots = papers_steps.deep_momentum(x.unit_q, x.unit_k, x.v, *gates(x).values(), start, algorithm.rate)
    names = ("slots.w_in.weight", "slots.w_out.weight")
    return Trial(x, y, {"weight": weight, **dict(zip(names, slots, strict=True))}, gates(x))


def gates(x: Inputs, lr: float = 1.0) -> dict[str, Any]:
    return {"lr": lr * x.lr, "retain": x.retain, "momentum": x.momentum}


def _scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same on queries divided by the root of their width."""
    return lambda q, *rest: function(q / np.sqrt(q.shape[1]), *rest)


def _gated(q: Array, k: Array, v: Array, beta: Array, alpha: Array) -> Any:
    return papers.gated_delta(q, k, v, alpha, beta)


def _kda(q: Array, k: Array, v: Array, beta: Array, alpha: Array) -> Any:
    return papers.kda(q, k, v, alpha, beta)


# Rules whose gates erase and write apart, or write several times.


def gated_delta_2(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    erase, value = x.rng.uniform(size=(length, 4)), x.rng.uniform(size=(length, 3))
    y, weight = newer.gated_delta_2(x.unit_q, x.unit_k, x.v, x.channels, erase, value)
    x.v = value * x.v
    return Trial(x, y, {"weight": weight}, {"lr": 1.0, "retain": x.channels, "erase": erase})


def delta_product(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    x.k, x.v = x.rng.normal(size=(length, config.writes, 4)), x.rng.normal(size=(length, config.writes, 3))
    lr = x.rng.uniform(0.1, 1.9, size=(length, config.writes))
    keys = x.k / np.linalg.norm(x.k, axis=-1, keepdims=True)
    y, weight = older.gated_delta_product(x.unit_q, keys, x.v, lr, x.retain)
    return Trial(x, y, {"weight": weight}, {"lr": lr, "retain": x.retain})


def rwkv7(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    a, xi, zeta = x.rng.uniform(size=(length, 4)), x.rng.uniform(0.5, 1, size=4), x.rng.uniform(0.5, 1, size=4)
    y, weight = older.rwkv7(x.q, x.channels, x.k, x.v, a, xi, zeta)
    erased, written = older.rwkv7_keys(x.k, a, xi, zeta)
    x.k, x.v = np.stack((erased, written), 1), np.stack((0 * x.v, x.v), 1)
    erase, write = np.stack((np.ones(length), np.zeros(length)), 1), np.stack((a, np.ones_like(a)), 1)
    gates = {"lr": np.ones((length, 2)), "retain": x.channels, "erase": erase, "write": write}
    return Trial(x, y, {"weight": weight}, gates)


def comba(config: MemoryConfig, length: int) -> Trial:
    x, c, d = Inputs(length), 0.7, 0.4
    x.q = x.q - d * c * x.k  # the layer's correction, ahead of both norms
    y, weight = older.comba(unit(x.q), x.unit_k, x.v, x.retain, x.lr, c)
    return Trial(x, y, {"weight": weight}, {"lr": x.lr, "retain": x.retain, "erase": c})


def momentum_delta(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    b, eta = x.rng.uniform(0.1, 0.9, size=length), x.rng.uniform(0.2, 1.5, size=length)
    mu = 0.5 * x.momentum
    y, weight, slot = newer.momentum_delta(x.unit_q, x.unit_k, x.v, x.retain, b, mu, eta)
    momentum = mu * b / np.concatenate([b[:1], b[:-1]])
    gates = {"lr": b * eta, "retain": x.retain, "momentum": momentum}
    return Trial(x, y, {"weight": weight, "slots.momentum.weight": b[-1] * slot}, gates)


def mamba3(config: MemoryConfig, length: int) -> Trial:
    x, rest = Inputs(length), np.zeros
    a, dt, share, angle = heads.mamba3(*x.rng.normal(size=(3, length)), x.rng.normal(size=(length, 2)), -1.0)
    y, weight = newer.mamba3(x.q, x.k, x.v, a, dt, share, angle)
    theta = np.cumsum(angle, 0)
    x.q, key = newer.rotate(x.q, theta), newer.rotate(x.k, theta)
    x.k = np.stack((np.concatenate([rest((1, 4)), key[:-1]]), key), 1)
    x.v = np.stack((np.concatenate([rest((1, 3)), x.v[:-1]]), x.v), 1)
    lr = np.stack(((1 - share) * dt * a, share * dt), 1)
    return Trial(x, y, {"weight": weight}, {"lr": lr, "retain": a})


def preconditioned(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    retain = x.channels if config.retention.gate_form.channels else x.retain
    factor = newer.curvature(x.unit_k, x.retain, x.momentum)
    y, weight = newer.preconditioned_delta(x.unit_q, x.unit_k, x.v, factor, x.lr, retain)
    return Trial(x, y, {"weight": weight}, {"lr": x.lr, "retain": retain, "write": factor})


def osdn(config: MemoryConfig, length: int) -> Trial:
    x, own = Inputs(length), config.gating
    factor = newer.hypergradient(x.unit_k, x.retain, own.eta, own.begin, low=own.low, high=np.inf)
    y, weight = newer.preconditioned_delta(x.unit_q, x.unit_k, x.v, factor, x.lr, np.ones(length))
    return Trial(x, y, {"weight": weight}, {"lr": x.lr, "write": factor})


def in_place_ttt(config: MemoryConfig, length: int) -> Trial:
    x, chunk, eta = Inputs(length), config.chunk, config.algorithm.lr
    w_gate, w_up, w_down, conv = (x.weights(*shape) for shape in ((16, 4), (16, 4), (3, 16), (5, 3)))
    x.q = x.k
    y, weight = newer.in_place_ttt(x.k, x.v, w_gate, w_up, w_down, conv, chunk, eta)
    place, k, v = np.arange(length) % chunk, x.k, x.v

    def back(item: Array, by: int) -> Array:
        """Of the token so many before, in the chunk."""
        return np.where((place >= by)[:, None], np.roll(item, by, 0), 0.0)

    first = conv[2] * v + conv[1] * back(v, 1) + conv[0] * back(v, 2)
    x.k = np.stack((k, back(k, 1), back(k, 2)), 1)
    ahead = [conv[2 + by] * v * (place >= by)[:, None] for by in (1, 2)]
    x.v = np.stack((first, *ahead), 1)
    learned = {"w_gate": w_gate.T, "w_up": w_up.T}
    return Trial(x, y, {"weight": weight}, {"lr": np.full((length, 3), eta)}, {"weight": w_down}, learned)


def mlstm(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    i = x.rng.normal(size=length)
    y, weight, sums = older.mlstm(x.q / 2, x.k, x.v, i, x.retain)
    state = {"weight": weight, "normalizer.weight": sums[None]}
    return Trial(x, y, state, {"lr": np.exp(i), "retain": x.retain})


def hgrn2(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    y, weight = older.hgrn2(x.q, x.channels, x.v)
    x.k = 1 - x.channels
    return Trial(x, y, {"weight": weight}, {"lr": 1.0, "retain": x.channels})


def oja(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    x.v, kept = unit(x.v), x.rng.uniform(0.7, 1.0, size=(length, 3))
    y, weight = older.gated_oja(x.q, x.k, x.v, x.lr, kept)
    return Trial(x, y, {"weight": weight.T}, {"lr": x.lr, "retain_value": kept})


def gated_mesa(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    ridge = x.rng.uniform(0.3, 2, size=4)
    y, weight, keys = older.mesa(x.unit_q, x.unit_k, x.v, x.retain, x.lr, ridge)
    given = {"lr": x.lr, "retain": x.retain, "ridge": np.tile(ridge, (length, 1))}
    return Trial(x, y, {"weight": weight, "readout.keys": keys}, given)


def gated_kalmanet(config: MemoryConfig, length: int) -> Trial:
    x = Inputs(length)
    y, weight, keys = older.gated_kalmanet(x.unit_q / 2, x.unit_k, x.v, x.retain, x.lr, x.momentum)
    given = {"lr": x.lr**2, "retain": x.retain, "mix": x.momentum}
    return Trial(x, y, {"weight": weight, "readout.keys": keys}, given)


def routed(scores: Array) -> tuple[Array, Array]:
    kept = heads.raven(scores, -np.linspace(0.2, 2.0, len(scores)), 2)
    return 1 - kept, kept


def slotted(written: Any, divisor: float = 2.0) -> Any:
    def trial(config: MemoryConfig, length: int) -> Trial:
        x = Inputs(length)
        s, kept = written(x.rng.normal(size=(length, 4)))
        y, keys, values = older.gsa(x.q / divisor, x.k, x.v, s, kept)
        state = {"weight": values.T, "readout.keys": keys.T}
        return Trial(x, y, state, {"lr": 1.0, "retain": kept, "write": s})

    return trial


TRIALS: dict[str, Callable[[MemoryConfig, int], Trial]] = {
    "hebbian": matrix(papers.sum_rule, normalise=False),
    "linear_attention": linear_attention,
    "retnet": retnet,
    "gla": matrix(_scaled(papers.gla), normalise=False, retain="channels"),
    "mamba2": mamba2,
    "delta": matrix(papers.fast_weights, normalise=True, lr="lr"),
    "gated_delta": matrix(_gated, normalise=True, lr="lr", retain="retain"),
    "kda": matrix(_kda, normalise=True, lr="lr", retain="channels"),
    "gated_delta_2": gated_delta_2,
    "delta_product": delta_product,
    "rwkv7": rwkv7,
    "comba": comba,
    "efla": matrix(older.efla, normalise=False, lr="lr"),
    "momentum_delta": momentum_delta,
    "mamba3": mamba3,
    "pgdn": preconditioned,
    "pkda": preconditioned,
    "osdn": osdn,
    "oja": oja,
    "mlstm": mlstm,
    "hgrn2": hgrn2,
    "longhorn": matrix(papers.longhorn, normalise=False, lr="lr"),
    "dgd": matrix(papers.dgd, normalise=False, lr="lr", retain="retain"),
    "mesa": mesa,
    "gated_mesa": gated_mesa,
    "gated_kalmanet": gated_kalmanet,
    "gsa": slotted(heads.gsa, 1.0),
    "abc": slotted(older.abc_gates),
    "raven": slotted(routed, 1.0),
    "titans_linear": titans_linear,
    "titans": titans,
    "ttt_linear": ttt_linear,
    "ttt_linear_norm": ttt({"w1": (4, 4), "b1": (4, 1)}, None),
    "ttt_mlp": ttt(
        {"w1": (16, 4), "b1": (16, 1), "w2": (4, 16), "b2": (4, 1)}, (papers_deep.gelu, papers_deep.gelu_slope)
    ),
    "large_chunk_ttt": large_chunk,
    "in_place_ttt": in_place_ttt,
    "moneta": miras(papers_deep.moneta, eps="retention.eps"),
    "yaad": miras(papers_deep.yaad, 16.0, delta="bias.delta", eps="bias.eps"),
    "memora": miras(papers_deep.memora, scale="retention.scale"),
    "omeganet": omeganet,
    "atlas": atlas,
    "lattice": lattice,
    "trellis": trellis,
    "delta_momentum": delta_momentum,
    "deep_momentum": deep_momentum,
}
"""The trial of each named rule."""
