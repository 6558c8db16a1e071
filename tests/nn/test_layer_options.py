"""Options of the layer around a memory against a reference of the whole layer in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hecate import MemoryConfig
from hecate.errors import ConfigError
from hecate.nn import Memory
from tests.nn.layers import in_pieces, seeded, shaken
from tests.nn.test_one_token import tokens_beside_the_whole_way

D_MODEL, HEADS, D_KEY, D_VALUE, TOKENS = 12, 4, 6, 5, 9
RULE: dict[str, Any] = {
    "retention": "decay",
    "decay_order": "before_gradient",
    "query_scale": "key_dim",
    "algorithm": {"kind": "gd", "lr": 0.9},
    "state_dtype": "float64",
}
BOUNDED = {"kind": "decay", "gate": "bounded", "lowest": -2.0}
AFTER = {"gate": "sigmoid", "norm": {"place": "after_gate", "over": "all"}}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "key_heads": {"key_heads": 2},
    "one key": {"key_heads": 1, "conv": {"on": "qk"}},
    "qk_eps": {"qk_eps": 0.1},
    "conv bias": {"conv": {"bias": True}},
    "conv on qk": {"conv": {"bias": True, "on": "qk"}},
    "sigmoid": {"output": {"gate": "sigmoid", "rank": 3}},
    "gate bias": {"output": {"rank": 2, "bias": True}},
    "no gate": {"output": {"gate": "none"}},
    "norm": {"output": {"norm": {"eps": 0.2, "weight": "shared"}}},
    "all heads": {"output": {"norm": {"over": "all"}}},
    "after the gate": {"output": {"norm": {"place": "after_gate"}}},
    "after, all heads": {"output": AFTER},
    "all shared": {"output": {"norm": {"over": "all", "weight": "shared"}}},
    "lr without bias": {"lr_bias": False},
}


def layer_of(options: dict[str, Any] | None = None, rule: dict[str, Any] | None = None, **layer: Any) -> Memory:
    config = {**RULE, **(rule or {}), "layer_options": options}
    sizes: dict[str, Any] = {"d_key": D_KEY, "d_value": D_VALUE, "dtype": torch.float64, "generator": seeded()}
    made: Memory = shaken(Memory(D_MODEL, HEADS, config, **{**sizes, **layer}))
    return made


def tokens(seed: int = 2) -> Tensor:
    return torch.randn(2, TOKENS, D_MODEL, generator=seeded(seed), dtype=torch.float64)


def reference(layer: Memory, x: Tensor, options: dict[str, Any], *, bounded: bool = False) -> Tensor:
    """The layer's formulas from its parameters, a token and a head at a time."""
    p = dict(layer.named_parameters())
    groups, conv = options.get("key_heads", HEADS), options.get("conv", {})
    out = options.get("output", {})
    norm, eps = out.get("norm", {}), options.get("qk_eps", 1e-12)
    rows = x @ p["qkv.weight"].T
    mixed = rows.new_zeros(rows.shape)
    channels = p["conv.weight"].shape[1]
    assert channels == (2 * groups * D_KEY if conv.get("on") == "qk" else rows.shape[-1])
    for t in range(TOKENS):
        total = sum(p["conv.weight"][j] * rows[:, t - j, :channels] for j in range(min(t + 1, 4)))
        total = total + p.get("conv.bias", 0.0)
        mixed[:, t] = torch.cat([total * torch.sigmoid(total), rows[:, t, channels:]], -1)
    q, k, v = mixed.split([groups * D_KEY, groups * D_KEY, HEADS * D_VALUE], -1)
    lr = 0.9 * torch.sigmoid(x @ p["gates.weight.lr"].T + p.get("gates.bias.lr", 0.0))
    logit = x @ p["gates.weight.retain"].T + p["gates.bias.retain"]
    retain = torch.sigmoid(logit)
    if bounded:
        retain = torch.exp(-2.0 * torch.sigmoid(p["gates.retain.rate"].exp() * logit))
    answers = []
    for head in range(HEADS):
        own = head * groups // HEADS  # keys serve heads that follow one another
        q1, k1 = (z[..., own * D_KEY : (own + 1) * D_KEY] for z in (q, k))
        q1, k1 = (z / torch.sqrt((z * z).sum(-1, keepdim=True) + eps) for z in (q1, k1))
        v1, memory = v[..., head * D_VALUE : (head + 1) * D_VALUE], p["initial.weight"][head].expand(2, -1, -1)
        found = []
        for t in range(TOKENS):
            memory = retain[:, t, head, None, None] * memory
            error = v1[:, t] - torch.einsum("bvk,bk->bv", memory, k1[:, t])
            memory = memory + lr[:, t, head, None, None] * torch.einsum("bv,bk->bvk", error, k1[:, t])
            found.append(torch.einsum("bvk,bk->bv", memory, q1[:, t]) * D_KEY**-0.5)
        answers.append(torch.stack(found, 1))
    y = torch.stack(answers, 2)
    gate = torch.ones_like(y)
    if out.get("gate") != "none":
        seen = x @ p["gate_down.weight"].T if "rank" in out else x
        gate = seen @ p["output_gate.weight"].T + p.get("output_gate.bias", 0.0)
        gate = (torch.sigmoid(gate) * (1 if out.get("gate") == "sigmoid" else gate)).view(y.shape)
    after = norm.get("place") == "after_gate"
    y = y * gate if after else y
    mean = y.square().mean((-1, -2) if norm.get("over") == "all" else -1, keepdim=True)
    y = y / torch.sqrt(mean + norm.get("eps", 1e-6)) * p["norm"]
    return (y if after else y * gate).flatten(-2) @ p["out.weight"].T


