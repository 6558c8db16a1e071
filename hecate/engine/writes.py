"""Several writes a token: n tokens of one write each, of which the first decays and one is read. [ENG-WRITES-D1]

A token of n writes decays the memory once and writes n pairs (k_j, v_j) one after the other, each seeing those before;
it is read once, after the last (`read="after"`) or before the first. So it is n tokens with retain 1 but at the first,
for every engine alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hecate.checks import described, expect
from hecate.engine.arguments import retain_per_head
from hecate.engine.tokens import linear_block
from hecate.errors import ConfigError, ShapeError
from hecate.rule import Gates, MemoryConfig
from hecate.tape import Block, Run, one


def one_write_each(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, *, run: Run, **given: Any
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
    own: dict[str, Any] = gates._asdict()
    for name in ("lr", "erase", "write"):
        if isinstance(gate := own[name], Tensor):
            if gate.shape[:4] != k.shape[:4]:
                each = f"[B, T, n, H] = {list(k.shape[:4])}"
                raise ShapeError(f"gates.{name} must be {each}, one for each of writes={n}, got {list(gate.shape)}")
            # [B, T, n, H, *] to [B, T n, H, *].
            own[name] = one(run(_ROWS, gate))
    for name in ("retain", "retain_value"):
        gate = own[name]
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
            own[name] = one(run(_once(n), gate))
    if isinstance(own["floor"], Tensor):
        expect(own["floor"], "B T H", name="gates.floor", sizes=(batch, length, heads))
        own["floor"] = one(run(_each(n), own["floor"]))
    for name, mask in (("write_mask", given.get("write_mask")), ("reset_mask", given.get("reset_mask"))):
        if isinstance(mask, Tensor):
            expect(mask, "B T", name=name, sizes=(batch, length), dtype=torch.bool, like=k)
            given[name] = mask.repeat_interleave(n, 1)
            if name == "reset_mask":
                # A restart comes before the first write, and not again before the others.
                given[name] = given[name] & (torch.arange(length * n, device=k.device) % n == 0)
    if isinstance(given.get("cu_seqlens"), Tensor):
        given["cu_seqlens"] = given["cu_seqlens"] * n
    tokens = one(run(_each(n), q)), one(run(_ROWS, k)), one(run(_ROWS, v)), Gates(**own)
    return config.single, tokens, given


def read_once(config: MemoryConfig, y: Tensor, *, run: Run) -> Tensor:
    """The answers of T tokens `[B, T, H, V]`, from those after or before every write."""
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
