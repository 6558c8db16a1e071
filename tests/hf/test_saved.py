"""Folders of models: the same bits come back, elsewhere too, and what is missing is drawn as hecate draws it."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

from hecate.errors import ConfigError, install_line
from hecate.hf import HecateConfig, HecateForCausalLM, HecateModel
from hecate.models import HopeConfig, LanguageModel, LanguageModelConfig
from hecate.train import load_experiment
from tests import forked
from tests.hf.common import LEVELS, RULES, SOME, made, moved, same_bits, tokens

EPS = torch.finfo(torch.float64).eps
PRESETS = ("quickstart", "cms", "hope", "mac", "tnt", "lact_760m", "yaad_170m")


@pytest.mark.spec("HF-CONFIG-D1")
def test_a_config_holds_any_model_and_one_vocabulary():
    every = [LanguageModelConfig(vocab_size=9, levels=LEVELS, d_model=16), HopeConfig(vocab_size=9)]
    every += [load_experiment(name).model_for_data() for name in PRESETS]
    for own in every:
        config = HecateConfig(model=own)
        again = HecateConfig.from_dict(json.loads(config.to_json_string()))
        assert again.language_model == config.language_model == LanguageModelConfig.model_validate(own.model_dump())
        sizes = config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        assert sizes == (own.vocab_size, own.d_model, own.layers, own.heads)
        assert config.tie_word_embeddings == own.tie_embeddings
    config.vocab_size = 12
    assert config.language_model.vocab_size == config.vocab_size == 12
    assert HecateConfig().language_model == LanguageModelConfig(vocab_size=256)
    for model, sentence in (
        ({"vocab_size": 9, "d_modl": 3}, "model.d_modl: unknown field"),
        ({"vocab_size": 9, "levels": [{"name": "a", "memory": "titan"}]}, r"model.levels\[0\].memory"),
        ({"d_model": 16}, "model.vocab_size: must be set"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            HecateConfig(model=model)
    with pytest.raises(ConfigError, match="tie_word_embeddings: must be True, as model.tie_embeddings is"):
        HecateConfig(model={"vocab_size": 9}, tie_word_embeddings=False)


SMALL = {"vocab_size": 9, "d_model": 16, "layers": 3, "heads": 2}
THEIR_NAMES = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}


@pytest.mark.spec("HF-CONFIG-D1")
def test_fields_of_a_model_stand_beside_those_of_transformers():
    titans = LanguageModelConfig(**SMALL, memory="titans", tie_embeddings=False)
    for fields in (
        {**SMALL, "memory": "titans", "tie_embeddings": False},
        {**THEIR_NAMES, "memory": {"kind": "titans"}, "tie_word_embeddings": False},
        {**SMALL, **THEIR_NAMES, "memory": titans.memory, "tie_word_embeddings": False, "tie_embeddings": False},
        {"model": titans, **THEIR_NAMES, "tie_word_embeddings": False},
        {"model": {**titans.model_dump(), "vocab_size": None}, "vocab_size": 9},
    ):
        config = HecateConfig(**fields, dtype="float64", eos_token_id=3, use_cache=False)
        assert config.language_model == titans, fields
        assert config.dtype == torch.float64 and config.eos_token_id == 3 and not config.use_cache
    assert HecateConfig(layers=1).language_model == LanguageModelConfig(vocab_size=256, layers=1)
    assert len(HecateForCausalLM(HecateConfig(**THEIR_NAMES)).model.lm.blocks) == 3


@pytest.mark.spec("HF-CONFIG-D1")
def test_what_no_field_is_or_two_fields_disagree_on_is_refused():
    for fields, sentence in (
        ({**SMALL, "d_modl": 3}, r"^d_modl: unknown field .*Did you mean 'd_model'\?"),
        ({**SMALL, "n_layer": 3}, r"^n_layer: unknown field .*Did you mean 'layers'\?"),
        ({**SMALL, "max_position_embeddings": 3}, "^max_position_embeddings: unknown field"),
        ({**SMALL, "intermediate_size": 3}, "^intermediate_size: unknown field"),
        ({**SMALL, "temperature": 0.5}, "^temperature: unknown field"),
        ({"model": SMALL, "nonsense": 3}, "^nonsense: unknown field"),
        ({**SMALL, "memory": "titan"}, r"^memory: .*Did you mean 'titans'\?"),
        ({"vocab_size": 9, "hidden_size": 0}, "^hidden_size: must be >= 1, got 0"),
        ({"num_attention_heads": 3}, "^num_attention_heads: must divide d_model=128, got 3"),
        (
            {**SMALL, "hidden_size": 32},
            "^hidden_size: is d_model in other words, and both are set: 32 and 16; keep one",
        ),
        ({"model": SMALL, "hidden_size": 32}, "^hidden_size: must be 16, as model.d_model is; change that one"),
        ({"model": SMALL, "vocab_size": 32}, "^vocab_size: must be 9, as model.vocab_size is; change that one"),
        ({"model": SMALL, "memory": "titans"}, "^memory: must be .* as model.memory is; change that one"),
        ({"vocab_size": None}, "^vocab_size: must be set to build a model"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            HecateConfig(**fields)


@pytest.mark.spec("HF-CONFIG-D1")
def test_a_config_can_be_changed_by_either_name():
    config = HecateConfig(**SMALL)
    config.hidden_size, config.layers = 32, 5
    assert (
        (config.d_model, config.num_hidden_layers) == (32, 5) == (config.language_model.d_model, config.model["layers"])
    )
    with pytest.raises(ConfigError, match="heads"):
        config.num_attention_heads = 5
    assert config.heads == 2


@pytest.mark.spec("HF-CONFIG-D1")
def test_a_file_says_sizes_as_others_read_them_and_older_files_load(tmp_path):
    from transformers import AutoConfig

    config = HecateConfig(**SMALL, tie_embeddings=False)
    config.note = "an attribute of somebody's"
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for told in (written, config.to_dict()):
        assert THEIR_NAMES.items() <= told.items() and told["model_type"] == "hecate"
        assert told["tie_word_embeddings"] is False
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.language_model == config.language_model and again.note == config.note
    assert AutoConfig.from_pretrained(tmp_path, num_hidden_layers=1).language_model.layers == 1
    older = {name: value for name, value in written.items() if name not in (*THEIR_NAMES, "tie_word_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert AutoConfig.from_pretrained(tmp_path).language_model == config.language_model
    (tmp_path / "config.json").write_text(json.dumps({**written, "hidden_size": 32}))
    with pytest.raises(ConfigError, match="hidden_size: must be 16, as model.d_model is"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("rule", SOME)
@pytest.mark.spec("HF-SAVE-D1")
def test_a_saved_model_is_the_same(rule, tmp_path):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    model, ids = made(rule), tokens(2, 7)
    model.save_pretrained(tmp_path)
    names = {"config.json", "generation_config.json", "model.safetensors", "modeling_hecate.py"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for trust in (False, True):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(again) is HecateForCausalLM and not again.training and same_bits(again, model)
        assert torch.equal(moved(again)(ids).logits, moved(model)(ids).logits)
    inner = AutoModel.from_pretrained(tmp_path)
    assert type(inner) is HecateModel and same_bits(inner, model.model)
    assert AutoConfig.from_pretrained(tmp_path).model == model.config.model
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.get_input_embeddings().weight.dtype == torch.bfloat16
    # bfloat16 has 8 bits, over a handful of sums of order 1.
    assert torch.allclose(half(ids).logits.double(), model(ids).logits, atol=0.25)
    again.save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    assert same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "parts"), model)


@pytest.mark.spec("HF-SAVE-D1")
def test_a_new_model_has_the_draws_of_hecate_and_a_copy_its_weights():
    own = LanguageModelConfig(vocab_size=9, d_model=16, heads=2, tie_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = LanguageModel(own)
        torch.manual_seed(5)
        assert same_bits(HecateForCausalLM(HecateConfig(model=own)).model.lm, expected)
    copied = HecateForCausalLM.of(expected)
    assert same_bits(copied.model.lm, expected) and all(p.requires_grad for p in copied.parameters())
    with torch.no_grad():
        copied.model.lm.embedding.weight.zero_()
    assert expected.embedding.weight.any() and copied.device.type == "cpu"


@pytest.mark.spec("HF-SAVE-D1")
def test_what_a_checkpoint_lacks_is_drawn_and_said(tmp_path, caplog):
    from transformers.utils import logging as their

    model = made("momentum")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = [name for name in tensors if "blocks.1." in name]
    save_file({k: v for k, v in tensors.items() if k not in gone}, tmp_path / "model.safetensors", {"format": "pt"})
    their.enable_propagation()
    with caplog.at_level(logging.WARNING, "transformers"):
        again = HecateForCausalLM.from_pretrained(tmp_path)
    their.disable_propagation()
    assert "blocks.1" in caplog.text
    state = again.state_dict()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors.keys() - gone)
    drawn = again.model.lm.blocks[1].memory
    assert drawn.out.weight.std().item() == pytest.approx(16**-0.5, rel=0.3)  # 256 draws
    assert torch.equal(drawn.norm, torch.ones_like(drawn.norm)) and again(tokens(1, 3)).logits.isfinite().all()


@pytest.mark.parametrize("rule", ["decay", "momentum"])
@pytest.mark.spec("HF-CONFIG-D1", "HF-LM-D1")
def test_a_vocabulary_grows(rule, tmp_path):
    model, ids = made(rule), tokens(1, 5)
    expected = model(ids).logits
    model.resize_token_embeddings(20, mean_resizing=False)
    assert model.config.vocab_size == model.model.lm.config.vocab_size == 20
    # A product of more columns may sum its 16 terms in another order.
    torch.testing.assert_close(
        model(ids).logits[..., :17], expected, rtol=0, atol=16 * EPS * float(expected.detach().abs().max())
    )
    assert model(ids + 3).logits.shape[-1] == 20
    model.save_pretrained(tmp_path)
    assert same_bits(HecateForCausalLM.from_pretrained(tmp_path), model)
    head = model.get_output_embeddings()
    assert (head.weight is model.get_input_embeddings().weight) == (rule == "momentum") and head.bias is None
    assert torch.equal(head(model.model(ids).last_hidden_state), model(ids).logits)
    if rule == "momentum":
        with pytest.raises(ConfigError, match="the output layer is the embedding"):
            model.set_output_embeddings(torch.nn.Linear(16, 20))


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
for name in [name for name in sys.modules if name.split(".")[0] == {absent!r}]:
    del sys.modules[name]  # the process that all are forked of has loaded hecate
"""