def close(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):  # sums of some hundred numbers in float64
        assert (a - b).norm() <= 1e-12 * b.norm() and b.norm() > 1e-3


@pytest.mark.spec("NN-OPT-D1")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str):
    options = CASES[name]
    layer, x = layer_of(options or None), tokens().requires_grad_()
    learned = [x, *layer.parameters()]
    found, wanted = layer(x)[0], reference(layer, x, options)
    close([found], [wanted])
    g = tokens(3)
    close(torch.autograd.grad(found, learned, g), torch.autograd.grad(wanted, learned, g))


@pytest.mark.spec("NN-GATE-D2")
def test_the_bounded_decay():
    layer, x = layer_of({}, {"retention": BOUNDED}), tokens().requires_grad_()
    learned = [x, *layer.parameters()]
    found, wanted = layer(x)[0], reference(layer, x, {}, bounded=True)
    close([found], [wanted])
    close(torch.autograd.grad(found, learned, x), torch.autograd.grad(wanted, learned, x))
    fresh = Memory(8, 2, {"retention": {**BOUNDED, "retain": 0.95}})
    assert torch.allclose(fresh.gates(torch.zeros(1, 1, 8)).retain, torch.tensor(0.95))
    heads = Memory(8, 2, {"retention": {**BOUNDED, "retain": [0.5, 0.9]}})
    assert torch.allclose(heads.gates(torch.zeros(1, 1, 8)).retain, torch.tensor([0.5, 0.9]))


@pytest.mark.spec("NN-GATE-D2")
@pytest.mark.parametrize("lowest", [-0.1, -5.0, -200.0, -1e4, -1e20])
def test_a_bounded_decay_starts_where_it_is_told(lowest):
    for retain in (0.99, 0.9999):
        made = Memory(8, 2, {"retention": {"kind": "decay", "gate": "bounded", "lowest": lowest, "retain": retain}})
        kept = made.gates(torch.zeros(1, 1, 8, dtype=torch.float64)).retain
        assert torch.allclose(kept, torch.tensor(retain, dtype=torch.float64), rtol=0, atol=(1 - retain) * 1e-4)
    fresh = Memory(8, 2, {"retention": {"kind": "decay", "gate": "bounded", "lowest": lowest, "retain": 1.0}})
    assert (fresh.gates(torch.zeros(1, 1, 8)).retain < 1).all()  # from where it can be left
    with pytest.raises(ConfigError, match=r"retain: 0.\d+ is not above exp\(lowest\) = 0.9.*lower lowest=-0.1"):
        MemoryConfig(retention={"kind": "decay", "gate": "bounded", "lowest": -0.1, "retain": (0.99, 0.5)})
    usual = MemoryConfig(retention={"kind": "decay", "gate": "bounded", "lowest": -1e-3})
    assert MemoryConfig(**usual.model_dump()) == usual


