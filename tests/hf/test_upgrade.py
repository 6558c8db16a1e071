"""Trained models under richer rules: the same function at the start, and alive."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hecate.errors import ConfigError
from hecate.hf import adopt, from_layer, release, upgrade
from hecate.hf.upgrade import NOT_WIDER, WIDER, Hosted, rule_name
from hecate.rule import RULES
from tests.hf.common import IDS, goes_on, logits, off, stirred, takes_back, tuned
from tests.hf.families import built
from tests.hf.test_adopt import greedy, model_of
from tests.hf.test_layers import DELTA, linear

SOME = {"qwen3_next": "gated_delta", "kimi_linear": "kda", "bailing_hybrid": "kda"}
CASES = [("qwen3_next", rule) for rule in WIDER]  # every rule from a gated delta rule, and once from either KDA
CASES += [(("kimi_linear", "bailing_hybrid")[n % 2], rule) for n, rule in enumerate(WIDER) if rule != "kda"]
WARNS = pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")


def hosted(model: Any) -> Any:
    """The model with its layers as memories of their own rule."""
    model = copy.deepcopy(model)
    for name, layer in [(name, part) for name, part in model.named_modules() if part is linear(model)]:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Hosted(from_layer(layer), layer.layer_idx))
    return model


@cache
def said_by(family: str) -> tuple[Tensor, Tensor, Tensor, dict[str, torch.Size]]:
    """What a family's model says, the same with its layers as memories, and how it goes on; the shapes of those."""
    plain, model = hosted(model_of(family)), model_of(family)
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    return logits(model), logits(plain), greedy(model, IDS[:1, :20], 6), shapes


@pytest.mark.spec("HF-UPGRADE-D1")
@pytest.mark.parametrize(("family", "rule"), CASES)
def test_the_same_function_and_alive(family, rule):
    model, (before, plain, tokens, old) = copy.deepcopy(model_of(family)), said_by(family)
    report = upgrade(model, rule)
    assert len(report.layers) == 1 and f"1 layer runs {rule}, which adds {WIDER[rule].adds}" in str(report)
    assert off(logits(model), plain) < 3e-7
    assert off(logits(model), before) < 1e-6  # what from_layer's memory is off by itself
    assert torch.equal(greedy(model, IDS[:1, :20], 6), tokens)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    sizes = {name: p.grad.abs().mean() for name, p in model.named_parameters() if p.grad is not None}
    median = torch.stack([*sizes.values()]).median()
    assert report.new and all(sizes[name] > 1e-3 * median for name in report.new)
    own = {name for name, p in model.named_parameters() if old.get(name) != p.shape}
    assert own == set(report.new)
    assert off(logits(stirred(model, 0.5, report.new)), before) > 1e-4


@WARNS
@pytest.mark.spec("HF-UPGRADE-D1")
@pytest.mark.parametrize("family", [family for family in DELTA if family not in SOME])
def test_every_family(family):
    model = copy.deepcopy(model_of(family))
    before = logits(model)
    report = upgrade(model, "gated_delta_2")
    assert off(logits(model), before) < 1e-6 and report.new
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in report.new)


@WARNS
@pytest.mark.spec("HF-UPGRADE-I1")
@pytest.mark.parametrize("rule", WIDER)
def test_caches_padding_beams_and_documents_of_richer_rules(rule):
    model = copy.deepcopy(model_of("qwen3_next"))
    stirred(model, 0.5, upgrade(model, rule).new)
    goes_on(model)
    starts = torch.arange(40).remainder(13).eq(0)[None]
    with pytest.raises(ConfigError, match="a row of several documents cannot fill a cache"):
        model(input_ids=IDS[:1], seq_idx=starts.cumsum(1), use_cache=True)


@pytest.mark.parametrize("train", ["new", "all"])
def test_it_trains_alone_or_with_the_rest(train):
    model = copy.deepcopy(model_of("qwen3_next"))
    report = upgrade(model, "gated_delta_2", train=train)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = tuned(model, 12)
    assert losses[-1] < losses[0] - (0.01 if train == "new" else 0.5)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(report.new) if train == "new" else changed > set(report.new)


