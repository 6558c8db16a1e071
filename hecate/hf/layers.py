"""Layers of transformers as memories and back: `from_layer`, `to_layer`, and the state in the middle of a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hecate.errors import ConfigError, ShapeError, shorten
from hecate.hf.adopt import FLOATS, official, rule_of
from hecate.nn import LayerState, Memory
from hecate.nn.sums import state_of_sums
from hecate.rule import LAYER, LAYER_FIELDS, MemoryConfig

RULES = ("gated_delta", "kda")
_QK_EPS = 1e-6  # beside the square, in the kernels of every family
_ASIDE = {*LAYER_FIELDS, "on_nonfinite", "state_dtype"}  # fields of a config that are told apart by other means
_GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


class Described(NamedTuple):
    """A layer of transformers in hecate's words.

    Fields:
        config: the memory's.
        sizes: further arguments of `hecate.nn.Memory`.
        weights: views of the layer's parameters, by the name of what they are in a memory.
    """

    config: MemoryConfig
    sizes: dict[str, Any]
    weights: dict[str, Tensor]


def describe(layer: Any) -> Described:
    """A layer in hecate's words, and where its numbers are.

    Raises:
        TypeError: no torch module.
        ConfigError: no layer of the gated delta rule or KDA; weights that are quantised, adapted, on meta or have no
            place in a memory; another activation or output gate.
    """
    if not isinstance(layer, nn.Module):
        raise TypeError(f"from_layer takes a layer of transformers, got a {type(layer).__name__}")
    kind = official(type(layer))
    rule, name = rule_of(kind), kind.__name__
    if rule not in RULES:
        own = f"of rule {rule!r}" if rule else "of no rule of ours"
        raise ConfigError(f"{name} is a layer {own}; from_layer takes those of {' and '.join(RULES)}")
    for own, weight in layer.named_parameters():
        if weight.is_meta or weight.dtype not in FLOATS:
            where = "on the meta device" if weight.is_meta else f"quantised to {weight.dtype}"
            raise ConfigError(f"{name}.{own} is {where}; load it, or unpack it, in floating point")
    try:
        weights = dict(_weights(layer))
        norm: Any = getattr(layer, "norm", None) or layer.o_norm
        decay = getattr(layer, "forget_gate", layer)
        squash, eps = norm.activation, norm.variance_epsilon
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(f"{name} is not laid out as one of those known: {shorten(str(error))}") from None
    taken = {*map(_storage, weights.values())}
    for own, weight in layer.named_parameters():
        if _storage(weight) not in taken:
            raise ConfigError(f"{name}.{own} has no place in a memory; merge or remove what it belongs to")
    if layer.activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act={layer.activation!r} of {name}: the convolution of a memory has silu")
    if squash not in _GATES:
        raise ConfigError(f"the output gate of {name} is {squash!r}, and that of a memory one of {sorted(_GATES)}")
    config = MemoryConfig(
        retention=_retention(decay, weights, channels=rule == "kda"),
        algorithm={"kind": "gd", "lr": 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0},
        decay_order="before_gradient",
        query_scale="key_dim",
        layer_options={
            "key_heads": vars(layer).get("num_k_heads", vars(layer).get("num_heads")),
            "qk_eps": _QK_EPS,
            "conv": {"bias": "conv_bias" in weights},
            "output": {
                "gate": _GATES[squash],
                "rank": len(weights["gate_down"]) if "gate_down" in weights else None,
                "bias": "gate_bias" in weights,
                "norm": {"eps": eps, "weight": "shared"},
            },
            "lr_bias": False,
        },
    )
    names: dict[str, tuple[str, ...]] = {"heads": ("num_v_heads", "num_heads"), "d_key": ("head_k_dim", "head_dim")}
    names |= {"d_value": ("head_v_dim", "head_dim"), "d_model": ("hidden_size",), "conv_kernel": ("conv_kernel_size",)}
    sizes = {key: next(vars(layer)[own] for own in each if own in vars(layer)) for key, each in names.items()}
    return Described(config, sizes, weights)


def _storage(tensor: Tensor) -> int:
    """Where the numbers of a parameter, and of views of it, lie."""
    return tensor.untyped_storage().data_ptr()


def _weights(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """The layer's parameters by name; those of one map in views of it."""
    if hasattr(layer, "in_proj_qkvz"):  # of each key head: q, k, and v and gate of the heads that it serves
        keys, width = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
        values, fused = width * layer.head_v_dim, layer.in_proj_qkvz.weight.unflatten(0, (keys, -1))
        sizes = [layer.head_k_dim, layer.head_k_dim, values, values]
        yield from zip(("q", "k", "v", "gate"), fused.split(sizes, 1), strict=True)
        yield from zip(("lr", "retain"), layer.in_proj_ba.weight.unflatten(0, (keys, -1)).split(width, 1), strict=True)
    elif hasattr(layer, "in_proj_qkv"):
        parts = layer.in_proj_qkv.weight.split([layer.key_dim, layer.key_dim, layer.value_dim])
        yield from zip("qkv", parts, strict=True)
        yield from (("gate", layer.in_proj_z.weight), ("lr", layer.in_proj_b.weight))
        yield "retain", layer.in_proj_a.weight
    else:
        yield from ((name, getattr(layer, f"{name}_proj").weight) for name in "qkv")
        yield "lr", layer.b_proj.weight
        low = hasattr(layer, "g_a_proj")
        forget: Any = getattr(layer, "forget_gate", None)
        if low:
            yield "gate_down", layer.g_a_proj.weight
        gate = layer.g_b_proj if low else layer.g_proj
        yield "gate", gate.weight
        if gate.bias is not None:
            yield "gate_bias", gate.bias
        if hasattr(forget, "f_a_proj"):
            yield from (("down", forget.f_a_proj.weight), ("retain", forget.f_b_proj.weight))
        else:
            yield "retain", layer.a_proj.weight if forget is None else forget.f_proj.weight
    decay, norm = getattr(layer, "forget_gate", layer), getattr(layer, "norm", None)
    yield from (("bias", decay.dt_bias), ("rate", decay.A_log), ("conv", layer.conv1d.weight))
    if layer.conv1d.bias is not None:
        yield "conv_bias", layer.conv1d.bias
    yield "norm", (layer.o_norm if norm is None else norm).weight
    yield "out", (layer.o_proj if hasattr(layer, "o_proj") else layer.out_proj).weight


