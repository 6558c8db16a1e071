"""Sliding attention against a loop over tokens, in pieces, packed, padded, and refused."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hecate.errors import ConfigError, ShapeError
from hecate.nn import Composed, SlidingAttention
from hecate.nn.positions import rotated
from hecate.nn.sliding import Windows, entries_of
from tests.nn.attentions import D_MODEL, HEADS, inputs, masks_of, reference_of, sliding_of
from tests.nn.layers import in_pieces, near, near_with_slopes
from tests.nn.layers import inputs as narrow
from tests.reference.attention import sliding

LENGTH = 9


def same_state(got, expected, tolerance=1e-12):
    assert torch.equal(got.present, expected.present)
    near(got[:2], expected[:2], tolerance, "state")
    assert (got.conv is None) == (expected.conv is None)
    if got.conv is not None:
        near(got.conv, expected.conv, tolerance, "conv")


def expected_of(layer, x, write_mask=None, reset_mask=None):
    write = torch.ones(x.shape[:2], dtype=torch.bool) if write_mask is None else write_mask
    reset = torch.zeros_like(write) if reset_mask is None else reset_mask
    reference = reference_of(layer)
    rows = zip(x, write, reset, strict=True)
    return torch.stack([sliding(reference, row, layer.window, w, r) for row, w, r in rows])


LAYERS = {
    "one": {"window": 1},
    "narrow": {"window": 3, "persistent": 2},
    "plain": {"window": 5, "rotary": False, "qk_norm": "none"},
    "shared": {"window": 4, "kv_heads": 1},
    "wide": {"window": 66, "persistent": 1},
    "full": {"window": None},
    "full_persistent": {"window": None, "persistent": 2, "kv_heads": 1},
    "gated": {"window": None, "output_gate": True},
    "conv": {"window": 4, "conv_kernel": 3, "persistent": 1, "kv_heads": 1},
    "conv_gated": {"window": None, "conv_kernel": 4, "output_gate": True},
}
every_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)


@pytest.mark.spec("ATT-SLIDE-D1", "ATT-SLIDE-D2", "ATT-SLIDE-I2")
@pytest.mark.parametrize(
    ("name", "masked", "length"),
    [
        *((name, masked, LENGTH) for name in LAYERS for masked in (False, True)),
        *((name, True, 70) for name in ("narrow", "wide", "full_persistent", "conv")),  # two blocks
    ],
)
def test_against_a_loop(name, masked, length):
    batch = 2 if length == LENGTH else 1
    layer, x = sliding_of(**LAYERS[name]), inputs(batch, length).requires_grad_()
    masks = masks_of(batch, length) if masked else {}
    y, _ = layer(x, **masks)
    near_with_slopes(y, expected_of(layer, x, **masks), [x, *layer.parameters()])


@pytest.mark.spec("ATT-SLIDE-I1")
def test_a_long_sequence_in_pieces_longer_and_shorter_than_the_window():
    layer, x, masks = sliding_of(70, persistent=1), inputs(2, 300), masks_of(2, 300, reset=0.01)
    y, state = layer(x, **masks)
    pieces, last = in_pieces(layer, x, [1, 2, 150, 200, 201], **masks)
    near(pieces, y)
    same_state(last, state)


@pytest.mark.spec("ATT-SLIDE-I2")
@every_layer
def test_masks_that_hide_nothing_change_nothing(options):
    """Over three blocks, which no loop goes through."""
    layer, x = sliding_of(**options), inputs(length=150).requires_grad_()
    everywhere = torch.ones(2, 150, dtype=torch.bool)
    (y, state), (same, after) = layer(x), layer(x, write_mask=everywhere, reset_mask=~everywhere)
    near(same, y)
    same_state(after, state)
    wanted = [x, *layer.parameters()]
    near(*(torch.autograd.grad(own.square().sum(), wanted) for own in (same, y)), 1e-11)


@pytest.mark.spec("ATT-SLIDE-I3")
def test_cost_and_state_do_not_grow_with_what_came_before():
    def pairs(length, window=256):  # products of a query and a key
        windows = Windows(entries_of(None, torch.empty(1, length, device="meta"), None, None), window)
        return -(-length // windows.size) * windows.size * windows.reach

    assert pairs(16384) == 16 * pairs(1024) == 16384 * (256 + 128 - 1)
    layer = sliding_of(5, kv_heads=1)
    _, short = layer(inputs(length=1))
    _, long = layer(inputs(length=200))
    assert short.bytes == long.bytes == 2 * 4 * (2 * 8 * 8 + 1)
    assert sliding_of(None)(inputs(length=6))[1].bytes == 2 * 6 * (2 * 16 * 8 + 1)
    kept = long.keys.untyped_storage()
    assert kept.nbytes() == long.keys.numel() * 8  # no view of all that was seen


@pytest.mark.spec("ATT-ROT-D1")
def test_rotation_is_relative_however_far_the_count_has_come():
    q, k = inputs(1, 1)[0, 0], inputs(1, 1, seed=3)[0, 0]

    def product(a, b):
        return rotated(q, torch.tensor(a)) @ rotated(k, torch.tensor(b))

    near(product(7, 3), product(10**6 + 7, 10**6 + 3), 1e-8)  # an angle of 10^6 holds 10 digits
    assert (product(7, 3) - product(7, 4)).abs() > 1e-3
    near(rotated(q, torch.tensor(9))[8:], q[8:], 0.0)
    near(rotated(q, torch.tensor(9)).norm(), q.norm())


def test_names():
    layer = sliding_of(4, persistent=2)
    assert sorted(layer.state_dict()) == ["gain", "key_value.weight", "out.weight", "query.weight", "tokens"]
    assert "window=4" in repr(layer)


@pytest.mark.spec("ATT-SLIDE-I4")
def test_second_derivatives_with_the_plain_kernel():
    layer, one = sliding_of(), inputs(1).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (slope,) = torch.autograd.grad(layer(one)[0].square().sum(), one, create_graph=True)
        assert torch.autograd.grad(slope.square().sum(), one)[0].norm() > 1e-3


BUILDS = {
    "window must be an integer >= 1, got 0": {"window": 0},
    "persistent must be an integer >= 0, got -1": {"persistent": -1},
    "kv_heads=3 does not divide heads=2": {"kv_heads": 3},
    "qk_norm must be one of .*'rms'.*got 'l2'": {"qk_norm": "l2"},
    "conv_kernel: must be 0 .none. or at least 2, got 1": {"conv_kernel": 1},
    "d_model=12 over heads=2 must be divisible by 4, got 6.*rotary=False": {"d_model": 12},
    "d_model=15 is not divisible by heads=2": {"d_model": 15},
}


@pytest.mark.spec("ATT-SLIDE-I5")
def test_builds_that_are_refused():
    for message in BUILDS:
        with pytest.raises(ConfigError, match=message):
            SlidingAttention(**{"d_model": D_MODEL, "heads": HEADS, "window": 4, **BUILDS[message]})


CALLS = {
    r"x must be \[B, T, 16\], got \[2, 7, 12\]": lambda layer: layer(narrow()),
    r"write_mask must be bool": lambda layer: layer(inputs(), write_mask=torch.ones(2, LENGTH)),
    r"beside must be \[2, 9, 16\]": lambda layer: layer(inputs(), beside=inputs(length=1)),
    "near: state must be the SlidingState.*got tuple": lambda layer: layer(inputs(), (1, 2)),
    r"near: state.keys must be \[3, 4, 1, 2, 8\].*3 sequences, got \[2,": lambda layer: layer(
        inputs(3), layer(inputs())[1]
    ),
    r"near: state.keys must be \[2, 4, 1, 2, 8\].*got \[2, 6": lambda layer: layer(
        inputs(), sliding_of(7)(inputs())[1]
    ),
}


@pytest.mark.spec("ATT-SLIDE-I5")
def test_a_convolution_has_one_sequence():
    layer = sliding_of(5, conv_kernel=3, name="near")
    with pytest.raises(ConfigError, match="near: conv_kernel=3.*beside"):
        layer(inputs(), beside=inputs())
    with pytest.raises(ConfigError, match="conv_kernel: is 3, but kind 'mac'"):
        Composed(D_MODEL, HEADS, {"kind": "mac", "segment": 4, "conv_kernel": 3})
    with pytest.raises(ShapeError, match=r"near: state.conv must be \[2, 2, 48\].*got None"):
        layer(inputs(), sliding_of(5)(inputs())[1])


@pytest.mark.spec("ATT-SLIDE-I5")
def test_calls_that_are_refused():
    for message in CALLS:
        with pytest.raises(ShapeError, match=message):
            CALLS[message](sliding_of(5, name="near"))
