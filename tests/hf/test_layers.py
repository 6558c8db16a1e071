"""Layers of transformers as memories and back, against a reference of each family's layer in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5")

from transformers import DynamicCache

from hecate.errors import ConfigError, ShapeError
from hecate.hf import adopt, from_cache, from_layer, release, to_cache, to_layer
from hecate.hf.adopt import families, official, rule_of
from hecate.nn import Memory
from tests.hf.common import off
from tests.hf.families import built, modeling
from tests.hf.test_adopt import model_of


def of_a_delta_rule(family: str) -> bool:
    kinds = [kind for kind in vars(modeling(family)).values() if isinstance(kind, type)]
    return any(rule_of(kind) in ("gated_delta", "kda") for kind in kinds)


DELTA = [family for family in families() if of_a_delta_rule(family)]
SOME = ["qwen3_next", "kimi_linear", "bailing_hybrid"]


def linear(model: nn.Module) -> Any:
    """The model's first layer of a delta rule."""
    return next(part for part in model.modules() if rule_of(official(type(part))) in ("gated_delta", "kda"))


def spread(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A layer whose every weight matters."""
    layer, source = copy.deepcopy(linear(model_of(family))).to(dtype), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            low, high = (-4, 0) if "dt_bias" in name else (-1, 1.5) if "A_log" in name else (0.5, 1.5)
            if p.dim() == 1 or "A_log" in name:
                p.copy_(low + (high - low) * torch.rand(p.shape, generator=source, dtype=torch.float64))
            else:
                p.copy_(torch.randn(p.shape, generator=source, dtype=torch.float64) * p[0].numel() ** -0.5)
    return layer


def tokens(layer: Any, length: int = 21, seed: int = 1) -> Tensor:
    source, dtype = torch.Generator().manual_seed(seed), layer.conv1d.weight.dtype
    return torch.randn(2, length, layer.hidden_size, generator=source, dtype=torch.float64).to(dtype)


def reference(layer: Any, x: Tensor) -> Tensor:
    """The layer's function from its own modules, a token at a time, in x's dtype."""
    sigmoid, softplus = torch.sigmoid, lambda z: torch.log1p(torch.exp(-z.abs())) + z.clamp(min=0)
    batch, length, _ = x.shape
    if hasattr(layer, "in_proj_qkvz"):
        found = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
        q, k, v, gate, lr, decay = [part.reshape(batch, length, -1) for part in found]
        mixed = torch.cat([q, k, v], -1)
    elif hasattr(layer, "in_proj_qkv"):
        mixed, gate = layer.in_proj_qkv(x), layer.in_proj_z(x)
        lr, decay = layer.in_proj_b(x), layer.in_proj_a(x)
    else:
        mixed = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
        gate = layer.g_b_proj(layer.g_a_proj(x)) if hasattr(layer, "g_a_proj") else layer.g_proj(x)
        lr = layer.b_proj(x)
        decay = layer.a_proj(x) if hasattr(layer, "a_proj") else None
    kda = decay is None
    lr = sigmoid(lr) * (2 if getattr(layer, "allow_neg_eigval", False) else 1)
    heads = lr.shape[-1]
    if kda:
        forget = layer.forget_gate
        low = hasattr(forget, "f_a_proj")
        decay = forget.f_b_proj(forget.f_a_proj(x)) if low else forget.f_proj(x)
        logit = (decay + forget.dt_bias).view(batch, length, heads, -1)
        rate, family = forget.A_log.view(heads, 1).exp(), type(layer).__module__
        bound = forget.lower_bound if "bailing" in family and forget.safe_gate else None
        bound = forget.safe_gate_lower_bound if "glm5" in family else bound
        retain = (-rate * softplus(logit) if bound is None else bound * sigmoid(rate * logit)).exp()
    else:
        retain = (-layer.A_log.exp() * softplus(decay + layer.dt_bias)).exp().unsqueeze(-1)
    taps, zero = layer.conv1d.weight[:, 0], mixed.new_zeros(batch, layer.conv_kernel_size - 1, mixed.shape[-1])
    ahead = torch.cat([zero, mixed], 1)
    mixed = sum(ahead[:, j : j + length] * taps[:, j] for j in range(taps.shape[1]))
    mixed = mixed if layer.conv1d.bias is None else mixed + layer.conv1d.bias
    mixed = mixed * sigmoid(mixed)
    values = gate.shape[-1]
    q, k, v = mixed.split([(mixed.shape[-1] - values) // 2] * 2 + [values], -1)
    width = q.shape[-1] // (heads if kda else layer.num_k_heads)
    each, v = heads * width // q.shape[-1], v.unflatten(-1, (heads, -1))
    q, k = [z.unflatten(-1, (-1, width)) for z in (q, k)]
    q, k = [z / torch.sqrt((z * z).sum(-1, keepdim=True) + 1e-6) for z in (q, k)]
    memory, answers = x.new_zeros(batch, heads, width, v.shape[-1]), []
    for t in range(length):
        k1, q1 = [torch.stack([z[:, t, h // each] for h in range(heads)], 1) for z in (k, q)]
        memory = retain[:, t].unsqueeze(-1) * memory
        error = lr[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhkv,bhk->bhv", memory, k1))
        memory = memory + torch.einsum("bhk,bhv->bhkv", k1, error)
        answers.append(torch.einsum("bhkv,bhk->bhv", memory, q1) * width**-0.5)
    y, norm = torch.stack(answers, 1), getattr(layer, "norm", None) or layer.o_norm
    y = norm.weight * y / torch.sqrt(y.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    y = y.flatten(-2) * sigmoid(gate) * (1 if norm.activation == "sigmoid" else gate)
    return (layer.o_proj if hasattr(layer, "o_proj") else layer.out_proj)(y)


def first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.spec("HF-LAYER-D1")
@pytest.mark.parametrize("family", DELTA)
def test_the_function_of_every_family(family):
    layer = spread(family)
    memory, exact, x, g = from_layer(layer), copy.deepcopy(layer).double(), tokens(layer, 70), tokens(layer, 70, 2)

    def found(function: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        z = x.to(dtype).requires_grad_()
        y = first(function(z))
        return y.detach(), torch.autograd.grad(y, z, g.to(dtype))[0]

    z = x.double().requires_grad_()
    y_true = reference(exact, z)
    weights = (getattr(exact, "o_proj", None) or exact.out_proj).weight, getattr(exact, "forget_gate", exact).dt_bias
    others = torch.autograd.grad(y_true, [z, *weights], g.double())
    true = y_true.detach(), others[0]
    ours, theirs = found(memory, torch.float32), found(layer, torch.float32)
    assert off(ours[0], theirs[0]) < 1e-6 and off(ours[0], true[0]) < 1e-6 and true[0].std() > 0.1
    assert off(ours[1], true[1]) < max(1e-6, 1.5 * off(theirs[1], true[1]))
    wide = from_layer(exact)
    y = wide(z)[0]
    assert off(y, y_true) < 1e-12
    mine = torch.autograd.grad(y, [z, wide.out.weight, wide.gates.bias["retain"]], g.double())
    for own, other in zip(mine, others, strict=True):
        assert off(own, other) < 1e-11 and other.norm() > 1e-3


@pytest.mark.spec("HF-LAYER-D1")
@pytest.mark.parametrize("family", DELTA)
def test_there_and_back_to_the_bit(family):
    layer = spread(family)
    memory = from_layer(layer)
    with torch.no_grad():
        for p in memory.parameters():
            p.mul_(1.25)
    trained = to_layer(memory, copy.deepcopy(layer))
    for mine, theirs in zip(trained.state_dict().values(), layer.state_dict().values(), strict=True):
        assert torch.equal(mine, 1.25 * theirs)
    again = from_layer(trained)
    assert all(torch.equal(again.state_dict()[name], p) for name, p in memory.state_dict().items())
    assert sum(p.numel() for p in memory.parameters()) == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("family", SOME)
def test_a_bias_of_the_convolution_other_dtypes_and_adopted_layers(family):
    layer = spread(family, torch.float64)
    with torch.no_grad():
        layer.conv1d.bias = nn.Parameter(torch.linspace(-1, 1, layer.conv_dim, dtype=torch.float64))
        x = tokens(layer)
        assert off(from_layer(layer)(x)[0], reference(layer, x)) < 1e-12
    half = spread(family, torch.bfloat16)
    decay = getattr(half, "forget_gate", half)
    decay.A_log.data, decay.dt_bias.data = decay.A_log.data.float() + 1e-3, decay.dt_bias.data.float()
    other = to_layer(from_layer(half), copy.deepcopy(half))
    assert all(torch.equal(*pair) for pair in zip(other.parameters(), half.parameters(), strict=True))
    with torch.no_grad():
        exact = reference(copy.deepcopy(half).double(), tokens(half).double())
        ours, theirs = off(from_layer(half)(tokens(half))[0], exact), off(first(half(tokens(half))), exact)
    assert ours < 1.5 * theirs
    model = copy.deepcopy(model_of(family))
    plain = from_layer(linear(model)).state_dict()
    adopt(model)
    assert all(torch.equal(p, plain[name]) for name, p in from_layer(linear(model)).state_dict().items())
    release(model)


@pytest.mark.spec("HF-LAYER-D2")
@pytest.mark.parametrize("family", SOME)
def test_a_state_moves_in_the_middle_of_a_sentence(family):
    layer = spread(family)
    model, memory, x = model_of(family), from_layer(layer), tokens(layer, 40)
    index = layer.layer_idx

    def cache() -> DynamicCache:
        return DynamicCache(config=model.config.get_text_config())

    with torch.no_grad():
        whole, held = first(layer(x)), cache()
        for piece in (x[:, :19], x[:, 19:20]):
            first(layer(piece, cache_params=held))
        rest, state = memory(x[:, 20:30], from_cache(held, index))
        assert off(rest, whole[:, 20:30]) < 2e-6
        for other in (held, cache()):  # one that held a state, and one that holds none
            to_cache(state, other, index)
            again = from_cache(other, index)
            assert torch.equal(again.conv, state.conv)
            assert torch.equal(again.memory.memory["weight"], state.memory.memory["weight"])
            token = first(layer(x[:, 30:31], cache_params=other))
            rest = torch.cat([token, first(layer(x[:, 31:], cache_params=other))], 1)
            assert off(rest, whole[:, 30:]) < 2e-6
    with pytest.raises(ConfigError, match=f"layer {index} of the cache has read nothing yet"):
        from_cache(cache(), index)
    with pytest.raises(ConfigError, match="no layer 1 of linear attention"):
        from_cache(cache(), 1)
    for number in ("0", None, 0.0, True):
        with pytest.raises(ConfigError, match=f"index must be an integer >= 0, got {number!r}"):
            from_cache(cache(), number)
    with pytest.raises(ShapeError, match=r"conv_states of layer 0 .* are \[2, \d+, 4\], the state's \[1, "):
        to_cache(memory(x[:1])[1], held, index)
    reset = torch.arange(40).expand(2, -1) == 3
    with pytest.raises(ConfigError, match="several documents"):
        to_cache(memory(x, reset_mask=reset)[1], held, index)
    with pytest.raises(ShapeError, match="not that of a gated delta"):
        to_cache(Memory(8, 2, "titans_linear")(torch.zeros(2, 3, 8))[1], held, index)


def test_what_is_no_layer_is_refused():
    with pytest.raises(TypeError, match="takes a layer of transformers, got a int"):
        from_layer(3)
    with pytest.raises(ConfigError, match="Linear is a layer of no rule of ours"):
        from_layer(nn.Linear(2, 2))
    mamba = next(part for part in model_of("mamba2").modules() if rule_of(type(part)) == "mamba2")
    with pytest.raises(ConfigError, match="Mamba2Mixer is a layer of rule 'mamba2'"):
        from_layer(mamba)
    with pytest.raises(TypeError, match=r"to_layer takes a hecate.nn.Memory, got a Linear"):
        to_layer(nn.Linear(2, 2), mamba)


def _quantised(layer: Any) -> None:
    layer.q_proj.weight = nn.Parameter(layer.q_proj.weight.to(torch.int8), requires_grad=False)


def _adapted(layer: Any) -> None:
    layer.q_proj.lora = nn.Linear(2, 2)


def _made_of_others(layer: Any) -> None:
    nn.utils.parametrizations.weight_norm(layer.o_proj)


def _another_gate(layer: Any) -> None:
    layer.o_norm.activation = "gelu"


def _another_build(layer: Any) -> None:
    del layer.b_proj


BROKEN: dict[str, Any] = {
    r"q_proj.weight is quantised to torch.int8": _quantised,
    r"conv1d.weight is on the meta device": lambda layer: layer.conv1d.to("meta"),
    r"q_proj.lora.weight has no place in a memory": _adapted,
    r"o_proj.parametrizations.weight.original0 has no place in a memory; merge": _made_of_others,
    r"hidden_act='relu' of KimiLinearDeltaAttention": lambda layer: setattr(layer, "activation", "relu"),
    r"output gate of KimiLinearDeltaAttention is 'gelu'": _another_gate,
    r"not laid out as one of those known: .*b_proj": _another_build,
}


def test_layers_that_no_memory_is_are_refused():
    for words in BROKEN:
        layer = copy.deepcopy(linear(model_of("kimi_linear")))
        BROKEN[words](layer)
        with pytest.raises(ConfigError, match=words):
            from_layer(layer)


def test_a_weight_may_be_no_parameter():
    layer = copy.deepcopy(linear(model_of("kimi_linear")))
    weight = layer.o_proj.weight.detach()
    del layer.o_proj.weight
    layer.o_proj.weight = weight
    memory = from_layer(layer)
    assert torch.equal(memory.out.weight, weight) and not memory.out.weight.requires_grad


def rebuilt(memory: Memory, options: dict[str, Any] | None = None, rule: Any = None, **changes: Any) -> Memory:
    """A memory of the same layer but for some settings; those of options by their paths."""
    own = memory.config.layer_options.model_dump()
    for path, value in (options or {}).items():
        place, (*parents, last) = own, path.split(".")
        for parent in parents:
            place = place[parent]
        place[last] = value
    rule = {"layer_options": own, **(rule or {})}
    sizes = {"d_key": memory.d_key, "d_value": memory.d_value, "dtype": memory.out.weight.dtype}
    sizes |= {"learned_initial": False, **changes}
    return Memory(memory.d_model, memory.heads, memory.config.model_copy(update=rule), **sizes)


NO_PLACE: dict[str, dict[str, Any]] = {
    r"layer_options.output.norm.eps=0.1 .* Qwen3NextGatedDeltaNet, whose is 1e-06": {
        "options": {"output.norm.eps": 0.1}
    },
    r"layer_options.qk_eps=0.1 .* whose is 1e-06": {"options": {"qk_eps": 0.1}},
    r"layer_options.output.gate='sigmoid' .* whose is 'silu'": {"options": {"output.gate": "sigmoid"}},
    r"output_gate=False .* whose is True": {"options": {"output.gate": "none"}},
    r"layer_options.key_heads=4 .* whose is 2": {"options": {"key_heads": None}},
    r"layer_options.lr_bias=True .* whose is False": {"options": {"lr_bias": True}},
    r"layer_options.output.norm.weight='head'": {"options": {"output.norm.weight": "head"}},
    r"d_value=8 .* whose is 16": {"d_value": 8},
    r"conv_kernel=0 .* whose is 4": {"conv_kernel": 0},
    r"qk_norm='rms' .* whose is 'l2'": {"qk_norm": "rms"},
    r"algorithm.kind='momentum' .* whose is 'gd'": {"rule": {"algorithm": "momentum"}, "options": {"lr_bias": True}},
    r"bias.kind='dot' .* whose is 'l2'": {"rule": {"bias": "dot"}},
    r"algorithm.lr=0.5 .* whose is 1.0": {"rule": {"algorithm": {"kind": "gd", "lr": 0.5}}},
    r"retention.gate='sigmoid' .* whose is 'softplus'": {"rule": {"retention": "decay"}},
    r"firing='learned' .* whose is 'always'": {"firing": "learned"},
    r"query_projection='sum' .* whose is 'none'": {"query_projection": "sum"},
    r"a feature memory has no place": {"feature_memory": {}},
    r"weight 'q' of the memory is torch.float64, and that of Qwen3NextGatedDeltaNet torch.float32": {
        "dtype": torch.float64
    },
}


@pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")
@pytest.mark.parametrize("words", NO_PLACE)
def test_what_has_no_place_in_a_layer_is_refused(words):
    layer = spread("qwen3_next")
    memory, before = rebuilt(from_layer(layer), **NO_PLACE[words]), copy.deepcopy(layer.state_dict())
    with pytest.raises(ConfigError, match=words):
        to_layer(memory, layer)
    assert all(torch.equal(p, before[name]) for name, p in layer.state_dict().items())


def test_a_learned_start_is_refused_and_a_zero_one_is_not():
    layer = spread("qwen3_next")
    memory = rebuilt(from_layer(layer), learned_initial=True)
    to_layer(memory, layer)
    with torch.no_grad():
        memory.initial.weight[0, 0, 0] = 1
    with pytest.raises(ConfigError, match="the initial memory is not zero"):
        to_layer(memory, layer)


def test_drawing_leaves_the_generator_of_torch_alone():
    layer, before = linear(built("qwen3_5")), torch.get_rng_state()
    from_layer(layer)
    assert torch.equal(torch.get_rng_state(), before)
