"""Gradients, precision and torch's transforms."""

import copy

import pytest
import torch

from hecate import phi
from hecate.nn import Memory
from tests.nn.layers import inputs, layer_of, leaves, near, rules, seeded, untouched
from tests.phi.examples import examples, named

DELTA = {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}
ENGINES = ("sequential", "parallel")
every_engine = pytest.mark.parametrize("engine", ENGINES)
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
@every_engine
def test_engines_and_ways_to_differentiate_agree(engine):
    results = []
    for autodiff in ("auto", "tape", "torch"):
        layer = layer_of(DELTA, engine=engine, autodiff=autodiff)
        y, _ = layer(inputs())
        results.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    reference = layer_of(DELTA)
    y, _ = reference(inputs())
    expected = [y, *torch.autograd.grad(y.square().sum(), list(reference.parameters()))]
    for result in results:
        near(result, expected, 1e-10)


@pytest.mark.spec("NN-MEM-I11")
def test_ensembles():
    layers = [layer_of(DELTA, seed=seed) for seed in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = inputs()

    def call(parameters, buffers):
        return torch.func.functional_call(layers[0], (parameters, buffers), (x,))[0]

    y = torch.func.vmap(call)(parameters, buffers)
    near(y, torch.stack([layer(x)[0] for layer in layers]))


@pytest.mark.spec("NN-MEM-I12")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("conv_kernel", [0, 4])
def test_autocast_keeps_the_state_in_float32(dtype, conv_kernel):
    layer = layer_of(DELTA, dtype=torch.float32, conv_kernel=conv_kernel, shake=0.0)
    x = inputs(length=32).float()
    y, state = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        rough, rough_state = layer(x)
        pieces = [layer(x[:, :9])]
        pieces.append(layer(x[:, 9:], pieces[0][1]))
    rough.float().square().mean().backward()
    floats = [item for item in leaves(rough_state.memory) if item.is_floating_point()]
    assert {item.dtype for item in floats} == {torch.float32}
    assert {item.grad.dtype for item in layer.parameters()} == {torch.float32}
    # Half a dozen roundings of relative size eps between x and y, not all in one direction.
    tolerance = 6 * torch.finfo(dtype).eps
    near(rough.float() / y.norm(), y / y.norm(), tolerance)
    scale = leaves(state.memory.memory)[0].norm()
    near(leaves(rough_state.memory.memory)[0] / scale, leaves(state.memory.memory)[0] / scale, tolerance)
    near(torch.cat([item[0] for item in pieces], 1).float() / y.norm(), y / y.norm(), tolerance)


@pytest.mark.spec("NN-MEM-I12")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_engine
def test_low_precision_module(dtype, engine):
    wide = layer_of(DELTA, shake=0.0, engine=engine)
    layer, x = copy.deepcopy(wide).to(dtype), inputs(length=32)
    y, state = layer(x.to(dtype))
    y.float().square().mean().backward()
    assert y.dtype == dtype and state.conv.dtype == dtype
    assert {item.dtype for item in leaves(state.memory.memory)} == {torch.float32}
    assert all(torch.isfinite(item.grad).all() for item in layer.parameters())
    expected, _ = wide(x)
    # Parameters, inputs and about ten intermediate values are rounded.
    near(y.double() / expected.norm(), expected / expected.norm(), 10 * torch.finfo(dtype).eps)


def test_module_moves_and_is_seeded(device):
    layer = Memory(12, 2, DELTA, generator=seeded(), device=device)
    near([item.cpu() for item in layer.parameters()], list(Memory(12, 2, DELTA, generator=seeded()).parameters()), 0.0)
    y, _ = layer(inputs().to(device))
    near(y.cpu(), Memory(12, 2, DELTA, generator=seeded())(inputs())[0], 1e-10)