def _retention(decay: Any, weights: dict[str, Tensor], *, channels: bool) -> dict[str, Any]:
    """The decay of a layer, or of its forget gate: bounded below by a number of one name or the other."""
    lowest = getattr(decay, "safe_gate_lower_bound", None)
    if getattr(decay, "safe_gate", False):
        lowest = decay.lower_bound
    rank = len(weights["down"]) if "down" in weights else None
    made: dict[str, Any] = {"kind": "decay", "channels": channels, "rank": rank, "gate": "softplus"}
    return made if lowest is None else {**made, "gate": "bounded", "lowest": lowest}


def _places(memory: Any) -> dict[str, Tensor]:
    """Views of a memory's parameters, by the names of `Described.weights`."""
    gates, retain, conv = memory.gates, memory.gates.retain, memory.conv
    found = dict(zip("qkv", memory.qkv.weight.split(memory.splits), strict=True))
    found |= {"gate": memory.output_gate.weight, "lr": gates.weight["lr"], "retain": gates.weight["retain"]}
    found |= {"bias": gates.bias["retain"], "rate": retain.rate, "norm": memory.norm, "out": memory.out.weight}
    found["conv"] = conv.weight.T.unsqueeze(1)
    optional = {"gate_bias": memory.output_gate.bias, "conv_bias": conv.bias, "down": retain.down}
    optional["gate_down"] = None if memory.gate_down is None else memory.gate_down.weight
    return found | {name: weight for name, weight in optional.items() if weight is not None}


