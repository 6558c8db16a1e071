"""Ten thousand steps of every optimiser: weights stay finite, and nothing piles up."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from hecate.optim import DGD, M3, Leveled, PhiMomentum
from tests.optim.test_edges import KINDS

STEPS = 10_000
LR = 1e-3
SOME = "identity, diagonal, kronecker, learned, kernel, delta, deep, deep shared, m3, muon"
EVERY = {name: KINDS[name] for name in SOME.split(", ")} | {
    "tanh nesterov": (PhiMomentum, {"feature_map": "tanh", "nesterov": True}),
    "learned phi": (PhiMomentum, {"feature_map": "hedgehog", "phi_lr": 0.01}),
    "phi space": (PhiMomentum, {"feature_map": {"kind": "linear", "d_phi": 6}, "space": "phi"}),
    "leveled m3": (Leveled, {"factory": M3, "period": 4}),
    "dgd": (DGD, {"rescaled": "follow"}),
}


def held(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of state, and tensors alive in the process."""
    values = [x for state in optimizer.state.values() for x in state.values()]
    gc.collect()
    alive = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    return sum(x.numel() * x.element_size() for x in values), alive


@pytest.mark.slow
@pytest.mark.spec("OPT-BASE-I3")
@pytest.mark.parametrize("name", EVERY)
def test_ten_thousand_steps(name):
    """A noisy regression with lost gradients, clipping and a schedule of the learning rate."""
    draws = torch.Generator().manual_seed(0)
    layer = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(3, 4, generator=draws))
    wanted = torch.randn(3, 4, generator=draws)
    cls, options = EVERY[name]
    optimizer = cls(layer.parameters(), **{"lr": LR, **options})
    if name == "dgd":
        optimizer.attach(layer)
    inputs = torch.randn(64, 8, 4, generator=draws)
    targets = inputs @ wanted.mT + 0.1 * torch.randn(64, 8, 3, generator=draws)
    first = seen = None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (layer(inputs[step % 64]) - targets[step % 64]).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        if step % 7 == 3:
            optimizer.zero_grad()  # a step without a gradient
        optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        optimizer.step()
        first = loss.item() if first is None else first
        if step == 500:
            seen = held(optimizer)
    assert layer.weight.isfinite().all() and loss.item() < 0.5 * first
    after = held(optimizer)
    assert after[0] == seen[0] and after[1] <= seen[1] + 4  # a running window or a scale
