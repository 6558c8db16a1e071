"""A retain gate per phi channel in layers: KDA and GLA as their papers have them."""

import math

import numpy as np
import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan, named_rule
from hecate.cms import CMS, SelfReferential
from hecate.errors import ConfigError
from hecate.nn import GateHeads, Memory
from tests.nn.layers import in_pieces, inputs, near, same_memory, seeded

D, HEADS, D_KEY = 12, 2, 6
RULES = ["kda", "gla"]
every = pytest.mark.parametrize("rule", RULES)


def built(rule, *, shake=1.0, config=None, **options):
    """A layer whose gates differ from token to token and channel to channel."""
    layer = Memory(D, HEADS, config or named_rule(rule), generator=seeded(), **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "gates" in name:
                parameter += shake * torch.randn(parameter.shape, generator=seeded(3)) / 2
    return layer


@pytest.mark.spec("NN-GATE-D2", "NN-MEM-I1")
@every
@pytest.mark.parametrize("phi", ["identity", "elu", "crelu"])
def test_any_split_engine_and_gradient(rule, phi):
    """A gate for every feature, of which there may be more than a key has numbers; with a firing gate beside it."""
    config = named_rule(rule).model_copy(update={"feature_map": phi})
    layer, x = built(rule, config=config, firing="learned"), inputs(2, 9)
    retain = layer.gates(x).retain
    assert retain.shape == (2, 9, HEADS, config.feature_map.output_dim(D_KEY)) and retain.std(3).max() > 1e-4
    y, state = layer(x)
    for engine in ("sequential", "parallel"):
        layer.engine = engine
        near(layer(x)[0], y, 1e-10)
    pieces, last = in_pieces(layer, x, [1, 4, 4])
    near(pieces, y)
    same_memory(last, state)
    (y * torch.randn(y.shape, generator=seeded(4))).sum().backward()
    own = {name: p.grad.norm() for name, p in layer.named_parameters() if "retain" in name}
    assert len(own) == (4 if rule == "kda" else 3)
    assert all(norm > 1e-4 for norm in own.values()), own


@pytest.mark.spec("NN-GATE-D2")
def test_a_head_is_what_the_retention_says():
    """Linear, of low rank, per head or per channel, with each function of the logit."""
    x = inputs()
    for channels in (False, True):
        for rank in (None, 3, "head"):
            for gate in ("sigmoid", "root", "softplus"):
                knob = {"kind": "decay", "channels": channels, "rank": rank, "gate": gate}
                heads = GateHeads(D, HEADS, MemoryConfig(retention=knob))
                heads.reset_parameters(seeded())
                rows = HEADS * D_KEY if channels else HEADS
                inner = {None: D, 3: 3, "head": D_KEY}[rank]
                assert heads.weight["retain"].shape == (rows, inner)
                retain = heads(x).retain
                assert retain.shape == ((2, 7, HEADS, D_KEY) if channels else (2, 7, HEADS))
                stated = heads(0 * x).retain
                if gate != "softplus":
                    near(stated, torch.full(stated.shape, 0.99))
                assert (rank is None) == torch.equal(retain, stated)


@pytest.mark.spec("NN-GATE-D2")
def test_published_starting_values():
    gates = GateHeads(512, 64, named_rule("kda"), d_key=64)
    gates.reset_parameters(seeded())
    rate, step = gates.retain.rate.exp(), torch.nn.functional.softplus(gates.bias["retain"])
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16
    assert 1e-3 <= step.min() < 1.1e-3 and 0.97e-1 < step.max() <= 1e-1
    # log-uniform: the mean of n draws is within five standard errors of the middle.
    spread = (math.log(1e-1) - math.log(1e-3)) / 12**0.5
    assert abs(step.log().mean() - math.log(1e-2)) < 5 * spread / step.numel() ** 0.5
    for weight in (gates.retain.down, gates.weight["retain"]):
        assert abs(weight.std() / 0.02 - 1) < 5 / (2 * weight.numel()) ** 0.5
    gates = GateHeads(512, 64, named_rule("gla"))
    gates.reset_parameters(seeded())
    assert gates.retain.down.shape == (16, 512)
    assert gates.bias["retain"].abs().max() < 1e-14
    same, other = (Memory(D, HEADS, named_rule("kda"), generator=seeded(s)) for s in (0, 1))
    first = Memory(D, HEADS, named_rule("kda"), generator=seeded())
    assert torch.equal(first.gates.bias["retain"], same.gates.bias["retain"])
    assert not torch.equal(first.gates.bias["retain"], other.gates.bias["retain"])


@pytest.mark.spec("CMS-LAYER-I1", "NN-GATE-D2")
@pytest.mark.parametrize("period", [1, 3])
def test_a_level_commits_per_channel(period):
    """A commit multiplies every channel by its own product of retains."""
    memory = {"kind": "kda", "decay_order": "with_step", "algorithm": {"kind": "gd", "lr": 0.3}}
    level = {"name": "a", "period": period, "memory": memory, "conv_kernel": 0}
    cms = CMS(D, HEADS, {"levels": [level], "composition": "independent"}, generator=seeded())
    layer, x = cms.memories[0], inputs(1, 6)
    with torch.no_grad():
        layer.initial.tensors["weight"].normal_(generator=seeded(5))
        layer.gates.bias["lr"].fill_(-800.0)  # nothing is written, so that only retain acts
    y, state = cms(x)
    product = layer.gates(x).retain.prod(1)[0]
    assert product.std(-1).min() > 1e-3
    expected = product.unsqueeze(1) * layer.initial.tensors["weight"]
    near(state.levels[0].memory.memory["weight"][0], expected)
    near(in_pieces(cms, x, [2, 5])[0], y)


@pytest.mark.spec("SELF-BOX-D1")
@every
def test_boxes_have_gates_per_channel(rule):
    layer, x = SelfReferential(D, HEADS, {"memory": rule}, generator=seeded()), inputs(2, 7)
    answers = torch.randn(2, 7, HEADS, D_KEY, generator=seeded(1))
    gates = layer.boxes.gates(dict.fromkeys(layer.config.boxes, answers))
    p = {name: item.detach().numpy() for name, item in layer.boxes.state_dict().items()}
    seen = answers.numpy() @ p["retain.down"].T
    weight = p["gate_weight.retain"].reshape(HEADS, D_KEY, -1)
    logit = np.einsum("bthr,hpr->bthp", seen, weight)
    logit += p["gate_bias.retain"].reshape(HEADS, D_KEY)
    expected = (1 / (1 + np.exp(-logit))) ** (1 / 16)
    if rule == "kda":
        rate = np.exp(p["retain.rate"])[:, None]
        expected = np.exp(-rate * np.log1p(np.exp(logit)))
    near(gates["retain"], torch.tensor(expected))
    y, _ = layer(x)
    near(in_pieces(layer, x, [3])[0], y)
    y.sum().backward()
    grads = {n: p.grad for n, p in layer.named_parameters() if "retain" in n}
    assert all(g is not None and g.norm() > 1e-6 for g in grads.values()), grads


@pytest.mark.spec("NN-GATE-D2")
def test_gates_per_head_still_go_with_the_rule():
    """A scan takes whatever gate it is given: a number, one per head, one per channel."""
    q = torch.randn(1, 5, HEADS, D_KEY, generator=seeded())
    for given in (None, 0.9, torch.full((1, 5, HEADS), 0.9)):
        y, _ = memory_scan(named_rule("kda"), q, q, q, Gates(0.5, given))
        value = 0.99 if given is None else 0.9
        wide = torch.full((1, 5, HEADS, D_KEY), value)
        near(y, memory_scan(named_rule("gated_delta"), q, q, q, Gates(0.5, wide))[0])


@pytest.mark.spec("NN-GATE-D2")
def test_what_has_no_phi_axis_is_refused():
    for structure in ("mlp", "gated_mlp", "slots"):
        with pytest.raises(ConfigError, match=rf"retention\.channels.*structure '{structure}'"):
            MemoryConfig(structure=structure, retention={"kind": "decay", "channels": True})
    capped = {"kind": "norm_cap", "retention": {"kind": "decay", "channels": True}}
    with pytest.raises(ConfigError, match=r"retention\.channels"):
        MemoryConfig(structure="mlp", retention=capped)
    assert GateHeads(D, HEADS, MemoryConfig(retention=capped)).retain.rows == HEADS * D_KEY
    with pytest.raises(ConfigError, match="rank"):
        MemoryConfig(retention={"kind": "decay", "rank": 0})


@pytest.mark.spec("RET-DECAY-D2")
def test_boxes_without_a_gate_keep_the_share_of_their_head():
    layer, x = SelfReferential(D, HEADS, {"memory": "retnet"}, generator=seeded()), inputs(2, 7)
    assert layer.config.boxes == ("k", "v", "q")
    gates = layer.boxes.gates({"q": torch.zeros(2, 7, HEADS, D_KEY)})
    near(gates["retain"][0, 0], torch.tensor([1 - 2**-5, 1 - 2**-6]))
    near(in_pieces(layer, x, [3])[0], layer(x)[0])
