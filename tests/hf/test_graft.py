"""Memories in models of transformers: unchanged at first, alone in learning, the same from a cache, saved and found."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

transformers = pytest.importorskip("transformers")

from hecate.errors import CheckpointError, ConfigError, ShapeError  # noqa: E402
from hecate.hf import graft, load_graft, save_graft  # noqa: E402
from hecate.hf.graft import Grafted, InPlace  # noqa: E402
from tests.hf.common import goes_on, moved  # noqa: E402
from tests.hf.families import BASE  # noqa: E402

SIZES = BASE | {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),  # biases
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 12}),  # norms of q and k
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 4}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {"head_dim": 16}),
}
MORE = {
    "qwen2_window": (
        "Qwen2ForCausalLM", "Qwen2Config", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 16, "sliding_window": 4}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {}),
}  # fmt: skip
EVERY = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
HOW: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
IDS = torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(0))


def made(family: str = "llama", **fields: Any) -> Any:
    """A model of random weights, the same ones each time."""
    model, config, own = (FAMILIES | MORE)[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, model)(getattr(transformers, config)(**SIZES | own | fields)).eval()


def put(model: Any, memory: Any = "titans", layers: list[int] | None = None, loud: float = 0.0, **how: Any) -> Any:
    """A grafted model, drawn the same each time, whose gates are `loud`."""
    graft(model, [0, 2] if layers is None else layers, memory, generator=torch.Generator().manual_seed(1), **how)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("hecate.gate"):
                parameter.fill_(loud)
    return model


def told(model: Any, ids: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model generates, and the scores of each step."""
    out = model.generate(ids, output_scores=True, return_dict_in_generate=True, **HOW | how)
    return out.sequences, torch.stack(out.scores)