@pytest.mark.spec("NN-OPT-D1")
def test_a_rectified_momentum_is_zero_at_zero_and_learns():
    rule = {"algorithm": {"kind": "momentum", "lr": 0.9, "momentum": 0.0}}
    sizes: dict[str, Any] = {"d_key": D_KEY, "d_value": D_VALUE, "dtype": torch.float64, "generator": seeded()}
    made = Memory(D_MODEL, HEADS, {**RULE, **rule, "layer_options": {"momentum": "rectified"}}, **sizes)
    plain = Memory(D_MODEL, HEADS, RULE, **{**sizes, "generator": seeded()})
    assert made.load_state_dict(plain.state_dict(), strict=False).missing_keys == [
        "gates.weight.momentum", "gates.bias.momentum"
    ]  # fmt: skip
    x = tokens()
    y = made(x)[0]
    close([y], [plain(x)[0]])
    y.square().sum().backward()
    for part in (made.gates.weight, made.gates.bias):
        assert part["momentum"].grad.abs().min() > 0
    bias, shown = made.gates.bias["momentum"], torch.tensor([0.0, 0.0, 0.1, 0.5], dtype=torch.float64)
    with torch.no_grad():
        bias.copy_(torch.tensor([-0.5, -0.1, 0.1, 0.5]))
    gate = made.gates(x).momentum
    assert torch.equal(gate, torch.tanh(shown).expand_as(gate))
    slope = torch.autograd.grad(gate[0, 0].sum(), bias)[0]
    assert torch.allclose(slope, 1 - torch.tanh(bias.detach()) ** 2)  # a gate that was pushed below 0 can come back
    started = Memory(8, 2, {"algorithm": "momentum", "layer_options": {"momentum": "rectified"}})
    assert torch.allclose(started.gates(torch.ones(1, 1, 8)).momentum, torch.tensor(0.9))


@pytest.mark.spec("NN-OPT-D1")
def test_later_writes_of_a_rectified_lr_start_at_none():
    sizes: dict[str, Any] = {"d_key": D_KEY, "d_value": D_VALUE, "dtype": torch.float64}
    made = Memory(D_MODEL, HEADS, {**RULE, "writes": 3, "layer_options": {"later_writes": "rectified"}}, **sizes)
    assert torch.equal(
        made.gates(tokens()).lr, torch.tensor([0.45, 0, 0], dtype=torch.float64).view(3, 1).expand(2, TOKENS, 3, 4)
    )
    with torch.no_grad():
        made.gates.bias["lr"].copy_(torch.linspace(-2, 2, 3 * HEADS))
    logit = made.gates.bias["lr"].detach()
    wanted = 0.9 * torch.cat([torch.sigmoid(logit[:HEADS]), torch.tanh(logit[HEADS:]).clamp(min=0)])
    assert torch.allclose(made.gates(tokens()).lr[0, 0].flatten(), wanted)
    made(tokens())[0].square().sum().backward()
    assert made.gates.weight["lr"].grad.abs().min() > 0


@pytest.mark.parametrize("name", CASES)
def test_pieces_and_single_tokens(name: str):
    layer, x = layer_of(CASES[name] or None), tokens()
    whole = layer(x)[0]
    close([in_pieces(layer, x, [1, 4, 5])[0]], [whole])
    with torch.no_grad():
        assert tokens_beside_the_whole_way(layer, x[:, :4]) == 3
        close([in_pieces(layer, x, [*range(1, TOKENS)])[0]], [whole])


def test_single_tokens_of_a_bounded_decay_and_other_gates():
    with torch.no_grad():
        assert tokens_beside_the_whole_way(layer_of({"lr_bias": False}, {"retention": BOUNDED}), tokens()[:, :4]) == 3
        momentum = {"algorithm": {"kind": "momentum", "momentum": 0.5}}
        layer = layer_of({"momentum": "rectified", "key_heads": 2}, momentum)
        assert tokens_beside_the_whole_way(layer, tokens()[:, :4]) == 3


