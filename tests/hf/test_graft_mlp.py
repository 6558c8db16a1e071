"""MLPs of trained models as memories that start at their weights."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import conv1d, gelu, silu
from transformers import DynamicCache

from hecate.errors import ConfigError, ShapeError
from hecate.hf import MLPGraftConfig, graft, graft_mlp
from hecate.hf.graft_mlp import FastMLP
from tests.hf.common import IDS, goes_on, in_pieces, logits, off, stirred, takes_back
from tests.hf.families import BASE, built

SIZES = BASE | {"intermediate_size": 44, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
# Family: whether all of its MLP can learn, or only its last layer, and what its config has beside SIZES; one for each
# set of names of an MLP's layers, and for each cause to let its last layer alone learn.
FAMILIES: dict[str, tuple[bool, dict[str, Any]]] = {
    "Llama": (True, {"attention_bias": True}),
    "Mistral": (True, {"sliding_window": 8}),
    "Phi": (False, {}),  # gelu_new
    "GPTNeoX": (True, {"hidden_act": "gelu"}),
    "Starcoder2": (True, {"hidden_act": "gelu", "residual_dropout": 0.0}),
    "Nemotron": (True, {"hidden_act": "silu"}),
    "Phi3": (False, {}),  # gate and up in one map
    "Lfm2": (True, {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}),
}
HEBB = {
    "bias": "dot", "retention": {"kind": "decay", "towards": "start"}, "algorithm": {"kind": "gd", "lr": 0.01},
    "read": "before", "step": "normalized",
}  # fmt: skip


def model_of(family: str = "Llama", **over: Any) -> Any:
    own = SIZES | FAMILIES.get(family, (True, {}))[1] | over
    config = getattr(transformers, f"{family}Config")(**own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(over.get("dtype", torch.float32))
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
    return model


def mlps(model: Any) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, FastMLP)]


@pytest.mark.spec("HF-MLP-D1")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES if family != "Mistral"), ("Llama", torch.bfloat16)],
)
def test_the_same_function_at_first(family, dtype):
    model = model_of(family, dtype=dtype)
    before, names = logits(model), set(model.state_dict())
    last = copy.deepcopy(model)
    assert graft_mlp(last, periods=(4, 16)) is last and len(mlps(last)) == 2
    assert torch.equal(logits(last), before)
    assert names < set(last.state_dict()) and all(".hecate." in name for name in set(last.state_dict()) - names)
    if not FAMILIES[family][0]:
        with pytest.raises(ConfigError, match="(has the activation|has layers .* no MLP of hecate's).*fast='last'"):
            graft_mlp(model, fast="whole")
        assert torch.equal(logits(model), before) and not mlps(model)
        return
    graft_mlp(model, fast="whole", periods=(4, 8, 16))
    # A memory of wide numbers stands for a matrix product in narrow ones, with a rounding for each of two products.
    assert off(logits(model), before) < (1e-6 if dtype == torch.float32 else 4e-2)


def conv_of(values: Tensor, taps: Tensor, chunk: int) -> Tensor:
    """Values `[T, V]` under five taps of each channel `[5, V]`, the middle one the token's own, chunk by chunk."""
    parts = [
        conv1d(part.T[None], taps.T[:, None], padding=2, groups=taps.shape[1])[0].T for part in values.split(chunk)
    ]
    return torch.cat(parts)


