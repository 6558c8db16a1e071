"""Features that are the answers of a memory: phi itself learns while it is used."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.engine.given import check_mask, check_tokens
from hecate.engine.scan import memory_scan
from hecate.engine.select import EngineName
from hecate.errors import ShapeError
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import Autodiff


def memory_features(
    inner: MemoryConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    residual: bool = True,
    phi_params: Params | None = None,
    state: MemoryState | None = None,
    initial: dict[str, Tensor] | None = None,
    write_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    engine: EngineName = "auto",
    autodiff: Autodiff = "auto",
    name: str = "feature memory",
) -> tuple[Tensor, Tensor, MemoryState]:
    """phi_t(x) = x + M_t(x) at x = q_t and x = k_t: the features, and M's state at the end; with `residual=False`
    M_t(x) itself.

    M is a memory of its own, written with (k_t, v_t) at every token, and both features of a token read it in one state
    (`inner.read` says whether before or after that token's write), so nothing sees a later token. An empty M leaves q
    and k as they are. Pass the features as q and k to `memory_scan`: any rule follows on any rule. v = k makes M
    self-supervised: it learns which directions keys take, and the features stretch those. Without the residual they are
    as wide as v, and 0 while M is empty. [ENG-FEAT-D1]

    Shapes: q, k `[B, T, H, D]`, v and features `[B, T, H, V]`, V = D with the residual. The other arguments are those
    of `memory_scan`, which runs twice, once for each read.
    """
    check_tokens(q, k, v)
    check_mask("write_mask", write_mask, k)
    if residual and v.shape != k.shape:
        raise ShapeError(
            f"v must be as wide as k, {list(k.shape)}, for phi(x) = x + M(x) to have a sum, got "
            f"{list(v.shape)}; or take phi(x) = M(x), residual=False"
        )
    if write_mask is not None:
        # The k of a masked token may hold garbage, and it is read at as well.
        k = torch.where(write_mask[..., None, None], k, 0.0)

    def answer(x: Tensor) -> tuple[Tensor, MemoryState]:
        y, after = memory_scan(
            inner,
            x,
            k,
            v,
            gates,
            phi_params=phi_params,
            state=state,
            initial=initial,
            write_mask=write_mask,
            reset_mask=reset_mask,
            cu_seqlens=cu_seqlens,
            engine=engine,
            autodiff=autodiff,
            name=name,
        )
        return (x + y if residual else y), after

    (phi_q, _), (phi_k, state) = answer(q), answer(k)
    return phi_q, phi_k, state
