"""Upgraded, grafted and adopted models in folders: the same bits come back."""

from __future__ import annotations

import copy
import json
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
from tests.hf.common import same_bits
from tests.hf.families import built
from tests.hf.test_graft_mlp import IDS, logits, mlps, model_of, moved
from tests.hf.test_layers import DELTA

WARNS = pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")
SOME = ["qwen3_next", "bailing_hybrid"]  # the latter's names are others in its files


def stirred(model: Any) -> Any:
    """The model with every weight off its start."""
    source = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=source).to(p.dtype)
    return model


def upgraded(family: str = "qwen3_next", *rules: str) -> Any:
    model = built(family)
    for rule in rules or ("gated_delta_2",):
        upgrade(model, rule)
    return stirred(model)


def grafted(fast: str = "last") -> Any:
    model = graft(model_of(), layers=[1], memory="titans")
    return moved(graft_mlp(model, layers=[0], fast=fast, periods=(4, 8)), 0.1)


@WARNS
@pytest.mark.spec("HF-SAVED-D1")
@pytest.mark.parametrize(
    "family", [f if f in SOME else pytest.param(f, marks=pytest.mark.slow) for f in DELTA if f != "glm5_next"]
)
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
    model = stirred(built("qwen3_5"))
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


def edited(folder: Path, change: Any) -> None:
    facts = json.loads((folder / "config.json").read_text())
    change(facts)
    (folder / "config.json").write_text(json.dumps(facts))


def dropped(folder: Path, name: str) -> None:
    path = folder / "hecate.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def retyped(folder: Path, change: Any) -> None:
    path = folder / "hecate.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def cut(folder: Path) -> None:
    path = folder / "hecate.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


LAYER = "model.layers.0.linear_attn"
BROKEN: dict[str, Any] = {
    "has hecate_layers or hecate_mlp of another version": lambda f: edited(
        f, lambda c: c["hecate_layers"][LAYER].update(version=2)
    ),
    "or hecate_mlp of another version than 1; load it": lambda f: edited(f, lambda c: c.update(hecate_layers=[1])),
    "settings of .*linear_attn that do not fit: .*conv_kernel": lambda f: edited(
        f, lambda c: c["hecate_layers"][LAYER].update(conv_kernel=1)
    ),
    "has settings of .*linear_attn that do not fit: heads: must be": lambda f: edited(
        f, lambda c: c["hecate_layers"][LAYER].update(heads=0)
    ),
    "has settings of .*linear_attn that do not fit: odd: unknown field": lambda f: edited(
        f, lambda c: c["hecate_layers"][LAYER].update(odd=1)
    ),
    "has weights model.layers.0.linear_attn.*, of which": lambda f: edited(
        f, lambda c: c["hecate_layers"].update({"model.x": c["hecate_layers"].pop(LAYER)})
    ),
    r"memory.out.weight is of shape None, expected \[32, 64\]": lambda f: dropped(f, f"{LAYER}.memory.out.weight"),
    r"memory.conv.weight is of shape \[4, 96\], expected \[4, 128\]": lambda f: edited(
        f, lambda c: c["hecate_layers"][LAYER].update(d_value=24)
    ),
    "truncated or not a safetensors file": cut,
    "settings of .*linear_attn that do not fit: layer_idx=1, and the model's layer has 0": lambda f: edited(
        f, lambda c: c["hecate_layers"][LAYER].update(layer_idx=1)
    ),
    "has weights odd, of which its config says nothing": lambda f: retyped(f, lambda t: t.update(odd=torch.ones(1))),
    r"memory.norm as torch.int64, no floating point": lambda f: retyped(
        f, lambda t: t.update({f"{LAYER}.memory.norm": t[f"{LAYER}.memory.norm"].long()})
    ),
    "cannot be loaded: .*no file named model.safetensors": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors is truncated or not": lambda f: (f / "model.safetensors").write_bytes(bytes(100)),
    "cannot be loaded: weights of other shapes": lambda f: edited(f, lambda c: c.update(vocab_size=99)),
    "cannot be loaded: .*model type": lambda f: edited(f, lambda c: c.update(model_type="none")),
    "has no config.json of a model": lambda f: (f / "config.json").unlink(),
}  # fmt: skip


@pytest.mark.spec("HF-SAVED-E1")
@pytest.mark.parametrize("words", BROKEN)
def test_folders_that_do_not_fit_are_refused(words, tmp_path):
    hecate.hf.save(upgraded(), tmp_path / "a")
    BROKEN[words](tmp_path / "a")
    with pytest.raises(CheckpointError, match=words):
        hecate.hf.load(tmp_path / "a")


@pytest.mark.spec("HF-SAVED-E1")
def test_a_graft_that_does_not_fit_and_what_load_does_not_take(tmp_path):
    hecate.hf.save(grafted(), tmp_path / "a")
    with pytest.raises(ConfigError, match="device_map: memories are put into a model on one device"):
        hecate.hf.load(tmp_path / "a", device_map="auto")
    with pytest.raises(ConfigError, match="train must be"):
        hecate.hf.load(tmp_path / "a", train="new")
    edited(tmp_path / "a", lambda c: c["hecate_mlp"].update(layers=[7]))
    with pytest.raises(CheckpointError, match="does not fit its model: layers: has layer 7"):
        hecate.hf.load(tmp_path / "a")
    for key in ("hecate_graft", "hecate_mlp"):
        hecate.hf.save(grafted(), tmp_path / key)
        edited(tmp_path / key, lambda c, key=key: c.pop(key))
        with pytest.raises(CheckpointError, match=r"has weights model.layers.*hecate\..*, of which its config says"):
            hecate.hf.load(tmp_path / key)
    edited(tmp_path / "a", lambda c: c["hecate_mlp"].update(version=3))
    with pytest.raises(CheckpointError, match="hecate_mlp of another version than 1"):
        hecate.hf.load(tmp_path / "a")


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
