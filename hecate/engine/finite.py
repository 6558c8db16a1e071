"""Non-finite memories: find the token at which a memory leaves the finite numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.engine.sequential import select, token_step
from hecate.engine.tokens import Carry, Tokens
from hecate.errors import NonFiniteError
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import execute


def can_inspect(*tensors: Tensor) -> bool:
    """Whether values may steer Python: not while compiling, not inside `torch.func` transforms."""
    if torch.compiler.is_compiling():
        return False
    return not any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors)


def all_finite(y: Tensor, carry: Carry) -> bool:
    """Whether outputs and state are finite."""
    tensors = [y, *(tensor for tensor in carry.flat if tensor.is_floating_point())]
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors)


@torch.no_grad()
def finite_writes(config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory) -> Tensor:
    """`[N, T]`: which tokens leave the state finite when every other one is left unwritten."""
    columns = [None if tensor is None else tensor.unbind(1) for tensor in tokens]
    good: list[Tensor] = []
    for t in range(tokens.v.shape[1]):
        token = Tokens(*(None if column is None else column[t] for column in columns))  # type: ignore[arg-type]
        _, tried = token_step(config, token, carry, initial, run=execute)
        floats = [item.flatten(1) for item in tried.flat if item.is_floating_point()]
        ok = torch.stack([torch.isfinite(item).all(1) for item in floats]).all(0)
        asked = ok if token.write is None else ok & token.write
        _, skipped = token_step(config, token._replace(write=asked), carry, initial, run=execute)
        carry = select(ok, tried, skipped, execute)
        good.append(ok)
    return torch.stack(good, 1)


def raise_at_first(
    config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, heads: int, name: str
) -> None:
    """Raises `NonFiniteError` for the first token that breaks a memory or an output."""
    good = finite_writes(config, tokens, carry, initial)
    where = (~good).nonzero()
    if where.numel():
        first = where[where[:, 1].argmin()]
        row, token = int(first[0]), int(first[1])
        size = float(tokens.phi_k[row, token].detach().square().sum())
        lr = float(tokens.lr[row, token].detach())
        raise NonFiniteError(
            f"memory {name!r} became non-finite at batch row {row // heads}, head {row % heads}, "
            f"token {token}: lr={lr:.4g}, |phi(k)|^2={size:.4g}, lr * |phi(k)|^2={lr * size:.4g} "
            f"(a delta-type memory diverges from {config.algorithm.stable_step:g} on). Set "
            "key_norm='l2' or step='normalized', lower lr, or choose on_nonfinite='skip'"
        )
    queries = (~torch.isfinite(tokens.phi_q)).any(-1).nonzero()
    at = f" at token {int(queries[0, 1])}" if queries.numel() else ""
    raise NonFiniteError(
        f"memory {name!r} is finite but an output is not{at}: the query or its features overflow"
    )