@torch.no_grad()
def from_layer(layer: Any) -> Memory:
    """A memory with a layer's function and weights: a copy, in its dtype, on its device, and frozen where the layer is.
    [HF-LAYER-D1]

        memory = hecate.hf.from_layer(model.model.layers[0].linear_attn)    # Qwen3-Next, 3.5, 4, OLMo hybrid, Kimi ...
        y, state = memory(x)

    Layers of transformers, adopted or not, of the gated delta rule and KDA. The memory is hecate's in every respect:
    its rule can be another than the layer's can be (`upgrade`), and it stands in levels, compositions and models.

    Raises:
        TypeError: no torch module.
        ConfigError: another layer; weights that are quantised, on meta, adapted, or that a memory has no place for;
            a hidden_act other than silu; an output gate other than silu and sigmoid.
    """
    config, sizes, weights = describe(layer)
    like = weights["out"]
    place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "learned_initial": False}
    memory: Any = Memory(config=config, generator=torch.Generator().manual_seed(0), **sizes, **place)
    for owner, name, of in ((memory.gates.retain, "rate", "rate"), (memory.gates.bias, "retain", "bias")):
        wide = torch.promote_types(like.dtype, weights[of].dtype)  # which models keep in float32
        setattr(owner, name, nn.Parameter(getattr(owner, name).to(wide)))
    places = _places(memory)
    for name, place_of in places.items():
        weight = weights[name].flip(-1) if name == "conv" else weights[name]  # the last tap is of the token itself
        place_of.copy_(weight.reshape(place_of.shape))
    trained = {_storage(p) for p in layer.parameters() if p.requires_grad}
    learned = {_storage(places[name]) for name, weight in weights.items() if _storage(weight) in trained}
    for p in memory.parameters():
        p.requires_grad_(_storage(p) in learned)
    return memory.train(layer.training)


@torch.no_grad()
def to_layer(memory: Memory, layer: Any) -> Any:
    """Writes a memory's weights into a layer of transformers, in place; the layer. [HF-LAYER-D1]

    Bit by bit the way back of `from_layer`, after whatever training. Nothing is written where something has no place.

    Raises:
        TypeError: no memory, or no layer.
        ConfigError: a rule, size, eps, gate or other option that is not the layer's, by name; a learned initial memory;
            a feature memory, projected queries or learned firing; weights of more digits than the layer's.
    """
    if type(memory) is not Memory:
        raise TypeError(f"to_layer takes a hecate.nn.Memory, got a {type(memory).__name__}")
    config, sizes, weights = describe(layer)
    name = official(type(layer)).__name__
    mine = {key: getattr(memory, key) for key in ("d_model", "heads", "d_key", "d_value")}
    mine["conv_kernel"] = 0 if memory.conv is None else memory.conv.kernel
    pairs = [(key, mine[key], sizes[key]) for key in mine]
    pairs += [("qk_norm", memory.qk_norm, "l2"), ("output_gate", memory.output_gate is not None, True)]
    pairs += [("layer_activation", memory.conv is not None and memory.conv.activation, True)]
    pairs += [("firing", "learned" if "firing" in memory.gates.starts else "always", "always")]
    pairs += [("query_projection", memory.query_projection, "none"), *_apart(memory, config)]
    for key, own, theirs in pairs:
        if own != theirs:
            raise ConfigError(f"{key}={own!r} of the memory has no place in {name}, whose is {theirs!r}")
    if memory.feature_memory is not None:
        raise ConfigError(f"a feature memory has no place in {name}")
    if any(bool(start.any()) for start in memory.initial.tensors.values()):
        raise ConfigError(f"the initial memory is not zero, and {name} has no place for another")
    places = _places(memory)
    for key, weight in weights.items():
        if torch.promote_types(weight.dtype, places[key].dtype) != weight.dtype:
            kinds = f"{places[key].dtype}, and that of {name} {weight.dtype}"
            raise ConfigError(f"weight {key!r} of the memory is {kinds}; convert one of them")
    for key, weight in weights.items():
        own = places[key].flip(-1) if key == "conv" else places[key]
        weight.copy_(own.reshape(weight.shape))
    return layer


