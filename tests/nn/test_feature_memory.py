"""A layer whose features are a memory: the layer's promises, and that it learns."""

import warnings

import pytest
import torch

from hecate.engine import memory_features, memory_scan
from hecate.errors import ConfigError, ShapeError, StabilityWarning
from hecate.models import LanguageModelConfig
from hecate.nn import Memory, normalise_qk
from tests.nn.layers import inputs, layer_of, near, seeded

OUTER = {"retention": "decay", "key_norm": "l2"}
INNERS = {
    "delta": {"retention": "decay"},
    "momentum": {"bias": "dot", "algorithm": "momentum", "key_norm": "l2"},
    "deep": {
        "structure": {"kind": "mlp", "expansion": 1},
        "algorithm": {"kind": "gd", "lr": 0.1},
        "chunk": 2,
        "feature_map": {"kind": "linear", "d_phi": 4},
    },
    "placed": {"feature_map": {"kind": "cosformer", "max_length": 50}, "key_norm": "l2"},
}
LENGTH = 7
every = pytest.mark.parametrize("inner", INNERS)


def built(inner, **options):
    return layer_of(OUTER, feature_memory=INNERS[inner], **options)


@pytest.mark.spec("NN-FEAT-D1")
@every
def test_is_two_scans_written_out(inner):
    layer, x = built(inner, conv_kernel=0, output_gate=False), inputs()
    q, k, v = (part.unflatten(-1, (2, -1)) for part in layer.qkv(x).split(layer.splits, -1))
    q, k = normalise_qk(q, "l2"), normalise_qk(k, "l2")
    part = layer.feature_memory
    own = {"phi_params": part.phi_params, "initial": part.initial.tensors}
    phi_q, phi_k, state = memory_features(part.config, q, k, k, part.gates(x), **own)
    phi_q, phi_k = normalise_qk(phi_q, "l2"), normalise_qk(phi_k, "l2")
    y, memory = memory_scan(layer.config, phi_q, phi_k, v, layer.gates(x), initial=layer.initial.tensors)
    y = torch.nn.functional.rms_norm(y, (y.shape[-1],), eps=1e-6) * layer.norm
    expected, after = layer(x)
    near(layer.out(y.flatten(-2)), expected)
    near(after.features, state)
    near(after.memory, memory)


@pytest.mark.spec("NN-FEAT-I1")
@pytest.mark.parametrize("inner", ["delta", "momentum"])
def test_matrices_start_at_zero_so_that_the_first_token_finds_q_and_k_unchanged(inner):
    plain, layer = (layer_of(OUTER, feature_memory=f, shake=0.0) for f in (None, {**INNERS[inner], "read": "before"}))
    near(layer(inputs())[0][:, :1], plain(inputs())[0][:, :1], 1e-10)


@pytest.mark.spec("NN-FEAT-I1")
def test_names():
    own = [name for name, _ in built("delta").named_parameters() if name.startswith("feature_memory.")]
    ends = ["gates.bias.lr", "gates.bias.retain", "gates.weight.lr", "gates.weight.retain"]
    assert sorted(own) == [f"feature_memory.{name}" for name in (*ends, "initial.weight")]


@pytest.mark.spec("NN-FEAT-I1")
def test_what_does_not_fit_is_refused():
    with_it, without = built("delta"), layer_of(OUTER)
    _, state = with_it(inputs())
    with pytest.raises(ShapeError, match=r"state\.features is a state, but this layer has no"):
        without(inputs(), state)
    with pytest.raises(ShapeError, match=r"state\.features is None, but this layer has a feature"):
        with_it(inputs(), without(inputs())[1])
    with pytest.raises(ConfigError, match="cannot run this memory exactly"):
        Memory(12, 2, OUTER, feature_memory=INNERS["deep"], engine="parallel")
    with pytest.raises(ConfigError, match="feature_memory"):
        LanguageModelConfig(feature_memory={"feature_map": {"kind": "tensor_product", "maps": ["identity"] * 4}})
    with pytest.warns(StabilityWarning, match=r"'m \(features\)'.*'elu'"):
        Memory(64, 2, OUTER, feature_memory={"feature_map": "elu"}, name="m", generator=seeded())
    with warnings.catch_warnings():  # an outer delta rule without key_norm stays safe behind it
        warnings.simplefilter("error")
        Memory(12, 2, {}, feature_memory={}, generator=seeded())
