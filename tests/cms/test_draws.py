"""A level's starting values are its own, whatever levels stand beside it."""

import pytest
import torch

from hecate.cms import CMS
from tests.nn.layers import seeded

SLOW = {"name": "slow", "period": 4, "memory": {"kind": "kda", "decay_order": "with_step"}}
SLOW["memory"]["algorithm"] = {"kind": "gd", "lr": 0.1}
DEEP = {"structure": "mlp", "algorithm": {"kind": "gd", "lr": 0.1}}


def level_of(levels, name, *, seed=0, again=False, **options):
    """The parameters and draws of one level of a layer drawn from a seed."""
    layer = CMS(8, 2, {"levels": levels, **options}, generator=seeded(seed))
    if again:
        layer.reset_parameters(seeded(seed))
    index = [level.name for level in layer.config.levels].index(name)
    return layer.levels[index].state_dict()


def same(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.spec("CMS-LAYER-I7")
@pytest.mark.parametrize("again", [False, True])
def test_levels_do_not_hear_of_each_other(again):
    alone = level_of([SLOW], "slow")
    fast = {"name": "fast"}
    for before in (
        [fast],
        [{**fast, "memory": DEEP}],
        [{**fast, "heads": 1, "conv_kernel": 0}],
        [fast, {"name": "middle", "period": 2, "memory": DEEP}],
    ):
        for after in ([], [{**SLOW, "name": "slowest", "period": 8}]):
            assert same(level_of([*before, SLOW, *after], "slow", again=again), alone)
    assert same(level_of([fast, SLOW], "slow", composition="independent"), alone)
    twin = {**SLOW, "name": "twin"}
    both = [level_of([SLOW, twin], name) for name in ("slow", "twin")]
    assert not torch.equal(both[0]["qkv.weight"], both[1]["qkv.weight"])
    assert not same(level_of([SLOW], "slow", seed=1), alone)


@pytest.mark.spec("CMS-LAYER-I7")
def test_one_generator_gives_two_layers():
    source, levels = seeded(), {"levels": [SLOW]}
    before = torch.random.get_rng_state()
    one, two = (CMS(8, 2, levels, generator=source).levels[0] for _ in range(2))
    assert not torch.equal(one.qkv.weight, two.qkv.weight)
    CMS(8, 2, levels, device="meta", generator=source)
    third = CMS(8, 2, levels, generator=source).levels[0]
    again = seeded()
    for _ in range(3):
        last = CMS(8, 2, levels, generator=again).levels[0]
    assert same(last.state_dict(), third.state_dict())
    assert torch.equal(before, torch.random.get_rng_state())
