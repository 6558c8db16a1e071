"""One token in machine code, over the states that transformers keeps: a convolution and the gated delta rule.

Both write into the state they are given. A state is read twice: once for what it answers key and query, once to be
decayed and written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import njit
from torch import Tensor


def _compiled(function: Callable[..., Any]) -> Any:
    """Compiled when first called; kept on disk where there is a place for it."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to write to
        return njit(**options)(function)


@_compiled
def _convolve(x: Any, state: Any, weight: Any, bias: Any, y: Any) -> None:
    batch, channels, kernel = state.shape
    for b in range(batch):
        for c in range(channels):
            total = bias[c] if bias.size else x[b, c] * 0
            for j in range(kernel - 1):
                state[b, c, j] = state[b, c, j + 1]
                total += weight[c, j] * state[b, c, j]
            state[b, c, kernel - 1] = x[b, c]
            total += weight[c, kernel - 1] * x[b, c]
            y[b, c] = total / (1 + math.exp(-total))


@_compiled
def _step(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, y: Any, scratch: Any) -> None:
    """q, k `[B, H', K]`, v and y `[B, H, V]`, g `[B, H, 1 or K]`, beta `[B, H]`, state `[B, H, K, V]`."""
    batch, heads, width, values = state.shape
    several = heads // k.shape[1]
    unit_q, unit_k, decay, held = scratch[0], scratch[1], scratch[2], scratch[3]
    for b in range(batch):
        for h in range(heads):
            row_q, row_k, gate = q[b, h // several], k[b, h // several], g[b, h]
            size_q, size_k, both = row_q[0] * 0, row_q[0] * 0, row_q[0] * 0
            for i in range(width):
                size_q += row_q[i] * row_q[i]
                size_k += row_k[i] * row_k[i]
            size_q, size_k = 1 / math.sqrt((size_q + 1e-6) * width), 1 / math.sqrt(size_k + 1e-6)
            first = math.exp(gate[0])
            for i in range(width):
                unit_q[i], unit_k[i] = row_q[i] * size_q, row_k[i] * size_k
                decay[i] = first if gate.size == 1 else math.exp(gate[i])
                both += unit_q[i] * unit_k[i]
            cells, out = state[b, h], y[b, h]
            for j in range(values):
                held[j], out[j] = 0, 0
            for i in range(width):
                read_k, read_q = decay[i] * unit_k[i], decay[i] * unit_q[i]
                for j in range(values):
                    held[j] += read_k * cells[i, j]
                    out[j] += read_q * cells[i, j]
            for j in range(values):
                held[j] = (v[b, h, j] - held[j]) * beta[b, h]
                out[j] += both * held[j]
            for i in range(width):
                kept, write = decay[i], unit_k[i]
                for j in range(values):
                    cells[i, j] = kept * cells[i, j] + write * held[j]


def _array(x: Tensor) -> Any:
    return (x.detach() if x.requires_grad else x).contiguous().numpy()


def convolved(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu of the convolution at one token x `[B, C, 1]` after the state `[B, C, K]`, which takes it; float32."""
    y = x.new_empty(x.shape)
    none = weight.new_empty(0) if bias is None else bias
    rows = x.shape[:2]
    _convolve(*map(_array, (x.reshape(rows), state, weight, none, y.view(rows))))
    return y


def stepped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`delta_rule` of one token `[B, 1, H, *]` of unit queries and keys: y `[B, 1, H, V]` and the state, written."""
    y = v.new_empty(v.shape)
    scratch = v.new_empty(4, state.shape[2] + state.shape[3])
    g = g.squeeze(1)
    g = g if g.dim() == 3 else g.unsqueeze(-1)
    given = (*[x.squeeze(1) for x in (q, k, v)], g, beta.squeeze(1), state, y.squeeze(1), scratch)
    _step(*map(_array, given))
    return y, state
