"""Adopted models on the ways that models go: copied, saved, wrapped, compiled, patched; and what cannot be adopted."""

from __future__ import annotations

import copy
import importlib
import io
import os
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", minversion="5")

from hecate.errors import ConfigError
from hecate.hf import adopt, release
from hecate.hf.adopt import KERNELS, Adopted, Kernel, adopted, rule_of
from tests.hf.common import off, tuned
from tests.hf.families import BUILT, built, modeling
from tests.hf.test_adopt import IDS, logits, model_of


@pytest.fixture
def model() -> Any:
    return built("kimi_linear")


def layers(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, Adopted)]


@pytest.mark.spec("HF-ADOPT-I1")
def test_copies_and_files(model, tmp_path):
    before = logits(model)
    adopt(model)
    ours = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), ours) and len(layers(twin)) == len(layers(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(logits(loaded), ours) and layers(loaded)
    for one in (twin, loaded):
        assert release(one) == len(layers(model))
        assert torch.equal(logits(one), before)
    assert torch.equal(logits(model), ours), "releasing a copy released the model"
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert not layers(plain) and torch.equal(logits(plain), before)
    assert [*adopt(model).adopted] == [*adopt(model).adopted]
    assert release(model) == len(layers(twin) or layers(loaded)) + 1 and release(model) == 0
    assert torch.equal(logits(model), before)
    leftover = {name for part in model.modules() for name in vars(part) if "hecate" in name}
    assert not leftover and not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.spec("HF-ADOPT-I1")
def test_hooks_of_accelerate_before_and_after(model):
    hooks = pytest.importorskip("accelerate.hooks")

    class Counting(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Counting.calls += 1
            return args, kwargs

    before = logits(model)
    layer = next(part for part in model.modules() if rule_of(type(part)) is not None)
    adopt(model)
    ours = logits(model)
    release(model)
    hooks.add_hook_to_module(layer, Counting())
    hooks.add_hook_to_module(layer.conv1d, Counting())
    assert torch.equal(logits(model), before) and Counting.calls == 2
    report = adopt(model)
    assert not report.left and torch.equal(logits(model), ours) and Counting.calls == 4
    release(model)
    assert torch.equal(logits(model), before) and Counting.calls == 6
    hooks.remove_hook_from_module(layer)
    hooks.remove_hook_from_module(layer.conv1d)
    assert not adopt(model).left and torch.equal(logits(model), ours)
    hooks.add_hook_to_module(layer, Counting())
    assert torch.equal(logits(model), ours) and Counting.calls == 7
    hooks.remove_hook_from_module(layer)
    release(model)
    assert torch.equal(logits(model), before)


@pytest.mark.spec("HF-ADOPT-D1")
def test_lora_before_and_after(model):
    peft = pytest.importorskip("peft")
    targets = sorted(
        {n.split(".")[-1] for n, part in model.named_modules() if isinstance(part, nn.Linear)} - {"lm_head"}
    )

    def wrapped(one: Any) -> Any:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            torch.set_default_dtype(torch.float32)
            return peft.get_peft_model(one, peft.LoraConfig(r=2, target_modules=targets))

    plain, first, last = (copy.deepcopy(model) for _ in range(3))
    wanted = tuned(wrapped(plain), 3, IDS)
    adopt(first)
    first = wrapped(first)
    last = wrapped(last)
    report = adopt(last)
    assert all(name.startswith("base_model.model.") for name in report.adopted)
    for one in (first, last):
        assert max(abs(ours - theirs) for ours, theirs in zip(tuned(one, 3, IDS), wanted, strict=True)) < 1e-4
    merged = first.merge_and_unload()
    assert layers(merged) and release(merged) == len(report.adopted)


@pytest.mark.spec("HF-ADOPT-D1")
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        pytest.param(name, packed, marks=() if (name, packed) == ("qwen3_5", True) else pytest.mark.slow)
        for name in ("qwen3_5", "kimi_linear", "bamba")
        for packed in (True, False)
    ],
)
def test_compiled_in_one_graph(name, packed):
    model = built(name, num_hidden_layers=1, layer_types=None if name == "bamba" else ["linear_attention"])
    adopt(model)
    how = {"position_ids": torch.cat([torch.arange(40), torch.arange(50)])[None]} if packed else {}
    eager = logits(model, **how)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert off(logits(compiled, **how), eager) < 3e-6
    torch._dynamo.reset()


@pytest.mark.spec("HF-ADOPT-D1")
@pytest.mark.filterwarnings("ignore")
def test_kernels_of_other_packages_need_not_run(monkeypatch):
    """With fla installed and no GPU transformers' own model dies."""
    pytest.importorskip("fla")
    if torch.cuda.is_available():
        pytest.skip("fla runs")
    name = modeling("qwen3_next").__name__
    theirs = logits(model_of("qwen3_next"))
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    module: Any = importlib.import_module(name)
    module._in_torch = True
    model = built("qwen3_next")
    assert type(model).__module__ == name and type(model) is not type(model_of("qwen3_next"))
    with pytest.raises(Exception, match="driver"):
        logits(model)
    adopt(model)
    assert off(logits(model), theirs) < 3e-6
    assert model.generate(IDS[:, :9], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 12)


# What cannot be.


@pytest.mark.spec("HF-ADOPT-E1")
def test_what_is_no_model_of_ours():
    for given in ("text", None, 3):
        with pytest.raises(TypeError, match="takes a torch module"):
            adopt(given)
        with pytest.raises(TypeError, match="takes a torch module"):
            release(given)
    with pytest.raises(ConfigError) as refused:
        adopt(nn.Linear(2, 2))
    assert all(name in str(refused.value) for name in BUILT)
    assert release(nn.Linear(2, 2)) == 0


@pytest.mark.spec("HF-ADOPT-E1")
def test_arguments_that_cannot_be(model):
    for given, text in (({"packed": "always"}, "packed must be one of"), ({"engine": "fastest"}, "fastest")):
        with pytest.raises(ConfigError, match=text):
            adopt(model, **given)
        assert not layers(model)
    adopt(model, engine="sequential")
    assert off(logits(model), logits(model_of("kimi_linear"))) < 3e-6


@pytest.mark.spec("HF-ADOPT-E1")
def test_a_forward_of_somebody_else_is_left(monkeypatch):
    model = built("qwen3_next", num_hidden_layers=3, layer_types=["linear_attention"] * 2 + ["full_attention"])
    first, second = (part for part in model.modules() if rule_of(type(part)) is not None)
    patched = types.MethodType(lambda self, hidden_states, **_: hidden_states, first)
    first.forward = patched
    report = adopt(model)
    assert [*report.left] == ["model.layers.0.linear_attn"] and "test_adopted_ways" in str(report)
    assert [*report.adopted] == ["model.layers.1.linear_attn"] and layers(model) == [second]
    assert first.forward is patched
    release(model)
    assert first.forward is patched
    del first.forward

    def other(self: Any, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    monkeypatch.setattr(type(first), "forward", other)
    with pytest.raises(ConfigError, match="comes from tests.hf.test_adopted_ways"):
        adopt(model)


@pytest.mark.spec("HF-ADOPT-E1")
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "causal_conv1d_update"])
def test_kernels_of_an_unknown_version_are_refused_as_a_whole(monkeypatch, name):
    model = built("qwen3_next")
    before = logits(model)
    monkeypatch.setitem(KERNELS, name, Kernel("query key", KERNELS[name].rule, KERNELS[name].ours))
    with pytest.raises(ConfigError, match=f"{name} differ; nothing was changed"):
        adopt(model)
    assert not layers(model) and torch.equal(logits(model), before)
    assert not any(part._forward_pre_hooks for part in model.modules())
    monkeypatch.undo()
    monkeypatch.delitem(KERNELS, "causal_conv1d_fn")
    with pytest.raises(ConfigError, match="causal_conv1d_fn differ"):
        adopt(model)


