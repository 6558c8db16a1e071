"""Reductions to plain scans, the same for every engine: of memories with several writes a token, or with a readout.

A token of n writes decays the memory once and writes n pairs (k_j, v_j) one after the other, each seeing those before;
it is read once, after the last (`read="after"`) or before the first. So it is n tokens with retain 1 but at the first.
[ENG-WRITES-D1]

A readout first transforms the queries by a state of its own, in spans or by a scan; then the memory answers them, under
`config.direct`, the config without the readout. [ENG-READ-D1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hecate.checks import described, expect
from hecate.engine.arguments import check_held, check_params, check_tensors, readout_gates, retain_per_head
from hecate.engine.call import complete, state_dtype
from hecate.engine.engine import COPY, Engine, check_exact
from hecate.engine.features import to_tokens
from hecate.engine.tokens import CONCAT, cast, cut, linear_block
from hecate.errors import ConfigError, ShapeError
from hecate.readout import Asked, Means
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import Block, Run, execute, one, several
from hecate.tape.bridge import full_precision

SPAN = 16  # tokens whose matrices are held at once

Scan = Callable[..., tuple[Tensor, MemoryState]]


def read_through(
    scan: Scan, config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, *, run: Run,
    how: dict[str, Any], phi_params: Any = None, state: MemoryState | None = None,
    initial: dict[str, Tensor] | None = None, write_mask: Tensor | None = None, reset_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, MemoryState]:  # fmt: skip
    """`memory_scan` of a config with a readout, by `scan`, which is `memory_scan` of its direct one; `how` are engine,
    autodiff, tape and name."""
    check_exact(config, how["engine"])
    gates = Gates() if gates is None else gates
    inputs = complete(config, q, k, v, gates, write_mask, reset_mask, cu_seqlens, going_on=state is not None)
    states = _readout_state(config, state, k)
    dtype = state_dtype(config, q, k, v, states)
    params = check_params(config.feature_map, phi_params, k)
    readout = readout_gates(config, gates, inputs.k, inputs.retain, dtype, run)
    with full_precision((q, k, v)):
        # The readout works on phi(q) and phi(k) as the memory makes them.
        tokens = to_tokens(config, inputs._replace(write_gate=None), params, dtype, run)
    states = {name: item.to(dtype) for name, item in states.items()}
    means = Means(run, _spans(run), _recalled(scan, config, inputs.write, inputs.reset, how), config.read == "after")
    asked = Asked(tokens.phi_q, tokens.phi_k, tokens.lr, tokens.retain, readout, inputs.write, inputs.reset)
    with full_precision((q, k, v)):
        turned = config.readout.turned(asked, states, means)
    decays = config.retention.uses_retain
    options: dict[str, Any] = {"write_mask": inputs.write, "reset_mask": inputs.reset, "initial": initial}
    options["state"] = None if state is None else state._replace(readout=None)
    # phi is not applied again: the direct config has the identity in its place.
    plain = Gates(tokens.lr, turned.retain if decays else None)
    y, new = scan(config.direct, turned.q, turned.k, v, plain, **options, **how)
    if y.dtype != v.dtype:
        y = one(run(cast(v.dtype), y, label="outputs"))
    held = turned.held
    if not k.shape[1]:  # no tokens: the new state is a copy
        held = {name: one(run(COPY, item, label="readout")) for name, item in held.items()}
    return y, new._replace(readout=held)


def _readout_state(config: MemoryConfig, state: MemoryState | None, k: Tensor) -> dict[str, Tensor]:
    """The readout's state to go on from, zeros without one."""
    batch, _, heads, width = k.shape
    shapes = config.readout.state_shapes(config.feature_map.output_dim(width))
    if state is None:
        return {name: torch.zeros(batch, heads, *s, dtype=config.dtype, device=k.device) for name, s in shapes.items()}
    check_held(config, state)
    held: dict[str, Tensor] = state.readout  # type: ignore[assignment]
    check_tensors("state.readout", held, {n: (batch, heads, *s) for n, s in shapes.items()}, k)
    return {name: held[name] for name in shapes}


def _spans(run: Run) -> Callable[..., tuple[Tensor, Tensor]]:
    def walked(block: Block, inputs: Sequence[Tensor | None], state: Tensor) -> tuple[Tensor, Tensor]:
        first = inputs[0]
        length = 0 if first is None else first.shape[1]
        outputs: list[Tensor] = []
        for row in cut(tuple(inputs), [min(SPAN, length - at) for at in range(0, length, SPAN)], run):
            y, state = several(run(block, *row, state, label="readout"))
            outputs.append(y)
        return (one(run(CONCAT, *outputs, label="readout")) if outputs else one((first,))), state

    return walked


