"""Upgraded, grafted and adopted models in folders: the same bits come back."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers", minversion="5")

import transformers
from transformers import AutoModelForCausalLM

import hecate.hf
from hecate.errors import CheckpointError, ConfigError
from hecate.hf import adopt, graft, graft_mlp, upgrade
from hecate.hf.upgrade import Hosted
from tests.hf.common import IDS, logits, same_bits, stirred
from tests.hf.families import built
from tests.hf.test_graft_mlp import mlps, model_of
from tests.hf.test_layers import DELTA

WARNS = pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")


def upgraded(family: str = "qwen3_next", *rules: str) -> Any:
    model = built(family)
    for rule in rules or ("gated_delta_2",):
        upgrade(model, rule)
    return stirred(model, 0.1, model.state_dict())


def grafted(fast: str = "last") -> Any:
    model = graft(model_of(), layers=[1], memory="titans")
    return stirred(graft_mlp(model, layers=[0], fast=fast, periods=(4, 8)), 0.1)


@WARNS
@pytest.mark.spec("HF-SAVED-D1")
@pytest.mark.parametrize("family", [family for family in DELTA if family != "glm5_next"])
def test_upgraded_models_come_back(family, tmp_path):
    rules = ("momentum", "learned_initial", "kda") if family == "qwen3_next" else ()
    model = upgraded(family, *rules)
    hecate.hf.save(model, tmp_path / "a")
    again = hecate.hf.load(tmp_path / "a")
    assert same_bits(model, again) and not again.training
    assert {n for n, p in again.named_modules() if isinstance(p, Hosted)} == {
        n for n, p in model.named_modules() if isinstance(p, Hosted)
    }
    assert torch.equal(logits(again), logits(model))
    generated = [m.generate(IDS[:, :9], max_new_tokens=4, do_sample=False) for m in (model, again)]
    assert torch.equal(*generated)
    starts = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    packed = [logits(m, IDS[:1, :7], position_ids=starts) for m in (model, again)]
    assert torch.equal(*packed)
    hecate.hf.save(again, tmp_path / "b")  # and once more
    assert torch.equal(logits(hecate.hf.load(tmp_path / "b")), logits(model))
    if family == "qwen3_next":  # by transformers alone, as Trainer writes it
        model.save_pretrained(tmp_path / "plain")
        assert same_bits(model, hecate.hf.load(tmp_path / "plain"))


@pytest.mark.spec("HF-SAVED-D1")
@pytest.mark.parametrize("fast", ["last", "whole"])
def test_grafted_models_come_back(fast, tmp_path):
    model = grafted(fast)
    hecate.hf.save(model, tmp_path / "a")
    model.save_pretrained(tmp_path / "plain")
    for folder in ("a", "plain"):
        again = hecate.hf.load(tmp_path / folder)
        assert same_bits(model, again) and len(mlps(again)) == 1
        assert torch.equal(logits(again), logits(model))
        assert all(p.requires_grad for p in again.parameters())
    names = [n for n, p in hecate.hf.load(tmp_path / "a", train="memory").named_parameters() if p.requires_grad]
    assert names and all(".hecate." in name for name in names)
    narrow = hecate.hf.load(tmp_path / "a", dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert {p.dtype for n, p in narrow.named_parameters() if ".hecate." in n} == {torch.float32}
    assert {path.suffix for path in (tmp_path / "a").iterdir()} == {".json", ".safetensors"}


@pytest.mark.spec("HF-SAVED-D1")
def test_an_adopted_model_is_the_official_one(tmp_path):
    model = built("qwen3_5")
    stirred(model, 0.1, model.state_dict())
    adopt(model)
    hecate.hf.save(model, tmp_path / "a")
    assert "hecate" not in (tmp_path / "a/config.json").read_text()
    assert not (tmp_path / "a/hecate.safetensors").exists()
    plain, again = AutoModelForCausalLM.from_pretrained(tmp_path / "a"), hecate.hf.load(tmp_path / "a")
    assert same_bits(plain, model) and same_bits(again, model)
    adopt(again)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.spec("HF-SAVED-E1")
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch):
    model = grafted()
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there exists already"):
        hecate.hf.save(model, tmp_path / "there")
    with pytest.raises(TypeError, match="save takes a model of transformers, got a Linear"):
        hecate.hf.save(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(ConfigError, match="LlamaModel is no class of AutoModelForCausalLM"):
        hecate.hf.save(model.model, tmp_path / "a")

    with pytest.raises(ConfigError, match="on the meta device, or offloaded"):
        hecate.hf.save(grafted().to("meta"), tmp_path / "a")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hecate.hf.saved.write_tensors", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*a: .*No space"):
        hecate.hf.save(model, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


LAYER = "model.layers.0.linear_attn"


def config(change: Any) -> Any:
    """An edit of a folder's config."""

    def edit(folder: Path) -> None:
        facts = json.loads((folder / "config.json").read_text())
        change(facts)
        (folder / "config.json").write_text(json.dumps(facts))

    return edit


