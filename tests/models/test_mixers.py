"""Blocks of levels, self-referential memories and attention: streaming, sizes, refusals."""

from itertools import cycle

import pytest
import torch
from torch.nn.functional import cross_entropy

from hecate.cms import CMS, SelfReferential
from hecate.errors import ConfigError, ShapeError
from hecate.models import Hope, HopeConfig, LanguageModel, LanguageModelConfig
from hecate.models.language_model import BlockState
from hecate.nn import Composed, Memory
from hecate.train import load_experiment
from tests.models.test_language_model import GATED, config_of, model_of, tokens_of
from tests.nn.layers import in_pieces, leaves, near, seeded

SLOW = {"retention": "decay", "algorithm": {"kind": "gd", "lr": 0.2}, "feature_map": "elu", "key_norm": "l2"}
LEVELS = [{"name": "fast", "memory": "titans_linear"}, {"name": "slow", "period": 3, "memory": SLOW}]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
DELTA = {"retention": "decay", "algorithm": {"kind": "gd", "lr": 0.4}, "decay_order": "before_gradient"}
MIXERS = {
    "plain": ({"memory": GATED, "tie_embeddings": False}, Memory, None),
    "carry": ({"levels": [{"name": "tree", "memory": DELTA}], "composition": "carry", "carry_levels": 4}, CMS, None),
    "levels": ({"levels": LEVELS}, CMS, None),
    "gated": ({"levels": LEVELS, "composition": "independent", "aggregation": "gated"}, CMS, None),
    "self": ({"self_reference": {}}, SelfReferential, None),
    "hope": ({"self_reference": {}, "levels": LEVELS, "mlp_ratio": 0.0}, SelfReferential, CMS),
    "hope_attention": ({"attention": {"kind": "attention", "window": 4}, "levels": LEVELS}, Composed, CMS),
    "mag": ({"memory": "titans_linear", "attention": {"window": 4}}, Composed, None),
    "mac_levels": ({"levels": LEVELS, "attention": {"kind": "mac", "segment": 3}}, Composed, None),
    "mal_self": ({"self_reference": {}, "attention": {"kind": "mal", "window": 4}, "levels": LEVELS}, Composed, CMS),
}


@pytest.mark.spec("LM-MIXER-D1", "LM-MODEL-I1")
@pytest.mark.parametrize("name", MIXERS)
def test_any_split_of_every_mixer(name):
    fields, first, second = MIXERS[name]
    model, tokens = model_of(**fields), tokens_of()
    block = model.blocks[0]
    assert isinstance(block.memory, first)
    assert block.levels is None if second is None else isinstance(block.levels, second)
    y, state = model(tokens)
    pieces, last = in_pieces(model, tokens, [1, 2, 6])
    near(pieces, y)
    near(last, state)
    assert state[0].detach().bytes == state[0].bytes > 0


@pytest.mark.spec("LM-MIXER-D1", "LM-MODEL-I2")
@pytest.mark.parametrize("name", MIXERS)
def test_the_future_changes_nothing_and_all_learn(name):
    model, tokens = model_of(**MIXERS[name][0]), tokens_of()
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 11
    near(model(changed)[0][:, :5], model(tokens)[0][:, :5], 1e-13)
    logits, _ = model(tokens)
    cross_entropy(logits.flatten(0, 1), tokens_of(seed=3).flatten()).backward()
    assert [n for n, item in model.named_parameters() if item.numel() and not item.grad.norm() > 0] == []


