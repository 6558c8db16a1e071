"""What every group shares: the reference inputs, and a scan as a function of its tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan

BATCH, HEADS, WIDTH = 2, 4, 64


def sequence(
    length: int, *, batch: int = BATCH, heads: int = HEADS, width: int = WIDTH
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of unit length, v of unit variance: `[B, T, H, D]` in float32."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, length, heads, width)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float32) for _ in range(3))
    return torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), v


def gates(length: int, *, largest: float = 1.0, batch: int = BATCH) -> tuple[Tensor, ...]:
    """lr in (0, largest), retain in (0.9, 0.999) and momentum in (0.4, 0.9), `[B, T, H]`."""
    generator = torch.Generator().manual_seed(1)
    lr, retain, momentum = (
        torch.rand((batch, length, HEADS), generator=generator, dtype=torch.float32) for _ in range(3)
    )
    return largest * lr, 0.9 + 0.099 * retain, 0.4 + 0.5 * momentum


def scan(config: MemoryConfig, **options: object) -> Callable[..., Tensor]:
    """The outputs of `memory_scan` as a function of q, k, v and as many gates as are given."""

    def run(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        return memory_scan(config, q, k, v, Gates(*given), **options)[0]

    return run


def work(length: int, products: int) -> float:
    """Floating point operations of a recurrence with so many state-sized products per token."""
    return 2.0 * products * BATCH * HEADS * length * WIDTH**2
