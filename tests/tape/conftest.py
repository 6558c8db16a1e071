"""A point to differentiate at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.fixture
def point(generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    matrix = torch.randn(2, 3, 3, generator=generator).to(device).requires_grad_()
    x = torch.randn(2, 3, generator=generator).to(device).requires_grad_()
    return matrix, x
