"""Tensors as the flat arrays of kernels, and memories shared out over threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

BYTES, ROWS = 64, 4  # of a vector, and rows that go together: widths are padded to these
SHARE = 1 << 20  # tokens x cells that are worth a thread of their own


def flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The numbers of a tensor in a row; shared with it if it is contiguous."""
    return tensor.numpy(force=True).reshape(-1)


def padded(tensor: Tensor, *sizes: int) -> Tensor:
    """A tensor with zeros up to these sizes of its last axes; itself, but contiguous, where it has them."""
    missing = [size - given for size, given in zip(sizes, tensor.shape[tensor.dim() - len(sizes) :], strict=True)]
    tensor = tensor.detach()
    if any(missing):
        tensor = pad(tensor, [end for size in reversed(missing) for end in (0, size)])
    return tensor.contiguous()


def share_out(work: Callable[[int, int], None], count: int, cells: int) -> None:
    """Calls `work(lo, hi)` for `count` memories of so many cells x tokens in all, a thread per share of them."""
    workers = min(torch.get_num_threads(), count, 1 + cells // SHARE)
    if workers <= 1:
        work(0, count)
        return
    borders = [count * index // workers for index in range(workers + 1)]
    # Threads that live as long as the call: none are left behind for a fork to lose.
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, borders, borders[1:]))
