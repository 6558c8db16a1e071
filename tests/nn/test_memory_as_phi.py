"""phi is a memory and nothing else: residual=False, of a width of its own."""

import numpy as np
import pytest
import torch
import yaml

from hecate import MemoryConfig
from hecate.cms import CMS, SelfReferential
from hecate.engine import memory_features
from hecate.errors import ConfigError, ShapeError
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.nn import FeatureMemoryConfig, Memory
from tests.nn.layers import D_KEY, HEADS, in_pieces, inputs, layer_of, near, seeded

OUTER = {"retention": "decay", "key_norm": "l2"}
INNERS = {
    "wide": {"retention": "decay", "d_value": 9},
    "narrow": {"bias": "dot", "algorithm": "momentum", "key_norm": "l2", "d_value": 4},
    "alike": {"kind": "delta", "read": "before"},
    "deep": {
        "structure": {"kind": "mlp", "expansion": 1},
        "algorithm": {"kind": "gd", "lr": 0.1},
        "chunk": 2,
        "d_value": 5,
    },
}
every = pytest.mark.parametrize("inner", INNERS)


def built(inner, **options):
    return layer_of(OUTER, feature_memory={**INNERS[inner], "residual": False}, **options)


def unit(z):
    return z / np.sqrt(z @ z + 1e-12)


@pytest.mark.spec("NN-FEAT-D2", "ENG-FEAT-D1")
@pytest.mark.parametrize("read", ["after", "before"])
def test_against_a_loop(read):
    """Token by token in numpy: M is written with (k, U k) and read at q and k, then the outer."""
    inner = {"kind": "delta", "key_norm": "none", "retention": "decay", "read": read, "d_value": 9}
    layer = layer_of(OUTER, feature_memory={**inner, "residual": False}, conv_kernel=0, output_gate=False)
    x = inputs(1, 10)
    given = layer.qkv(x).detach()[0].split(layer.splits, -1)
    q, k, v = (part.unflatten(-1, (HEADS, -1)).numpy() for part in given)
    part = layer.feature_memory
    gates = [[g.detach()[0].numpy() for g in heads(x)[:2]] for heads in (part.gates, layer.gates)]
    reads = []
    for h in range(HEADS):
        target = part.target[h].detach().numpy()
        m, w = (p.initial.tensors["weight"][h].detach().numpy() for p in (part, layer))
        assert np.linalg.norm(m) > 1
        (lr, retain), (rate, keep) = gates
        for t in range(10):
            key, query = unit(k[t, h]), unit(q[t, h])
            before = m
            m = retain[t, h] * m - lr[t, h] * np.outer(m @ key - target @ key, key)
            seen = before if read == "before" else m
            phi_k, phi_q = unit(unit(seen @ key)), unit(unit(seen @ query))
            w = keep[t, h] * w - rate[t, h] * np.outer(w @ phi_k - v[t, h], phi_k)
            reads.append(w @ phi_q)
    answers = torch.tensor(np.array(reads)).unflatten(0, (HEADS, 10)).transpose(0, 1)
    y = torch.nn.functional.rms_norm(answers, answers.shape[-1:], eps=1e-6) * layer.norm
    near(layer(x)[0][0], layer.out(y.flatten(-2)), 1e-8)


@pytest.mark.spec("NN-FEAT-D2")
@every
def test_it_starts_with_features_and_every_gradient_is_right(inner):
    layer, x = built(inner, shake=0.0), inputs(1, 3)
    assert layer(x)[0][:, 0].norm() > 1e-3  # the first token is written and read somewhere
    for drawn in (layer.feature_memory.target, *layer.feature_memory.initial.tensors.values()):
        assert 0.2 < drawn.std() * D_KEY**0.5 < 2
    layer = built(inner)
    names = [n for n, _ in layer.named_parameters() if n.startswith("feature_memory.")]
    assert "feature_memory.target" in names

    def output(*values):
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, given, (x,))[0].sum(-1)

    values = tuple(layer.get_parameter(n).detach().requires_grad_() for n in names)
    torch.autograd.gradcheck(output, values, fast_mode=True)
    norms = [g.norm() for g in torch.autograd.grad(output(*values).square().sum(), values)]
    assert min(norms) > 1e-6


