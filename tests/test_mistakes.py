"""Plausible mistakes of people who are new here: one sentence each, which says what to write instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from hecate import Gates, MemoryConfig, data, evals, hf, memory_scan, named_rule, phi, states
from hecate.cms import CMS
from hecate.errors import ADVICE, MEANT, ArgumentError, CheckpointError, ConfigError, DataError, ShapeError
from hecate.microscope import View
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.nn import LinearAttention, Memory, PerformerAttention, SlidingAttention
from hecate.optim import Muon, PhiMomentum, level_groups
from hecate.rule import RULES
from hecate.serve import Memories, Request, Scheduler
from hecate.train import catalogue, generate, load_experiment, open_model, run_experiment
from hecate.train.config import BudgetConfig
from hecate.train.state import check_allowed

SMALL = {"vocab_size": 64, "d_model": 8, "heads": 2, "layers": 1}
NAMES: dict[str, Any] = {
    **{item.__name__: item for item in (Memory, LinearAttention, PerformerAttention, SlidingAttention, CMS, Muon)},
    **{item.__name__: item for item in (LanguageModel, LanguageModelConfig, MemoryConfig, PhiMomentum, Gates, View)},
    **{item.__name__: item for item in (memory_scan, named_rule, generate, load_experiment, open_model)},
    **{item.__name__: item for item in (run_experiment, level_groups, check_allowed, Memories, Request, Scheduler)},
    "hecate": hecate, "phi": phi, "states": states, "data": data, "hf": hf, "evals": evals.run, "torch": torch,
    "nn": nn, "catalogue": catalogue, "greedy": {"temperature": 0.0, "generator": None},
}  # fmt: skip
MISTAKES: dict[type[Exception], dict[str, str]] = {
    ConfigError: {
        # a config
        'MemoryConfig(phi="elu")': "phi: unknown field of MemoryConfig. Did you mean 'feature_map'?",
        "MemoryConfig(lr=0.1)": "It is a field of algorithm: algorithm={'kind': 'gd', 'lr': ...}.",
        "MemoryConfig(retain=0.9)": "It is a field of retention: retention={'kind': 'decay', 'retain': ...}.",
        "MemoryConfig(alpha=0.9)": "It is a field of retention: retention={'kind': 'decay', 'retain': ...}.",
        "MemoryConfig(momentum=0.9)": "It is a field of algorithm: algorithm={'kind': 'momentum', 'momentum': ...}.",
        "MemoryConfig(chunk_size=16)": "Did you mean 'chunk'?",
        "MemoryConfig(chnk=2)": "Did you mean 'chunk'?",
        "MemoryConfig(heads=4)": "Heads and widths are the layer's: Memory(d_model, heads, config).",
        "MemoryConfig(dtype=torch.float32)": "Did you mean 'state_dtype'?",
        'MemoryConfig("titans")': "MemoryConfig.model_validate reads a name or a mapping",
        "MemoryConfig(feature_map=nn.ReLU())": "becomes one as a class with a kind",
        "MemoryConfig(feature_map=torch.relu)": "becomes one as a class with a kind",
        'MemoryConfig(feature_map="rff")': "Did you mean 'random_fourier'?",
        'MemoryConfig(feature_map="eluu")': "Did you mean 'elu'?",
        'MemoryConfig(bias="mse")': "Did you mean 'l2'?",
        'MemoryConfig(algorithm="sgd")': "Did you mean 'gd'?",
        'MemoryConfig(algorithm="muon")': "Did you mean 'newton_schulz'?",
        'MemoryConfig(structure="linear")': "Did you mean 'matrix'?",
        "phi.RandomFourier(num_features=8)": "Did you mean 'd_phi'?",
        "phi.RandomFourier(8)": "write d_phi=...",
        "LanguageModelConfig(n_layers=2)": "Did you mean 'layers'?",
        "LanguageModelConfig(hidden_size=2)": "Did you mean 'd_model'?",
        "LanguageModelConfig(chunk=2)": "It is a field of memory: memory={'chunk': ...}.",
        "LanguageModelConfig(levels=[{'name': 'a', 'perod': 2}])": "Did you mean 'period'?",
        # rules, layers and scans
        'named_rule("titan")': "Did you mean 'titans'?",
        'named_rule("gated_deltanet")': "Did you mean 'gated_delta'?",
        'named_rule("titans", chunck=16)': "Did you mean 'chunk'?",
        'Memory("delta", 8)': "d_model must be an integer >= 1, got 'delta'",
        'memory_scan("titans", q, q, q)': "a rule by its name is named_rule('titans')",
        'memory_scan(q, q, q, "delta")': "config must be a MemoryConfig, got",
        "memory_scan(MemoryConfig(), q, q, q, {'lr': 0.1})": "write Gates(**gates)",
        "memory_scan(MemoryConfig(), q, q, q, torch.rand(2, 5, 3))": "write Gates(lr=...)",
        "memory_scan(MemoryConfig(), q, q, q, Gates(retain=0.5))":
            "gates.retain is given, but retention 'none' takes no retain gate; leave it None or choose retention",
        "memory_scan(MemoryConfig(), q, q, q, engine='sequentail')": "Did you mean 'sequential'?",
        # experiments
        'run_experiment("quickstart", "out")':
            "config must be an ExperimentConfig, got 'quickstart'; load_experiment makes one of a preset or a file",
        "load_experiment({'seed': 1})":
            "source must be a preset or the path of a file, got {'seed': 1}; ExperimentConfig.model_validate takes",
        'load_experiment("quickstart", "seed=1")':
            "overrides must be a list of path=value, got 'seed=1'; write ['seed=1']",
        'load_experiment("mqra")': "Did you mean 'mqar'?",
        'load_experiment("mqar", ["optimiser=sgd"])': "Did you mean 'optimizer'?",
        'check_allowed(["optim.lrr"], load_experiment("mqar"), True)': "Did you mean 'optim.lr'?",
        # what a trained model is used for
        'list(generate(model, "def ", 2, **greedy))':
            "prompt must be token ids such as [72, 105], got 'def '; a tokenizer's encode makes them",
        "list(generate(model, tokens, 2, **greedy))": "prompt must be token ids",
        "list(generate(model, [1], 2, temperature=1.0, generator=0))":
            "generator must be a torch.Generator: torch.Generator()",
        "list(generate(model, [], 2, **greedy))": "generation needs a prompt of at least one token",
        'Scheduler(model).submit(Request("def "))': "tokens must be token ids such as [72, 105]",
        'Memories("users", model)': "model must be what states.fingerprint(model) says, got ",
        # optimisers, lists and evaluations
        "PhiMomentum(nn.Linear(2, 2), lr=0.1)": "write linear.parameters()",
        'level_groups([("blocks.0.norm", nn.Parameter(x))], {"blocks.0.nrm": 2})': "Did you mean 'blocks.0.norm'?",
        'catalogue.catalogue("ruls")': "Did you mean 'rules'?",
        'list(catalogue.warm(["detla"], 4))': "Did you mean 'delta'?",
        'evals.evaluation_of("nia")': "Did you mean 'niah'?",
        'View(fast=None)["fst"]': "Did you mean 'fast'?",
    },
    ArgumentError: {
        "Memory(8, n_heads=2)": "Did you mean 'heads'?",
        "PerformerAttention(8, num_heads=2)": "PerformerAttention takes no argument 'num_heads'",
        "PerformerAttention(8, 2, value_dim=4)": "Did you mean 'd_value'?",
        "Memory(dim=8, heads=2)": "Did you mean 'd_model'?",
        "Memory(8, 2, head_dim=4)": "Did you mean 'd_key'?",
        'Memory(8, 2, phi="elu")': "It is a field of config: config={'feature_map': ...}.",
        "Memory(8, 2, chunk=16)": "It is a field of config: config={'chunk': ...}.",
        'Memory(8, 2, rule="titans")': "Did you mean 'config'?",
        "Memory(8, 2, batch_first=True)": "batch first, in every layer",
        "Memory(8, 2, dropout=0.1)": "put nn.Dropout around the layer",
        'LinearAttention(8, 2, phi="elu")': "Did you mean 'feature_map'?",
        "PerformerAttention(8, 2, phi=8)": "Did you mean 'feature_map'?",
        "SlidingAttention(8, n_heads=2, window=3)": "Did you mean 'heads'?",
        'CMS(8, 2, levels=[{"name": "a"}])': "It is a field of config: config={'levels': ...}.",
        "LanguageModel(vocab_size=7)": "It is a field of config: config={'vocab_size': ...}.",
        "layer(x, attention_mask=mask)":
            "Padding is write_mask, bool [B, T], True for tokens that are written: attention_mask.bool()",
        "layer(x, cache=None)": "Did you mean 'state'?",
        "model(tokens, labels=tokens)":
            "the loss is torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())",
        "model(input_ids=tokens)": "Did you mean 'tokens'?",
        "memory_scan(MemoryConfig(), q, q, q, lr=0.1)": "Did you mean 'gates'?",
        "memory_scan(MemoryConfig(), q, q, q, initial_state=None)": "Did you mean 'state'?",
        "memory_scan(MemoryConfig(), q, q, q, engin='auto')": "Did you mean 'engine'?",
        "Gates(alpha=0.9)": "Did you mean 'retain'?",
        "Gates(beta=0.9)": "What papers call beta is lr in a rule and momentum in an optimiser",
        'PhiMomentum(nn.Linear(2, 2).parameters(), phi="elu")': "Did you mean 'feature_map'?",
        "PhiMomentum(nn.Linear(2, 2).parameters(), lr=0.1, momentun=0.9)": "Did you mean 'momentum'?",
        "PhiMomentum(nn.Linear(2, 2).parameters(), beta=0.9)": "momentum in an optimiser",
        "Muon(nn.Linear(2, 2).parameters(), betas=(0.9, 0.99))": "Did you mean 'momentum'?",
    },
    ShapeError: {
        "layer(x, x)": "state must be the LayerState that this layer returned",
        "layer(x.transpose(1, 2))": "of [B, 8, T] give x.transpose(1, 2)",
        "layer(x[0])": "one sequence is x.unsqueeze(0)",
        "memory_scan(MemoryConfig(), turned, turned, turned, Gates(lr=torch.rand(2, 5, 3)))": "T and H look swapped",
        "memory_scan(MemoryConfig(), turned, turned, q)": "T and H look swapped",
        "memory_scan(MemoryConfig(), turned, turned, turned, write_mask=mask)": "look swapped",
        "list(generate(model, [99], 2, **greedy))": "tokens must be in 0..63, the vocabulary",
    },
    CheckpointError: {
        'states.load("gone")': "gone; name a file that states.save has written",
        'open_model("gone")': "gone is not a run folder: there is no such folder; name one that",
    },
    DataError: {'data.Text(paths=["gone"]).load()': "data.paths: no file or folder 'gone' (working directory "},
    TypeError: {
        'hf.adopt("folder")': "adopt takes a torch module, got a str; from_pretrained gives one",
        'hf.upgrade("folder", "kda")': "from_pretrained gives one",
    },
    AttributeError: {"hecate.Memory": "it is hecate.nn.Memory"},
}  # fmt: skip


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    double = {"dtype": torch.float64}
    q = torch.zeros(2, 5, 3, 4, **double)
    own = {"q": q, "turned": q.transpose(1, 2), "x": torch.zeros(2, 5, 8, **double), "mask": torch.ones(2, 5).bool()}
    own |= {"layer": Memory(8, 2, **double), "model": LanguageModel(SMALL), "tokens": torch.zeros(2, 5).long()}
    return {**NAMES, **own}


@pytest.mark.spec("VAR-WORDS-I1")
@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in MISTAKES.items() for line in lines])
def test_a_mistake_in_python_is_answered_by_a_sentence(kind, line, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:
        eval(line, given)
    said, sentence = str(caught.value), MISTAKES[kind][line]
    assert type(caught.value) is kind and sentence in said and [*tmp_path.iterdir()] == []
    if "Did you mean" in sentence:  # what was meant stands ahead of all there is
        ahead, _, after = said.partition(" Did you mean ")
        assert ahead.endswith(".") and ", " not in ahead and len(ahead) < 120
        assert not after.partition("? ")[2].startswith(("known", "it "))


@pytest.mark.spec("VAR-WORDS-I1")
def test_words_from_elsewhere_mean_something_here():
    """No hint points to a name that nothing has."""
    lists = [*MemoryConfig.model_fields, *LanguageModelConfig.model_fields, *RULES, *phi.RandomFourier.model_fields]
    lists += [*phi.Favor.model_fields, *Gates._fields, "state", "x", "gates", "num_heads", "embed_dim", "hidden_size"]
    lists += ["config", "num_layers", "tokens", "d_head", "momentum", *catalogue.FAMILIES, *BudgetConfig.model_fields]
    for family in (hecate.phi.FeatureMap, hecate.bias.Bias, hecate.algorithm.Algorithm, hecate.structure.Structure):
        lists += family.variants()
    lists += hecate.retention.Retention.variants()
    assert {word for ours in MEANT.values() for word in ours} <= set(lists)
    assert not MEANT.keys() & ADVICE.keys()


@pytest.mark.spec("RULE-NAMED-D1")
def test_a_named_rule_with_other_fields():
    rule = named_rule("titans", chunk=16)
    assert rule == MemoryConfig.model_validate({"kind": "titans", "chunk": 16})
    assert rule.model_fields_set == {*named_rule("titans").model_fields_set, "chunk"}
    assert rule.chunk == 16 and rule.model_copy(update={"chunk": named_rule("titans").chunk}) == named_rule("titans")
    assert named_rule("titans") is RULES["titans"].config
    with pytest.raises(ConfigError, match="decay_order"):  # what cannot go together is refused as ever
        named_rule("delta", decay_order="before_gradient")


def test_a_mapping_makes_a_model():
    assert LanguageModel(SMALL).config == LanguageModelConfig(**SMALL)
    assert isinstance(hecate.models.Hope(SMALL).config, hecate.models.HopeConfig)


def test_calls_keep_their_signatures():
    assert list(inspect.signature(Memory.__init__).parameters)[1:4] == ["d_model", "heads", "config"]
    assert list(inspect.signature(memory_scan).parameters)[:4] == ["config", "q", "k", "v"]
    assert Gates(lr=1.0)._replace(retain=0.5) == Gates(1.0, 0.5) and Gates.__new__.__doc__
