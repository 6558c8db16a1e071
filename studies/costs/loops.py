"""The peers written by hand: token loops in plain torch, for autograd to record.

What a careful person writes without this library: tensors unbound once, batched products, no
indexing inside the loop. They import nothing of hecate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Slope = Callable[[Tensor], Tensor]


def by_token(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """`[B, T, H, ...]` as T tuples of `[B * H, ...]`."""
    columns = [item.transpose(1, 2).flatten(0, 1).unbind(1) for item in tensors]
    return list(zip(*columns, strict=True))


def together(outputs: list[Tensor], like: Tensor) -> Tensor:
    """T tensors `[B * H, V]` as `[B, T, H, V]`."""
    return torch.stack(outputs, 1).unflatten(0, (-1, like.shape[2])).transpose(1, 2)


def matrix_loop(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor, *, slope: Slope = lambda error: error
) -> Tensor:
    """M = retain M - lr slope(M k - v) k^T; y = M q."""
    memory = q.new_zeros(q.shape[0] * q.shape[2], v.shape[-1], q.shape[-1])
    outputs = []
    for qt, kt, vt, step, kept in by_token(q, k, v, lr, retain):
        error = torch.bmm(memory, kt.unsqueeze(-1)).squeeze(-1) - vt
        write = (-step.unsqueeze(-1) * slope(error)).unsqueeze(-1) * kt.unsqueeze(-2)
        memory = torch.addcmul(write, kept[:, None, None], memory)
        outputs.append(torch.bmm(memory, qt.unsqueeze(-1)).squeeze(-1))
    return together(outputs, q)


def mlp_loop(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Two layers with SiLU, l2, decay and plain steps; the inner gradient by hand."""
    batch = q.shape[0]
    first = w1.expand(batch, *w1.shape).flatten(0, 1)
    second = w2.expand(batch, *w2.shape).flatten(0, 1)
    outputs = []
    for qt, kt, vt, step, kept in by_token(q, k, v, lr, retain):
        step, kept = step[:, None, None], kept[:, None, None]
        key = kt.unsqueeze(-1)
        z = torch.bmm(first, key)
        gate = torch.sigmoid(z)
        hidden = z * gate
        error = torch.bmm(second, hidden) - vt.unsqueeze(-1)
        back = torch.bmm(second.mT, error) * (gate + hidden * (1 - gate))
        second = kept * second - torch.bmm(step * error, hidden.mT)
        first = kept * first - torch.bmm(step * back, key.mT)
        read = torch.nn.functional.silu(torch.bmm(first, qt.unsqueeze(-1)))
        outputs.append(torch.bmm(second, read).squeeze(-1))
    return together(outputs, q)
