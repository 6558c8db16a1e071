"""Building a layer: draws, names, sizes, refusals and warnings."""

import inspect
import warnings
from functools import partial

import pytest
import torch

from hecate import named_rule
from hecate.cms import LevelConfig, SelfReferential
from hecate.errors import ConfigError, ShapeError, StabilityWarning
from hecate.models import LanguageModelConfig
from hecate.nn import Memory, SlidingAttention
from tests.nn.layers import inputs, layer_of, near, seeded

RANDOM = {"kind": "random_fourier", "d_phi": 8}
MIXED = {
    "structure": {"kind": "mlp", "expansion": 1},
    "feature_map": {"kind": "compose", "maps": [{"kind": "linear", "d_phi": 3}, RANDOM]},
    "algorithm": {"kind": "momentum", "lr": 0.1},
    "retention": "decay",
}


def built(seed=0, config=MIXED, **options):
    return Memory(12, 2, config, generator=seeded(seed), **options)


def same(a, b):
    mine, theirs = a.state_dict(), b.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.spec("NN-MEM-I5", "NN-MEM-I7")
def test_a_layer_of_the_meta_device_is_drawn_late():
    with torch.device("meta"):
        late = built()
    late.to_empty(device="cpu").reset_parameters(seeded())
    assert same(late, built())
    near(late(inputs())[0], built()(inputs())[0], 0.0)


@pytest.mark.spec("NN-MEM-I5")
@pytest.mark.parametrize(
    "rule",
    ["mamba2", "rwkv7", "mlstm", {"feature_map": "hedgehog"}, {"feature_map": "polynomial", "key_norm": "l2"}],
    ids=str,
)
def test_a_layer_of_a_device_of_its_own_is_drawn_there_whatever_the_default(rule):
    with torch.device("meta"):
        layer = built(config=rule, device="cpu")
    assert same(layer, built(config=rule))


@pytest.mark.spec("NN-MEM-I5")
def test_without_a_generator_torch_s_own_is_used():
    layers = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        layers.append(Memory(12, 2, MIXED))
    assert same(layers[0], layers[1])
    assert not same(layers[1], layers[2])
    assert same(layers[0], Memory(12, 2, MIXED, generator=torch.Generator().manual_seed(3)))


@pytest.mark.spec("NN-MEM-I5")
def test_two_layers_of_one_generator_differ_in_every_draw():
    generator = seeded()
    one, two = (Memory(12, 2, MIXED, generator=generator).state_dict() for _ in range(2))
    constant = {name for name in one if torch.equal(one[name], two[name])}
    assert constant == {"norm"} | {name for name in one if name.startswith("gates.")}


@pytest.mark.spec("NN-MEM-I5")
def test_parameters_may_be_loaded_onto_meta():
    layer = built(device="meta")
    layer.load_state_dict(built(5).state_dict(), assign=True)
    assert same(layer, built(5))
    near(layer(inputs())[0], built(5)(inputs())[0], 0.0)


@pytest.mark.spec("NN-MEM-I7")
def test_names_of_parameters_and_buffers():
    layer = built()
    gates = ["lr", "momentum", "retain"]
    assert {name for name, _ in layer.named_buffers()} == {"phi_frozen.1__w", "phi_frozen.1__b"}
    assert sorted(name for name, _ in layer.named_parameters()) == sorted(
        [
            "norm",
            "qkv.weight",
            "conv.weight",
            *(f"gates.weight.{name}" for name in gates),
            *(f"gates.bias.{name}" for name in gates),
            "output_gate.weight",
            "out.weight",
            "phi_learned.0__weight",
            "initial.w1",
            "initial.w2",
        ]
    )
    plain = Memory(12, 2, conv_kernel=0, output_gate=False, learned_initial=False)
    assert sorted(plain.state_dict()) == sorted(
        ["gates.bias.lr", "gates.weight.lr", "initial.weight", "norm", "out.weight", "qkv.weight"]
    )
    assert [name for name, _ in plain.named_buffers()] == ["initial.weight"]