@pytest.mark.spec("NN-FEAT-D2")
def test_widths():
    """phi of the outer memory sees what M answers: d_value wide."""
    layer = built("wide")
    _, state = layer(inputs())
    assert layer.d_key == D_KEY and layer.phi_width == 9
    assert state.memory.memory["weight"].shape[-1] == 9
    assert state.features.memory["weight"].shape[2:] == (9, D_KEY)
    kda = Memory(12, 2, "kda", feature_memory={"residual": False, "d_value": 9})
    assert kda.gates(inputs()).retain.shape == (2, 7, 2, 9)
    with pytest.warns(UserWarning, match="reaches"):  # 256 keys of width 9 under elu
        Memory(12, 2, {"feature_map": "elu"}, feature_memory={"residual": False, "d_value": 9})


@pytest.mark.spec("NN-FEAT-D2")
def test_what_does_not_fit_is_refused():
    wide = {"residual": False, "d_value": 9}
    for words, build in {
        "d_value=9 with residual=True": lambda: FeatureMemoryConfig(d_value=9),
        "d_value=9 in a self-referential memory": lambda: SelfReferential(12, 2, feature_memory=wide),
        "residual: unknown field": lambda: Memory(12, 2, FeatureMemoryConfig(residual=False)),
        "feature_memory: .* width 32 and values width 9": lambda: LanguageModelConfig(
            vocab_size=5, feature_memory={**wide, "structure": "vector"}
        ),
    }.items():
        with pytest.raises(ConfigError, match=words):
            build()
    SelfReferential(12, 2, feature_memory={"residual": False})(inputs())
    plain = Memory(12, 2, OUTER, feature_memory=MemoryConfig(retention="decay"))
    assert plain.feature_memory.config == FeatureMemoryConfig(retention="decay")
    q, v = torch.ones(1, 2, 1, 2), torch.ones(1, 2, 1, 3)
    with pytest.raises(ShapeError, match="or take .* residual=False"):
        memory_features(MemoryConfig(), q, q, v)
    phi_q, _, _ = memory_features(MemoryConfig(read="before"), q, q, v, residual=False)
    assert phi_q.shape == v.shape and not phi_q[:, 0].any() and phi_q[:, 1].any()


@pytest.mark.spec("NN-FEAT-D2", "LM-MIXER-D1", "TRAIN-EST-D1")
def test_models_and_levels_from_yaml():
    sizes = "vocab_size: 8\nd_model: 16\nlayers: 1\nheads: 2\n"
    own = "{kind: delta, residual: false, d_value: 5}"
    for mixer in (f"feature_memory: {own}", f"levels: [{{name: a, feature_memory: {own}}}]"):
        config = LanguageModelConfig.model_validate(yaml.safe_load(sizes + mixer))
        assert LanguageModelConfig.model_validate(config.model_dump(mode="json")) == config
        model, tokens = LanguageModel(config, generator=seeded()), torch.randint(8, (2, 6), generator=seeded(1))
        near(in_pieces(model, tokens, [2])[0], model(tokens)[0])
        widths = {path: (rule.d_key, rule.d_value) for path, rule in config.rules().items()}
        assert sorted(widths.values()) == [(5, 8), (8, 5)]
    level = {"name": "a", "period": 3, "feature_memory": {"residual": False, "d_value": 5}}
    level["memory"] = {"algorithm": {"kind": "gd", "lr": 0.1}}
    layer, x = CMS(12, 2, {"levels": [level]}, generator=seeded()), inputs()
    near(in_pieces(layer, x, [1, 4])[0], layer(x)[0])