@pytest.mark.spec("HF-MLP-D1")
@pytest.mark.parametrize("fast", ["last", "whole"])
@pytest.mark.parametrize("family", ["Llama", "Starcoder2"])
def test_the_formula(family, fast):
    """Against loops over chunks, in which a step on the whole MLP is torch's own gradient."""
    model, size = model_of(family).double(), 2.0 if fast == "last" else 0.02  # steps of a deep memory grow with it
    stirred(graft_mlp(model, [1], "in_place_ttt", fast=fast, periods=(4, 6), dtype=torch.float64), size)
    (mlp,) = mlps(model)
    x = torch.randn(1, 21, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if family == "Llama":
        names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")

        def hidden(w: list[Tensor], x: Tensor) -> Tensor:
            return silu(x @ w[0].T) * (x @ w[1].T)
    else:
        names = ("c_fc.weight", "c_fc.bias", "c_proj.bias", "c_proj.weight")

        def hidden(w: list[Tensor], x: Tensor) -> Tensor:
            return gelu(x @ w[0].T + w[1])

    def whole(w: list[Tensor], x: Tensor) -> Tensor:
        return hidden(w, x) @ w[-1].T + (w[-2] if family == "Starcoder2" else 0)

    start = [mlp.get_parameter(name).detach() for name in names]
    expected = whole(start, x[0]) if fast == "last" else torch.zeros(21, 32, dtype=torch.float64)
    for index, (level, chunk) in enumerate(zip(mlp.hecate.levels, (4, 6), strict=True)):
        targets = conv_of(x[0] @ level.value.weight.T, level.gating.params.tensors["conv"][:, 0], chunk).detach()
        w, answers = [item.clone() for item in start], []
        moves = torch.zeros(32, 44, dtype=torch.float64)
        for now, v in zip(x[0].split(chunk), targets.split(chunk), strict=True):
            if fast == "last":
                answers.append(hidden(start, now) @ moves.T)
                moves += 0.3 * v.T @ hidden(start, now)
                continue
            answers.append(mlp.hecate.mix[index] * whole(w, now))
            w = [item.requires_grad_() for item in w]
            grads = torch.autograd.grad(-(whole(w, now) * v).sum(), w)
            w = [(item - 0.3 * grad).detach() for item, grad in zip(w, grads, strict=True)]
        expected = expected + torch.cat(answers)
    y, _ = mlp.with_states(x, None, write_mask=None, reset_mask=None)
    assert off(y[0], expected) < 1e-12 and off(y[0], whole(start, x[0])) > 1e-2


@pytest.mark.spec("HF-MLP-D1")
@pytest.mark.parametrize("fast", ["last", "whole"])
@pytest.mark.parametrize("memory", [None, HEBB])
def test_every_new_parameter_learns_and_alone(memory, fast):
    model = graft_mlp(model_of(), memory=memory, fast=fast, periods=(2, 4))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learns = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    assert learns and all(".mlp.hecate." in name for name, _ in learns)
    optimizer = torch.optim.AdamW([p for _, p in learns], 1e-2)
    losses = []
    for step in range(6):
        loss = model(input_ids=IDS[:, :18], labels=IDS[:, :18]).loss
        loss.backward()
        alive = {name for name, p in learns if p.grad is not None and bool(p.grad.any())}
        first = {name for name, _ in learns if name.endswith(("value.weight", "mix"))}
        assert alive >= (first if step == 0 else {name for name, _ in learns})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.002
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, _ in learns}


@pytest.mark.spec("HF-MLP-D1")
def test_what_a_gating_adds_to_answers():
    """Mamba-2's D v, beside its memory."""
    model = graft_mlp(model_of(), layers=[0], memory="mamba2")
    (mlp,) = mlps(model)
    (level,) = mlp.hecate.levels
    nn.init.normal_(level.value.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 9, 32, dtype=torch.float32, generator=torch.Generator().manual_seed(2))
    masks: dict[str, Any] = {"write_mask": None, "reset_mask": None}
    with torch.no_grad():
        before, d = mlp.with_states(x, None, **masks)[0], level.gating.params.tensors["d"]
        d += 2.0
        assert off(mlp.with_states(x, None, **masks)[0] - before, 2 * level.value(x)) < 1e-5


@pytest.mark.spec("HF-MLP-D1")
def test_the_start_is_learned_with_the_rest():
    model = stirred(graft_mlp(model_of(), fast="whole", periods=(4,), train="all"))
    model(input_ids=IDS, labels=IDS).loss.backward()
    for mlp in mlps(model):
        assert all(bool(getattr(mlp, name).weight.grad.any()) for name in ("gate_proj", "up_proj", "down_proj"))