def without(module, code, *arguments):
    """What a Python says that lacks a module."""
    done = forked.run(ABSENT.format(absent=module) + code, *arguments)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.spec("HF-REMOTE-D1")
def test_where_hecate_is_absent_a_reader_is_told(tmp_path):
    made().save_pretrained(tmp_path)
    code = (tmp_path / "modeling_hecate.py").read_text()
    assert "from hecate.hf import HecateConfig, HecateForCausalLM, HecateModel" in code and install_line("hf") in code
    said = without("hecate", "from transformers import AutoConfig\n"
                   "AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)", tmp_path)  # fmt: skip
    assert f"which is not installed: {install_line('hf')}" in said and "Run `pip" not in said


@pytest.mark.spec("HF-REMOTE-D1")
def test_where_transformers_is_absent_one_sentence_says_so():
    said = without("transformers", "import hecate, hecate.cli\n"
                   "try: hecate.hf\nexcept ImportError as error: print(error)\n"
                   "hecate.cli.main(['export', 'run', '--to', 'hf'])")  # fmt: skip
    sentence = f"hecate.hf needs transformers 5 or later: {install_line('hf')}"
    assert said.splitlines() == [sentence, f"error: --to hf: {sentence}"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.spec("HF-CACHE-D1")
def test_every_tensor_of_a_state_has_a_row_for_each_sequence(rule):
    layers = made(rule)(tokens(3, 6), use_cache=True).past_key_values.layers
    for leaf in pytree.tree_leaves([layer.state for layer in layers]):
        assert leaf is None or leaf.shape[0] == 3
