"""A self-referential layer token by token, for one sequence, in straight-line numpy float64.

The boxes of a head are written by `tests.reference.memory`, one at a time.
"""

from dataclasses import dataclass

import numpy as np

from tests.reference import memory as ref

GATES = ("lr", "retain", "momentum")


@dataclass
class Setting:
    rule: ref.Rule
    boxes: tuple  # all projections
    moving: tuple  # those that are written
    phase: int
    erase: str
    period: int
    lr_max: float
    qk_norm: str = "l2"
    input_norm: str = "l2"


def layer(setting, params, x, write=None, reset=None):
    """Outputs `[T, d_model]` and the boxes `{box: weights}` of every head at the end.

    params: into, conv (or None), out, output_gate (or None), norm `[H, D]`, and per head boxes
    `{box: [weights]}`, gate_weight and gate_bias `{gate: ...}`.
    """
    steps, heads = len(x), len(params["heads"])
    write = np.ones(steps, bool) if write is None else write
    reset = np.zeros(steps, bool) if reset is None else reset
    states = [None] * heads
    past, rows = [], []
    for t in range(steps):
        if reset[t]:
            past = []
        own = params["into"] @ x[t]
        if params["conv"] is not None:
            taps, past = [own, *past], [own if write[t] else 0 * own, *past]
            own = silu(sum(w * z for w, z in zip(params["conv"], taps, strict=False)))
        reads = []
        for h, z in enumerate(own.reshape(heads, -1)):
            head = params["heads"][h]
            if states[h] is None or reset[t]:
                states[h] = first(head)
            y, states[h] = token(setting, head, states[h], z, write[t])
            reads.append(y / np.sqrt((y @ y) / len(y) + 1e-6) * params["norm"][h])
        y = np.concatenate(reads)
        if params["output_gate"] is not None:
            y = y * silu(params["output_gate"] @ x[t])
        rows.append(params["out"] @ y)
    return np.array(rows), [{box: s.weights for box, s in state[0].items()} for state in states]


def first(head):
    """Box states, their weights at the anchor, tokens written since."""
    states = {box: ref.start(weights) for box, weights in head["boxes"].items()}
    return states, {box: state.weights for box, state in states.items()}, 0


def token(setting, head, state, z, write):
    """The read and the state after it."""
    rule, (states, anchor, position) = setting.rule, state
    if position == 0:
        anchor = {box: state.weights for box, state in states.items()}
    x = unit(setting.input_norm, z)

    def ask(box, at):
        still = box not in (*setting.moving, "memory")
        return answer(rule, head["boxes"][box] if still else anchor[box], at)

    told = {box: ask(box, x) for box in setting.boxes}
    q, k, v = unit(setting.qk_norm, told["q"]), unit(setting.qk_norm, told["k"]), told["v"]
    gates = {"lr": 0.0, "retain": 1.0, "momentum": 0.0}
    for gate in GATES:
        if gate in told:
            scale = setting.lr_max if gate == "lr" else 1.0
            at = head["gate_weight"][gate] @ told[gate] + head["gate_bias"][gate]
            gates[gate] = scale / (1 + np.exp(-at))
    before, states = states["memory"], dict(states)
    if write:
        for box in (*setting.moving, "memory"):
            target = ask(box, unit(setting.input_norm, v)) if setting.phase == 3 else v
            states[box] = written(setting, states[box], anchor[box], k, target, gates)
        position = (position + 1) % setting.period
    weights = (states["memory"] if rule.read == "after" else before).weights
    scale = len(q) ** -0.5 if rule.query_scale == "key_dim" else 1.0
    p = ref.normalised(rule.key_norm, rule.phi(q)) * scale
    return ref.predict(rule, weights, p)[-1], (states, anchor, position)


def answer(rule, weights, x):
    return ref.predict(rule, weights, ref.normalised(rule.key_norm, rule.phi(x)))[-1]


def written(setting, state, anchor, k, target, gates):
    """One box after one token."""
    rule = setting.rule
    p = ref.normalised(rule.key_norm, rule.phi(k))
    lr = ref.step_size(rule.step, gates["lr"], p)
    if setting.erase == "once":
        return ref.written(rule, state, p, target, lr, gates["retain"], gates["momentum"])
    # As printed: M (retain I - lr p p^T) - lr (M_anchor p - target) p^T.
    (m,), (s,), (a,) = state.weights, state.slots, anchor
    s = gates["momentum"] * s - lr * np.outer(m @ p, p) - lr * np.outer(a @ p - target, p)
    return ref.State([gates["retain"] * m + s], [s], state.anchor, state.pending, 1.0, 0)


def unit(kind, z):
    if kind == "none":
        return z
    return z / np.sqrt(z @ z / (1 if kind == "l2" else len(z)) + 1e-12)


def silu(z):
    return z / (1 + np.exp(-z))
