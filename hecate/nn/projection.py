"""Queries projected onto what the keys of the current chunk span."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hecate.checks import expect_choice
from hecate.engine import L2_NORM, memory_scan, written_before
from hecate.errors import ConfigError
from hecate.nn.arguments import check_length
from hecate.nn.rule import features_of
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import execute, one

Projection = Literal["none", "sum", "orthogonal"]

SUM = MemoryConfig(bias="dot")  # M = sum of v k^T
NEW = 1e-4  # a unit key adds a direction if this much of its length lies outside the span


def check_projection(config: MemoryConfig, projection: Projection) -> None:
    """Refuses rules whose queries cannot be projected."""
    expect_choice(projection, "query_projection", get_args(Projection))
    if projection == "none":
        return
    refusal = None
    if config.feature_map.needs_position:
        refusal = f"feature_map {config.feature_map.kind!r} depends on positions, which a scan counts"
    elif config.normalizer != "none":
        refusal = "normalizer 'sum' needs phi(q) as it is: a projected one may have negative weights"
    elif config.on_nonfinite == "skip":
        refusal = "on_nonfinite='skip' may leave out tokens, whose keys the projection would hold"
    if refusal is not None:
        raise ConfigError(
            f"query_projection={projection!r}: {refusal}; use 'none' or change the memory", path=("query_projection",)
        )


def project_queries(
    projection: Projection,
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    params: Params,
    memory: MemoryState | None,
    held: MemoryState | None,
    write: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, MemoryState]:
    """P_t phi(q_t), phi(k_t) and what P holds at the end. [CMS-TNT-D2]

    P_t is made of the unit features of keys written in the memory's present chunk, the token's own among them: "sum"
    adds up their projections k k^T, "orthogonal" projects onto their span. `memory` tells how far its chunk has come,
    `held` is what P holds at the start.

    Shapes: q, k `[B, T, H, D]`, features `[B, T, H, P]`, masks `[B, T]`.
    Cost: "sum" that of one more memory with P x P weights; "orthogonal" a loop over tokens.
    """
    if projection == "orthogonal":
        check_length(q, f"query_projection={projection!r}")
    phi_q, phi_k, _ = features_of(config, q, k, params, write=write)
    position = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)  # `len` would fix an exported batch
    if memory is not None:
        position = memory.position[:, 0]
    opens = written_before(position, write, reset, q.shape[1]) % config.chunk == 0
    if write is not None:  # a chunk's directions stay until a token of the next one is written
        opens = opens & write
    if reset is not None:
        opens = opens | reset
    unit = one(execute(L2_NORM, phi_k))
    if projection == "sum":
        given: dict[str, Any] = {"state": held, "write_mask": write, "reset_mask": opens}
        phi_q, after = memory_scan(SUM, phi_q, unit, unit, Gates(lr=1.0), **given, name="projection")
        return phi_q, phi_k, after
    if held is None:
        _, held = memory_scan(SUM, phi_q[:, :0], unit[:, :0], unit[:, :0])
    phi_q, span = _orthogonal(phi_q, unit, opens, write, held.memory["weight"])
    return phi_q, phi_k, held._replace(memory={"weight": span})


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
