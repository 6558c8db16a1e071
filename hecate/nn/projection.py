"""Queries projected onto what the keys of the current chunk span."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hecate.engine import L2_NORM, Sequence, memory_scan, to_tokens, written_before
from hecate.errors import ConfigError
from hecate.phi import Identity, Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.rule.rule import one
from hecate.tape import execute
from hecate.tape.bridge import without_autocast

Projection = Literal["none", "sum", "orthogonal"]

SUM = MemoryConfig(bias="dot")  # M = sum of v k^T
NEW = 1e-4  # a unit key adds a direction if this much of its length lies outside the span


def projected_config(config: MemoryConfig) -> MemoryConfig:
    """The rule as it runs on features that are ready."""
    plain = {"feature_map": Identity(), "key_norm": "none", "query_scale": "none"}
    return config.model_copy(update=plain)


def projection_refusal(config: MemoryConfig) -> str | None:
    """Why the queries of a rule cannot be projected; None if they can."""
    if config.feature_map.needs_position:
        return f"feature_map {config.feature_map.kind!r} depends on positions, which a scan counts"
    if config.normalizer != "none":
        return "normalizer 'sum' needs phi(q) as it is: a projected one may have negative weights"
    if config.on_nonfinite == "skip":
        return "on_nonfinite='skip' may leave out tokens, whose keys the projection would hold"
    return None


def project_queries(
    kind: Projection,
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    params: Params,
    state: MemoryState | None,
    position: Tensor,
    write: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, MemoryState]:
    """P_t phi(q_t), phi(k_t) and what P holds at the end. [CMS-TNT-D2]

    P_t is made of the unit features of keys written in the memory's present chunk, the token's own among them: "sum"
    adds up their projections k k^T, "orthogonal" projects onto their span. `position` `[B]` counts the tokens written
    in the unfinished chunk at the start.

    Shapes: q, k `[B, T, H, D]`, features `[B, T, H, P]`, masks `[B, T]`.
    Cost: "sum" that of one more memory with P x P weights; "orthogonal" a loop over tokens.
    """
    phi_q, phi_k = _features(config, q, k, params, write)
    before = written_before(position, write, reset, q.shape[1])
    opens = before % config.chunk == 0
    if write is not None:  # a chunk's directions stay until a token of the next one is written
        opens = opens & write
    if reset is not None:
        opens = opens | reset
    unit = one(execute(L2_NORM.block(keeps=False), phi_k))
    if kind == "sum":
        given: dict[str, Any] = {"state": state, "write_mask": write, "reset_mask": opens}
        phi_q, after = memory_scan(SUM, phi_q, unit, unit, Gates(lr=1.0), **given, name="projection")
        return phi_q, phi_k, after
    if state is None:
        _, state = memory_scan(SUM, phi_q[:, :0], unit[:, :0], unit[:, :0])
    phi_q, span = _orthogonal(phi_q, unit, opens, write, state.memory["weight"])
    return phi_q, phi_k, state._replace(memory={"weight": span})


def _features(
    config: MemoryConfig, q: Tensor, k: Tensor, params: Params, write: Tensor | None
) -> tuple[Tensor, Tensor]:
    """phi(q) and phi(k) as a scan computes them, after key_norm and query_scale."""
    dtype = torch.promote_types(k.dtype, config.dtype)
    gate = torch.ones(k.shape[:3], dtype=dtype, device=k.device)
    with without_autocast(k.device.type):
        sequence = Sequence(q, k, k, gate, gate, gate, write)
        tokens = to_tokens(config, sequence, params, dtype, execute)
    return tokens.phi_q, tokens.phi_k


def _orthogonal(q: Tensor, k: Tensor, opens: Tensor, write: Tensor | None, span: Tensor) -> tuple[Tensor, Tensor]:
    """Gram-Schmidt, token by token: P grows by r r^T / |r|^2, r the part of k outside the span."""
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        span = torch.where(opens[:, t, None, None, None], 0.0, span)
        rest = k[:, t].unsqueeze(-1)
        for _ in range(2):  # the second time takes away what rounding has left
            rest = rest - span @ rest
        square = rest.square().sum(-2, keepdim=True)
        new = square > NEW * NEW
        if write is not None:
            new = new & write[:, t, None, None, None]
        unit = torch.where(new, rest / torch.where(new, square, 1.0).sqrt(), 0.0)
        span = span + unit @ unit.mT
        outputs.append((span @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return (torch.stack(outputs, 1) if outputs else q), span


def check_projection(config: MemoryConfig, kind: Projection) -> None:
    """Refuses rules whose queries cannot be projected."""
    refusal = None if kind == "none" else projection_refusal(config)
    if refusal is not None:
        raise ConfigError(
            f"query_projection={kind!r}: {refusal}; use 'none' or change the memory", path=("query_projection",)
        )
