"""Layers of memories: ensembles, devices, masked tokens, and inputs that lie apart."""

import pytest
import torch

from hecate.nn import Memory
from tests.nn.layers import inputs, layer_of, near, seeded

DELTA = {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}


@pytest.mark.spec("NN-MEM-I11")
def test_ensembles():
    layers = [layer_of(DELTA, seed=seed) for seed in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = inputs()

    def call(parameters, buffers):
        return torch.func.functional_call(layers[0], (parameters, buffers), (x,))[0]

    y = torch.func.vmap(call)(parameters, buffers)
    near(y, torch.stack([layer(x)[0] for layer in layers]))


def test_module_moves_and_is_seeded(device):
    layer = Memory(12, 2, DELTA, generator=seeded(), device=device)
    near([item.cpu() for item in layer.parameters()], list(Memory(12, 2, DELTA, generator=seeded()).parameters()), 0.0)
    y, _ = layer(inputs().to(device))
    near(y.cpu(), Memory(12, 2, DELTA, generator=seeded())(inputs())[0], 1e-10)


@pytest.mark.spec("NN-MEM-I3")
def test_a_masked_token_reads_with_its_own_input():
    layer = layer_of({"retention": "decay", "key_norm": "l2", "read": "before"})
    x = inputs()
    _, state = layer(x[:, :-1])
    written, _ = layer(x[:, -1:], state)  # it reads before it writes: masked or not
    masked, _ = layer(x[:, -1:], state, write_mask=torch.zeros(2, 1, dtype=torch.bool))
    near(masked, written)
    assert masked.norm() > 0.1


def test_non_contiguous_and_expanded_inputs():
    layer, x = layer_of(DELTA), inputs()
    near(layer(x.mT.contiguous().mT)[0], layer(x)[0], 1e-13)
    row = inputs(1)
    near(layer(row.expand(3, -1, -1))[0], layer(row)[0].expand(3, -1, -1), 1e-13)
