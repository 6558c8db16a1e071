"""A continuum memory for one sequence, token by token and head by head, in numpy float64.

`params` are a layer's `state_dict` as arrays. A level is told by a dict: its rule (see
`tests.reference.memory`), sizes and options.
"""

from dataclasses import dataclass

import numpy as np

from tests.reference import memory as reference


@dataclass
class Level:
    rule: reference.Rule
    period: int = 1
    heads: int = 2
    d_key: int = 4
    d_value: int = 4
    kernel: int = 4
    lr_max: float = 1.0
    output_gate: bool = True
    firing: bool = False
    restart: int | None = None
    projection: str = "none"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x):
    return x / np.sqrt((x * x).mean() + 1e-6)


def cms(levels, params, x, composition, aggregation="sum", write=None, reset=None):
    """Outputs `[T, d]` and the weights of every level and head at the end."""
    steps = len(x)
    write = np.ones(steps, bool) if write is None else write
    reset = np.zeros(steps, bool) if reset is None else reset
    own = [below(params, f"levels.{i}.") for i in range(len(levels))]
    states = [fresh(level, p) for level, p in zip(levels, own, strict=True)]
    written, rows = 0, []
    for t in range(steps):
        if reset[t]:
            # The window of the convolution keeps its length and forgets what it holds.
            states, written = [fresh(lv, p) for lv, p in zip(levels, own, strict=True)], 0
        seen, outs = x[t], []
        for i, (level, p) in enumerate(zip(levels, own, strict=True)):
            given = seen
            if composition in ("sequential", "nested"):
                given = rms(seen) * params[f"norms.{i}.weight"]
            outs.append(token(level, p, given, states[i], write[t], written))
            if composition in ("sequential", "nested"):
                seen = seen + outs[-1]
            elif composition == "chained":
                seen = outs[-1]
        written += int(write[t])
        rows.append(joined(params, x[t], outs, composition, aggregation))
        if composition == "nested" and write[t]:
            for i in reversed(range(1, len(levels))):
                if written % levels[i].period == 0:
                    slow = [list(state.weights) for state in states[i]["memory"]]
                    states[i - 1]["memory"] = [reference.start(weights) for weights in slow]
    ends = [[state.weights for state in level["memory"]] for level in states]
    return np.array(rows), ends


def below(params, prefix):
    return {name[len(prefix) :]: p for name, p in params.items() if name.startswith(prefix)}


def joined(params, x, outs, composition, aggregation):
    if composition == "chained":
        return outs[-1]
    if aggregation == "rsqrt":
        return sum(outs) / np.sqrt(len(outs))
    if aggregation == "learned":
        return sum(w * out for w, out in zip(params["weight"], outs, strict=True))
    if aggregation == "gated":
        gates = sigmoid(params["weight"] @ x + params["bias"])
        return sum(g * out for g, out in zip(gates, outs, strict=True))
    return sum(outs)


def fresh(level, p):
    channels = level.heads * (2 * level.d_key + level.d_value)
    names = sorted((name for name in p if name.startswith("initial.")), key=list(p).index)
    return {
        "memory": [reference.start([p[name][h] for name in names]) for h in range(level.heads)],
        "initial": [[p[name][h] for name in names] for h in range(level.heads)],
        "window": [np.zeros(channels)] * (level.kernel - 1),
        "chunk": [[] for _ in range(level.heads)],
    }


def token(level, p, x, state, write, written):
    """The level's output; `state` is brought up to date."""
    rule, heads = level.rule, level.heads
    if level.restart and write and written % level.restart == 0:
        state["memory"] = [reference.start(weights) for weights in state["initial"]]
    mixed = p["qkv.weight"] @ x
    if level.kernel:
        taps, kept = [mixed, *state["window"]], [mixed if write else 0 * mixed, *state["window"]]
        state["window"] = kept[: level.kernel - 1]
        mixed = silu(sum(w * tap for w, tap in zip(p["conv.weight"], taps, strict=True)))
    keys = heads * level.d_key
    q, k, v = (part.reshape(heads, -1) for part in np.split(mixed, [keys, 2 * keys]))
    gates = {
        name: sigmoid(p[f"gates.weight.{name}"] @ x + p[f"gates.bias.{name}"])
        for name in ("lr", "retain", "momentum", "firing")
        if f"gates.bias.{name}" in p
    }
    reads = []
    for h in range(heads):
        fires = not level.firing or gates["firing"][h] > 0.5
        lr = level.lr_max * gates["lr"][h] * fires
        retain = gates["retain"][h] if fires and "retain" in gates else 1.0
        momentum = gates["momentum"][h] if "momentum" in gates else 0.0
        phi_q, phi_k = (rule.phi(z / np.sqrt(z @ z + 1e-12)) for z in (q[h], k[h]))
        phi_q, phi_k = (reference.normalised(rule.key_norm, z) for z in (phi_q, phi_k))
        before = state["memory"][h]
        if write:
            rate = reference.step_size(rule.step, lr, phi_k)
            state["memory"][h] = reference.written(rule, before, phi_k, v[h], rate, retain, momentum)
            if written % rule.chunk == 0:
                state["chunk"][h] = []
            state["chunk"][h].append(phi_k)
        phi_q = projected(level.projection, state["chunk"][h], phi_q)
        source = before if rule.read == "before" else state["memory"][h]
        reads.append(rms(reference.predict(rule, source.weights, phi_q)[-1]) * p["norm"][h])
    y = np.concatenate(reads)
    if level.output_gate:
        y = y * silu(p["output_gate.weight"] @ x)
    return p["out.weight"] @ y


def projected(kind, keys, q):
    if kind == "none":
        return q
    if kind == "sum":
        return sum((k * (k @ q) / (k @ k) for k in keys), 0 * q)
    if not keys:
        return 0 * q
    basis, sizes, _ = np.linalg.svd(np.array(keys).T, full_matrices=False)
    basis = basis[:, sizes > 1e-8 * sizes.max()]
    return basis @ (basis.T @ q)