@pytest.mark.spec("HF-UPGRADE-D1")
def test_what_is_frozen_stays_frozen():
    def learns(model: Any) -> set[str]:
        return {name for name, p in model.named_parameters() if p.requires_grad}

    model = copy.deepcopy(model_of("qwen3_next")).requires_grad_(False)
    layer = linear(model)
    assert not any(p.requires_grad for p in from_layer(layer).parameters())
    layer.out_proj.requires_grad_(True)
    assert [name for name, p in from_layer(layer).named_parameters() if p.requires_grad] == ["out.weight"]
    first = upgrade(model, "kda")
    assert learns(model) == {*first.new, "model.layers.0.linear_attn.memory.out.weight"}
    before, second = learns(model), upgrade(model, "momentum")
    assert learns(model) == before | set(second.new)


@pytest.mark.spec("HF-UPGRADE-D1")
def test_the_table_of_rules():
    assert {own for wider in WIDER.values() for own in wider.contains} == {"gated_delta", "kda"}
    for rule in WIDER:
        for family, own in (("qwen3_next", "gated_delta"), ("kimi_linear", "kda")):
            model = copy.deepcopy(model_of(family))
            assert rule_name(from_layer(linear(model)).config) == own
            if own in WIDER[rule].contains:
                upgrade(model, rule)
                with pytest.raises(ConfigError, match=rf"{rule!r} (adds nothing|contains gated_delta, and)"):
                    upgrade(model, rule)
                continue
            with pytest.raises(ConfigError, match=f"{rule!r} contains gated_delta, and .* is kda already"):
                upgrade(model, rule)
    page = (Path(__file__).parents[2] / "docs/pages/adopt.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| (.+) \| .+ \|$", page, re.M)
    assert rows == [(rule, ", ".join(wider.contains), wider.adds) for rule, wider in WIDER.items()]


@pytest.mark.spec("HF-UPGRADE-E1")
def test_rules_that_do_not_contain_the_layers_are_refused_by_name():
    model = copy.deepcopy(model_of("qwen3_next"))
    before = model.state_dict()
    for rule in {*RULES, *NOT_WIDER} - WIDER.keys():
        words = "cannot take the layers over" if rule in NOT_WIDER else "does not contain gated_delta"
        words = "is that of model.layers.0.linear_attn already" if rule == "gated_delta" else words
        with pytest.raises(ConfigError, match=f"rule {rule!r} {words}.* there are kda, gated_delta_2"):
            upgrade(model, rule)
    with pytest.raises(ConfigError, match="model.layers.0.linear_attn: it has gating 'rwkv7', writes 2, decay_order"):
        upgrade(model, "rwkv7")
    with pytest.raises(ConfigError, match="'gated_delta' does not contain kda, .*: it has one decay for a head"):
        upgrade(model_of("kimi_linear"), "gated_delta")
    with pytest.raises(ConfigError, match="unknown rule 'gated_delta2'. Did you mean 'gated_delta_2'"):
        upgrade(model, "gated_delta2")
    with pytest.raises(ConfigError, match="unknown rule .*'kind': 'kda'.*Known: kda"):
        upgrade(model, {"kind": "kda"})
    assert model.state_dict().keys() == before.keys()


def test_what_else_is_refused_leaves_the_model_as_it_was():
    model = copy.deepcopy(model_of("qwen3_next"))
    modules = [*model.modules()]
    with pytest.raises(TypeError, match="takes a torch module, got a str"):
        upgrade("model", "kda")
    with pytest.raises(ConfigError, match="the Linear has no layer of gated_delta or kda"):
        upgrade(nn.Linear(2, 2), "kda")
    with pytest.raises(ConfigError, match=r"layer 1 is none of a delta rule; they are \[0\]"):
        upgrade(model, "kda", layers=[0, 1])
    for numbers, told in (
        ([], r"\[\]"),
        (0, "0"),
        ("0", "'0'"),
        (torch.tensor(0), r"tensor\(0\)"),
        ([0.0], r"\[0.0\]"),
    ):
        with pytest.raises(ConfigError, match=f"layers must be numbers of layers, such as .*, got {told}"):
            upgrade(model, "kda", layers=numbers)
    assert len(upgrade(copy.deepcopy(model), "kda", layers=iter([0])).layers) == 1
    with pytest.raises(ConfigError, match="train must be"):
        upgrade(model, "kda", train="some")
    linear(model).activation = "relu"
    with pytest.raises(ConfigError, match="hidden_act='relu'"):
        upgrade(model, "kda")
    linear(model).activation, linear(model)._hf_hook = "silu", object()
    with pytest.raises(ConfigError, match="accelerate dispatches model.layers.0.linear_attn"):
        upgrade(model, "kda")
    assert [*model.modules()] == modules
    cache = DynamicCache(config=model.config)
    del linear(model)._hf_hook
    model(input_ids=IDS, past_key_values=cache)
    upgrade(model, "kda")
    with pytest.raises(ConfigError, match="filled by the model before its upgrade"):
        model(input_ids=IDS[:, :1], past_key_values=cache)