@pytest.mark.spec("HF-ADOPT-E1")
def test_weights_that_are_not_there_or_no_floats():
    known = model_of("qwen3_5")
    with torch.device("meta"):
        empty = type(known)(known.config)
    with pytest.raises(ConfigError, match="on the meta device; load the weights"):
        adopt(empty)
    assert not layers(empty)
    model = built("qwen3_5")
    layer = next(part for part in model.modules() if rule_of(type(part)) is not None)
    whole = layer.conv1d.weight
    layer.conv1d.weight = nn.Parameter(whole.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="conv1d.weight is quantised to torch.int8"):
        adopt(model)
    layer.conv1d.weight = whole

    class Eight(nn.Module):  # projections may be of any kind: kernels never see them
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.scale = linear.weight.detach().abs().max() / 127
            self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight * self.scale).to(x.dtype).mT

    layer.in_proj_qkv = Eight(layer.in_proj_qkv)
    before = logits(model)
    adopt(model)
    assert layers(model) and off(logits(model), before) < 3e-6


@pytest.mark.spec("HF-ADOPT-D1")
def test_layers_without_a_rule_are_named():
    from transformers import JambaConfig, JambaForCausalLM

    modeling("jamba")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    jamba = JambaForCausalLM(
        JambaConfig(vocab_size=9, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1, **sizes)
    )
    with pytest.raises(ConfigError, match="Mamba-1's scan, which no rule of ours is"):
        adopt(jamba)


def test_a_class_is_made_once():
    model = model_of("qwen3_5")
    kind = next(type(part) for part in model.modules() if rule_of(type(part)) is not None)
    assert adopted(kind) is adopted(kind) and rule_of(adopted(kind)) is not None
