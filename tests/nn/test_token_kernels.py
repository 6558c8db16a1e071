"""Kernels of one token beside the layer's whole way, which any mask takes: the token loop in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import hecate
from hecate import MemoryConfig
from hecate.errors import NonFiniteError, ShapeError
from hecate.models import LanguageModel
from hecate.nn import Memory, blocks
from hecate.nn.blocks import swiglu
from tests.nn.layers import leaves, rules, seeded, shaken

pytest.importorskip("numba")

RULES = rules()
KEYS: dict[str, Any] = {"retention": "decay", "key_norm": "l2"}
CONFIGS: dict[str, Any] = {
    **{rule: RULES[rule] for rule in ("delta", "gated_delta", "kda", "titans_linear")},
    "before": {**KEYS, "read": "before"},
    "early": {**KEYS, "decay_order": "before_gradient"},
    "momentum": {"retention": "decay", "algorithm": "momentum", "bias": "dot", "query_scale": "key_dim"},
    "early momentum, read before": {
        **KEYS, "algorithm": "momentum", "decay_order": "before_gradient", "read": "before"
    },
    "channels": {"retention": {"kind": "decay", "channels": True}, "key_norm": "l2"},
    "channels, early": {
        "retention": {"kind": "decay", "channels": True}, "key_norm": "l2", "decay_order": "before_gradient"
    },
}  # fmt: skip
GATHERED: dict[str, Any] = {
    "a chunk": {"key_norm": "l2", "chunk": 3, "commit": "chunk"},
    "a chunk that decays": {**KEYS, "chunk": 3, "commit": "chunk"},
    "a chunk, early, read before": {
        **KEYS, "chunk": 3, "commit": "chunk", "decay_order": "before_gradient", "read": "before"
    },
    "a chunk of sums": {"bias": "dot", "retention": "decay", "chunk": 3, "commit": "chunk"},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "values wider than keys": {"d_value": 48},
    "no output gate": {"output_gate": False},
    "mean squares": {"qk_norm": "rms"},
    "no norm of the layer's": {"qk_norm": "none"},
    "two taps": {"conv_kernel": 2},
    "firing": {"firing": "learned"},
}
ULP = 2.0**-52


def layer_of(config: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Memory:
    """A layer off its starting values; heads are two vectors of float64 wide."""
    options = {"d_key": 16, "d_value": 16, **options}
    config = MemoryConfig.model_validate(config)
    return shaken(Memory(32, 2, config, generator=seeded(), dtype=torch.float64, **options)).to(dtype)


def inputs(batch: int = 3, length: int = 6) -> Tensor:
    return torch.randn(batch, length, 32, generator=seeded(2))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every token that was offered to the kernel, whether it took it."""
    taken: list[bool] = []

    def counted(*given: Any) -> Any:
        found = own(*given)
        taken.append(found is not None)
        return found

    own = blocks.layer_token
    monkeypatch.setattr("hecate.nn.memory.layer_token", counted)
    return taken


def copied(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, tree)


@torch.no_grad()
def errors(layer: Memory, x: Tensor) -> float:
    """The largest error of any tensor that a token leaves, from states of the whole way, over that tensor's largest
    number."""
    state, worst = layer(x[:, :2])[1], 0.0
    written = torch.ones(len(x), 1, dtype=torch.bool)
    for t in range(2, x.shape[1]):
        token = x[:, t : t + 1]
        found, wanted = layer(token, state), layer(token, state, write_mask=written)
        assert pytree.tree_structure(found) == pytree.tree_structure(wanted)
        for got, want in zip(leaves(found), leaves(wanted), strict=True):
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            worst = max(worst, ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item())
        state = wanted[1]
    return worst


# By name: a config, options of the layer, and of tokens 2 to 5 which the kernel takes: not the one that ends a chunk.
TAKEN: dict[str, tuple[Any, dict[str, Any], list[bool]]] = {
    **{name: (config, {}, [True] * 4) for name, config in CONFIGS.items()},
    **{name: (config, {}, [False, True, True, False]) for name, config in GATHERED.items()},
    **{name: (CONFIGS["gated_delta"], options, [True] * 4) for name, options in OPTIONS.items()},
}