def layer(**fields: Any) -> Any:
    """An edit of what the config says of the upgraded layer."""
    return config(lambda facts: facts["hecate_layers"][LAYER].update(fields))


def weights(change: Any) -> Any:
    """An edit of the weights that an upgrade has added."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / "hecate.safetensors")
        change(tensors)
        save_file(tensors, folder / "hecate.safetensors")

    return edit


def _move(facts: dict[str, Any]) -> None:
    facts["hecate_layers"]["model.x"] = facts["hecate_layers"].pop(LAYER)


NORM = f"{LAYER}.memory.norm"
BROKEN: dict[str, Any] = {
    "has hecate_layers or hecate_mlp of another version": layer(version=2),
    "or hecate_mlp of another version than 1; load it": config(lambda facts: facts.update(hecate_layers=[1])),
    "settings of .*linear_attn that do not fit: .*conv_kernel": layer(conv_kernel=1),
    "has settings of .*linear_attn that do not fit: heads: must be": layer(heads=0),
    "has settings of .*linear_attn that do not fit: odd: unknown field": layer(odd=1),
    "has weights model.layers.0.linear_attn.*, of which": config(_move),
    r"memory.out.weight is of shape None, expected \[32, 64\]": weights(lambda t: t.pop(f"{LAYER}.memory.out.weight")),
    r"memory.conv.weight is of shape \[4, 96\], expected \[4, 128\]": layer(d_value=24),
    "truncated or not a safetensors file": lambda folder: os.truncate(folder / "hecate.safetensors", 2000),
    "settings of .*linear_attn that do not fit: layer_idx=1, and the model's layer has 0": layer(layer_idx=1),
    "has weights odd, of which its config says nothing": weights(lambda t: t.update(odd=torch.ones(1))),
    r"memory.norm as torch.int64, no floating point": weights(lambda t: t.update({NORM: t[NORM].long()})),
    "cannot be loaded: .*no file named model.safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    "model.safetensors is truncated or not": lambda folder: (folder / "model.safetensors").write_bytes(bytes(100)),
    "cannot be loaded: weights of other shapes": config(lambda facts: facts.update(vocab_size=99)),
    "cannot be loaded: .*model type": config(lambda facts: facts.update(model_type="none")),
    "has no config.json of a model": lambda folder: (folder / "config.json").unlink(),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("upgraded") / "a"
    hecate.hf.save(upgraded(), folder)
    return folder


@pytest.mark.spec("HF-SAVED-E1")
@pytest.mark.parametrize("words", BROKEN)
def test_folders_that_do_not_fit_are_refused(words, saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "a"))
    BROKEN[words](folder)
    with pytest.raises(CheckpointError, match=words):
        hecate.hf.load(folder)


@pytest.mark.spec("HF-SAVED-E1")
def test_a_graft_that_does_not_fit_and_what_load_does_not_take(tmp_path):
    hecate.hf.save(grafted(), tmp_path / "a")
    for how, words in (
        ({"device_map": "auto"}, "device_map: memories are put into a model on one device"),
        ({"train": "new"}, "train must be"),
    ):
        with pytest.raises(ConfigError, match=words):
            hecate.hf.load(tmp_path / "a", **how)
    lost = r"has weights model.layers.*hecate\..*, of which its config says"
    for number, (change, words) in enumerate((
        (lambda facts: facts["hecate_mlp"].update(layers=[7]), "does not fit its model: layers: has layer 7"),
        (lambda facts: facts["hecate_mlp"].update(version=3), "hecate_mlp of another version than 1"),
        (lambda facts: facts.pop("hecate_graft"), lost),
        (lambda facts: facts.pop("hecate_mlp"), lost),
    )):  # fmt: skip
        folder = Path(shutil.copytree(tmp_path / "a", tmp_path / str(number)))
        config(change)(folder)
        with pytest.raises(CheckpointError, match=words):
            hecate.hf.load(folder)


def test_a_loaded_model_goes_on(tmp_path):
    hecate.hf.save(upgraded(), tmp_path / "a")
    model = hecate.hf.load(tmp_path / "a")
    report = upgrade(model, "momentum")
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], 0.1)
    twin(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()
    assert all(not torch.equal(twin.get_parameter(n), model.get_parameter(n)) for n in report.new)
    hecate.hf.save(twin, tmp_path / "b")
    assert same_bits(hecate.hf.load(tmp_path / "b"), twin)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "b").hecate_layers.keys() == {LAYER}


@pytest.mark.spec("HF-SAVED-D1")
def test_a_plain_model_of_a_config_that_was_an_upgraded_ones_is_plain(tmp_path):
    model = AutoModelForCausalLM.from_config(upgraded().config).eval()
    hecate.hf.save(model, tmp_path / "a")
    again = hecate.hf.load(tmp_path / "a")
    assert same_bits(model, again) and not any(isinstance(part, Hosted) for part in again.modules())