@pytest.mark.spec("NN-MEM-I13")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's, of norms under autocast
@pytest.mark.parametrize(
    ("name", "dtype"), [*zip(MIXERS, cycle(DTYPES), strict=False), *(("plain", dtype) for dtype in DTYPES[1:])]
)
@torch.no_grad()
def test_a_token_alone_has_the_bits_of_the_long_way_and_is_heard(name, dtype, monkeypatch):
    """A part with a hook is called as torch calls modules, which is the long way."""
    monkeypatch.setattr("hecate.nn.blocks.load_kernels", lambda name: None)
    model, tokens = model_of(**MIXERS[name][0], dtype=dtype), tokens_of(length=11)
    _, state = model(tokens[:, :5])
    taken, long = [], model.blocks[0]._token
    model.blocks[0]._token = lambda *given: taken.append(long(*given) is not None) or long(*given)
    want = []
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            want.append(model(tokens[:, 5:6], state))
    assert all(taken) == (model.blocks[0].levels is None and model.blocks[0].mlp is not None) and taken
    for path in ("memory", "memory_norm", "mlp", "mlp.norm", "mlp.up", "mlp.down"):
        try:
            parts = [block.get_submodule(path) for block in model.blocks]
        except AttributeError:  # no MLP
            continue
        heard: list[str] = []
        hooks = [part.register_forward_hook(lambda *_, to=heard, path=path: to.append(path)) for part in parts]
        for low, found in zip((False, True), want, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                assert all(map(torch.equal, leaves(model(tokens[:, 5:6], state)), leaves(found)))
        assert heard == [path] * 2 * len(parts)
        for hook in hooks:
            hook.remove()


@pytest.mark.spec("NN-MEM-I13")
@pytest.mark.parametrize("path", ["mlp.up", "mlp.down", "mlp.norm", "memory_norm", "memory.qkv", "memory.out"])
@torch.no_grad()
def test_a_token_alone_takes_weights_that_are_no_parameters(path, monkeypatch):
    monkeypatch.setattr("hecate.nn.blocks.load_kernels", lambda name: None)
    model, tokens = model_of(memory=GATED), tokens_of()
    _, state = model(tokens[:, :5])
    want, _ = model(tokens[:, 5:6], state)
    part = model.blocks[0].get_submodule(path)
    weight = part.weight.detach()
    del part.weight
    part.register_buffer("weight", weight)
    assert torch.equal(model(tokens[:, 5:6], state)[0], want)


def test_the_levels_stand_around_the_blocks_formula():
    model, tokens = model_of(**MIXERS["hope"][0]), tokens_of()
    x = model.embedding.weight[tokens] * 8**0.5
    for block in model.blocks:
        x = x + block.memory(block.memory_norm(x))[0]
        x = x + block.levels(block.levels_norm(x))[0]
    near(model(tokens)[0], model.norm(x) @ model.embedding.weight.mT)


@pytest.mark.spec("LM-MODEL-I4")
def test_blocks_are_drawn_apart():
    first, second = model_of().blocks
    assert not torch.equal(first.memory.out.weight, second.memory.out.weight)
    with torch.device("meta"):
        assert {item.device.type for item in model_of().parameters()} == {"meta"}


REFUSED = {
    "composition: 'nested' joins levels, and there are none": {"composition": "nested"},
    "memory: belongs to a block's plain memory, but levels": {"levels": LEVELS, "memory": "titans"},
    "qk_norm: .*self_reference takes its place": {"self_reference": {}, "qk_norm": "rms"},
    "memory: .*attention takes its place": {"attention": {"kind": "attention"}, "memory": "titans"},
    r"levels\[0\].*not divisible by heads=3": {"levels": [{"name": "a", "heads": 3}]},
    r"levels\[1\]\.memory\.feature_map\.sigma: must be > 0.0, got -1.0": {
        "levels": [
            {"name": "a"},
            {"name": "b", "memory": {"feature_map": {"kind": "random_fourier", "d_phi": 8, "sigma": -1.0}}},
        ]
    },
}


@pytest.mark.spec("LM-MIXER-D2")
@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_nothing_would_read(message):
    with pytest.raises(ConfigError, match=message):
        config_of(**REFUSED[message])


def test_a_state_of_another_kind_is_refused():
    _, state = model_of()(tokens_of())
    with pytest.raises(ShapeError, match="BlockState, got LayerState"):
        model_of(**MIXERS["hope"][0])(tokens_of(), state)


@pytest.mark.spec("LM-HOPE-D1")
def test_hope_is_a_language_model_with_other_defaults():
    sizes = {"vocab_size": 11, "d_model": 8, "heads": 2, "layers": 1}
    config = HopeConfig(**sizes)
    hope = Hope(config, generator=seeded())
    assert isinstance(hope.blocks[0].memory, SelfReferential) and hope.blocks[0].mlp is None
    assert [level.period for level in hope.blocks[0].levels.config.levels] == [16, 64, 256]
    plain = LanguageModel(LanguageModelConfig(**config.model_dump()), generator=seeded())
    near(plain(tokens_of())[0], hope(tokens_of())[0], 0.0)
    _, state = hope(tokens_of())
    assert isinstance(state[0], BlockState)
    attention = HopeConfig(**sizes, self_reference=None, attention={"kind": "attention", "window": 4})
    assert isinstance(Hope(attention).blocks[0].memory, Composed)


@pytest.mark.parametrize("preset", ["cms", "hope", "mac", "mag", "mal"])
def test_presets_name_the_rules_of_their_blocks(preset):
    config = load_experiment(preset)
    block = LanguageModel(config.model_for_data(), device="meta").blocks[0]
    memories = [item for item in block.modules() if isinstance(item, Memory | SelfReferential)]
    assert len(memories) == len(config.model.rules()) == len(config.engines())
