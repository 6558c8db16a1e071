"""From presets, files and overrides to one experiment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hecate import MemoryConfig, bias, named_rule, phi
from hecate.data import MQAR, Copy, Retrieval, Text
from hecate.errors import ConfigError
from hecate.models import LanguageModelConfig
from hecate.rule import RULES
from hecate.train import ExperimentConfig, OptimConfig, dump_experiment, load_experiment, presets
from hecate.train.compose import BY_BACKBONE, BY_RULE, RECALL_CHUNK
from hecate.train.config import AdamW

from .common import tiny


@pytest.fixture
def load(tmp_path):
    def loaded(text, *overrides, **others):
        for name, content in others.items():
            (tmp_path / f"{name}.yaml").write_text(content)
        (tmp_path / "x.yaml").write_text(text)
        return load_experiment(tmp_path / "x.yaml", overrides)

    return loaded


@pytest.fixture(scope="module")
def loaded():
    return {name: load_experiment(name) for name in presets()}


@pytest.fixture(scope="module")
def distinct(loaded):
    """The files, and one preset of each rule and each backbone."""
    again = tuple(f"{stem}-" for stem in (*BY_RULE[1:], *BY_BACKBONE[1:]))
    return {name: config for name, config in loaded.items() if not name.startswith(again)}


@pytest.mark.spec("TRAIN-COMPOSE-I1", "VAR-FROZEN-I1")
def test_presets_load_and_come_back_from_their_dump(load, loaded, distinct):
    assert all(config.name == name and isinstance(hash(config), int) for name, config in loaded.items())
    for config in distinct.values():
        assert load(dump_experiment(config)) == config


_MAPS = st.sampled_from([phi.ELU(), phi.RandomFourier(d_phi=6, sigma=0.3), phi.Compose(maps=(phi.ELU(), phi.Exp()))])
_DATA = st.sampled_from(
    [MQAR(power=1e-3), Copy(), Retrieval(), Text(paths=["no", "1e-3", "a b.txt"], validation=0.125)]
)


@pytest.mark.spec("TRAIN-COMPOSE-I1")
@given(
    feature_map=_MAPS, data=_DATA, lr=st.floats(1e-12, 1e6), seed=st.integers(0, (1 << 63) - 1),
    prompt=st.text(max_size=8), clip=st.none() | st.floats(1e-3, 10),
)  # fmt: skip
def test_any_experiment_comes_back_from_its_dump(tmp_path_factory, feature_map, data, lr, seed, prompt, clip):
    config = tiny(data=data, optim={"lr": lr, "clip": clip}, seed=seed, sample={"prompt": prompt})
    memory = config.model.memory.model_copy(update={"feature_map": feature_map, "key_norm": "l2"})
    model = config.model.model_copy(update={"memory": memory})
    config = config.model_copy(update={"model": model})
    path = tmp_path_factory.mktemp("dump") / "x.yaml"
    path.write_text(dump_experiment(config), encoding="utf-8")
    assert load_experiment(path) == config


@pytest.mark.spec("TRAIN-COMPOSE-D2")
def test_extends_merges_mappings_and_replaces_the_rest(load):
    config = load(
        "extends: base.yaml\nseed: 5\noptim:\n  betas: [0.5, 0.6]\n",
        base="extends: mqar\nname: mine\nseed: 4\noptim:\n  lr: 1e-2\n  betas: [0.1, 0.2]\n",
    )
    preset = load_experiment("mqar")
    assert (config.name, config.seed, config.optim.lr) == ("mine", 5, 0.01)
    assert config.optim.optimizer.betas == (0.5, 0.6)
    assert config.optim.warmup == preset.optim.warmup and config.data == preset.data


@pytest.mark.spec("TRAIN-COMPOSE-D2")
def test_another_kind_replaces_and_the_same_kind_merges(load):
    base = "data: {kind: mqar, num_pairs: 3, power: 0.5}\n"
    assert load("extends: b.yaml\ndata: copy", b=base).data == Copy()
    assert load("extends: b.yaml\ndata: {kind: copy, symbols: 3}", b=base).data == Copy(symbols=3)
    both = MQAR(num_pairs=4, power=0.5)
    assert load("extends: b.yaml\ndata: {kind: mqar, num_pairs: 4}", b=base).data == both
    assert load("extends: b.yaml\ndata: {num_pairs: 4}", b=base).data == both
    assert load("extends: b.yaml\ndata: {num_pairs: 4}", b="data: mqar").data == MQAR(num_pairs=4)


@pytest.mark.spec("TRAIN-COMPOSE-D3")
def test_overrides(load):
    assert load("") == ExperimentConfig() and load("optim: {lr: -1}", "optim.lr=1").optim.lr == 1
    config = load(
        "data: {kind: mqar, num_pairs: 3}",
        "optim.lr=1e-2", "data.num_pairs=5", "bias=dot", "optim.betas[0]=0.25",
        "sample.prompt='no'",
    )  # fmt: skip
    assert config.optim.lr == 0.01 and config.optim.optimizer == AdamW(betas=(0.25, 0.95))
    assert config.data == MQAR(num_pairs=5)
    assert config.model.memory.bias == bias.Dot()
    assert config.sample.prompt == "no"


@pytest.mark.spec("TRAIN-COMPOSE-D3")
@pytest.mark.parametrize("turn", [1, -1])
def test_a_kind_and_its_fields_may_be_set_in_any_order(load, turn):
    texts = ["feature_map.kind=favor", "feature_map.num_features=16"][::turn]
    found = load("model: {memory: {feature_map: {kind: random_fourier, d_phi: 4}}}", *texts)
    assert found.model.memory.feature_map == phi.Favor(num_features=16)
    texts = ["data=retrieval", "data.queries=2"][::turn]
    assert load("", *texts).data == Retrieval(queries=2)


@pytest.mark.spec("TRAIN-COMPOSE-D3")
def test_an_unknown_kind_is_where_it_was_asked_for(load):
    for text in ("data: mqar", "data:\n  kind: mqar", "seed: 1"):
        with pytest.raises(ConfigError, match=r"data: unknown data kind 'nope'.*\[--set data.kind=nope\]$"):
            load(text, "data.kind=nope")


@pytest.mark.spec("NN-MEM-D3", "TRAIN-COMPOSE-D3", "TRAIN-COMPOSE-I1")
def test_qk_norm_left_out_is_the_rules(load):
    for text, overrides, norm in (
        ("memory: gsa", (), "none"),
        ("memory: {kind: gsa, gating: {kind: gsa, temperature: 4.0}}", (), "none"),
        ("memory: {kind: gsa, layer_qk_norm: rms}", (), "rms"),
        ("{memory: linear_attention, qk_norm: l2}", (), "l2"),
        ("memory: delta", (), "l2"),
        ("{memory: delta, qk_norm: rms}", (), "rms"),
        ("memory: gsa", ("optim.lr=1e-2", "model.memory.gating.temperature=4.0"), "none"),
        ("memory: gsa", ("model.memory=delta",), "l2"),
        ("memory: delta", ("model.memory=gsa",), "none"),
        ("{memory: delta, qk_norm: l2}", ("model.memory=gsa",), "l2"),
        ("{memory: gsa, qk_norm: none}", ("model.memory=delta",), "none"),
        ("memory: gsa", ("qk_norm=l2",), "l2"),
        ("levels: [{name: a, memory: gsa}]", ("model.levels[0].memory=delta",), "l2"),
        ("levels: [{name: a}]", ("model.levels[0].memory=gsa",), "none"),
        ("levels: [{name: a, memory: gsa, qk_norm: rms}]", (), "rms"),
        ("self_reference: {memory: {layer_qk_norm: rms}}", (), "rms"),
    ):
        config = load(f"model: {text}" if text.startswith("{") else f"model: {{{text}}}", *overrides)
        model = config.model
        own = model.self_reference or next(iter(model.levels), model)
        assert own.qk_norm == norm
        dump = dump_experiment(config)
        assert f"qk_norm: {norm}" in dump and load(dump) == config
        assert ("layer_qk_norm" in dump) == (own.memory.layer_qk_norm is not None)


@pytest.mark.spec("TRAIN-LOOP-D1")
def test_rates():
    optim = OptimConfig(lr=1.0, warmup=4, schedule="linear", final=0.1)
    rates = [optim.rate(step, 14) for step in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[13] == pytest.approx(0.1)
    assert rates[4] - rates[5] == pytest.approx(0.1)
    cosine = OptimConfig(lr=1.0, warmup=0, final=0.0)
    assert cosine.rate(5, 11) == pytest.approx(0.5)
    assert cosine.rate(0, 11) == 1.0 and cosine.rate(10, 11) == pytest.approx(0.0)
    assert OptimConfig(lr=2.0, warmup=0, schedule="constant").rate(10, 11) == 2.0


@pytest.mark.parametrize("stem", BY_RULE)
def test_every_rule_has_a_preset(stem, loaded):
    for rule in RULES:
        own = named_rule(rule)
        fits = min(own.chunk, RECALL_CHUNK) if stem == "mqar" else own.chunk
        assert loaded[f"{stem}-{rule}"].model.memory == own.model_copy(update={"chunk": fits})
    changed = load_experiment(f"{stem}-titans", ["model.memory.chunk=4"])
    assert changed.model.memory == named_rule("titans").model_copy(update={"chunk": 4})
    assert changed.data == loaded[stem].data
    with pytest.raises(ConfigError, match=rf"no preset '{stem}-titan'.*Did you mean '{stem}-titans'"):
        load_experiment(f"{stem}-titan")


@pytest.mark.spec("VAR-TRIP-I1")
def test_a_config_prints_what_was_set_and_reads_it_back(distinct):
    names = {item.__name__: item for item in (ExperimentConfig, MemoryConfig, LanguageModelConfig)}
    configs = [*distinct.values()]
    configs += [named_rule(rule, **own) for rule in RULES for own in ({}, {"state_dtype": "float64"})]
    configs += [ExperimentConfig(), LanguageModelConfig(memory="linear_attention")]
    configs += [LanguageModelConfig(memory="linear_attention", qk_norm="l2", d_key=4)]
    for config in configs:
        assert eval(repr(config), names) == config and str(config) == repr(config)
        assert len(repr(config)) < 1600  # hope spells the rules of its four levels out
    assert repr(MemoryConfig()) == "MemoryConfig()"
    assert repr(MemoryConfig(feature_map="elu", chunk=4)) == "MemoryConfig(feature_map='elu', chunk=4)"
    assert repr(named_rule("titans", chunk=16)) == "MemoryConfig(kind='titans', chunk=16)"
    assert repr(phi.RandomFourier(d_phi=8, sigma=2.0)) == "RandomFourier(d_phi=8, sigma=2.0)"
    levels = LanguageModelConfig(levels=[{"name": "a"}, {"name": "b", "period": 4, "memory": "gated_delta"}])
    assert repr(levels) == (
        "LanguageModelConfig(levels=({'name': 'a'}, {'name': 'b', 'period': 4, 'memory': {'kind': 'gated_delta'}}))"
    )
    assert "sigma=-1" in repr(phi.RandomFourier.model_construct(d_phi=8, sigma=-1))
