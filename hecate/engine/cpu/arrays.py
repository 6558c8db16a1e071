"""Tensors as the flat arrays of kernels, and memories shared out over threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

BYTES, ROWS = 64, 4  # bytes in a vector, and rows that go together: sizes are padded to whole ones
_PLAIN = Tensor, nn.Parameter
SHARE = 1 << 20  # tokens x cells that are worth another thread
LOADING = RLock()  # threads that import numba together wait for each other for ever, and a kernel is compiled once


NO_MASK = torch.empty(0, dtype=torch.bool, device="cpu")  # stands for a mask that is not given


def whole(width: int, per: int) -> int:
    """A width in whole vectors, or fours, of so many numbers."""
    return -(-width // per) * per


def padded(tensor: Tensor, *sizes: int) -> Tensor:
    """A contiguous tensor, padded with zeros until its last axes have these sizes; no copy if none is needed."""
    tensor, given = tensor.detach(), tensor.shape[-len(sizes) :]
    if given != sizes:
        ends = zip(reversed(sizes), reversed(given), strict=True)
        tensor = pad(tensor, [end for size, has in ends for end in (0, size - has)])
    return tensor.contiguous()


def lies(tensor: Tensor) -> bool:
    """True if a kernel may read a tensor's numbers from its address: they lie there contiguously, on the CPU, and are
    not those of a subclass nor lazily negated."""
    return type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def arrays(tensors: Iterable[Tensor | None], sizes: Iterable[tuple[int, ...]] = repeat(())) -> list[Any]:
    """Each tensor as a flat numpy array, its last axes `padded` to these sizes, (): as they are; None stays None. A
    contiguous tensor that needs no padding shares its memory with the array."""
    # One loop over all arguments of a kernel: calls for each of them are what a short sequence would wait for.
    rows: list[Any] = []
    for tensor, size in zip(tensors, sizes):  # noqa: B905
        if tensor is not None and size and tensor.shape[-len(size) :] != size:
            tensor = padded(tensor, *size)
        rows.append(None if tensor is None else tensor.contiguous().numpy(force=True).reshape(-1))
    return rows


def share_out(work: Callable[[int, int], None], count: int, cells: int, share: int | None = None) -> None:
    """Calls `work(lo, hi)` on ranges of `count` memories, in a thread for each `share` of the cells x tokens in all."""
    workers = min(torch.get_num_threads(), count, 1 + cells // (share or SHARE))
    if workers <= 1:
        work(0, count)
        return
    borders = [count * index // workers for index in range(workers + 1)]
    # The threads end with the call, so that a later fork loses none.
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, borders, borders[1:]))
