"""The default layer of every named rule beside the layer that was published, and what the rule says of both."""

from typing import Any

import pytest
import torch

from hecate.nn import Memory
from hecate.rule import RULES
from tests.nn.layers import seeded
from tests.reference.layers import LAYERS, Weights

D_MODEL, HEADS, D_KEY = 12, 2, 6
LENGTH = {"large_chunk_ttt": 70, "in_place_ttt": 70, "ttt_linear": 35, "ttt_linear_norm": 35, "ttt_mlp": 35}


def weights_of(layer: Memory) -> Weights:
    """The weights of a layer by the names of a published one."""
    found = {}
    sizes = layer.splits
    for name, rows in zip("qkv", layer.qkv.weight.split(sizes), strict=True):
        found[f"{name}.weight"] = rows
    if layer.conv is not None:
        for name, taps in zip("qkv", layer.conv.weight.split(sizes, 1), strict=True):
            found[f"{name}_conv.weight"] = taps.mT.flip(1)
    found |= {"o_norm.weight": layer.norm, "o.weight": layer.out.weight}
    if layer.output_gate is not None:
        found["g.weight"] = layer.output_gate.weight
    for kind in ("weight", "bias"):
        found |= {f"{gate}.{kind}": item for gate, item in getattr(layer.gates, kind).items()}
    if layer.gates.retain is not None:
        found |= {f"retain.{name}": item for name, item in layer.gates.retain.named_parameters(recurse=False)}
    if layer.gating is not None:
        found |= layer.gating.params.tensors
    found |= {f"initial.{name}": item for name, item in layer.initial.tensors.items()}
    for name, item in layer.named_parameters(recurse=True):
        if name.startswith("phi_learned."):
            found[f"phi.{name.removeprefix('phi_learned.').replace('__', '.')}"] = item
    return Weights(found, layer.heads, layer.config.model_dump())


def drawn(rule: str) -> Memory:
    """A default layer in float64 whose parameters are off their starting values, gates' weights most of all."""
    layer = Memory(D_MODEL, HEADS, rule, d_key=D_KEY, engine="sequential", generator=seeded(), dtype=torch.float64)
    generator = seeded(1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += (0.7 if name.startswith(("gates", "gating")) else 0.3) * noise / parameter.shape[-1] ** 0.5
    return layer


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The error in norm over the norm of the truth."""
    return float((got - expected).detach().norm() / expected.detach().norm())


@pytest.mark.spec("RULE-NAMED-R3", "NN-MEM-D1", "GATE-RWKV-D1", "GATE-COMBA-D1", "GATE-MDN-D1", "GATE-LARGE-D1")
@pytest.mark.spec("GATE-MAMBA-D1", "GATE-MAMBA2-D1", "GATE-MLSTM-D1", "GATE-TIED-D1", "GATE-HEADS-D1", "GATE-GSA-D1")
@pytest.mark.spec("GATE-ABC-D1", "READ-SLOTS-D1", "GATE-MESA-D1", "GATE-KALMA-D1", "GATE-CURV-D1", "GATE-OSDN-D1")
@pytest.mark.spec("NN-CONV-D1", "NN-GATE-D1", "NN-GATE-D2")
@pytest.mark.parametrize("rule", RULES)
def test_the_default_layer_is_the_published_one_but_for_what_the_rule_says(rule):
    """Values, and the gradients of the input and of every weight. 1e-10: rounding of some 70 steps, whose products
    grow it by less than a thousand; a gradient counts from 1e-3 of the largest on, of which it is a difference."""
    if rule not in LAYERS:
        pytest.fail(f"{rule} has no published layer in tests/reference/layers")
    layer = drawn(rule)
    x = torch.randn(2, LENGTH.get(rule, 14), D_MODEL, generator=seeded(2), dtype=torch.float64).requires_grad_()
    weigh = torch.randn(x.shape, generator=seeded(3), dtype=torch.float64)
    y, expected = layer(x)[0], LAYERS[rule](x, weights_of(layer))
    assert apart(y, expected) < 1e-10
    inputs = {"x": x, **dict(layer.named_parameters())}
    grads, truth = (
        dict(
            zip(inputs, torch.autograd.grad((out * weigh).sum(), inputs.values(), materialize_grads=True), strict=True)
        )
        for out in (y, expected)
    )
    largest = max(float(grad.norm()) for grad in truth.values())
    for name, grad in truth.items():
        assert float((grads[name] - grad).norm()) < 1e-10 * max(float(grad.norm()), 1e-3 * largest), name
    silent = [name for name, grad in truth.items() if not grad.any()]
    assert not silent, f"weights that do not matter here: {silent}"


@pytest.mark.spec("RULE-NAMED-R3")
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(name, marks=pytest.mark.slow if "mlp" in rule.config.structure.kind else ())
        for name, rule in RULES.items()
        if rule.differs
    ],
)
def test_what_a_layer_differs_by_is_what_its_rule_says(rule):
    """The output of a fresh layer with each difference over that without it, to the digits that are shown."""
    layer = Memory(64, 4, rule, engine="sequential", generator=seeded(), dtype=torch.float64)
    x, w = torch.randn(2, 64, 64, generator=seeded(1), dtype=torch.float64), weights_of(layer)
    with torch.no_grad():
        ours = LAYERS[rule](x, w)
        found = {item.name: apart(ours, LAYERS[rule](x, w.as_published(item.name))) for item in RULES[rule].differs}
    assert {name: f"{by:.2f}" for name, by in found.items()} == {d.name: f"{d.by:.2f}" for d in RULES[rule].differs}


FIELDS: dict[str, dict[str, Any]] = {
    "conv": {"conv_kernel": 0},
    "output_gate": {"output_gate": False},
    "sigmoid_gate": {"output": {"gate": "sigmoid"}},
    "whole_norm": {"output": {"norm": {"over": "all"}}},
    "gate_ahead": {"output": {"norm": {"over": "all", "place": "after_gate"}}},
    "v_conv": {"conv": {"on": "qk"}},
}
"""The fields of a layer, or of its config's `layer_options`, that take a difference back."""
TAKEN_BACK = {
    name: [item.name for item in rule.differs if item.name in FIELDS]
    for name, rule in RULES.items()
    if any(item.name in FIELDS for item in rule.differs)
}


@pytest.mark.spec("NN-OPT-D1")
@pytest.mark.parametrize("rule", TAKEN_BACK)
def test_the_fields_of_a_layer_take_differences_back(rule):
    names = TAKEN_BACK[rule]
    layer, options = drawn(rule), {key: own for name in names for key, own in FIELDS[name].items()}
    own = {key: options.pop(key) for key in ("output", "conv") if key in options}
    config = RULES[rule].config.model_copy(update={"layer_options": own or None})
    plain = Memory(D_MODEL, HEADS, config, d_key=D_KEY, engine="sequential", dtype=torch.float64, **options)
    state = layer.state_dict()
    if plain.conv is not None:
        state["conv.weight"] = state["conv.weight"][:, : plain.conv.weight.shape[1]]
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    x = torch.randn(2, 14, D_MODEL, generator=seeded(2), dtype=torch.float64)
    assert apart(plain(x)[0], LAYERS[rule](x, weights_of(layer).as_published(*names))) < 1e-10


def test_no_reference_is_of_no_rule():
    assert not set(LAYERS) - set(RULES)
