"""A layer's short way for one token: the bits of its whole way, which any mask takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hecate.errors import NonFiniteError, ShapeError
from hecate.nn import Memory
from tests.nn.layers import inputs, layer_of, own_layers, rules

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

    def counted(*given: Any) -> Any:
        found = own(*given)
        short.append(found is not None)
        return found

    layer._one_token = counted
    for t in range(x.shape[1]):
        token = x[:, t : t + 1]
        y, after = layer(token, state)
        expected, state = layer(token, state, write_mask=written)
        flat, wanted = (torch.utils._pytree.tree_leaves(tree) for tree in ((y, after), (expected, state)))
        for item, other in zip(flat, wanted, strict=True):
            assert item is other is None or (item.dtype == other.dtype and torch.equal(item, other))
    return sum(short)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (config, {}) for name, config in own_layers().items()},
    **{str(options): (RULES["gated_delta"], options) for options in OPTIONS},
    **{
        f"{kernel} taps, {activation}": (
            RULES["gated_delta"].model_copy(update={"layer_conv_kernel": kernel, "layer_activation": activation}), {}
        )
        for kernel in (0, 4)
        for activation in ("none", "silu")
    },
}  # fmt: skip


@pytest.mark.spec("NN-MEM-I13")
@pytest.mark.parametrize("name", CASES)
def test_one_token_has_the_bits_of_the_whole_way(name: str):
    config, options = CASES[name]
    layer = layer_of(config, **options)
    bare = config.writes == 1 and config.gating.plain and not options.keys() & {"feature_memory", "query_projection"}
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
        for name in layer.gates.starts:  # which tell no token but by what they make of it
            own = layer_of(RULES["gated_delta"])
            state = own(x[:, :1], own(x[:, :1])[1])[1]
            own.gates.bias[name][1] = float("nan")
            with pytest.raises(NonFiniteError, match="batch row 0, head 1, token 0"):
                own(x[:, 1:2], state)


def test_under_autocast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert tokens_beside_the_whole_way(layer_of(RULES["kda"]).float(), inputs(2, 4).float()) == 3


PARTS = ("qkv", "conv", "gates", "output_gate", "out")


def test_hooks_of_submodules_run():
    layer, x, seen = layer_of(RULES["gated_delta"]), inputs(1, 2), []
    for name in PARTS:
        getattr(layer, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    with torch.no_grad():
        _, state = layer(x[:, :1])
        seen.clear()
        layer(x[:, 1:], state)
    assert seen == list(PARTS)


class Listening(torch.nn.Linear):
    """A part of another class."""


def _doubled(layer: Memory) -> None:
    torch.nn.utils.parametrize.register_parametrization(layer.out, "weight", Double())


def _another_class(layer: Memory) -> None:
    layer.qkv = Listening(layer.qkv.in_features, layer.qkv.out_features, bias=False, dtype=layer.qkv.weight.dtype)


def _own_forward(layer: Memory) -> None:
    forward = layer.output_gate.forward
    layer.output_gate.forward = lambda x: 2 * forward(x)


def _doubled_gate(layer: Memory) -> None:
    torch.nn.utils.parametrize.register_parametrization(layer.gates.weight, "retain", Double())


class Double(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


CHANGES = {_doubled: 0, _another_class: 0, _own_forward: 0, _doubled_gate: 2}  # and how many tokens go the short way


@pytest.mark.spec("NN-MEM-I13")
@pytest.mark.parametrize(("change", "short"), CHANGES.items())
def test_parts_that_are_changed_are_called_as_they_are(change: Any, short: int):
    layer = layer_of(RULES["gated_delta"])
    change(layer)
    with torch.no_grad():
        assert tokens_beside_the_whole_way(layer, inputs(3, 3)) == short


@pytest.mark.spec("NN-MEM-I13")
def test_parameters_that_change_under_way_are_those_of_the_next_token():
    layer, x, other = layer_of(RULES["gated_delta"]), inputs(2, 4), layer_of(RULES["gated_delta"], seed=1)
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: [p.data.mul_(0.5) for p in layer.parameters()],
            lambda: layer.load_state_dict(other.state_dict()),
            lambda: layer.load_state_dict({k: 0.3 * v for k, v in other.state_dict().items()}, assign=True),
        ):
            change()
            assert tokens_beside_the_whole_way(layer, x) == 3
        held = {name: 0.7 * p for name, p in other.named_parameters()}
        _, state = layer(x[:, :1])
        given, written = (x[:, 1:2], state), {"write_mask": torch.ones(2, 1, dtype=torch.bool)}
        y, _ = torch.func.functional_call(layer, held, given)
        assert torch.equal(y, torch.func.functional_call(layer, held, given, written)[0])
        assert not torch.equal(y, layer(*given)[0])


@torch.no_grad()
def test_no_sequences_and_a_state_without_a_memory_take_the_whole_way():
    layer, x = layer_of(RULES["gated_delta"]), inputs(2, 3)
    layer.initial.weight += 1.0
    state = layer(x[:, :1])[1]._replace(memory=None)
    written = torch.ones(2, 1, dtype=torch.bool)
    assert torch.equal(layer(x[:, 1:2], state)[0], layer(x[:, 1:2], state, write_mask=written)[0])
    _, empty = layer(x[:0, :1])
    assert layer(x[:0, 1:2], empty)[0].shape == (0, 1, x.shape[2])
