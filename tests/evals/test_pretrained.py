"""Models of transformers, upgraded too, are asked tasks from their folders."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from transformers import LlamaConfig, LlamaForCausalLM

import hecate.hf
from hecate.cli import main
from hecate.errors import CheckpointError, ConfigError, DataError
from hecate.evals import evaluate_run, evaluate_tasks
from hecate.train.trained import open_model
from tests.evals.test_evals import TEXT

SIZES = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=2048, torch_dtype="float32"))
    hecate.hf.graft_mlp(model, layers=[0])  # what save keeps beside transformers' own weights
    hecate.hf.save(model, tmp_path / "mine")
    hecate.hf.byte_tokenizer().save_pretrained(tmp_path / "mine")
    (tmp_path / "book.txt").write_text(TEXT)
    return tmp_path / "mine"


@pytest.mark.spec("EVAL-RUN-D2")
def test_a_folder_is_asked_as_its_model_is(folder):
    names, book = ["niah_1", "loss_by_position"], folder.parent / "book.txt"
    report, place = evaluate_run(folder, names, data=book, lengths=[800], samples=2)
    assert place == folder / "evals" / "llama"
    found = json.loads((place / "results.json").read_text())
    assert found["model"] == "llama" and found["results"] == [own.record() for own in report.results]
    model, tokenizer = hecate.hf.load(folder), hecate.hf.load_tokenizer(folder)
    asked = [hecate.evals.evaluation_of(name, lengths=(800,), samples=2) for name in names]
    again = evaluate_tasks(model, tokenizer, asked, text=book.read_text())
    assert [own.record() for own in again] == [own.record() for own in report.results]


@pytest.mark.spec("EVAL-RUN-D2")
def test_the_command_asks_it_and_says_what_it_cannot(folder, capsys):
    def said(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words])
        told = capsys.readouterr()
        return told.out if ended.value.code == 0 else told.err

    assert "results: " in said("eval", str(folder), "--tasks", "niah_1", "--lengths", "800", "--samples", "1")
    assert "is a model of transformers; take tasks in text" in said("eval", str(folder), "--tasks", "parity")
    assert "checkpoint='newest' is for runs" in said("eval", str(folder), "--tasks", "niah_1", "--checkpoint", "newest")
    for words in (["eval"], ["generate"], ["report"]):
        assert f"`hecate eval {folder} --tasks` asks it" in " ".join(said(*words, str(folder)).split()), words


@pytest.mark.spec("EVAL-RUN-D2")
def test_what_is_missing_is_named(folder):
    with pytest.raises(DataError, match="no text for loss_by_position; name a file or folder with --data"):
        evaluate_run(folder, ["loss_by_position"], lengths=[100], samples=1)
    with pytest.raises(ConfigError, match="2048|2,048"):
        evaluate_run(folder, ["niah_1"], lengths=[5000], samples=1)
    with pytest.raises(CheckpointError, match="is a model of transformers, no run folder"):
        open_model(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="has a tokenizer that transformers does not open"):
        evaluate_run(folder, ["niah_1"], lengths=[800], samples=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="tokenizer"):
        evaluate_run(folder, ["niah_1"], lengths=[800], samples=1)
    assert not (folder / "evals").exists()
