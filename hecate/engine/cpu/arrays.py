"""Tensors as the flat arrays of kernels, and memories shared out over threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

BYTES, ROWS = 64, 4  # of a vector, and rows that go together: widths are padded to these
_PLAIN = Tensor, nn.Parameter
SHARE = 1 << 20  # tokens x cells that are worth a thread of their own


NO_MASK = torch.empty(0, dtype=torch.bool, device="cpu")  # of tokens that are all written, or never restart


def whole(width: int, per: int) -> int:
    """A width in whole vectors, or fours, of so many numbers."""
    return -(-width // per) * per


def padded(tensor: Tensor, *sizes: int) -> Tensor:
    """A tensor with zeros up to these sizes of its last axes; itself, but contiguous, where it has them."""
    tensor, given = tensor.detach(), tensor.shape[-len(sizes) :]
    if given != sizes:
        ends = zip(reversed(sizes), reversed(given), strict=True)
        tensor = pad(tensor, [end for size, has in ends for end in (0, size - has)])
    return tensor.contiguous()


def lies(tensor: Tensor) -> bool:
    """True if the numbers of a tensor lie where its address says, in a row and as they are: for kernels that take
    addresses, which of a subclass, on another device, or negated once they are read, are those of other numbers."""
    return type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def arrays(tensors: Iterable[Tensor | None], sizes: Iterable[tuple[int, ...]] = repeat(())) -> list[Any]:
    """The numbers of each tensor in a row, `padded` to these sizes of its last axes, (): as it is; None stays None.
    Shared with a contiguous tensor that has its sizes."""
    # One loop over all arguments of a kernel: calls for each of them are what a short sequence would wait for.
    rows: list[Any] = []
    for tensor, size in zip(tensors, sizes):  # noqa: B905
        if tensor is not None and size and tensor.shape[-len(size) :] != size:
            tensor = padded(tensor, *size)
        rows.append(None if tensor is None else tensor.contiguous().numpy(force=True).reshape(-1))
    return rows


def share_out(work: Callable[[int, int], None], count: int, cells: int, share: int | None = None) -> None:
    """Calls `work(lo, hi)` for `count` memories of so many cells x tokens in all, a thread per share of them."""
    workers = min(torch.get_num_threads(), count, 1 + cells // (share or SHARE))
    if workers <= 1:
        work(0, count)
        return
    borders = [count * index // workers for index in range(workers + 1)]
    # Threads that live as long as the call: none are left behind for a fork to lose.
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, borders, borders[1:]))