def same(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The same tokens by the same scores, within the rounding of a few layers in float64."""
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[1], second[1], rtol=1e-9, atol=1e-11)


@pytest.mark.spec("HF-GRAFT-I1", "HF-GRAFT-D3")
@pytest.mark.parametrize("family", EVERY)
def test_nothing_changes_at_first_and_what_is_new_alone_learns(family):
    model = made(family)
    before, names = model(IDS).logits, set(model.state_dict())
    assert graft(model, [0, 2], "titans", generator=torch.Generator().manual_seed(1)) is model
    assert torch.equal(model(IDS).logits, before) and names <= set(model.state_dict())
    new = {name for name, _ in model.named_parameters()} - names
    assert new and all(".self_attn.hecate." in name for name in new)
    put(loud := made(family), loud=0.5)
    assert not torch.allclose(loud(IDS).logits, before)
    loud(IDS, labels=IDS).loss.backward()
    assert {name for name, p in loud.named_parameters() if p.grad is not None} == new
    assert all(p.grad.abs().sum() > 0 for name, p in loud.named_parameters() if name in new and "initial" not in name)


@pytest.mark.spec("HF-GRAFT-D1")
def test_an_attention_s_output_gains_what_the_memory_says_times_the_gate():
    plain, model = made(), put(made(), loud=0.5)
    seen: dict[str, Any] = {}
    for name, attention in (("plain", plain.model.layers[0].self_attn), ("grafted", model.model.layers[0].self_attn)):
        attention.register_forward_hook(
            lambda module, args, kwargs, out, name=name: seen.update({name: (kwargs["hidden_states"], out[0])}),
            with_kwargs=True,
        )
    plain(IDS), model(IDS)
    branch = model.model.layers[0].self_attn.hecate
    x, y = seen["plain"]
    torch.testing.assert_close(seen["grafted"][1], y + 0.5 * branch.memory(x)[0], rtol=0, atol=1e-12)


@pytest.mark.spec("HF-GRAFT-D1")
def test_weights_are_reused_where_shapes_allow():
    attention = put(made("qwen3")).model.layers[0].self_attn
    q, k, v = attention.hecate.memory.qkv.weight.split(48)
    assert torch.equal(q, attention.q_proj.weight) and torch.equal(
        attention.hecate.memory.out.weight, attention.o_proj.weight
    )
    for own, theirs in ((k, attention.k_proj.weight), (v, attention.v_proj.weight)):
        for head in range(4):  # two heads read each group
            assert torch.equal(own[12 * head : 12 * head + 12], theirs[12 * (head // 2) : 12 * (head // 2) + 12])
    assert "from q, k, v, o" in repr(attention)
    other = put(made(), "delta", heads=2, d_key=8, d_value=4).model.layers[0].self_attn.hecate
    assert other.reused == ("k",) and other.memory.d_value == 4  # two heads of 8 are what the keys have
    assert put(made(), reuse=False).model.layers[0].self_attn.hecate.reused == ()


RULES: dict[str, Any] = {
    "delta": "delta",
    "decay": {"retention": "decay", "feature_map": "elu", "key_norm": "l2"},
    "titans": "titans",
    "chunk": {"kind": "titans", "chunk": 4},
    "mlp": {"structure": "mlp", "algorithm": {"kind": "gd", "lr": 0.1}, "key_norm": "l2"},
    "mamba": "mamba3",
}


@pytest.mark.spec("HF-GRAFT-I2", "HF-GRAFT-I3")
@pytest.mark.parametrize(
    ("family", "memory"),
    [("llama", "titans"), ("mistral", "delta")]
    + [pytest.param(f, "titans", marks=pytest.mark.slow) for f in [*FAMILIES, *MORE] if f != "llama"]
    + [pytest.param("llama", rule, marks=pytest.mark.slow) for rule in RULES if rule != "titans"],
)
def test_caches_padding_beams_and_documents(family, memory):
    # Behind padding other positions are turned by, whose angles are float32.
    goes_on(put(made(family), RULES[memory], loud=2.0), 1e-6, static=True)


@pytest.mark.spec("HF-GRAFT-I2", "HF-GRAFT-D2")
@pytest.mark.parametrize("family", ["mistral", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_memory_in_an_attention_s_place(family):
    model = made(family)
    before = model(IDS).logits
    put(model, "delta", mode="replace")
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, InPlace) and not torch.allclose(model(IDS).logits, before)
    attention.q_proj.weight.data.zero_()  # not used
    attention.o_proj.weight.data.zero_()
    goes_on(model, 1e-6, static=True)
    assert not any(p.requires_grad for n, p in attention.named_parameters() if "hecate" not in n)
    model(IDS, labels=IDS).loss.backward()
    assert attention.hecate.memory.qkv.weight.grad.abs().sum() > 0
    everything = put(made(family), "delta", mode="replace", train="all")
    assert everything.lm_head.weight.requires_grad and everything.model.layers[1].self_attn.q_proj.weight.requires_grad
    assert not everything.model.layers[0].self_attn.q_proj.weight.requires_grad


@pytest.mark.spec("HF-GRAFT-I2")
def test_samples_and_chunks_of_a_prompt():
    model = put(made(), loud=2.0)

    def sampled(**how: Any) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return model.generate(IDS, **HOW | {"do_sample": True, "top_k": 20}, **how)

    assert torch.equal(sampled(), sampled(use_cache=False))
    whole = told(model, IDS, use_cache=False)
    same(told(model, IDS, prefill_chunk_size=4), whole)
    same(told(model, IDS, prefill_chunk_size=4, cache_implementation="static"), whole)
    how = {"compile_config": transformers.CompileConfig(), "cache_implementation": "static"}
    how["compile_config"]._compile_all_devices = True
    model.get_compiled_call = lambda config: pytest.fail("states change their place, which a compiled graph fixes")
    same(told(model, IDS, **how), whole)


@pytest.mark.spec("HF-GRAFT-I2")
def test_a_cache_is_copied_emptied_and_not_cut():
    model = put(made(), "delta", loud=2.0)
    with torch.no_grad():
        cache = model(IDS[:, :6]).past_key_values
        kept = copy.deepcopy(cache)
        after = model(IDS[:, 6:], past_key_values=cache).logits
        assert torch.equal(model(IDS[:, 6:], past_key_values=kept).logits, after)
        with pytest.raises(ConfigError, match=r"crop\(-1\): a memory takes back what it has recorded alone"):
            cache.crop(-1)
        cache.reset()
        torch.testing.assert_close(model(IDS, past_key_values=cache).logits, model(IDS).logits, rtol=0, atol=1e-12)
        assert type(transformers.DynamicCache(config=model.config).layers[0]) is transformers.cache_utils.DynamicLayer
        foreign = made()(IDS[:, :6]).past_key_values
        with pytest.raises(ShapeError, match="holds 6 tokens that the memory of layer 0 has not read"):
            model(IDS[:, 6:], past_key_values=foreign)
    with pytest.raises(ConfigError, match="a memory has a state of constant size"):
        model.generate_batch(IDS.tolist(), max_new_tokens=2)


@pytest.mark.spec("HF-GRAFT-I3")
def test_masks_as_wide_as_a_static_cache_and_masks_that_do_not_fit():
    model = put(made(), "delta", loud=2.0)
    padded = torch.cat([torch.zeros(3, 2, dtype=torch.long), IDS[:, :7]], 1)
    mask, room = (padded != 0).long(), torch.zeros(3, 40, dtype=torch.long)
    room[:, :9] = mask
    with torch.no_grad():
        position = (mask.cumsum(1) - 1).clamp(min=0)
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        for part in (slice(0, 6), slice(6, 9)):
            how = {"attention_mask": room, "position_ids": position[:, part], "past_key_values": cache}
            found = model(padded[:, part], **how).logits
        alone = model(IDS[:, :7], use_cache=False).logits
        torch.testing.assert_close(found, alone[:, 4:], rtol=0, atol=1e-12)
    with pytest.raises(ShapeError, match=r"attention_mask must be \[B, 9 or more\]"):
        model(IDS, attention_mask=torch.ones(3, 1, 9, 9, dtype=torch.bool))
    with pytest.raises(ConfigError, match="no masks reached the memory of layer 0"):
        model.model.layers[0].self_attn(torch.zeros(1, 2, 32))


@pytest.mark.spec("HF-GRAFT-D3")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_those_without_checkpointing(reentrant):
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    gradients = []
    for checkpointing in (False, True):
        model = put(made(), loud=0.5).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        model(IDS, attention_mask=mask, labels=IDS, use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


@pytest.mark.spec("HF-GRAFT-D3", "HF-GRAFT-D4")
def test_a_narrow_model_has_memories_in_float32(tmp_path):
    made().bfloat16().save_pretrained(tmp_path / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    before = model(IDS).logits
    put(model)
    assert model(IDS).logits.dtype == torch.bfloat16 and torch.equal(model(IDS).logits, before)
    branch = model.model.layers[0].self_attn.hecate
    assert {p.dtype for p in branch.parameters()} == {torch.float32}
    branch.gate.data.fill_(1e-3)
    model.save_pretrained(tmp_path / "whole")
    again = load_graft(tmp_path / "whole", dtype="auto")
    assert torch.equal(again(IDS).logits, model(IDS).logits) and again.dtype == torch.bfloat16
    assert again.model.layers[0].self_attn.hecate.gate.dtype == torch.float32
    narrow = put(made().bfloat16(), "delta", dtype=torch.bfloat16, loud=1.0)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16} and narrow(IDS).logits.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert put(made().float(), "delta", loud=1.0)(IDS).logits.isfinite().all()


@pytest.mark.spec("HF-GRAFT-D4")
@pytest.mark.parametrize("family", ["qwen2", "gemma"])  # an output layer of its own, and one that is the embedding
def test_saved_and_loaded(family, tmp_path):
    plain, model = made(family), put(made(family), loud=0.5)
    logits = moved(model)(IDS).logits
    model.save_pretrained(tmp_path / "whole", max_shard_size="60KB")
    assert len(list((tmp_path / "whole").glob("model-*.safetensors"))) > 1
    save_graft(model, tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"graft.json", "graft.safetensors"}
    for again in (
        load_graft(tmp_path / "whole"),
        load_graft(tmp_path / "new", model=made(family)),
        load_graft(tmp_path / "whole", model=made(family), train="all"),
    ):
        assert type(again).__mro__[0].__name__ == type(model).__name__
        assert torch.equal(moved(again).eval()(IDS).logits, logits)
    assert again.lm_head.weight.requires_grad
    # A library that knows nothing of memories reads the model that was there before.
    theirs = type(plain).from_pretrained(tmp_path / "whole").eval()
    assert torch.equal(moved(theirs)(IDS).logits, moved(plain)(IDS).logits)
    theirs.save_pretrained(tmp_path / "again")
    with pytest.raises(CheckpointError, match="has no tensors of a graft"):
        load_graft(tmp_path / "again")


@pytest.mark.spec("HF-GRAFT-D4")
def test_other_heads_and_parts_are_found_again(tmp_path):
    fields = {"heads": 2, "d_key": 6, "d_value": 5, "conv_kernel": 0, "output_gate": False, "firing": "learned"}
    model = put(made(), {"kind": "delta", "feature_map": "favor"}, mode="replace", feature_memory="delta", **fields)
    save_graft(model, tmp_path / "new")
    again = load_graft(tmp_path / "new", model=made())
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert json.loads((tmp_path / "new/graft.json").read_text())["mode"] == "replace"


@pytest.mark.spec("HF-GRAFT-E2")
def test_folders_that_are_damaged(tmp_path):
    model = put(made(), "delta")
    model.save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole/model.safetensors"
    sound = file.read_bytes()
    tensors = load_file(file)
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({name: value for name, value in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks {lost} "):
        load_graft(tmp_path / "whole")
    save_file(tensors | {"model.colour": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="has, unexpectedly, model.colour "):
        load_graft(tmp_path / "whole")
    lost = "model.layers.2.self_attn.hecate.gate"
    save_file({name: value for name, value in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.hecate\.gate is of shape None, expected"):
        load_graft(tmp_path / "whole")
    file.write_bytes(sound[:1000])
    with pytest.raises(CheckpointError, match="is truncated or not a safetensors file"):
        load_graft(tmp_path / "whole")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="it is a pipe or a device"):
        load_graft(tmp_path / "whole")


@pytest.mark.spec("HF-GRAFT-E2")
def test_folders_that_do_not_fit(tmp_path):
    new, plain, broken = (tmp_path / name for name in ("new", "plain", "broken"))
    model, smaller, other = put(made(), "delta"), made(num_hidden_layers=2), made(hidden_size=64)
    save_graft(model, new)
    save_graft(model, broken)
    (broken / "graft.json").write_text("{")
    made().save_pretrained(plain)
    before = other(IDS).logits
    for words, call in {
        "exists already": lambda: save_graft(model, new),
        "holds what a graft added alone; give the model": lambda: load_graft(new),
        "has neither graft.json nor config.json": lambda: load_graft(tmp_path),
        "has no hecate_graft": lambda: load_graft(plain),
        "has layer 2, but the model has layers 0 to 1": lambda: load_graft(new, model=smaller),
        r"layers\.0\.self_attn\.hecate\..* is of shape": lambda: load_graft(new, model=other),
        "graft.json is not of a graft": lambda: load_graft(broken, model=made()),
    }.items():
        with pytest.raises(CheckpointError, match=words):
            call()
    assert torch.equal(other(IDS).logits, before) and not any(isinstance(m, Grafted) for m in other.modules())
    with pytest.raises(ConfigError, match="has no graft"):
        save_graft(made(), tmp_path / "none")
    with pytest.raises(ConfigError, match="dtype would load a model"):
        load_graft(new, model=made(), dtype="auto")
    for field, words in (
        ({"layers": [0]}, r"has memories in layers \[2\]"),
        ({"colour": 1}, "of a graft .*unknown field"),
    ):
        facts = json.loads((new / "graft.json").read_text()) | field
        (new / "graft.json").write_text(json.dumps(facts))
        with pytest.raises(CheckpointError, match=words):
            load_graft(new, model=made())


def quantised(model: Any) -> Any:
    linear = model.model.layers[0].self_attn.k_proj
    linear.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
    return model


def dispatched(model: Any) -> Any:
    attention = model.model.layers[0].self_attn
    attention.forward = attention.forward  # as a hook of accelerate leaves it
    return model


def without(name: str) -> Any:
    model = made()
    delattr(model.model.layers[2].self_attn, name)
    return model


@pytest.mark.spec("HF-GRAFT-E1")
def test_what_cannot_be_grafted():
    for make, how, words in (
        (made, {"layers": [0, 3]}, "layers: has layer 3, but the model has layers 0 to 2"),
        (made, {"layers": [-1]}, r"layers\[0\]: must be >= 0"),
        (made, {"layers": []}, "layers"),
        (made, {"layers": [1, 1]}, r"layers: names a layer twice: \[1, 1\]"),
        (made, {"memory": "delt"}, "Did you mean 'delta'"),
        (made, {"head": 3}, "unknown field of GraftConfig.*Did you mean 'heads'"),
        (made, {"mode": "beside"}, "mode: must be 'add' or 'replace'"),
        (made, {"train": "nothing"}, "train must be one of"),
        (made, {"dtype": torch.int8}, "dtype: must be"),
        (lambda: put(made()), {}, "has a graft already"),
        (lambda: made().to("meta"), {}, "is on the meta device"),
        (lambda: quantised(made()), {}, r"k_proj, but that of layer 0 is a Linear of torch.int8.*reuse=False"),
        (lambda: dispatched(made()), {}, "accelerate dispatches a model"),
        (lambda: without("k_proj"), {}, r"layer 2: a graft needs self_attn\.k_proj, which LlamaAttention"),
        (lambda: nn.Linear(3, 3), {}, "needs a PreTrainedModel of transformers, got a Linear"),
    ):  # fmt: skip
        model = make()
        modules, free = list(model.named_modules()), [p.requires_grad for p in model.parameters()]
        with pytest.raises(ConfigError, match=words):
            graft(model, **{"layers": [0, 2], **how})
        assert list(model.named_modules()) == modules and [p.requires_grad for p in model.parameters()] == free


@pytest.mark.spec("HF-GRAFT-E1")
def test_models_of_another_build():
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9)
    with pytest.raises(ConfigError, match=r"the GPT2LMHeadModel has no \.layers"):
        graft(transformers.GPT2LMHeadModel(config))
    phi = transformers.Phi3Config(**SIZES)
    with pytest.raises(ConfigError, match=r"needs self_attn\.q_proj, which Phi3Attention does not have"):
        graft(transformers.Phi3ForCausalLM(phi))


@pytest.mark.spec("HF-GRAFT-D1")
def test_all_layers_of_a_model_without_a_head_of_quantised_weights():
    model = made().model
    before = model(IDS).last_hidden_state
    graft(model, memory="delta", reuse=False, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(IDS).last_hidden_state, before)
    assert sum(isinstance(module, Grafted) for module in model.modules()) == 3
    graft(quantised(made()), range(2), reuse=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.spec("HF-GRAFT-D5")
def test_peft_beside_a_graft(tmp_path):
    peft = pytest.importorskip("peft")
    model = put(made(), "delta", loud=0.5)
    logits, names = model(IDS).logits, {n for n, p in model.named_parameters() if p.requires_grad}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "qkv"], modules_to_save=["hecate"])
    tuned = peft.get_peft_model(model, config)
    assert torch.equal(tuned(IDS).logits, logits)
    trained_names = {n for n, p in tuned.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trained_names) and len(trained_names) > len(names)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.1)
    tuned(IDS, labels=IDS).loss.backward()
    optimizer.step()
    after = tuned(IDS).logits
    assert not torch.allclose(after, logits)
    with pytest.raises(ConfigError, match="is wrapped|are wrapped"):
        save_graft(tuned, tmp_path / "no")
    same(told(tuned, IDS), told(tuned, IDS, use_cache=False))
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, after, rtol=0, atol=1e-10)
    save_graft(merged, tmp_path / "new")
    with pytest.raises(ConfigError, match="graft the model first and wrap it then"):
        graft(peft.get_peft_model(made(), peft.LoraConfig(target_modules=["q_proj"])))
