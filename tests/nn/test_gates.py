"""Gates start where the documents say, and the memory forgets as fast as they promise."""

import pytest
import torch

from hecate import MemoryConfig
from hecate.errors import ConfigError
from hecate.nn import GateHeads, Memory
from tests.nn.layers import inputs, near, rules, seeded


def gates_of(config, dtype=None):
    heads = GateHeads(12, 2, MemoryConfig.model_validate(config), dtype=dtype)
    heads.reset_parameters()
    return heads


@pytest.mark.spec("NN-GATE-D1")
@pytest.mark.parametrize("rule", [n for n, c in rules().items() if c.gating.plain and c.writes == 1 and n != "retnet"])
def test_starting_values(rule):
    config, x = rules()[rule], inputs()
    form, shape = config.retention.gate_form, (2, 7, 2)
    if form.rank is not None:  # drawn, so that retain is stated where x is 0
        x = torch.zeros_like(x)
    lr, retain, momentum, *_ = gates_of(config)(x)
    algorithm = config.algorithm
    undamped = 1.0 if getattr(algorithm, "dampening", False) else 1 - algorithm.default_momentum
    start = algorithm.lr_start * algorithm.lr * undamped
    if "lr" in config.gating.replaces:
        assert lr is None
    else:
        near(lr, torch.full((2, 7, 2), start))
    expected = (
        (retain, config.retention.uses_retain, config.retention.default_retain),
        (momentum, config.algorithm.uses_momentum, config.algorithm.default_momentum),
    )
    for gate, used, value in expected:
        assert (gate is not None) == used
        if used and form.squash != "softplus":  # whose start is drawn: see test_channel_gates
            width = config.feature_map.output_dim(6)
            own = (*shape, width) if gate is retain and form.channels else shape
            near(gate, torch.full(own, min(max(value, 1e-4), 1 - 1e-4)))


@pytest.mark.spec("NN-GATE-D1")
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_gate_at_its_end_can_still_move(start):
    gates = gates_of({"retention": {"kind": "decay", "retain": start}})
    retain = gates(inputs()).retain
    near(retain, torch.full((2, 7, 2), abs(start - 1e-4)))
    retain.sum().backward()
    assert gates.bias["retain"].grad.abs().min() > 1e-5


@pytest.mark.spec("NN-GATE-I1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_are_float32_in_low_precision_and_under_autocast(dtype):
    config = {"retention": {"kind": "decay", "retain": 0.999}}
    x, gates = inputs().to(dtype), gates_of(config, dtype=dtype)
    assert {gate.dtype for gate in gates(x) if gate is not None} == {torch.float32}
    # The bias is stored in 8 (11) bits: an error of half a unit of log(999) = 6.9.
    unit = 4 * torch.finfo(dtype).eps
    assert (gates(x).retain - 0.999).abs().max() < 0.001 * unit
    gates = gates_of(config, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        assert gates(x.float()).retain.dtype == torch.float32
        near(gates(x.float()).retain, torch.full((2, 7, 2), 0.999, dtype=torch.float32), 1e-6)


@pytest.mark.spec("CMS-FIRE-D1")
def test_a_rule_without_an_lr_gate_fires_with_its_number():
    layer = Memory(12, 2, "hebbian", firing="learned", generator=seeded())
    lr = layer.gates(inputs()).lr
    near(lr, torch.ones(2, 7, 2))
    lr.sum().backward()
    assert layer.gates.bias["firing"].grad.abs().min() > 1e-3
    with pytest.raises(ConfigError, match="retain of idle tokens 1, and gating 'heads' with retain=False leaves it"):
        Memory(12, 2, "retnet", firing="learned")