def test_keys_are_shared_by_several_writes_features_and_gatings():
    x = tokens()
    for rule, options in (
        ({"writes": 2}, {}),
        ({"gating": {"kind": "heads", "erase": {"channels": True}}}, {}),
        ({}, {"feature_memory": {}}),
    ):
        shared, own = layer_of({"key_heads": 2}, rule, **options), layer_of({}, rule, **options)
        with torch.no_grad():  # the same numbers, each key twice
            for name, p in own.named_parameters():
                theirs = dict(shared.named_parameters())[name]
                if p.shape == theirs.shape:
                    p.copy_(theirs)
            for mine, theirs in ((own.qkv.weight, shared.qkv.weight), (own.conv.weight.T, shared.conv.weight.T)):
                parts = zip(mine.split(own.splits), theirs.split(shared.splits), strict=True)
                for full, part in list(parts)[:2]:
                    full.copy_(part.unflatten(0, (-1, 2, D_KEY)).repeat_interleave(2, 1).reshape(full.shape))
                mine.split(own.splits)[2].copy_(theirs.split(shared.splits)[2])
        close([shared(x)[0]], [own(x)[0]])


def test_without_options_a_layer_is_what_it_was():
    plain, given = (
        Memory(12, 2, "kda", generator=seeded()),
        Memory(12, 2, {"kind": "kda", "layer_options": {}}, generator=seeded()),
    )
    x = torch.randn(2, 5, 12, generator=seeded(1))
    assert plain.state_dict().keys() == given.state_dict().keys()
    assert torch.equal(plain(x)[0], given(x)[0])
    assert "layer_options" not in MemoryConfig().model_dump()
    config = MemoryConfig(layer_options={"key_heads": 2, "output": {"gate": "sigmoid"}})
    assert MemoryConfig.model_validate_json(config.model_dump_json()) == config


REFUSED: dict[str, dict[str, Any]] = {
    "layer_options.key_heads: 3 does not divide heads=4": {"options": {"key_heads": 3}},
    "layer_options.conv: conv_kernel=0": {"options": {"conv": {"bias": True}}, "conv_kernel": 0},
    "layer_options.qk_eps: 1e-06 belongs to .* qk_norm is 'none'": {"options": {"qk_eps": 1e-6}, "qk_norm": "none"},
    "layer_options.output.gate: output_gate=False": {"options": {"output": {"gate": "silu"}}, "output_gate": False},
    "layer_options.output.rank: output_gate=False": {"options": {"output": {"rank": 2}}, "output_gate": False},
    "layer_options.output.norm: there is no output gate": {
        "options": {"output": {"gate": "none", "norm": {"place": "after_gate"}}}
    },
    "layer_options.lr_bias: False: .* start at 0.05": {
        "options": {"lr_bias": False}, "rule": {"algorithm": "momentum"}
    },
    "layer_options.lr_bias: False: gating 'heads' has no lr": {
        "options": {"lr_bias": False}, "rule": {"gating": {"kind": "heads", "lr": False, "erase": {}}}
    },
    "layer_options.later_writes: 'rectified': writes=1 with gating 'none' has no": {
        "options": {"later_writes": "rectified"}
    },
    "layer_options.momentum: 'rectified': algorithm 'gd' has no momentum": {"options": {"momentum": "rectified"}},
    "retention.lowest: -3 bounds": {"options": {}, "rule": {"retention": {"kind": "decay", "lowest": -3}}},
}  # fmt: skip


def test_what_does_not_fit_is_refused():
    for words, fields in REFUSED.items():
        with pytest.raises(ConfigError, match=words):
            layer_of(**fields)


def test_parts_without_a_layer_of_their_own_refuse_them():
    from hecate.cms import SelfReferenceConfig

    with pytest.raises(ConfigError, match=r"layer_options.*: a feature memory stands behind the options"):
        Memory(12, 2, feature_memory={"layer_options": {"qk_eps": 1e-6}})
    with pytest.raises(ConfigError, match=r"memory.layer_options: boxes make q, k, v"):
        SelfReferenceConfig(memory={"retention": "decay", "layer_options": {}})