@pytest.mark.spec("NN-MEM-I7")
def test_state_dict_crosses_dtypes():
    narrow = built(1, dtype=torch.bfloat16)
    narrow.load_state_dict(built().state_dict(), strict=True)
    assert {item.dtype for item in narrow.state_dict().values()} == {torch.bfloat16}
    assert same(narrow, built(dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="phi_frozen"):
        Memory(12, 2, {"retention": "decay"}).load_state_dict(built().state_dict())


def test_repr_names_the_rule_and_the_sizes():
    assert built().extra_repr() == (
        "12, heads=2, d_key=6, d_value=6, structure=mlp, bias=l2, retention=decay, "
        "algorithm=momentum, feature_map=compose"
    )


@pytest.mark.spec("NN-MEM-D3")
def test_qk_norm_is_the_rules_where_it_is_left_out():
    gsa, delta = named_rule("gsa"), named_rule("delta")
    assert [Memory(12, 2, rule).qk_norm for rule in (gsa, "gsa", gsa.model_copy(), delta)] == ["none"] * 3 + ["l2"]
    assert Memory(12, 2, gsa, qk_norm="l2").qk_norm == "l2"
    assert LanguageModelConfig(memory=gsa).model_copy(update={"memory": delta}).qk_norm == "l2"
    assert LanguageModelConfig(memory=gsa, qk_norm="rms").model_copy(update={"memory": delta}).qk_norm == "rms"
    held = Memory(12, 2, delta, feature_memory="linear_attention")
    assert held.qk_norm == "l2" and held.feature_memory.config.layer_qk_norm is None
    assert "layer_qk_norm" not in delta.model_dump() and '"layer_qk_norm":"none"' in gsa.model_dump_json()
    with pytest.raises(ConfigError, match="layer_qk_norm: 'rms': a feature memory stands behind the qk_norm of its"):
        Memory(12, 2, feature_memory={"layer_qk_norm": "rms"})


@pytest.mark.spec("NN-MEM-D3")
def test_convolution_and_activation_are_the_rules_where_they_are_left_out():
    raven, delta = named_rule("raven"), named_rule("delta")
    own = Memory(12, 2, raven)
    assert own.conv is None and own.activation and own.qk_norm == "rms"
    assert Memory(12, 2, delta).conv.kernel == 4 and Memory(12, 2, delta).conv.activation
    assert not Memory(12, 2, delta, conv_kernel=0).activation
    given = Memory(12, 2, raven, conv_kernel=3)
    assert given.conv.kernel == 3 and given.conv.activation and not given.activation
    plain = Memory(12, 2, "hebbian")
    assert not plain.conv.activation and plain.gates(inputs()).lr is None
    assert LanguageModelConfig(memory=raven).conv_kernel == 0
    assert LanguageModelConfig(memory=raven).model_copy(update={"memory": delta}).conv_kernel == 4
    assert LevelConfig(name="a", memory=raven, conv_kernel=2).conv_kernel == 2
    assert '"layer_conv_kernel":0,"layer_activation":"silu"' in raven.model_dump_json()
    assert not [name for name in delta.model_dump() if name.startswith("layer_") and name != "layer_v_norm"]
    assert named_rule("delta", layer_conv_kernel=2) != delta
    with pytest.raises(ConfigError, match="layer_conv_kernel: must be 0 .none. or at least 2, got 1"):
        named_rule("delta", layer_conv_kernel=1)
    with pytest.raises(ConfigError, match="layer_activation: 'silu': a feature memory stands behind the activation"):
        Memory(12, 2, feature_memory={"layer_activation": "silu"})


@pytest.mark.spec("NN-MEM-D3")
def test_a_config_that_names_no_field_of_a_layer_has_the_layer_it_always_had():
    """As files of earlier versions spell out what a rule's name stood for: unit keys, an lr gate, four taps, SiLU."""
    before = {"structure": "matrix", "bias": "dot", "retention": "none", "algorithm": "gd", "feature_map": "identity"}
    layer = Memory(12, 2, before)
    assert layer.qk_norm == "l2" and layer.conv.kernel == 4 and layer.conv.activation
    assert list(layer.gates.weight) == ["lr"] and layer.gating is None


BUILDS = {
    "heads must be an integer >= 1, got True": {"heads": True},
    "d_model must be an integer >= 1, got '12'": {"d_model": "12"},
    "d_key must be an integer >= 1, got 0": {"d_key": 0},
    "d_value must be an integer >= 1, got -1": {"d_value": -1},
    "d_model=12 is not divisible by heads=5": {"heads": 5},
    "conv_kernel: must be 0 .none. or at least 2, got 1": {"conv_kernel": 1},
    "qk_norm must be one of .*, got 'L2'": {"qk_norm": "L2"},
    "unknown engine 'fast'. Known: ": {"engine": "fast"},
    "autodiff must be one of .*, got 'jax'": {"autodiff": "jax"},
    "query_projection must be one of .*, got 'mean'": {"query_projection": "mean"},
    "cannot run this memory exactly": {"engine": "parallel", "config": MIXED},
    "unknown rule 'delt'": {"config": "delt"},
    "instance of MemoryConfig, got 7": {"config": 7},
    "unknown field": {"config": {"retention_": "decay"}},
    "generator must be a torch.Generator on the CPU.*got 3": {"generator": 3},
    "width": {"config": {"structure": {"kind": "mlp", "residual": True}}, "d_value": 5},
}


@pytest.mark.spec("NN-MEM-I8")
def test_builds_that_are_refused():
    for message in BUILDS:
        with pytest.raises(ConfigError, match=message):
            Memory(**{"d_model": 12, "heads": 2, **BUILDS[message]})


def refused_calls():
    """What is said, the input, and a state or masks."""
    layer, x, ones = built(), inputs(), torch.ones(2, 7, dtype=torch.bool)
    _, state = layer(x)

    def of(**options):
        return built(**options)(x)[1]

    return {
        r"x must be \[B, T, 12\], got \[2, 7, 11\]": (inputs(width=11), {}),
        r"x must be \[B, T, 12\], got \[7, 12\]": (x[0], {}),
        "x is torch.int64, the layer torch.float64": (x.long(), {}),
        "x is on meta, the layer on cpu": (x.to("meta"), {}),
        r"write_mask must be bool .*\[2, 7\].*got torch.float32 \[2, 7\]": (x, {"write_mask": ones.float()}),
        r"reset_mask must be bool .*\[2, 7\].*got torch.bool \[2, 6\]": (x, {"reset_mask": ones[:, :6]}),
        "write_mask must be bool .* on cpu, got .* on meta": (x, {"write_mask": ones.to("meta")}),
        r"state.conv must be \[3, 3, 36\].*3 sequences, got \[2, 3, 36\]": (inputs(3), {"state": state}),
        r"state.conv must be \[2, 3, 36\].*got \[2, 1, 36\]": (x, {"state": of(conv_kernel=2)}),
        "state.conv must be .*got None": (x, {"state": of(conv_kernel=0)}),
        "state.conv is on meta, x on cpu": (x, {"state": state.to("meta")}),
        r"state.gating\['moved'\] must be None .*got \[2, 2, 6\]": (
            x, {"state": state._replace(gating={"moved": torch.zeros(2, 2, 6)})}
        ),
        "got MemoryState": (x, {"state": state.memory}),
        r"state.memory must hold \['w1', 'w2'\], got \['weight'\]": (x, {"state": of(config={"retention": "decay"})}),
    }  # fmt: skip


@pytest.mark.spec("NN-MEM-I8")
def test_calls_that_are_refused():
    """The whole input; and of the state, one token without gradients, too."""
    layer = built()
    for message, (x, given) in refused_calls().items():
        with pytest.raises(ShapeError, match=message):
            layer(x, **given)
        if "state" in given:
            with torch.no_grad(), pytest.raises(ShapeError, match=message):
                layer(x[:, :1], **given)


@pytest.mark.spec("NN-MEM-I8")
@pytest.mark.parametrize("gating", ["hypergradient", "mamba3"])
def test_what_a_gating_carries_is_checked(gating):
    config = "mamba3" if gating == "mamba3" else {"kind": "delta", "gating": gating}
    layer, x = Memory(16, 2, config, conv_kernel=0), torch.randn(2, 7, 16)
    _, state = layer(x)
    first = next(iter(state.gating))
    alone = {name: item[:1] for name, item in state.gating.items()}
    for carried, message in ((alone, r"got \[1, "), (None, "got None"), ({}, "got None")):
        with pytest.raises(ShapeError, match=rf"state.gating\['{first}'\] must be \[2, .*{message}"):
            layer(x, state._replace(gating=carried))
    moved = {name: item.to("meta") for name, item in state.gating.items()}
    with pytest.raises(ShapeError, match=rf"state.gating\['{first}'\] is on meta, x on cpu"):
        layer(x, state._replace(gating=moved))


@pytest.mark.spec("NN-MEM-I8")
def test_a_state_on_another_device_is_refused():
    for kind in (partial(SlidingAttention, window=4), SelfReferential):
        layer, x = kind(16, 2), torch.randn(2, 7, 16)
        with pytest.raises(ShapeError, match=r"state\..* is on meta, x on cpu; move them together"):
            layer(x, layer(x)[1].to("meta"))


def test_a_convolution_s_state_is_refused_where_there_is_none():
    with pytest.raises(ShapeError, match="state.conv must be None"):
        built(conv_kernel=0)(inputs(), built()(inputs())[1])


@pytest.mark.spec("NN-MEM-I9")
def test_warns_of_a_step_that_may_diverge():
    with pytest.warns(StabilityWarning) as caught:
        Memory(64, 2, {"feature_map": "elu"}, generator=seeded(), name="layer 3")
    text = str(caught[0].message)
    # phi(k) = 1 + k up to the curve of exp: 32 + 2 sum(k) + 1, and |sum(k)| <= sqrt(32).
    largest = float(text.split("reaches ")[1].split()[0])
    assert 33 < largest < 33 + 2 * 32**0.5
    assert all(part in text for part in ("'layer 3'", "lr=1 ", "'elu'", "beyond 2", "key_norm"))
    assert caught[0].filename == inspect.getfile(inspect.currentframe())
    with pytest.warns(StabilityWarning):
        layer = Memory(64, 2, {"feature_map": "elu"}, device="meta").to_empty(device="cpu")
        layer.reset_parameters(seeded())


@pytest.mark.spec("NN-MEM-I9")
def test_is_silent_where_the_step_is_safe():
    for fields in (
        {"key_norm": "l2"},
        {"key_norm": "sum"},
        {"step": "normalized"},
        {"step": "implicit"},
        {"algorithm": {"kind": "gd", "lr": 0.04}},
        {"bias": "dot"},
        {"feature_map": "identity"},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Memory(64, 2, {"feature_map": "elu", **fields})


@pytest.mark.spec("NN-MEM-I9")
def test_the_warning_tells_the_truth():
    """One key written again and again at the gate's ceiling grows; with key_norm it does not."""
    sizes = {}
    for norm in ("none", "l2"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StabilityWarning)
            layer = layer_of({"feature_map": "elu", "key_norm": norm}, shake=0.0, d_key=32)
        with torch.no_grad():
            layer.gates.bias["lr"].fill_(20.0)
        _, state = layer(inputs(1, 1).expand(1, 12, 12))
        sizes[norm] = float(state.memory.memory["weight"].detach().norm())
    assert sizes["none"] > 1e9 and sizes["l2"] < 100
