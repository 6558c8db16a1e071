"""Gradients, precision and torch's transforms."""

import pytest
import torch

from hecate import phi
from hecate.nn import Memory
from tests.nn.layers import inputs, layer_of, near, rules, seeded, untouched
from tests.phi.examples import examples, named

DELTA = {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}
LEARNING = [item for item in examples() if item.init(6, heads=2)["learned"]]


@pytest.mark.spec("NN-MEM-I10")
@pytest.mark.parametrize("rule", rules())
def test_every_parameter_learns_from_a_cold_start(rule):
    config = rules()[rule]
    if config.commit == "chunk":  # as few tokens as this decide nothing in a longer chunk
        config = config.model_copy(update={"chunk": min(config.chunk, 3)})
    assert untouched(layer_of(config, shake=0.0)) == []


@pytest.mark.spec("NN-MEM-I10")
@pytest.mark.parametrize("feature_map", LEARNING, ids=named)
def test_every_parameter_of_phi_learns_from_a_cold_start(feature_map):
    config = {**DELTA, "feature_map": feature_map}
    assert untouched(layer_of(config, shake=0.0)) == []


def test_frozen_parts_do_not_learn():
    layer = layer_of({**DELTA, "feature_map": phi.RandomFourier(d_phi=8)}, learned_initial=False)
    before = [item.clone() for item in layer.buffers()]
    layer(inputs())[0].sum().backward()
    assert len(before) == 3
    near(list(layer.buffers()), before, 0.0)
    assert not any(item.requires_grad for item in layer.buffers())


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