def _apart(memory: Memory, config: MemoryConfig) -> Iterator[tuple[str, Any, Any]]:
    """Settings of a memory's layer and of a config, by path: those that change a layer's function."""

    def flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from flat(f"{path}.{key}" if path else key, item)
        else:
            yield path, value

    found = []
    for own in (memory.config, config):
        options = (own.layer_options or LAYER).model_dump()
        options["key_heads"] = options["key_heads"] or memory.heads
        found.append(dict(flat("", {**own.model_dump(exclude=_ASIDE), "layer_options": options})))
    for path in dict.fromkeys([*found[1], *found[0]]):
        if path not in ("retention.retain", "algorithm.lr_start"):  # of scans without gates, and of fresh layers
            yield path, found[0].get(path), found[1].get(path)


# The state of a layer in the middle of a sentence.


def from_cache(cache: Any, index: int) -> LayerState:
    """The state of layer `index` in a cache of transformers, as `from_layer`'s memory goes on from it. [HF-LAYER-D2]

    Raises:
        ConfigError: no number, or a layer of the cache without the state of a linear layer.
    """
    held = _held(cache, index)
    if not any(held.has_previous_state.values()) or held.recurrent_states.get(0) is None:
        raise ConfigError(f"layer {index} of the cache has read nothing yet; a memory begins without a state")
    kept, weight = held.conv_kernel_size[0] - 1, held.recurrent_states[0]
    conv = held.conv_states[0][..., -kept:].mT.contiguous()
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32)).mT.contiguous()
    return LayerState(state_of_sums(weight), conv, None)


def to_cache(state: LayerState, cache: Any, index: int) -> None:
    """Writes the state of `from_layer`'s memory into layer `index` of a cache of transformers. [HF-LAYER-D2]

    Raises:
        ConfigError: no number; a layer of the cache without the state of a linear layer; documents in the convolution.
        ShapeError: a state of another rule, of other sizes or of another batch.
    """
    held, memory = _held(cache, index), state.memory
    if state.conv is None or [*memory.memory] != ["weight"] or memory.slots or memory.pending or memory.anchor:
        raise ShapeError("the state is not that of a gated delta rule's or KDA's layer, with its convolution")
    if state.conv_segment is not None:
        raise ConfigError("the convolution holds several documents, which a cache cannot tell apart")
    conv = nn.functional.pad(state.conv.mT, (1, 0))  # a tap more than the next token reaches back to
    weight = memory.memory["weight"].mT.contiguous()
    if not held.is_conv_states_initialized[0]:
        held.lazy_initialization(conv_states=conv)
    if not held.is_recurrent_states_initialized[0]:
        held.lazy_initialization(recurrent_states=weight)
    for name, given in (("conv_states", conv), ("recurrent_states", weight)):
        if (own := getattr(held, name)[0]).shape != given.shape:
            raise ShapeError(
                f"{name} of layer {index} of the cache are {list(own.shape)}, the state's {[*given.shape]}"
            )
        own.copy_(given)
    held.has_previous_state[0] = True


def _held(cache: Any, index: int) -> Any:
    layers = getattr(cache, "layers", [])
    if not isinstance(index, int) or isinstance(index, bool):
        raise ConfigError(f"index must be the number of a layer, got {shorten(index)}")
    held = layers[index] if 0 <= index < len(layers) else None
    if not hasattr(held, "recurrent_states"):
        raise ConfigError(f"the cache has no layer {index} of linear attention; make it with config=model.config")
    return held
