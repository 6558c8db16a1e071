"""Plausible mistakes of people who are new here: one sentence each, which names the setting and says what to do."""

from __future__ import annotations

import re

import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan, named_rule, states
from hecate.cli import main
from hecate.data import Text
from hecate.errors import CheckpointError, ConfigError, DataError, HecateError, ShapeError
from hecate.hf import adopt, upgrade
from hecate.models import LanguageModel
from hecate.nn import Memory
from hecate.serve import Memories, Request, Scheduler
from hecate.train import generate, load_experiment, open_model, run_experiment

MODEL = LanguageModel({"vocab_size": 64, "d_model": 8, "layers": 1, "heads": 2})
X = torch.zeros(1, 4, 2, 8)


def drawn(prompt, temperature=0.0, generator=None):
    return list(generate(MODEL, prompt, 2, temperature=temperature, generator=generator))


CALLS = {
    "a preset where an experiment is asked for": (
        lambda: run_experiment("quickstart", "out"), ConfigError,
        "config must be an ExperimentConfig, got 'quickstart'; load_experiment makes one of a preset or a file",
    ),
    "settings where a file is asked for": (
        lambda: load_experiment({"seed": 1}), ConfigError,
        "source must be a preset or the path of a file, got {'seed': 1}; ExperimentConfig.model_validate takes",
    ),
    "one override": (
        lambda: load_experiment("quickstart", "seed=1"), ConfigError,
        "overrides must be a list of path=value, got 'seed=1'; write ['seed=1']",
    ),
    "a text to continue": (
        lambda: drawn("def "), ConfigError,
        "prompt must be token ids such as [72, 105], got 'def '; a tokenizer's encode makes them",
    ),
    "a tensor to continue": (lambda: drawn(torch.tensor([[1, 2]])), ConfigError, "prompt must be token ids"),
    "a seed for a generator": (
        lambda: drawn([1], 1.0, 0), ConfigError, "generator must be a torch.Generator: torch.Generator()",
    ),
    "a prompt of nothing": (lambda: drawn([]), ConfigError, "generation needs a prompt of at least one token"),
    "a token beyond the vocabulary": (lambda: drawn([99]), ShapeError, "tokens must be in 0..63, the vocabulary"),
    "a text to serve": (
        lambda: Scheduler(MODEL).submit(Request("def ")), ConfigError, "tokens must be token ids such as [72, 105]",
    ),
    "a model for its fingerprint": (
        lambda: Memories("users", MODEL), ConfigError, "model must be what states.fingerprint(model) says, got ",
    ),
    "a state of nowhere": (
        lambda: states.load("gone"), CheckpointError, "gone; name a file that states.save has written",
    ),
    "a run of nowhere": (
        lambda: open_model("gone"), CheckpointError, "gone is not a run folder: there is no such folder; name one that",
    ),
    "a folder to adopt": (
        lambda: adopt("folder"), TypeError, "adopt takes a torch module, got a str; from_pretrained gives one",
    ),
    "a folder to upgrade": (lambda: upgrade("folder", "kda"), TypeError, "from_pretrained gives one"),
    "text of nowhere": (
        lambda: Text(paths=["gone"]).load(), DataError, "data.paths: no file or folder 'gone' (working directory ",
    ),
    "swapped arguments of a layer": (
        lambda: Memory("delta", 8), ConfigError, "d_model must be an integer >= 1, got 'delta'",
    ),
    "a rule by its name": (lambda: memory_scan("delta", X, X, X), ConfigError, "its name is named_rule('delta')"),
    "queries for the rule": (lambda: memory_scan(X, X, X, "delta"), ConfigError, "config must be a MemoryConfig, got"),
    "gates as a mapping": (
        lambda: memory_scan(named_rule("delta"), X, X, X, {"lr": 0.5}), ConfigError, "write Gates(**gates)",
    ),
    "a gate that a rule lacks": (
        lambda: memory_scan(named_rule("delta"), X, X, X, Gates(retain=0.5)), ConfigError,
        "gates.retain is given, but retention 'none' takes no retain gate; leave it None or choose retention 'decay'",
    ),
    "beta": (lambda: Gates(beta=0.5), HecateError, "What papers call beta is lr in a rule and momentum"),
    "phi": (lambda: MemoryConfig(phi="elu"), ConfigError, "phi: unknown field of MemoryConfig. Did you mean 'feature_"),
    "a layer's mask": (
        lambda: Memory(8, heads=2)(torch.zeros(1, 4, 8), attention_mask=1), HecateError,
        "Padding is write_mask, bool [B, T], True for tokens that are written",
    ),
    "labels of transformers": (lambda: MODEL(torch.zeros(1, 4).long(), labels=1), HecateError, "A model gives logits"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_in_python_is_answered_by_a_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, kind, sentence = CALLS[name]
    with pytest.raises(kind, match=re.escape(sentence)):
        call()
    assert [*tmp_path.iterdir()] == []


LINES = {
    "train my.yaml": "cannot read config my.yaml: No such file or directory; `hecate init my.yaml` writes one",
    "train latin.yaml": "latin.yaml is not UTF-8 text (byte 6); save it as UTF-8",
    "train --set engine=fused": "engine: no such setting. hecate takes the fastest engine that is exact; `hecate show",
    "eval folder --checkpoint first": "checkpoint must be one of 'best', 'newest', got 'first'",
    "eval folder": "folder is a model of transformers, no run folder: `hecate eval folder --tasks` asks it",
}


@pytest.mark.spec("TRAIN-CLI-D2")
@pytest.mark.parametrize("line", LINES)
def test_a_mistake_on_the_command_line_is_answered_by_a_sentence(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("name: \u00e9".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and err.count("error: ") == 1 and "Traceback" not in err
    assert LINES[line] in err and sorted(tmp_path.rglob("*")) == before