@pytest.mark.spec("NN-TOKEN-D1")
@pytest.mark.parametrize("name", TAKEN)
def test_a_token_is_that_of_the_whole_way(name: str, used: list[bool]):
    config, options, taken = TAKEN[name]
    # Sums of 32 numbers, twice a norm: some ten roundings of each beside each other.
    assert errors(layer_of(config, **options), inputs()) < 64 * ULP
    assert used == taken


@pytest.mark.parametrize(
    "config",
    [
        {**KEYS, "chunk": 3},
        {**KEYS, "chunk": 3, "commit": "chunk", "algorithm": "momentum"},
        {"chunk": 3, "commit": "chunk", "step": "normalized"},
    ],
    ids=str,
)
def test_other_chunks_have_no_kernel(config: Any, used: list[bool]):
    assert errors(layer_of(config), inputs()) == 0
    assert used == []


@pytest.mark.parametrize("config", ["gated_delta", "momentum"])
def test_float32(config: str, used: list[bool]):
    assert errors(layer_of(CONFIGS[config], torch.float32), inputs().float()) < 64 * 2.0**-23
    assert used == [True] * 4


@pytest.mark.spec("NN-TOKEN-D1")
@torch.no_grad()
def test_threads_share_the_memories_out_and_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    layer, x = layer_of(CONFIGS["titans_linear"]), inputs(5)
    state = layer(x[:, :2])[1]
    alone = layer(x[:, 2:3], state)
    monkeypatch.setattr(blocks, "SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(map(torch.equal, leaves(layer(x[:, 2:3], state)), leaves(alone)))


@torch.no_grad()
def test_nothing_that_was_given_is_written_into(used: list[bool]):
    layer, x = layer_of(CONFIGS["titans_linear"]), inputs()
    state = layer(x[:, :2])[1]
    before = copied((x, state, dict(layer.named_parameters())))
    layer(x[:, 2:3], state)
    assert used == [True]
    assert all(map(torch.equal, leaves((x, state, dict(layer.named_parameters()))), leaves(before)))


@pytest.mark.spec("NN-TOKEN-D1")
@torch.no_grad()
def test_what_is_not_finite_is_said_by_the_whole_way(used: list[bool]):
    layer, x = layer_of(CONFIGS["gated_delta"]), inputs()
    state = layer(x[:, :2])[1]
    for change in (
        lambda s: s.memory.memory["weight"].view(3, 2, -1)[1, 1].fill_(float("nan")),
        lambda s: s.memory.memory["weight"].view(3, 2, -1)[1, 1].fill_(float("inf")),
        lambda s: s.conv[1].fill_(float("nan")),
    ):
        broken = copied(state)
        change(broken)
        with pytest.raises(NonFiniteError, match="batch row 1"):
            layer(x[:, 2:3], broken)
    assert used == [False] * 3
    layer = layer_of(GATHERED["a chunk"])
    broken = copied(layer(x[:, :1])[1])
    broken.memory.pending["weight"].view(3, 2, -1)[2, 0, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="batch row 2, head 0"):
        layer(x[:, 1:2], broken)
    assert used == [False] * 4


@pytest.mark.spec("NN-TOKEN-D1")
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@torch.no_grad()
def test_what_the_kernel_leaves_is_not_handed_on_where_it_is_not_to_be_looked_at(value: float, used: list[bool]):
    """A key of length 0, or a sequence that is not finite, and its neighbours under on_nonfinite="propagate"."""
    layer, x = layer_of({**KEYS, "on_nonfinite": "propagate"}), inputs()
    state, token = layer(x[:, :2])[1], x[:, 2:3].clone()
    token[0], state.conv[0] = value, value
    found, wanted = layer(token, state), layer(token, state, write_mask=torch.ones(3, 1, dtype=torch.bool))
    assert used == [False]
    for got, want in zip(leaves(found), leaves(wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)


@torch.no_grad()
def test_lengths_beyond_squares_are_those_of_the_whole_way(used: list[bool]):
    layer, x = layer_of(CONFIGS["gated_delta"]), inputs()
    for size in (1e200, 0.0):
        layer.conv.weight.copy_(size * torch.ones_like(layer.conv.weight))
        assert errors(layer, x) < 64 * ULP
    assert used == [False] * 8


@pytest.mark.spec("NN-TOKEN-D1")
@torch.no_grad()
def test_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch, used: list[bool]):
    """Bits of the whole way within `exact`, under autocast, without numba, at widths that fill no vector, and for
    tensors that lie otherwise."""
    x, plain = inputs(), layer_of(CONFIGS["gated_delta"])
    with hecate.exact():
        assert errors(plain, x) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert errors(plain.float(), x.float()) == 0
    plain.double()
    assert errors(layer_of(CONFIGS["gated_delta"], d_key=12), x) == 0
    assert errors(layer_of({**KEYS, "bias": "huber"}), x) == 0
    assert used == []
    state = plain(x[:, :2])[1]
    memory = state.memory.memory["weight"].mT.contiguous().mT
    apart = state._replace(memory=state.memory._replace(memory={"weight": memory}))
    given = x[:, 2:3], {"write_mask": torch.ones(3, 1, dtype=torch.bool)}
    assert torch.equal(plain(given[0], apart)[0], plain(given[0], apart, **given[1])[0])
    assert used == [False]
    monkeypatch.setattr(blocks, "load_kernels", lambda name: None)
    assert errors(plain, x) == 0


@torch.no_grad()
def test_parts_of_gates_that_are_changed_are_called_as_they_are(used: list[bool]):
    layer, heard = layer_of(CONFIGS["gated_delta"]), []
    layer.gates.retain.register_forward_hook(lambda *_: heard.append(True))
    torch.nn.utils.parametrize.register_parametrization(layer.gates.bias, "lr", Halved())
    assert errors(layer, inputs()) < 64 * ULP
    assert used == [True] * 4
    assert len(heard) == 9


class Halved(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.spec("NN-TOKEN-D1")
@pytest.mark.parametrize("memory", ["gated_delta", "titans_linear", {**KEYS, "bias": "huber"}])
@torch.no_grad()
def test_blocks_of_a_model(memory: Any, monkeypatch: pytest.MonkeyPatch):
    sizes = {"vocab_size": 11, "d_model": 32, "layers": 2, "heads": 2, "memory": memory}
    model = LanguageModel(sizes, generator=seeded(), dtype=torch.float64)
    tokens = torch.randint(0, 11, (2, 5), generator=seeded(1))
    _, state = model(tokens[:, :3])
    found = model(tokens[:, 3:4], state)
    monkeypatch.setattr(blocks, "load_kernels", lambda name: None)
    wanted = model(tokens[:, 3:4], state)
    differ = [not torch.equal(got, want) for got, want in zip(leaves(found), leaves(wanted), strict=True)]
    assert any(differ), "no kernel ran"
    for got, want in zip(leaves(found), leaves(wanted), strict=True):
        assert (got - want).abs().max() <= 256 * ULP * want.abs().max()


@torch.no_grad()
def test_states_and_weights_of_another_shape_are_refused(used: list[bool]):
    layer, x = layer_of(CONFIGS["titans_linear"], d_key=32), inputs()
    state = layer(x[:, :2])[1]
    other = pytree.tree_map_only(Tensor, lambda item: item.mT.contiguous() if item.dim() == 4 else item, state)
    with pytest.raises(ShapeError, match="memory"):
        layer(x[:, 2:3], other)
    slots = {name: item.mT.contiguous() for name, item in state.memory.slots.items()}
    with pytest.raises(ShapeError, match="slots"):
        layer(x[:, 2:3], state._replace(memory=state.memory._replace(slots=slots)))
    assert used == [False] * 2


@torch.no_grad()
def test_states_of_other_parts_are_refused_and_numbers_elsewhere_are_not_read(used: list[bool]):
    layer, x = layer_of(CONFIGS["titans_linear"]), inputs()
    state = layer(x[:, :2])[1]
    memory, slots = state.memory.memory["weight"], state.memory.slots
    for change in (
        {"memory": {"weight": memory, "other": memory}},
        {"memory": {}},
        {"memory": {"other": memory}},
        {"memory": {"weight": None}},
        {"memory": {"weight": memory.to("meta")}},
        {"slots": {}},
        {"slots": {"other.weight": memory}},
        {"slots": {name: item.to("meta") for name, item in slots.items()}},
        {"pending": {"weight": memory}},
        {"position": None},
        {"position": state.memory.position.mT.contiguous()},
        {"normalizer": state.memory},
        {"seen": state.memory.position[:, 0]},
    ):
        with pytest.raises(ShapeError, match="state"):
            layer(x[:, 2:3], state._replace(memory=state.memory._replace(**change)))
    with pytest.raises(ShapeError, match="state.conv is on meta, x on cpu"):
        layer(x[:, 2:3], state._replace(conv=state.conv.to("meta")))
    with pytest.raises(ShapeError, match="MemoryState"):
        layer(x[:, 2:3], state._replace(memory=(memory,)))
    assert not any(used)
    turned = {"weight": torch._neg_view(-memory)}
    given = x[:, 2:3], state._replace(memory=state.memory._replace(memory=turned))
    assert torch.equal(layer(*given)[0], layer(*given, write_mask=torch.ones(3, 1, dtype=torch.bool))[0])
    assert not any(used)


@torch.no_grad()
def test_a_state_below_the_precision_of_its_config_is_widened():
    layer, x = layer_of({**KEYS, "state_dtype": "float64"}, torch.float32), inputs().float()
    state = layer(x[:, :2])[1]
    low = {"weight": state.memory.memory["weight"].float()}
    after = layer(x[:, 2:3], state._replace(memory=state.memory._replace(memory=low)))[1]
    assert after.memory.memory["weight"].dtype == torch.float64


@torch.no_grad()
def test_a_bias_that_is_no_parameter_counts(used: list[bool]):
    layer = layer_of(CONFIGS["gated_delta"])
    prune.identity(layer.gates.bias, "lr")
    assert errors(layer, inputs()) < 64 * ULP
    assert used == [True] * 4


@torch.no_grad()
def test_rows_that_fill_no_vector_go_the_whole_way():
    x = torch.randn(2, 1, 40, generator=seeded(), dtype=torch.float64)
    assert torch.equal(blocks.gated_product(blocks.token_kernels(x), x), swiglu.__wrapped__(x))


@torch.no_grad()
def test_torch_sees_every_operation_where_it_has_to():
    """Counters of operations, transforms and traces see the long way."""
    sizes = {"vocab_size": 11, "d_model": 32, "layers": 1, "heads": 2, "memory": "gated_delta"}
    model = LanguageModel(sizes, generator=seeded(), dtype=torch.float64)
    tokens = torch.randint(0, 11, (3, 4), generator=seeded(1))
    _, state = model(tokens[:, :3])
    wanted = model(tokens[:, 3:], state)[0]
    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(operation))
            return operation(*args, **(kwargs or {}))

    with Names():
        found = model(tokens[:, 3:], state)[0]
    assert (found - wanted).abs().max() < 256 * ULP * wanted.abs().max()
    assert sum("bmm" in name for name in seen) == 2
    every, layout = pytree.tree_flatten(state)
    held = {place: item.unsqueeze(1) for place, item in enumerate(every) if isinstance(item, Tensor)}

    def alone(token: Tensor, own: dict[int, Tensor]) -> Tensor:
        return model(token[None], pytree.tree_unflatten([own.get(place) for place in range(len(every))], layout))[0][0]

    assert (torch.func.vmap(alone)(tokens[:, 3:], held) - wanted).abs().max() < 256 * ULP * wanted.abs().max()


@pytest.mark.spec("NN-TOKEN-D1")
@torch.no_grad()
def test_few_tokens_go_one_by_one(used: list[bool], monkeypatch: pytest.MonkeyPatch):
    layer, x = layer_of(CONFIGS["titans_linear"]), inputs()
    state = layer(x[:, :2])[1]
    first, after = layer(x[:, 2:3], state)
    second, last = layer(x[:, 3:4], after)
    found = layer(x[:, 2:4], state)
    assert used == [True] * 4
    assert all(map(torch.equal, leaves(found), leaves((torch.cat((first, second), 1), last))))
    layer(torch.cat((x, x), 1)[:, 2:9], state)
    with torch.enable_grad():
        assert layer(x[:, 2:4], state)[0].requires_grad
    with hecate.exact():
        layer(x[:, 2:4], state)
    monkeypatch.setattr(blocks, "load_kernels", lambda name: None)
    layer(x[:, 2:4], state)
    assert used == [True] * 4