@pytest.mark.spec("HF-MLP-I1")
@pytest.mark.parametrize(
    ("family", "fast"),
    [("Llama", "last"), ("Lfm2", "whole")]
    + [
        pytest.param(*pair, marks=pytest.mark.slow)
        for pair in (("Llama", "whole"), ("Mistral", "last"), ("GPTNeoX", "whole"))
    ],
)
def test_caches_padding_beams_documents_and_drafts(family, fast):
    model = stirred(graft_mlp(model_of(family), fast=fast, periods=(3, 4)))
    assert off(logits(model), logits(model_of(family))) > 1e-3
    goes_on(model, static=family == "Llama", documents=family == "Llama")
    if family == "Llama":
        one = {"max_new_tokens": 12, "do_sample": False}
        drafted = model.generate(IDS[:1, :20], prompt_lookup_num_tokens=3, **one)
        assert torch.equal(drafted, model.generate(IDS[:1, :20], **one))


@pytest.mark.spec("HF-MLP-I1")
def test_tokens_are_taken_back_and_a_cache_of_others_is_refused():
    plain, model = model_of(), stirred(graft_mlp(graft(model_of(), layers=[0], memory="titans"), periods=(3,)))
    assert len({name for name, p in model.named_parameters() if p.requires_grad and ".self_attn.hecate." in name}) > 3
    takes_back(model)
    other = DynamicCache(config=model.config)
    plain(input_ids=IDS[:, :4], past_key_values=other)
    with pytest.raises(ShapeError, match="holds (4 )?tokens that the (memory|MLP) of layer 0 has not read"):
        model(input_ids=IDS[:, 4:5], past_key_values=other)
    with pytest.raises(ConfigError, match="no masks reached layer 0"):
        model.model.layers[0](torch.zeros(1, 2, 32))
    with pytest.raises(ConfigError, match="no masks reached the MLP of layer 1"):
        model.model.layers[1].mlp(torch.zeros(1, 2, 32))


