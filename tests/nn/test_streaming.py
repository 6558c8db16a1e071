"""A sequence in pieces, packed, padded and cut short gives what it gives whole."""

import pytest
import torch

from hecate.nn import Memory
from tests.nn.layers import in_pieces, inputs, layer_of, near, rules, same_memory, seeded
from tests.phi.examples import examples, named

RULES = rules()
LENGTH = 7
MAPS = examples()

every_rule = pytest.mark.parametrize("rule", RULES)
every_map = pytest.mark.parametrize("feature_map", MAPS, ids=named)


@pytest.fixture(scope="module")
def layers():
    """One layer per rule: hypothesis runs many examples on each."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    made = {name: layer_of(config) for name, config in RULES.items()}
    torch.set_default_dtype(before)
    return made


@pytest.mark.spec("NN-MEM-I1")
@every_map
def test_token_by_token_with_every_feature_map(feature_map):
    config = {"feature_map": feature_map, "key_norm": "l2", "retention": "decay"}
    layer, x = layer_of(config), inputs(length=LENGTH)
    reset = torch.zeros(2, LENGTH, dtype=torch.bool)
    reset[0, 3] = True
    y, state = layer(x, reset_mask=reset)
    pieces, last = in_pieces(layer, x, [*range(LENGTH), 3], reset_mask=reset)
    near(pieces, y, what="y")
    same_memory(last, state)


@pytest.mark.spec("NN-MEM-I3")
@every_rule
def test_left_padding_equals_no_padding(layers, rule):
    layer, x, pad = layers[rule], inputs(), 4
    write = torch.ones(2, pad + x.shape[1], dtype=torch.bool)
    write[:, :pad] = False
    y, state = layer(torch.cat([inputs(length=pad, seed=5), x], 1), write_mask=write)
    expected, last = layer(x)
    near(y[:, pad:], expected)
    same_memory(state, last)


@pytest.mark.spec("NN-MEM-I3")
@every_rule
def test_a_masked_token_leaves_the_memory_bit_for_bit(layers, rule):
    x = inputs(length=LENGTH)
    _, state = layers[rule](x)
    _, after = layers[rule](inputs(length=3, seed=8), state, write_mask=torch.zeros(2, 3, dtype=torch.bool))
    near(after.memory, state.memory, 0.0)


@pytest.mark.spec("NN-MEM-I3")
def test_a_masked_token_reads_with_its_own_input():
    layer = layer_of({"retention": "decay", "key_norm": "l2", "read": "before"})
    x = inputs(length=LENGTH)
    _, state = layer(x[:, :-1])
    written, _ = layer(x[:, -1:], state)  # it reads before it writes: masked or not
    masked, _ = layer(x[:, -1:], state, write_mask=torch.zeros(2, 1, dtype=torch.bool))
    near(masked, written)
    assert masked.norm() > 0.1


@pytest.mark.spec("NN-MEM-I6")
def test_an_empty_piece_changes_no_state(layers):
    layer = layers["titans_linear"]
    _, state = layer(inputs())
    _, same = layer(inputs(length=0), state)
    near(same, state, 0.0)


@pytest.mark.spec("NN-MEM-I6")
def test_state_bytes_do_not_grow():
    layer = Memory(12, 2, generator=seeded())
    _, short = layer(inputs(length=1))
    _, long = layer(inputs(length=60))
    # Two sequences, two heads, 6 x 6 doubles and a position; three inputs of 36 channels.
    assert short.bytes == long.bytes == 2 * (2 * (36 + 1) + 3 * 36) * 8


@pytest.mark.spec("NN-MEM-I6")
def test_truncated_backpropagation_trains():
    layer = layer_of({"retention": "decay", "key_norm": "l2"}, shake=0.0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x = inputs(4, 24)
    target, losses = x.roll(2, 1), []
    for _ in range(25):
        state, total = None, 0.0
        for at in range(0, 24, 8):
            y, state = layer(x[:, at : at + 8], state)
            loss = (y - target[:, at : at + 8]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = state.detach()
            total += float(loss.detach())
        losses.append(total / 3)
    assert losses[-1] < 0.7 * losses[0]


def test_non_contiguous_and_expanded_inputs(layers):
    layer, x = layers["titans_linear"], inputs()
    near(layer(x.mT.contiguous().mT)[0], layer(x)[0], 1e-13)
    row = inputs(1)
    near(layer(row.expand(3, -1, -1))[0], layer(row)[0].expand(3, -1, -1), 1e-13)
