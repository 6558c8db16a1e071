"""`hecate export RUN --to hf`, and the tokenizers that it writes."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hecate.data.tokenizer import Bytes, FileTokenizer, train_tokenizer
from hecate.errors import CheckpointError
from hecate.hf import byte_tokenizer, file_tokenizer
from hecate.hf.saved import export_run, tokenizer_of
from hecate.train.trained import open_model
from tests.hf.common import RULES  # noqa: F401  (skips where transformers is absent)
from tests.train.common import TASK, quiet_run, text_run, tiny

TEXT = "the slow memory forgets what the fast memory keeps\n" * 40


@pytest.fixture(scope="module")
def trained_on_text(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    budget = {"steps": 2, "seq_len": 8, "checkpoint_every": 2}
    return text_run(tmp_path_factory.mktemp("text"), budget=budget)


pytestmark = pytest.mark.usefixtures("float32")


def export(*arguments):
    from hecate.cli import app

    return CliRunner().invoke(app, ["export", *map(str, arguments), "--to", "hf"])


@pytest.mark.spec("HF-EXPORT-D1", "HF-BYTES-D1")
def test_a_run_on_bytes_is_loaded_with_its_tokenizer(trained_on_text, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = export(trained_on_text, "--out", tmp_path / "out")
    assert done.exit_code == 0 and done.stdout == f"{tmp_path / 'out'}\n" and "tokenizer" not in done.stderr
    trained = open_model(trained_on_text)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    own = trained.model.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in model.model.lm.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    read = tokenizer("a\u00e9\0\u0100", return_tensors="pt")
    assert read["input_ids"].tolist() == [list("a\u00e9\0\u0100".encode())]
    assert torch.equal(model(**read).logits, trained.model(read["input_ids"])[0])
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0
    again = export(trained_on_text, "--out", tmp_path / "out")
    assert again.exit_code == 2 and "exists already; choose another --out" in again.stderr
    of_checkpoint = export_run(trained_on_text / "checkpoints/step_00000002", tmp_path / "two", "newest")
    assert of_checkpoint.step == 2 and of_checkpoint.has_tokenizer


@pytest.mark.spec("HF-EXPORT-D1")
def test_a_run_without_text_is_exported_without_a_tokenizer(tmp_path):
    quiet_run(tiny(data=TASK, budget={"steps": 1}), tmp_path / "run")
    done = export(tmp_path / "run")
    assert done.exit_code == 0 and "it has no tokenizer" in done.stderr
    names = {path.name for path in (tmp_path / "run-hf").iterdir()}
    assert "model.safetensors" in names and not any("token" in name for name in names)
    with pytest.raises(CheckpointError, match="is a model of transformers, no run folder"):
        export_run(tmp_path / "run-hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.spec("HF-EXPORT-D1")
def test_nothing_is_left_of_an_export_that_fails(trained_on_text, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hecate.hf.model.HecateForCausalLM.save_pretrained", full)
    with pytest.raises(CheckpointError, match="cannot write .*: No space left on device; free some space"):
        export_run(trained_on_text, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@given(st.text(), st.binary())
@pytest.mark.spec("HF-BYTES-D1")
def test_bytes_are_their_own_ids(text, raw):
    tokenizer, own = BYTES, Bytes()
    ids = tokenizer(text)["input_ids"]
    assert ids == own.encode([text])[0].tolist() and tokenizer.decode(ids) == text
    assert tokenizer.decode(list(raw)) == own.decode(raw)


BYTES = byte_tokenizer()


@pytest.mark.spec("HF-BYTES-D1")
def test_bytes_have_no_special_words(tmp_path):
    BYTES.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    for tokenizer in (BYTES, AutoTokenizer.from_pretrained(tmp_path)):
        for text in ("\u0100\0\u0100", "<|endoftext|>", "<s> a  b\n ,", " a", "\ufeff", "e\u0301"):
            assert tokenizer(text)["input_ids"] == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
        assert len(tokenizer) == 256 and tokenizer.pad_token_id == 0 and tokenizer.eos_token_id is None
        padded = tokenizer(["a", "bcd"], padding=True)
        assert padded["input_ids"] == [[0, 0, 97], [98, 99, 100]] and padded["attention_mask"][0] == [0, 0, 1]


@pytest.mark.spec("HF-FILE-D1")
def test_a_file_has_the_ids_that_training_reads(tmp_path):
    from transformers import AutoTokenizer

    text = json.loads(train_tokenizer(iter(TEXT.splitlines()), 300))
    text["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                                                 {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }  # fmt: skip
    text["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    own = FileTokenizer(json.dumps(text), "it")
    tokenizer_of(own).save_pretrained(tmp_path)
    for tokenizer in (file_tokenizer(own.text), AutoTokenizer.from_pretrained(tmp_path)):
        for words in ("the slow memory", "it ends <|endoftext|> here", "\u00e9 \U0001f600\n\n  x", ""):
            ids = tokenizer(words)["input_ids"]
            assert ids == own.encode([words])[0].tolist() and tokenizer.decode(ids) == words
        assert tokenizer.eos_token_id == tokenizer.pad_token_id == own.end == 0
