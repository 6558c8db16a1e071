"""KernelMomentum: the formula, and what its kernel means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hecate.optim import KernelMomentum
from tests.optim.test_muon_and_m3 import parameter
from tests.optim.test_phi_momentum import MAPS, C
from tests.reference import optim_phi as reference


@pytest.mark.spec("OPT-KERNEL-D1")
@pytest.mark.parametrize("unit", [True, False], ids=["unit", "plain"])
@pytest.mark.parametrize("keys", ["columns", "rows"])
@pytest.mark.parametrize("name", ["identity", "elu", "random_fourier", "polynomial"])
def test_reference(name, keys, unit):
    made, params, plain = MAPS[name]
    w, scale = parameter(*((C, 6) if keys == "columns" else (6, C))), "unit" if unit else "none"
    optimizer = KernelMomentum([w], 0.001, 0.8, made, keys=keys, phi_params={C: params}, input_scale=scale)
    mine, memory = w.detach().numpy().copy(), 0.0
    rng = np.random.default_rng(5)
    for _ in range(30):
        g = 0.3 * (mine - 1) + 0.2 * rng.normal(size=mine.shape)
        memory, mine = reference.kernel_step(memory, mine, g, plain, 0.001, 0.8, columns=keys == "columns", unit=unit)
        w.grad = torch.tensor(g)
        optimizer.step()
    np.testing.assert_allclose(w.detach().numpy(), mine, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(optimizer.state[w]["memory"], memory, rtol=1e-11, atol=1e-12)


@pytest.mark.spec("OPT-KERNEL-R1")
def test_past_gradients_count_by_their_similarity():
    w = torch.nn.Parameter(torch.zeros(2, 1))
    optimizer = KernelMomentum([w], 1.0, 0.5)
    w.grad = torch.tensor([[3.0], [0.0]])
    optimizer.step()  # u = g k(g, g) = (3, 0), the keys being of length 1
    assert torch.equal(w.detach(), torch.tensor([[-3.0], [0.0]]))
    w.grad = torch.tensor([[0.0], [2.0]])
    optimizer.step()  # at a right angle: the past has no say
    assert torch.equal(w.detach(), torch.tensor([[-3.0], [-2.0]]))
    w.grad = torch.tensor([[1.0], [0.0]])
    optimizer.step()  # in the direction of the first: 1 + 0.25 * 3
    assert torch.equal(w.detach(), torch.tensor([[-4.75], [-2.0]]))
