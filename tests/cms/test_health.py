"""What `health` reports, against the layer itself, and the dead levels it names."""

import math

import pytest
import torch

from hecate.errors import HealthWarning, ShapeError
from tests.cms.common import DELTA, JOINS, LEVELS, cms_of, inputs
from tests.nn.layers import near

HALF = {**DELTA, "retention": {"kind": "decay", "retain": 0.5 ** (1 / 8)}}


@pytest.mark.spec("CMS-HEALTH-D1")
@pytest.mark.parametrize("join", JOINS, ids="-".join)
def test_what_is_reported(join):
    layer, x = cms_of(*join), inputs(length=13)
    _, state = layer(x)
    found = layer.health(x, state)
    assert [level.name for level in found] == ["fast", "middle", "slow"]
    assert [level.commits for level in found] == [13, 7, 3]  # from token 14 to 26
    _, after = layer(x, state)
    for index, level in enumerate(found):
        ends = (state.levels[index], after.levels[index])
        norms = [end.memory.memory["weight"].norm(dim=(2, 3)).mean().item() for end in ends]
        assert (level.norm_start, level.norm_end) == pytest.approx(tuple(norms))
        assert level.dead is None and level.fired is None and level.cotangent > 0


@pytest.mark.spec("CMS-HEALTH-D1")
@pytest.mark.parametrize("join", [join for join in JOINS if join[0] != "nested"], ids="-".join)
def test_cotangents_are_those_of_autograd(join):
    layer, x = cms_of(*join), inputs(length=13)
    outputs = []
    for memory in layer.memories:
        memory.register_forward_hook(lambda _, __, result: outputs.append(result[0]))
    y, _ = layer(x)
    wanted = torch.autograd.grad(y.sum() / y.numel() ** 0.5, outputs)
    found = layer.health(x)
    for level, grad, out in zip(found, wanted, outputs, strict=False):
        assert level.cotangent == pytest.approx(grad.norm().item(), rel=1e-9)
        assert level.output_rms == pytest.approx(out.square().mean().sqrt().item())


@pytest.mark.spec("CMS-HEALTH-D1", "RET-MIRROR-D2")
def test_norms_are_those_of_the_weights():
    """A level that carries logits is as long as its distributions."""
    layer, x = cms_of(levels=[{"name": "logits", "memory": {"retention": "kl"}}]), inputs()
    _, state = layer(x)
    rows = state.levels[0].memory.memory["weight"].softmax(-1)
    (level,) = layer.health(x)
    assert level.norm_end == pytest.approx(rows.norm(dim=(2, 3)).mean().item())


@pytest.mark.spec("CMS-HEALTH-D1")
def test_half_lives():
    levels = [
        {"name": "eight", "memory": HALF},
        {"name": "eight too", "memory": HALF, "period": 4},
        {"name": "never", "memory": {**DELTA, "retention": "none"}, "period": 4},
        {"name": "idle half the time", "memory": HALF, "period": 4, "firing": "learned"},
    ]
    layer = cms_of("independent", levels=levels, shake=0.0)
    gates = layer.memories[3].gates
    x = inputs(1, 12)
    with torch.no_grad():
        gates.weight["firing"][:, 0] = 10.0
        gates.bias["firing"].zero_()
        x[..., 0] = torch.tensor([1.0, -1.0]).repeat(6)
    found = layer.health(x)
    assert [level.half_life for level in found] == pytest.approx([8, 8, math.inf, 16])
    assert [level.fired for level in found] == [None, None, None, 0.5]


@pytest.mark.spec("CMS-HEALTH-I1")
def test_dead_levels_are_named_with_a_reason():
    late = {"name": "late", "period": 64, "memory": {**DELTA, "algorithm": {"kind": "gd", "lr": 0.01}}}
    layer = cms_of(levels=[LEVELS[0], late], shake=0.0)
    with pytest.warns(HealthWarning, match="'late' of 'cms' is dead: it has never committed"):
        found = layer.health(inputs())
    assert found[0].dead is None and "its output is zero" in found[1].dead
    _, state = layer(inputs(length=64))
    assert layer.health(inputs(), state)[1].dead is None  # it has committed before

    shut = cms_of(levels=[{**LEVELS[0], "firing": "learned"}, LEVELS[1]])
    with torch.no_grad():
        shut.memories[0].gates.bias["firing"].fill_(-50.0)
    with pytest.warns(HealthWarning, match="firing gate stays shut"):
        shut.health(inputs())

    chain = cms_of("chained", levels=LEVELS[:2])
    with torch.no_grad():
        chain.memories[1].out.weight.zero_()
    with pytest.warns(HealthWarning) as caught:
        found = chain.health(inputs())
    assert [str(item.message).split("dead: ")[1] for item in caught] == ["no gradient reaches it", "its output is zero"]


@pytest.mark.spec("CMS-HEALTH-I1")
def test_health_leaves_the_layer_alone_and_wants_tokens():
    layer, x = cms_of(), inputs()
    y, _ = layer(x)
    layer.health(x)
    near(layer(x)[0], y, 0.0)
    assert all(p.grad is None for p in layer.parameters())
    with pytest.raises(ShapeError, match="health needs tokens"):
        layer.health(inputs(length=0))
