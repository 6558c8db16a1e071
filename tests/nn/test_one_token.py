"""A layer's short way for one token: the bits of its whole way, which any mask takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hecate.errors import NonFiniteError, ShapeError
from hecate.nn import Memory
from tests.nn.layers import inputs, layer_of, rules
from tests.nn.test_streaming import every_rule

RULES = rules()
OPTIONS: list[dict[str, Any]] = [
    {"conv_kernel": 0, "qk_norm": "none", "output_gate": False},
    {"conv_kernel": 2, "qk_norm": "rms", "firing": "learned"},
    {"dtype": torch.bfloat16, "d_value": 3},
    {"feature_memory": {}},
    {"query_projection": "sum"},
]


def tokens_beside_the_whole_way(layer: Memory, x: torch.Tensor) -> int:
    """Every token of x by both ways from the states of the whole way; how many went the short one."""
    written, state, short = torch.ones(len(x), 1, dtype=torch.bool), None, []
    own = layer._one_token
    layer._one_token = lambda *given: (short.append(0), own(*given))[1]
    for t in range(x.shape[1]):
        token = x[:, t : t + 1]
        y, after = layer(token, state)
        expected, state = layer(token, state, write_mask=written)
        flat, wanted = (torch.utils._pytree.tree_leaves(tree) for tree in ((y, after), (expected, state)))
        for item, other in zip(flat, wanted, strict=True):
            assert item is other is None or (item.dtype == other.dtype and torch.equal(item, other))
    return len(short)


@pytest.mark.spec("NN-MEM-I13")
@every_rule
def test_one_token_has_the_bits_of_the_whole_way(rule: str):
    bare = RULES[rule].writes == 1 and RULES[rule].gating.plain
    with torch.no_grad():
        assert tokens_beside_the_whole_way(layer_of(RULES[rule]), inputs(3, 4)) == (3 if bare else 0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_every_option(options: dict[str, Any]):
    layer = layer_of(RULES["gated_delta"], **options)
    bare = not options.keys() & {"feature_memory", "query_projection"}
    with torch.no_grad():
        short = tokens_beside_the_whole_way(layer, inputs(3, 4).to(layer.qkv.weight.dtype))
    assert short == (3 if bare else 0)


def test_what_takes_the_whole_way_and_what_is_refused():
    layer, x = layer_of(RULES["gated_delta"]), inputs(2, 3)
    _, state = layer(x[:, :1])
    assert layer(x[:, 1:2], state)[0].requires_grad
    with torch.no_grad():
        layer(x[:, 1:2], state)
        with pytest.raises(ShapeError, match="state.conv must be"):
            layer(x[:1, 1:2], state)
        with pytest.raises(ShapeError, match="x must be"):
            layer(x[:, 1:2, :3], state)
        with pytest.raises(NonFiniteError, match="batch row 0, head 0, token 0"):
            layer(x[:, 1:2] / 0, state)


def test_under_autocast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert tokens_beside_the_whole_way(layer_of(RULES["kda"]).float(), inputs(2, 4).float()) == 3


def test_hooks_of_submodules_run():
    layer, x, seen = layer_of(RULES["gated_delta"]), inputs(1, 2), []
    for name in ("qkv", "conv", "gates", "output_gate", "out"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    with torch.no_grad():
        _, state = layer(x[:, :1])
        seen.clear()
        layer(x[:, 1:], state)
    assert seen == ["qkv", "conv", "gates", "output_gate", "out"]
