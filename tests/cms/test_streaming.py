"""Any split, masks and resets: a sequence in pieces gives what it gives whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hecate.cms import CMSState
from tests.cms.common import GATED, JOINS, LEVELS, cms_of, inputs, masks
from tests.nn.layers import in_pieces, leaves, near

LENGTH = 11
every_join = pytest.mark.parametrize("join", JOINS, ids="-".join)
cuts_of = st.lists(st.integers(0, LENGTH), max_size=LENGTH)
rows_of = st.lists(st.booleans(), min_size=2 * LENGTH, max_size=2 * LENGTH)
# A sum of weights, an unfinished chunk with an anchor, momentum, positions: all that is carried.
CARRYING = [
    {"name": "a", "memory": {"feature_map": "elu", "normalizer": "sum", "step": "normalized"}},
    {
        "name": "b",
        "period": 3,
        "memory": {
            "feature_map": "elu",
            "normalizer": "sum",
            "key_norm": "l2",
            "algorithm": {"kind": "momentum", "lr": 0.1},
        },
        "firing": "learned",
    },
]


@pytest.fixture(scope="module")
def layers():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    made = {"-".join(join): cms_of(*join) for join in JOINS}
    made["carrying"] = cms_of("nested", levels=CARRYING)
    frozen = {**LEVELS[0]["memory"], "chunk": 2}
    made["frozen"] = cms_of("nested", levels=[{"name": "x", "memory": frozen}, *LEVELS[2:]])
    made["gated"] = cms_of("nested", levels=GATED)
    torch.set_default_dtype(before)
    return made


@pytest.mark.spec("CMS-LAYER-I1", "CMS-NEST-I1")
@pytest.mark.parametrize("name", ["-".join(join) for join in JOINS] + ["carrying", "frozen", "gated"])
@settings(max_examples=15)
@given(cuts=cuts_of, write=rows_of, reset=rows_of)
def test_any_split_with_masks(layers, name, cuts, write, reset):
    x, shape = inputs(length=LENGTH), (2, LENGTH)
    given_masks = {"write_mask": torch.tensor(write).reshape(shape), "reset_mask": torch.tensor(reset).reshape(shape)}
    y, state = layers[name](x, **given_masks)
    pieces, last = in_pieces(layers[name], x, cuts, **given_masks)
    near(pieces, y, what="y")
    near([level.memory for level in last.levels], [level.memory for level in state.levels])
    assert torch.equal(last.written, state.written)


@pytest.mark.spec("CMS-LAYER-I1")
@every_join
def test_gradients_of_pieces_are_those_of_the_whole(layers, join):
    layer, x = layers["-".join(join)], inputs()
    own = list(layer.parameters())
    whole = torch.autograd.grad(layer(x)[0].square().sum(), own, allow_unused=True)
    pieces = torch.autograd.grad(in_pieces(layer, x, [0, 3, 4, 9])[0].square().sum(), own, allow_unused=True)
    near(pieces, whole, 1e-9)


@pytest.mark.spec("CMS-LAYER-I1")
@every_join
def test_causal(layers, join):
    layer, x = layers["-".join(join)], inputs()
    changed = x.clone()
    changed[:, 6] += 1.0
    near(layer(changed)[0][:, :6], layer(x)[0][:, :6], 1e-13)
    assert (layer(changed)[0][:, 6] - layer(x)[0][:, 6]).abs().max() > 1e-4


@pytest.mark.spec("CMS-LAYER-I2")
@every_join
def test_masked_tokens_change_nothing_that_is_carried(layers, join):
    layer, x = layers["-".join(join)], inputs()
    _, state = layer(x)
    off = torch.zeros(2, 5, dtype=torch.bool)
    _, after = layer(inputs(length=5, seed=8), state, write_mask=off)
    near([level.memory for level in after.levels], [level.memory for level in state.levels], 0.0)
    assert torch.equal(after.written, state.written)


@pytest.mark.spec("CMS-LAYER-I2")
@every_join
def test_packed_documents_equal_separate_runs(layers, join):
    layer, x = layers["-".join(join)], inputs(1)
    reset = torch.zeros(1, LENGTH, dtype=torch.bool)
    reset[0, [3, 8]] = True
    y, state = layer(x, reset_mask=reset)
    alone = [layer(x[:, a:b]) for a, b in ((0, 3), (3, 8), (8, LENGTH))]
    near(y, torch.cat([item[0] for item in alone], 1))
    assert torch.equal(state.written, alone[-1][1].written)


@pytest.mark.spec("CMS-LAYER-I1")
def test_no_sequence_no_token_one_token(layers):
    for name, layer in layers.items():
        for batch, length in ((0, 3), (2, 0), (0, 0), (2, 1)):
            y, state = layer(inputs(batch, length))
            assert y.shape == (batch, length, 8), name
            assert layer(inputs(batch, 1), state)[0].shape == (batch, 1, 8), name


@pytest.mark.spec("CMS-LAYER-I1")
def test_the_state(layers):
    layer, early = layers["nested-sum"], inputs().requires_grad_()
    _, state = layer(early)
    assert isinstance(state, CMSState) and state.written.tolist() == [11, 11]
    assert state.bytes == layer(inputs(length=40))[1].bytes
    assert state.bytes == sum(leaf.numel() * leaf.element_size() for leaf in leaves(state))
    (through,) = torch.autograd.grad(layer(inputs(), state)[0].sum(), early)
    assert through.abs().max() > 1e-6
    assert not any(leaf.requires_grad for leaf in leaves(state.detach()))


@every_join
def test_inputs_are_not_mutated(layers, join):
    layer, x, given_masks = layers["-".join(join)], inputs(), masks()
    _, state = layer(x, **given_masks)
    given = [x, *given_masks.values(), *leaves(state)]
    before = [item.clone() for item in given]
    layer(x, state, **given_masks)[0].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
