"""Growing a trained layer leaves its function as it is, and the new level learns."""

import pytest
import torch

from hecate.cms import LevelConfig
from hecate.errors import ConfigError
from tests.cms.common import DELTA, JOINS, LEVELS, cms_of, inputs, masks
from tests.nn.layers import near, seeded

NEW = {
    "push": LevelConfig(name="new", memory={**DELTA, "feature_map": "elu"}),
    "stack": LevelConfig(name="new", period=8, memory={**DELTA, "feature_map": "relu"}),
}
TWO = [{**level, "period": 2 * (i + 1)} for i, level in enumerate(LEVELS[:2])]
WAYS = [(*join, way) for join in JOINS for way in NEW if join[0] != "chained" and (join[0], way) != ("nested", "stack")]


def grow(layer, way, state=None):
    method = layer.push_up if way == "push" else layer.stack_up
    return method(NEW[way], state, generator=seeded(7))


@pytest.mark.spec("CMS-GROW-I1")
@pytest.mark.parametrize(("composition", "aggregation", "way"), WAYS)
def test_growth_keeps_the_function(composition, aggregation, way):
    layer = cms_of(composition, aggregation, levels=TWO)
    x, given = inputs(), masks()
    _, state = layer(x, **given)
    grown, taken = grow(layer, way, state)
    more, later = inputs(length=17, seed=8), masks(length=17, seed=9)
    near(grown(more, taken, **later)[0], layer(more, state, **later)[0], 1e-14)
    near(grown(more)[0], layer(more)[0], 1e-14)
    names = [level.name for level in grown.config.levels]
    assert names == (["new", "fast", "middle"] if way == "push" else ["fast", "middle", "new"])
    assert len(layer.levels) == 2  # the given layer is left alone


@pytest.mark.spec("CMS-GROW-I2")
@pytest.mark.parametrize(("composition", "aggregation", "way"), WAYS)
def test_the_new_level_learns(composition, aggregation, way):
    grown, _ = grow(cms_of(composition, aggregation, levels=TWO), way)
    place = 0 if way == "push" else -1
    x, target = inputs(2, 20), inputs(2, 20, seed=5)
    optimiser = torch.optim.SGD(grown.parameters(), lr=0.1)
    for step in range(2):
        loss = (grown(x)[0] - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        own = dict(grown.levels[place].named_parameters())
        flowing = {name for name, p in own.items() if p.grad.abs().max() > 1e-9}
        assert flowing == ({"out.weight"} if step == 0 else set(own))
        optimiser.step()


@pytest.mark.spec("CMS-GROW-I1")
def test_a_new_level_takes_its_place_in_the_schedule():
    layer = cms_of("sequential", levels=TWO)
    _, state = layer(inputs(length=13))
    grown, taken = grow(layer, "stack", state)
    assert (taken.levels[-1].memory.position == 5).all()  # 13 = 8 + 5
    _, later = grown(inputs(length=3, seed=4), taken)
    assert (later.levels[-1].memory.position == 0).all()
    assert later.levels[-1].memory.memory["weight"].abs().max() > 1e-3


@pytest.mark.spec("CMS-GROW-I1")
def test_what_is_frozen_stays_frozen():
    layer = cms_of("independent", "learned", levels=TWO).eval()
    layer.weight.requires_grad_(False)
    layer.memories[1].qkv.weight.requires_grad_(False)
    grown, state = grow(layer, "push")
    assert state is None and not grown.training and not grown.weight.requires_grad
    assert [memory.qkv.weight.requires_grad for memory in grown.memories] == [True, True, False]


@pytest.mark.spec("CMS-GROW-I3")
def test_growth_that_would_change_the_function():
    chained, nested = (cms_of(name, levels=TWO) for name in ("chained", "nested"))
    for way in NEW:
        with pytest.raises(ConfigError, match="chained layer cannot grow"):
            grow(chained, way)
    with pytest.raises(ConfigError, match="'middle' would restart from it"):
        grow(nested, "stack")
    with pytest.raises(ConfigError, match="from fast to slow"):
        cms_of(levels=TWO).push_up(NEW["stack"])
