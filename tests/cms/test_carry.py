"""Composition carry: a tree of levels that share one level's projections and gates."""

import pytest
import torch

from hecate.cms import CMS, CarryMemory, CMSConfig, LevelConfig
from hecate.errors import ConfigError
from hecate.microscope import look
from hecate.models import LanguageModelConfig
from hecate.nn import Memory
from tests.cms.common import DELTA, LEVELS, inputs, masks
from tests.nn.layers import near, seeded, shaken
from tests.reference import gates_2026, papers_2025

LENGTH = 13
TREE = {"name": "tree", "memory": {**DELTA, "decay_order": "before_gradient"}}
OTHERS = {
    "dot": {"memory": {"bias": "dot", "retention": "decay"}, "restart": 5},
    "momentum": {"memory": {**DELTA, "algorithm": {"kind": "momentum", "lr": 0.1}}, "firing": "learned"},
    "features": {
        "memory": {"kind": "gated_delta", "read": "before"},
        "feature_memory": {"algorithm": {"kind": "gd", "lr": 0.2}},
    },
    "rwkv7": {"memory": "rwkv7"},
}


def tree_of(levels=5, *, shake=0.3, **options):
    config = CMSConfig(levels=[{**TREE, **options}], composition="carry", carry_levels=levels)
    return shaken(CMS(8, 2, config, generator=seeded()), shake=shake)


@pytest.mark.spec("CMS-CARRY-D1")
@pytest.mark.parametrize("rule", ["dot", "delta"])
def test_against_the_reference(rule):
    memory = {"bias": "dot", "retention": "decay"} if rule == "dot" else TREE["memory"]
    layer, x = tree_of(memory=memory, learned_initial=False), inputs(1, LENGTH)
    own = layer.memories[0]
    with torch.no_grad():
        own.initial.tensors["weight"].zero_()
        y, state = layer(x)
        asked, *_ = own.asked(x)
        answers = torch.empty_like(asked.v)
        for head in range(2):
            q, k, v = (item[0, :, head].numpy() for item in (asked.q, asked.k, asked.v))
            if memory.get("key_norm") == "l2":
                k = k / (k**2).sum(-1, keepdims=True) ** 0.5
                q = q / (q**2).sum(-1, keepdims=True) ** 0.5
            logits = (x[0] @ own.mixture[5 * head : 5 * head + 5].T).numpy()
            scale = gates_2026.log_linear(logits, own.level[head].numpy())
            lr, retain = (gate[0, :, head].numpy() for gate in asked.gates[:2])
            if rule == "dot":
                v, lr = lr[:, None] * v, None
            answer, levels = papers_2025.log_linear(q, k, v, retain, scale, lr)
            answers[0, :, head] = torch.as_tensor(answer)
            near(state.levels[0].memory.memory["weight"][0, head], torch.as_tensor(levels))
        near(own.read_out(x, answers), y)


@pytest.mark.spec("CMS-CARRY-R1")
@pytest.mark.parametrize("rule", OTHERS)
def test_with_equal_weights_it_is_the_plain_memory(rule):
    layer, x = tree_of(**OTHERS[rule]), inputs(length=LENGTH)
    own = layer.memories[0]
    config = layer.config.levels[0]
    options = {"feature_memory": config.feature_memory, "firing": config.firing, "conv_kernel": config.conv_kernel}
    plain = Memory(8, 2, config.rule, **options)
    plain.load_state_dict({k: v for k, v in own.state_dict().items() if k not in ("mixture", "level")})
    own.scale = lambda x: torch.ones(*x.shape[:2], 2, 5)
    given_ = masks(length=LENGTH)
    near(own(x, **given_)[0], plain(x, **given_)[0])


@pytest.mark.spec("CMS-CARRY-I1")
def test_the_size_of_the_state():
    layer = tree_of()
    _, state = layer(inputs(length=LENGTH))
    held = state.levels[0].memory
    assert held.memory["weight"].shape == (2, 2, 5, 4, 4) and held.position.tolist() == [[LENGTH] * 2] * 2
    assert state.bytes == layer(inputs(length=3 * LENGTH))[1].bytes


@pytest.mark.spec("CMS-CARRY-D1", "CMS-LAYER-I7")
def test_starting_values_and_gradients():
    layer = tree_of(shake=0.0)
    own = layer.memories[0]
    assert isinstance(own, CarryMemory) and torch.equal(own.level, torch.ones(2, 5))
    plain = CMS(8, 2, CMSConfig(levels=[TREE], composition="independent"), generator=seeded(0))
    assert all(torch.equal(item, own.state_dict()[name]) for name, item in plain.memories[0].state_dict().items())
    before = {name: item.clone() for name, item in layer.state_dict().items()}
    layer.reset_parameters(seeded(0))
    assert all(torch.equal(item, before[name]) for name, item in layer.state_dict().items())
    layer(inputs(length=40))[0].square().sum().backward()
    lazy = [name for name, item in layer.named_parameters() if item.grad is None or not item.grad.any()]
    assert not lazy


@pytest.mark.spec("CMS-CARRY-I2")
def test_refusals():
    def refused(match, *, levels=(TREE,), composition="carry", **fields):
        with pytest.raises(ConfigError, match=match):
            CMSConfig(levels=levels, composition=composition, **fields)

    refused("makes its levels of one", levels=[TREE, {**TREE, "name": "more"}])
    refused("periods 1, 2, 4", levels=[{**TREE, "period": 4}])
    refused("no rows for levels", levels=[{"name": "a", "memory": {"structure": "mlp"}}])
    refused("remembered state", levels=[{"name": "a", "memory": {"chunk": 4}}])
    refused("leave it out", composition="independent", carry_levels=3)
    refused("weighs outputs", aggregation="learned")
    refused("must be >= 1", carry_levels=0)
    with pytest.raises(ConfigError, match="there are none"):
        LanguageModelConfig(carry_levels=4)
    layer = tree_of()
    with pytest.raises(ConfigError, match="no place for another level"):
        layer.push_up(LevelConfig(name="new"))
    with pytest.raises(ConfigError, match="engine of composition 'carry'"):
        CMS(8, 2, layer.config, engine="chunk")
    assert CMSConfig.model_validate(CMSConfig(levels=LEVELS).model_dump()).carry_levels == 15


@pytest.mark.spec("CMS-CARRY-I1")
def test_health_and_the_microscope():
    layer, x = tree_of(), inputs(length=LENGTH)
    (health,) = layer.health(x)
    assert health.commits == LENGTH and health.dead is None
    _, state = layer(x)
    view = look(layer, x, state=state)
    assert "age" in view["tree"].unread