@pytest.mark.spec("HF-MLP-I1")
def test_checkpointing_copies_hooks_and_the_linear_layers_of_a_hybrid():
    model = stirred(graft_mlp(model_of(), periods=(4,), train="all")).train()
    seen: list[Any] = []
    mlps(model)[0].register_forward_hook(lambda *_: seen.append(1))
    grads = []
    for checkpointing in (False, True):
        twin = copy.deepcopy(model)
        if checkpointing:
            twin.activation_checkpointing_enable({"use_reentrant": False})
        twin(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        grads.append([p.grad for p in twin.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and len(seen) == 2
    hybrid = stirred(graft_mlp(built("qwen3_5"), fast="whole", periods=(3,)))
    whole = logits(hybrid)
    assert len(mlps(hybrid)) == 2 and off(in_pieces(hybrid, IDS, 20, 1, 19), whole) < 3e-6
    fresh = DynamicCache(config=hybrid.config)
    built("qwen3_5")(input_ids=IDS, past_key_values=fresh)
    with pytest.raises(ShapeError, match="the MLP of layer 0 has not read"):
        hybrid(input_ids=IDS[:, :1], past_key_values=fresh)


@pytest.mark.spec("HF-MLP-I1")
def test_threads_share_a_model():
    model = stirred(graft_mlp(model_of(), periods=(3,)))
    rows = [IDS[:1], IDS[1:]]
    alone = [in_pieces(model, row, 20, 4, 16) for row in rows]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            together = [*pool.map(lambda row: in_pieces(model, row, 20, 4, 16), rows)]
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of peft are not ours
@pytest.mark.spec("HF-MLP-I1")
def test_one_graph_and_adapters():
    model = stirred(graft_mlp(model_of(), periods=(3,)))
    whole = logits(model)
    found = torch._dynamo.explain(model)(input_ids=IDS, use_cache=False)
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    torch._dynamo.reset()
    peft = pytest.importorskip("peft")
    how = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["hecate"], "r": 2}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**how))
    adapted(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    kept = {n for n, p in adapted.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert any("lora_B" in n and "down_proj" in n for n in kept) and any("value.weight" in n for n in kept)
    assert off(logits(adapted.merge_and_unload()), whole) < 1e-6


def changed(**parts: Any) -> Any:
    model = model_of()
    for name, part in parts.items():
        setattr(model.model.layers[1].mlp, name, part)
    return model


class Scaled(nn.Module):
    """An MLP that does more than its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(32, 44), nn.Linear(44, 32), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.fc2(self.act(self.fc1(x)))


def odd_mlp() -> Any:
    model = model_of()
    model.model.layers[0].mlp = Scaled()
    return model


def meta_model() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def quantised() -> Any:
    model = model_of()
    weight = nn.Parameter(torch.zeros(44, 32, dtype=torch.int8), requires_grad=False)
    model.model.layers[1].mlp.gate_proj.weight = weight
    return model


MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
DEEP = {"memory": {"structure": "mlp"}}
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "a graft needs a PreTrainedModel": (lambda: nn.Linear(2, 2), {}),
    "layers: has layer 2, but the model has layers 0 to 1": (model_of, {"layers": [2]}),
    "names a layer twice": (model_of, {"layers": [1, 1]}),
    "layer 0: the MixtralSparseMoeBlock is a mixture of experts": (lambda: model_of("Mixtral", **MOE), {}),
    "is on the meta device; load its weights": (meta_model, {}),
    "layer 1: the LlamaMLP has gate_proj.weight quantised to torch.int8": (quantised, {}),
    "layer 1: the LlamaMLP ends in none of down_proj": (lambda: changed(down_proj=None), {}),
    "ends in a Sequential, not a linear layer": (lambda: changed(down_proj=nn.Sequential(nn.Linear(44, 32))), {}),
    "has a forward that is not of its class": (lambda: changed(forward=lambda x: x), {}),
    "the LlamaMLP has the activation Mish, none of silu": (lambda: changed(act_fn=nn.Mish()), {"fast": "whole"}),
    "the forward of Scaled does more than its layers say": (odd_mlp, {"fast": "whole"}),
    "memory.structure: 'mlp': the MLP itself is the structure": (model_of, DEEP),
    "memory.feature_map: 'elu': the MLP itself is the feature_map": (model_of, {"memory": {"feature_map": "elu"}}),
    "memory.writes: writes=2 takes as many keys": (model_of, {"memory": "delta_product"}),
    "memory.step: bias 'l2' diverges with keys as long": (model_of, {"memory": {"bias": "l2"}}),
    "bias 'l2' with retention 'none' moves a memory": (model_of, {"memory": "delta", "fast": "whole"}),
    "with retention 'decay' moves a memory": (
        model_of, {"memory": HEBB | {"retention": {"kind": "decay", "towards": "zero"}}, "fast": "whole"}),
    "bias 'l1' gives values that start at zero no gradient": (
        model_of, {"memory": {"bias": "l1", "key_norm": "l2", "read": "after"}}),
    "periods: must rise, from fast to slow, got 8 ahead of 4": (model_of, {"periods": (8, 4)}),
    "periods: must be a list of 1 or more, got ()": (model_of, {"periods": ()}),
    "periods[1]: must be >= 1, got 0": (model_of, {"periods": (4, 0)}),
    "train must be": (model_of, {"train": "new"}),
    "has a graft already": (lambda: graft_mlp(model_of()), {}),
}  # fmt: skip


@pytest.mark.spec("HF-MLP-E1")
def test_what_cannot_be_is_refused_and_leaves_the_model():
    for words in REFUSED:
        make, given = REFUSED[words]
        model = make()
        kinds = [type(part) for part in model.modules()]
        with pytest.raises(ConfigError) as told:
            graft_mlp(model, **given)
        assert words in str(told.value)
        assert [type(part) for part in model.modules()] == kinds and not getattr(model, "_forward_pre_hooks", None)


def test_a_config_is_read_back():
    config = MLPGraftConfig(layers=(0, 3), fast="whole", periods=(16, 64))
    assert MLPGraftConfig.model_validate(config.model_dump(mode="json")) == config
    assert [rule.chunk for rule in config.rules("gated_mlp")] == [16, 64]
    with pytest.raises(ConfigError, match="fast"):
        MLPGraftConfig(layers=(0,), fast="all")
