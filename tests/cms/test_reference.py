"""Every composition against the numpy transcription, token by token."""

import pytest
import torch

from tests.cms.common import GATED, JOINS, LEVELS, cms_of, expected, inputs, masks
from tests.nn.layers import near

DEEP = {"structure": {"kind": "mlp", "expansion": 1, "residual": False}, "algorithm": {"kind": "momentum", "lr": 0.05}}


def compare(layer, x, **given):
    y, state = layer(x, **given)
    truth, ends = expected(layer, x, **given)
    near(y, truth, 1e-11, "y")
    for row, levels in enumerate(ends):
        for level, heads in enumerate(levels):
            for index, weight in enumerate(state.levels[level].memory.memory.values()):
                own = torch.stack([torch.tensor(head[index]) for head in heads])
                near(weight[row], own, 1e-11, f"row {row}, level {level}")
    return y, state


@pytest.mark.spec("CMS-LAYER-D1", "CMS-JOIN-D1", "CMS-JOIN-D2", "CMS-NEST-D1")
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("join", JOINS, ids="-".join)
def test_against_the_reference(join, masked):
    compare(cms_of(*join), inputs(), **(masks() if masked else {}))


SIZES = {"heads": 1, "d_key": 3, "d_value": 5, "conv_kernel": 2, "output_gate": False}
OTHERS = {  # levels, how they are joined, and whether under masks
    **{f"deep, {how}": ([{"name": f"every {n}", "period": n, "memory": DEEP} for n in (2, 4)], how, True)
       for how in ("sequential", "nested")},
    **{f"gated delta, {how}": (GATED, how, True) for how in ("independent", "nested")},
    "sizes of their own": ([{**LEVELS[0], **SIZES}, LEVELS[2]], "independent", False),
}  # fmt: skip


@pytest.mark.spec("CMS-LAYER-D1", "CMS-NEST-D1", "RULE-ORDER-D1")
@pytest.mark.parametrize("name", OTHERS)
def test_other_levels_against_the_reference(name):
    """Of gated delta rules: gradients see the memory of the window's start, decayed by the gates since."""
    levels, composition, masked = OTHERS[name]
    compare(cms_of(composition, levels=levels), inputs(), **(masks(seed=5) if masked else {}))


@pytest.mark.spec("CMS-NEST-D1", "CMS-NEST-I1")
def test_rows_restart_on_their_own():
    """A row that has written nothing yet keeps its own start while another restarts."""
    write = torch.ones(2, 7, dtype=torch.bool)
    write[0, :3] = False
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 4] = True
    compare(cms_of("nested"), inputs(length=7), write_mask=write, reset_mask=reset)


@pytest.mark.spec("CMS-NEST-D1")
@pytest.mark.parametrize("length", [4, 5])
def test_momentum_starts_anew_at_a_restart(length):
    levels = [{**LEVELS[1], "name": f"every {n}", "period": n} for n in (2, 4)]
    _, state = compare(cms_of("nested", levels=levels), inputs(length=length))
    fast, slow = (level.memory.slots["momentum.weight"] for level in state.levels)
    assert not fast.any() and slow.abs().max() > 1e-3


@pytest.mark.spec("CMS-NEST-D1")
def test_a_sum_of_weights_goes_with_its_memory():
    memory = {"feature_map": "elu", "normalizer": "sum", "key_norm": "l2"}
    levels = [{"name": f"every {n}", "period": n, "memory": memory} for n in (1, 2)]
    _, state = cms_of("nested", levels=levels)(inputs(length=4))
    fast, slow = (level.memory for level in state.levels)
    near(fast.memory, slow.memory, 0.0)
    near(fast.normalizer.memory, slow.normalizer.memory, 0.0)
    assert slow.normalizer.memory["weight"].abs().max() > 1e-2