@WARNS
def test_some_layers_again_adopted_and_from_a_file(tmp_path):
    over = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    model = built("qwen3_next", **over)
    before = logits(model)
    adopt(model)
    assert upgrade(model, "momentum", layers=[1]).layers == ("model.layers.1.linear_attn",)
    report = upgrade(model, "kda", layers=[1])
    assert report.new == tuple(f"model.layers.1.linear_attn.memory.gates.{own}.retain" for own in ("bias", "weight"))
    assert off(logits(model), before) < 1e-6
    ids, positions = IDS[:1, :9], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    stirred(model, 0.5, report.new)
    alone = torch.cat([logits(model, part) for part in ids.split((4, 5), 1)], 1)
    assert off(logits(model, ids, position_ids=positions), alone) < 3e-6
    assert release(model) == 1
    assert any(part._forward_pre_hooks for part in model.modules())  # the upgraded one goes on hearing of documents
    upgrade(model, "kda", layers=[0])
    assert off(logits(model, ids, position_ids=positions), alone) < 3e-6
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    again = built("qwen3_next", **over)
    for rule, layers in (("kda", None), ("momentum", [1])):
        upgrade(again, rule, layers=layers)
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(logits(again), logits(model))
    twin = copy.deepcopy(again)
    assert torch.equal(logits(twin), logits(model))


def test_a_model_in_bfloat16():
    model = copy.deepcopy(model_of("kimi_linear")).bfloat16()
    before, exact = logits(model), logits(copy.deepcopy(model).float())
    upgrade(model, "gated_delta_2")
    assert model.dtype == torch.bfloat16 and off(logits(model), exact) < 1.5 * off(before, exact)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.spec("HF-UPGRADE-D1")
def test_hooks_of_a_layer_go_on_and_can_be_removed():
    model, seen = copy.deepcopy(model_of("qwen3_next")), []
    layer = linear(model)

    def after(_: Any, args: Any, kwargs: Any, y: Tensor) -> Tensor:
        seen.append(("after", "hidden_states" in kwargs or bool(args)))
        return 2 * y

    handle = layer.register_forward_hook(after, with_kwargs=True)
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_full_backward_pre_hook(lambda *_: seen.append("back"))
    doubled = logits(model)
    upgrade(model, "kda")
    upgrade(model, "momentum")
    seen.clear()
    assert off(logits(model), doubled) < 1e-6 and seen == ["before", ("after", True)]
    handle.remove()
    seen.clear()
    assert off(logits(model), logits(model_of("qwen3_next"))) < 1e-6 and seen == ["before"]
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert seen == ["before", "before", "back"]


@pytest.mark.spec("HF-UPGRADE-D1")
def test_a_layer_of_two_names_is_upgraded_under_both():
    model = copy.deepcopy(model_of("qwen3_next"))
    model.mine = nn.ModuleDict({"first": linear(model)})
    before = logits(model)
    report = upgrade(model, "kda")
    assert len(report.layers) == 1 and isinstance(model.mine["first"], Hosted)
    assert model.mine["first"] is model.model.layers[0].linear_attn
    assert off(logits(model), before) < 1e-6
    assert set(report.new) <= {name for name, _ in model.named_parameters()}


@WARNS
@pytest.mark.spec("HF-UPGRADE-I1")
@pytest.mark.parametrize("rule", ["gated_delta_2", "delta_product"])
def test_recorded_tokens_are_taken_back(rule):
    model = copy.deepcopy(model_of("qwen3_next"))
    stirred(model, 0.5, upgrade(model, rule).new)
    cache = takes_back(model)
    with pytest.raises(ConfigError, match="3000 tokens are to be taken back"):
        cache.crop(-3000)
    plain = DynamicCache(config=model.config)
    model(input_ids=IDS[:, :4], past_key_values=plain)
    assert not plain.is_croppable
    with pytest.raises(ConfigError, match="has recorded nothing"):
        plain.crop(-1)
