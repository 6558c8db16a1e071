"""A sequence in pieces, packed, padded and cut short gives what it gives whole."""

import pytest
import torch

from tests.nn.layers import inputs, layer_of, near, rules, same_memory

RULES = rules()
LENGTH = 7


@pytest.mark.spec("NN-MEM-I3")
@pytest.mark.parametrize("rule", RULES)
def test_left_padding_equals_no_padding_and_a_masked_token_leaves_the_memory_bit_for_bit(rule):
    layer, x, pad = layer_of(RULES[rule]), inputs(), 4
    write = torch.ones(2, pad + x.shape[1], dtype=torch.bool)
    write[:, :pad] = False
    y, state = layer(torch.cat([inputs(length=pad, seed=5), x], 1), write_mask=write)
    expected, last = layer(x)
    near(y[:, pad:], expected)
    same_memory(state, last)
    _, after = layer(inputs(length=3, seed=8), last, write_mask=torch.zeros(2, 3, dtype=torch.bool))
    near(after.memory, last.memory, 0.0)


@pytest.mark.spec("NN-MEM-I3")
def test_a_masked_token_reads_with_its_own_input():
    layer = layer_of({"retention": "decay", "key_norm": "l2", "read": "before"})
    x = inputs(length=LENGTH)
    _, state = layer(x[:, :-1])
    written, _ = layer(x[:, -1:], state)  # it reads before it writes: masked or not
    masked, _ = layer(x[:, -1:], state, write_mask=torch.zeros(2, 1, dtype=torch.bool))
    near(masked, written)
    assert masked.norm() > 0.1


def test_non_contiguous_and_expanded_inputs():
    layer, x = layer_of(RULES["titans_linear"]), inputs()
    near(layer(x.mT.contiguous().mT)[0], layer(x)[0], 1e-13)
    row = inputs(1)
    near(layer(row.expand(3, -1, -1))[0], layer(row)[0].expand(3, -1, -1), 1e-13)
