"""Derivatives of activations at arguments of every size, against functions in float64."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from hecate.tape.ops import Activation, activate


@pytest.mark.parametrize("name", get_args(Activation))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_of_large_and_small_arguments(name, dtype):
    sizes = torch.tensor([0.0, 1e-30, 1e-3, 1.0, 5.0, 20.0, 300.0, 1e5, 1e9, 1e18, 1e30])
    x = torch.cat([-sizes, sizes]).to(dtype).double().requires_grad_()
    (slope,) = torch.autograd.grad(activate(name, x, 0).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, materialize_grads=True)
    for order, true in ((1, slope.detach()), (2, bend)):
        got = activate(name, x.detach().to(dtype), order).double()
        # Rounded differences of numbers up to the largest |x| at which a derivative still bends.
        error = 40 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, true, rtol=error, atol=error, equal_nan=True)