def _recalled(
    scan: Scan, config: MemoryConfig, write: Tensor | None, reset: Tensor | None, how: dict[str, Any]
) -> Callable[..., tuple[Tensor, Tensor]]:
    def recall(q: Tensor, k: Tensor, code: Tensor, lr: Tensor, retain: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rule, position = config.codes, torch.zeros(weight.shape[:2], dtype=torch.int64, device=weight.device)
        state = MemoryState({"weight": weight}, {}, {}, {}, position)
        asked, engine = how, how["engine"]
        if engine != "auto" and Engine.registry[engine].excludes(rule) is not None:
            asked = {**how, "engine": "auto"}
        # Here codes are the values, and each channel has a retain of its own.
        gates = Gates(lr, 1.0, retain_value=retain)
        y, new = scan(rule, q, k, code, gates, state=state, write_mask=write, reset_mask=reset, **asked)
        return y, new.memory["weight"]

    return recall


def one_write_each(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, *, run: Run = execute, **options: Any
) -> tuple[MemoryConfig, tuple[Tensor, Tensor, Tensor, Gates], dict[str, Any]]:
    """The config and the arguments of a scan of T n tokens, from those of T tokens of n writes: k `[B, T, n, H, D]`, v
    `[B, T, n, H, V]`, lr, erase and write `[B, T, n, H, *]`, and the others without the axis n."""
    n = config.writes
    for name, tensor, axes in (("q", q, "B T H width"), ("k", k, "B T n H width"), ("v", v, "B T n H width")):
        expect(tensor, axes, name=name)
    (batch, length, count, heads), gates = k.shape[:4], Gates() if gates is None else gates
    if count != n or v.shape[:4] != k.shape[:4] or q.shape != (batch, length, heads, k.shape[-1]):
        raise ShapeError(
            f"with writes={n} k must be [B, T, {n}, H, D], v [B, T, {n}, H, V] and q [B, T, H, D]; got k "
            f"{list(k.shape)}, v {list(v.shape)}, q {list(q.shape)}"
        )
    if not isinstance(gates, Gates):
        raise ConfigError(f"gates must be Gates(lr, retain, momentum), got {described(gates)}")
    fields: dict[str, Any] = gates._asdict()
    for name in ("lr", "erase", "write"):
        if isinstance(gate := fields[name], Tensor):
            if gate.shape[:4] != k.shape[:4]:
                each = f"[B, T, n, H] = {list(k.shape[:4])}"
                raise ShapeError(f"gates.{name} must be {each}, one for each of writes={n}, got {list(gate.shape)}")
            # [B, T, n, H, *] to [B, T n, H, *].
            fields[name] = one(run(_ROWS, gate))
    for name in ("retain", "retain_value"):
        gate = fields[name]
        if gate is None and name == "retain" and config.retention.uses_retain:
            gate = config.retention.default_retain
            if config.forms.per_head:
                gate = retain_per_head(config, (batch, length, heads), k)
        if isinstance(gate, float | int):
            wide = torch.promote_types(k.dtype, torch.float32)
            gate = torch.full((batch, length, heads), float(gate), dtype=wide, device=k.device)
        if isinstance(gate, Tensor):
            if gate.shape[:3] != (batch, length, heads):
                each = f"[B, T, H] = {[batch, length, heads]}, once per token"
                raise ShapeError(f"gates.{name} must be {each}, got {list(gate.shape)}")
            # Decay once a token: the first of its writes has the gate, the others 1.
            fields[name] = one(run(_once(n), gate))
    if isinstance(fields["floor"], Tensor):
        expect(fields["floor"], "B T H", name="gates.floor", sizes=(batch, length, heads))
        fields["floor"] = one(run(_each(n), fields["floor"]))
    for name, mask in (("write_mask", options.get("write_mask")), ("reset_mask", options.get("reset_mask"))):
        if isinstance(mask, Tensor):
            expect(mask, "B T", name=name, sizes=(batch, length), dtype=torch.bool, like=k)
            options[name] = mask.repeat_interleave(n, 1)
            if name == "reset_mask":
                # A reset acts before the first write of a token, not before the others.
                options[name] = options[name] & (torch.arange(length * n, device=k.device) % n == 0)
    if isinstance(options.get("cu_seqlens"), Tensor):
        options["cu_seqlens"] = options["cu_seqlens"] * n
    tokens = one(run(_each(n), q)), one(run(_ROWS, k)), one(run(_ROWS, v)), Gates(**fields)
    return config.single, tokens, options


def read_once(config: MemoryConfig, y: Tensor, *, run: Run = execute) -> Tensor:
    """The answers of T tokens `[B, T, H, V]`, picked from those at every write: at the last, or before the first."""
    at, n = config.writes - 1 if config.read == "after" else 0, config.writes

    def back(g: Tensor) -> Tensor:
        others = torch.zeros_like(g)
        return torch.stack([g if index == at else others for index in range(n)], 2).flatten(1, 2)

    return one(run(linear_block("read_once", lambda y: y[:, at::n], back), y))


def _each(n: int) -> Block:
    return linear_block("each_write", lambda q: q.repeat_interleave(n, 1), lambda g: g.unflatten(1, (-1, n)).sum(2))


def _once(n: int) -> Block:
    def there(gate: Tensor) -> Tensor:
        ones = torch.ones_like(gate).unsqueeze(2).expand(*gate.shape[:2], n - 1, *gate.shape[2:])
        return torch.cat([gate.unsqueeze(2), ones], 2).flatten(1, 2)

    return linear_block("first_write", there, lambda g: g[:, ::n])


_ROWS = Block("writes", lambda x: ((x.flatten(1, 2),), x.shape), lambda shape, g: (g.reshape(shape),))
