"""The same bits for any number of rows and any split of a sequence: operations whose results for a row ignore other
rows.

In torch a row's bits depend on other rows in three ways. A matrix product takes another kernel for another number of
rows, and for odd widths other code at another place in memory. A componentwise function takes vector instructions, and
other code for the remainder. An engine takes tokens in blocks. Under `exact`, products with weights are computed in
tiles of a fixed number of rows, all other products as sums in a fixed order; componentwise functions get whole vectors;
and scans run on engines that are `steady`. [TAPE-EXACT-D1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

STEADY: ContextVar[bool] = ContextVar("hecate.steady", default=False)  # whether the caller is within `exact`
MOST = 1 << 22  # products that are in memory at once
TILE, WIDTH = 8, 32  # rows of a tile, and the multiple to which widths are padded, so that bits do not depend on places
LANES, ALONE = 64, 1 << 14  # numbers that fill vectors of any dtype, and that one thread takes alone


def steady() -> bool:
    """True within `exact`; False under torch.compile, which does not see the context."""
    return not torch.compiler.is_compiling() and STEADY.get()


@contextmanager
def exact() -> Iterator[None]:
    """Within it rows of a batch, tokens of a window and continuations of a stored prefix have the same bits as alone.
    [TAPE-EXACT-D1]

        with hecate.exact():
            model.generate(tokens, prompt_lookup_num_tokens=5)

    It is for inference and acts on this thread. It holds within one process and for one number of threads, as far as
    torch's libraries give the same operation the same bits; they do, but do not promise it: `Scheduler` and tests check
    it.

    Raises (what is called within): ConfigError for an engine that takes tokens in blocks, and for padding and documents
    under attention without a window.
    """
    before = STEADY.set(True)
    try:
        with torch.no_grad(), _Forms():
            yield
    finally:
        STEADY.reset(before)


class _Forms(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        form = _OF.get(func, func)
        return form(*args, **kwargs) if kwargs else form(*args)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of rows in tiles."""
    rows = input.reshape(-1, input.shape[-1])
    count, rest, width, short = len(rows), -input.shape[-1] % WIDTH, len(weight), -len(weight) % LANES
    if rest or short:  # few outputs are padded too, as otherwise a row's bits depend on its place in the tile
        weight = F.pad(weight, (0, rest, 0, short))
    if short and bias is not None:
        bias = F.pad(bias, (0, short))
    rows = F.pad(rows, (0, rest, 0, -count % TILE)).contiguous()
    tiles = [F.linear(tile, weight, bias) for tile in rows.split(TILE)]
    y = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return y[:count, :width].reshape(*input.shape[:-1], width)


def _total(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a b over the last axis, in float32 or better."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    # The sum of contiguous numbers does not depend on other sums.
    return (a.to(wide) * b.to(wide)).contiguous().sum(-1).to(dtype)


def _matmul(a: Tensor, *second: Tensor, **named: Tensor) -> Tensor:
    """a b `[..., M, K] [..., K, P]`, b `[K, P]` being weights."""
    (b,) = (*second, *named.values())
    if b.dim() == 2:
        return _linear(a, b.mT)
    if a.dim() == 1:
        return _matmul(a.unsqueeze(0), b).squeeze(-2)
    if b.dim() == 1:
        return _matmul(a, b.unsqueeze(-1)).squeeze(-1)
    a, b = a.unsqueeze(-2), b.mT.unsqueeze(-3)
    each = torch.broadcast_shapes(a.shape[:-3], b.shape[:-3]).numel() * b.shape[-2:].numel()
    parts = [_total(part, b) for part in a.split(max(1, MOST // max(1, each)), -3)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _add_product(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * c + alpha * _matmul(a, b)


def _einsum(equation: str, *operands: Tensor) -> Tensor:
    """einsum of two operands as sums of products; any other as in torch."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    axes = inputs.split(",")
    operands = tuple(operands[0]) if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    summed = [axis for axis in dict.fromkeys("".join(axes)) if axis not in output]
    if len(axes) != 2 or not summed or "." in equation:
        return torch.einsum(equation, *operands)
    whole = [*output, *summed]
    a, b = (
        x.permute([letters.index(axis) for axis in whole if axis in letters])[
            tuple(slice(None) if axis in letters else None for axis in whole)
        ]
        for x, letters in zip(operands, axes, strict=True)
    )
    a, b = (x.flatten(len(output)) for x in torch.broadcast_tensors(a, b))
    return _total(a, b)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Softmax attention query by query: the keys that it sees come first, from the newest, so others change no sum."""
    dtype, length = query.dtype, query.shape[-2]
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    mask = torch.ones(length if is_causal else 1, k.shape[-2], dtype=torch.bool, device=q.device)
    mask = (mask.tril() if is_causal else mask) if attn_mask is None else attn_mask
    mask = mask[(None,) * (q.dim() - mask.dim())].flip(-1)
    scale, rest, answers = q.shape[-1] ** -0.5 if scale is None else scale, (0, -k.shape[-2] % LANES), []
    keys, values = k.flip(-2), v.flip(-2)
    for t in range(length):
        row = mask[..., min(t, mask.shape[-2] - 1), :]
        added = torch.where(row, 0.0, -torch.inf) if row.dtype == torch.bool else row
        order = (added > -torch.inf).byte().argsort(dim=-1, descending=True, stable=True)
        sorted_keys, sorted_values = (x.take_along_dim(order.unsqueeze(-1), -2) for x in (keys, values))
        scores = _total(q[..., t : t + 1, :], sorted_keys) * scale + added.take_along_dim(order, -1)
        weights = F.pad(_flat(torch.exp, scores - scores.amax(-1, keepdim=True)), rest)
        answers.append(_total(weights.unsqueeze(-2), F.pad(sorted_values.mT, rest)) / weights.sum(-1, keepdim=True))
    return torch.stack(answers, -2).to(dtype)


def _flat(func: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
    """A componentwise function on whole vectors."""
    tensors = torch.broadcast_tensors(*(item for item in arguments if isinstance(item, Tensor)))
    count = tensors[0].numel()
    if not tensors[0].is_cpu or (count % LANES == 0 and count <= ALONE and all(x.is_contiguous() for x in tensors)):
        return func(*arguments, **options)
    pieces = zip(*(F.pad(x.reshape(-1), (0, -count % LANES)).split(ALONE) for x in tensors), strict=True)
    parts = []
    for piece in pieces:
        rest = iter(piece)
        parts.append(func(*(next(rest) if isinstance(item, Tensor) else item for item in arguments), **options))
    return torch.cat(parts)[:count].view(tensors[0].shape)


_OF: dict[Any, Callable[..., Any]] = {
    F.linear: _linear, F.scaled_dot_product_attention: _attention, torch.einsum: _einsum,
    Tensor.__matmul__: _matmul, Tensor.__rmatmul__: lambda b, a: _matmul(a, b),
}  # fmt: skip
for _home, _form, _names in (
    (torch, _matmul, "matmul bmm mm mv"),
    (torch, _add_product, "baddbmm addmm addmv"),
    (torch, _flat, "sigmoid tanh exp expm1 log log1p sin cos sinh cosh erf pow rsqrt"),
    (F, _flat, "silu softplus logsigmoid gelu mish elu"),
    (torch._C._nn, _flat, "silu"),
    (Tensor, _flat, "__pow__ __rpow__"),
):
    for _name in _names.split():
        for _func in {getattr(_home, _name), getattr(Tensor, _name, getattr(_home, _name))}:
            _OF[_func] = partial(_flat, _func) if _form is _flat else _form
