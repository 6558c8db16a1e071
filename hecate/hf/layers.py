"""Layers of one library in the other. Conversion of weights and states: `from_layer`, `to_layer`, `from_cache`,
`to_cache`. Conversion of calls: `AsLayer` makes a layer of hecate one of transformers or flash-linear-attention,
`AsModel` a causal model of transformers one of hecate, for runs, evaluations and samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import signature
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from hecate.checks import described, expect_choice, expect_count, outside_vocabulary
from hecate.data import places_of
from hecate.distributed.world import flat
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.hf.adopt import CACHED, FLOATS, masks_of, official, rule_of
from hecate.hf.cache import StateLayer
from hecate.nn import LayerState, Memory
from hecate.nn.sums import state_of_sums
from hecate.rule import LAYER, LAYER_FIELDS, MemoryConfig
from hecate.tape.bridge import without_autocast
from hecate.train.evaluate import evaluating

RULES = ("gated_delta", "kda")
_QK_EPS = 1e-6  # added to the squared norm, in the kernels of every family
_ASIDE = {*LAYER_FIELDS, "on_nonfinite", "state_dtype"}  # fields of a config that are compared otherwise, or not at all
_GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


class Described(NamedTuple):
    """A layer of transformers as the arguments and weights of a `hecate.nn.Memory`.

    Fields:
        config: the memory's config.
        sizes: further arguments of `hecate.nn.Memory`.
        weights: views of the layer's parameters, by their names in a memory.
    """

    config: MemoryConfig
    sizes: dict[str, Any]
    weights: dict[str, Tensor]


def describe(layer: Any) -> Described:
    """Description of a layer of transformers as a memory, with views of its weights.

    Raises:
        TypeError: not a torch module.
        ConfigError: not a layer of the gated delta rule or KDA; weights that are quantised, adapted, on meta, or have
            no place in a memory; another activation or output gate.
    """
    if not isinstance(layer, nn.Module):
        raise TypeError(f"from_layer takes a layer of transformers, got a {type(layer).__name__}")
    kind = official(type(layer))
    rule, name = rule_of(kind), kind.__name__
    if rule not in RULES:
        of_rule = f"of rule {rule!r}" if rule else "of no rule of ours"
        raise ConfigError(f"{name} is a layer {of_rule}; from_layer takes those of {' and '.join(RULES)}")
    for key, weight in layer.named_parameters():
        if weight.is_meta or weight.dtype not in FLOATS:
            where = "on the meta device" if weight.is_meta else f"quantised to {weight.dtype}"
            raise ConfigError(f"{name}.{key} is {where}; load it, or unpack it, in floating point")
    try:
        weights = _weights(layer)
        norm: Any = getattr(layer, "norm", None) or layer.o_norm
        decay = getattr(layer, "forget_gate", layer)
        squash, eps = norm.activation, norm.variance_epsilon
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(f"{name} is not laid out as one of those known: {shorten(str(error))}") from None
    taken = {*map(_storage, weights.values())}
    for key, weight in layer.named_parameters():
        if _storage(weight) not in taken:
            raise ConfigError(f"{name}.{key} has no place in a memory; merge or remove what it belongs to")
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
    sizes = {key: next(vars(layer)[field] for field in each if field in vars(layer)) for key, each in names.items()}
    return Described(config, sizes, weights)


def _storage(tensor: Tensor) -> int:
    """Address of a tensor's storage, which its views share."""
    return tensor.untyped_storage().data_ptr()


_PATHS = {
    "q": ("q_proj.weight",), "k": ("k_proj.weight",), "v": ("v_proj.weight",),
    "lr": ("b_proj.weight", "in_proj_b.weight"),
    "gate": ("g_b_proj.weight", "g_proj.weight", "in_proj_z.weight"),
    "gate_bias": ("g_b_proj.bias", "g_proj.bias"), "gate_down": ("g_a_proj.weight",),
    "retain": ("forget_gate.f_b_proj.weight", "forget_gate.f_proj.weight", "a_proj.weight", "in_proj_a.weight"),
    "down": ("forget_gate.f_a_proj.weight",),
    "bias": ("forget_gate.dt_bias", "dt_bias"), "rate": ("forget_gate.A_log", "A_log"),
    "conv": ("conv1d.weight",), "conv_bias": ("conv1d.bias",),
    "norm": ("norm.weight", "o_norm.weight"), "out": ("o_proj.weight", "out_proj.weight"),
}  # fmt: skip
"""Paths of a layer's parameters in the families of transformers, by their names in a memory."""
_OPTIONAL = ("gate_bias", "gate_down", "down", "conv_bias")


def _weights(layer: Any) -> dict[str, Tensor]:
    """The layer's parameters by their names in a memory; fused projections are split into views."""
    weights: dict[str, Tensor] = {}
    if hasattr(layer, "in_proj_qkvz"):  # for each key head: q, k, and v and gate of its value heads
        keys, width = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
        values, fused = width * layer.head_v_dim, layer.in_proj_qkvz.weight.unflatten(0, (keys, -1))
        sizes = [layer.head_k_dim, layer.head_k_dim, values, values]
        gates = layer.in_proj_ba.weight.unflatten(0, (keys, -1)).split(width, 1)
        names = "q", "k", "v", "gate", "lr", "retain"
        weights = dict(zip(names, (*fused.split(sizes, 1), *gates), strict=True))
    elif hasattr(layer, "in_proj_qkv"):
        parts = layer.in_proj_qkv.weight.split([layer.key_dim, layer.key_dim, layer.value_dim])
        weights = dict(zip("qkv", parts, strict=True))
    for name, paths in _PATHS.items():
        for path in () if name in weights else paths:
            with suppress(AttributeError):
                weight = attrgetter(path)(layer)  # which may be no parameter, or None
                weights.update({} if weight is None else {name: weight})
        if name not in weights and name not in _OPTIONAL:
            raise AttributeError(f"it has no {' or '.join(paths)}")
    return weights


def _retention(decay: Any, weights: dict[str, Tensor], *, channels: bool) -> dict[str, Any]:
    """The retention of a layer, or of its forget gate, which may have a lower bound under one of two names."""
    lowest = decay.lower_bound if getattr(decay, "safe_gate", False) else getattr(decay, "safe_gate_lower_bound", None)
    rank = len(weights["down"]) if "down" in weights else None
    fields: dict[str, Any] = {"kind": "decay", "channels": channels, "rank": rank, "gate": "softplus"}
    return fields if lowest is None else {**fields, "gate": "bounded", "lowest": lowest}


def _places(memory: Any) -> dict[str, Tensor]:
    """Views of a memory's parameters, by the names of `Described.weights`."""
    gates, retain, conv = memory.gates, memory.gates.retain, memory.conv
    places = dict(zip("qkv", memory.qkv.weight.split(memory.splits), strict=True))
    places |= {"gate": memory.output_gate.weight, "lr": gates.weight["lr"], "retain": gates.weight["retain"]}
    places |= {"bias": gates.bias["retain"], "rate": retain.rate, "norm": memory.norm, "out": memory.out.weight}
    places["conv"] = conv.weight.T.unsqueeze(1)
    optional = {"gate_bias": memory.output_gate.bias, "conv_bias": conv.bias, "down": retain.down}
    optional["gate_down"] = None if memory.gate_down is None else memory.gate_down.weight
    return places | {name: weight for name, weight in optional.items() if weight is not None}


@torch.no_grad()
def from_layer(layer: Any) -> Memory:
    """A memory that computes the same function as a layer: a copy of its weights, with the same dtype, device and
    frozen parameters. [HF-LAYER-D1]

        memory = hecate.hf.from_layer(model.model.layers[0].linear_attn)    # Qwen3-Next, 3.5, 4, OLMo hybrid, Kimi ...
        y, state = memory(x)

    It takes layers of transformers, adopted or not, of the gated delta rule and KDA. The result is an ordinary
    `hecate.nn.Memory`: it can get a richer rule than such a layer can have (`upgrade`), and be used in levels,
    compositions and models.

    Raises:
        TypeError: not a torch module.
        ConfigError: another layer; weights that are quantised, on meta, adapted, or that a memory has no place for;
            a hidden_act other than silu; an output gate other than silu and sigmoid.
    """
    config, sizes, weights = describe(layer)
    like = weights["out"]
    place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "learned_initial": False}
    memory: Any = Memory(config=config, generator=torch.Generator().manual_seed(0), **sizes, **place)
    for owner, name, of in ((memory.gates.retain, "rate", "rate"), (memory.gates.bias, "retain", "bias")):
        wide = torch.promote_types(like.dtype, weights[of].dtype)  # models may keep these in float32
        setattr(owner, name, nn.Parameter(getattr(owner, name).to(wide)))
    places = _places(memory)
    for name, place_of in places.items():
        weight = weights[name].flip(-1) if name == "conv" else weights[name]  # the layer's last tap is the token's own
        place_of.copy_(weight.reshape(place_of.shape))
    trained = {_storage(p) for p in layer.parameters() if p.requires_grad}
    learned = {_storage(places[name]) for name, weight in weights.items() if _storage(weight) in trained}
    for p in memory.parameters():
        p.requires_grad_(_storage(p) in learned)
    return memory.train(layer.training)


@torch.no_grad()
def to_layer(memory: Memory, layer: Any) -> Any:
    """Writes a memory's weights to a layer of transformers, in place; returns the layer. [HF-LAYER-D1]

    It is the exact inverse of `from_layer`, also after training. If anything does not fit, nothing is written.

    Raises:
        TypeError: not a memory, or not a layer.
        ConfigError: a rule, size, eps, gate or other option that is not the layer's, by name; a learned initial memory;
            a feature memory, projected queries or learned firing; weights of a wider dtype than the layer's.
    """
    if type(memory) is not Memory:
        raise TypeError(f"to_layer takes a hecate.nn.Memory, got a {type(memory).__name__}")
    config, sizes, weights = describe(layer)
    name = official(type(layer)).__name__
    mine = arguments_of(memory)
    pairs = [(key, mine[key], theirs) for key, theirs in {**sizes, "firing": "always"}.items()]
    pairs += [("qk_norm", memory.qk_norm, "l2"), ("output_gate", memory.output_gate is not None, True)]
    pairs += [("layer_activation", memory.conv is not None and memory.conv.activation, True)]
    pairs += [("query_projection", memory.query_projection, "none"), *_apart(memory, config)]
    for key, setting, theirs in pairs:
        if setting != theirs:
            raise ConfigError(f"{key}={setting!r} of the memory has no place in {name}, whose is {theirs!r}")
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
        source = places[key].flip(-1) if key == "conv" else places[key]
        weight.copy_(source.reshape(weight.shape))
    return layer


def arguments_of(memory: Memory) -> dict[str, Any]:
    """The arguments of `hecate.nn.Memory` that may differ between memories of `from_layer` and `upgrade`."""
    sizes = {name: getattr(memory, name) for name in ("d_model", "heads", "d_key", "d_value")}
    return sizes | {
        "conv_kernel": 0 if memory.conv is None else memory.conv.kernel,
        "learned_initial": next(memory.initial.parameters(), None) is not None,
        "firing": "learned" if "firing" in memory.gates.starts else "always",
    }


def _apart(memory: Memory, config: MemoryConfig) -> Iterator[tuple[str, Any, Any]]:
    """The settings that affect a layer's function, by path, with their values in a memory and in a config."""
    settings = []
    for rule in (memory.config, config):
        options = (rule.layer_options or LAYER).model_dump()
        options["key_heads"] = options["key_heads"] or memory.heads
        settings.append(dict(flat({**rule.model_dump(exclude=_ASIDE), "layer_options": options})))
    for path in dict.fromkeys([*settings[1], *settings[0]]):
        if path not in ("retention.retain", "algorithm.lr_start"):  # only for scans without gates, and for new layers
            yield path, settings[0].get(path), settings[1].get(path)


# The state of a layer between calls.


def from_cache(cache: Any, index: int) -> LayerState:
    """The state of layer `index` in a cache of transformers, as a state for `from_layer`'s memory. [HF-LAYER-D2]

    Raises:
        ConfigError: an index that is not a number, or a cache layer without the state of a linear layer.
    """
    layer = _linear_layer(cache, index)
    if not any(layer.has_previous_state.values()) or layer.recurrent_states.get(0) is None:
        raise ConfigError(f"layer {index} of the cache has read nothing yet; a memory begins without a state")
    lag, weight = layer.conv_kernel_size[0] - 1, layer.recurrent_states[0]
    conv = layer.conv_states[0][..., -lag:].mT.contiguous()
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32)).mT.contiguous()
    return LayerState(state_of_sums(weight), conv, None)


def to_cache(state: LayerState, cache: Any, index: int) -> None:
    """Writes the state of `from_layer`'s memory to layer `index` of a cache of transformers. [HF-LAYER-D2]

    Raises:
        ConfigError: an index that is not a number; a cache layer that is not for linear layers; several documents in
            the convolution's state.
        ShapeError: a state of another rule, of other sizes or of another batch.
    """
    layer, memory = _linear_layer(cache, index), state.memory
    if state.conv is None or [*memory.memory] != ["weight"] or memory.slots or memory.pending or memory.anchor:
        raise ShapeError("the state is not that of a gated delta rule's or KDA's layer, with its convolution")
    if state.conv_segment is not None:
        raise ConfigError("the convolution holds several documents, which a cache cannot tell apart")
    conv = nn.functional.pad(state.conv.mT, (1, 0))  # a cache has one more tap than the next token needs
    weight = memory.memory["weight"].mT.contiguous()
    for name, tensor in (("conv_states", conv), ("recurrent_states", weight)):
        if not getattr(layer, f"is_{name}_initialized")[0]:
            layer.lazy_initialization(**{name: tensor})
        if (target := getattr(layer, name)[0]).shape != tensor.shape:
            raise ShapeError(
                f"{name} of layer {index} of the cache are {list(target.shape)}, the state's {[*tensor.shape]}"
            )
        target.copy_(tensor)
    layer.has_previous_state[0] = True


def _linear_layer(cache: Any, index: int) -> Any:
    layers = getattr(cache, "layers", [])
    expect_count(index, "index", 0)
    layer = layers[index] if index < len(layers) else None
    if not hasattr(layer, "recurrent_states"):
        raise ConfigError(f"the cache has no layer {index} of linear attention; make it with config=model.config")
    return layer


Returns = Literal["attention", "fla", "output"]
CLOSE = 8  # tolerance in units in the last place of the largest logit, for rounding that depends on the neighbours

FAULTS = {  # faults of a model, by the mask that it does not respect
    "reset_mask": "takes the documents of a row for one",
    "write_mask": "goes on from padding otherwise than from the row alone",
}


class AsLayer(nn.Module):
    """A layer of hecate for use in place of an attention or a linear layer of transformers or fla. [HF-CALL-D1]

        block.self_attn = AsLayer(Memory(256, heads=4, config="titans"), layer_idx=3)
        y, _ = block.self_attn(hidden_states=x, attention_mask=padding, past_key_values=cache)

    Positions are ignored. The state is in layer `layer_idx` of the cache, a `StateLayer`, which replaces an empty
    layer.

    Args:
        layer: `(x, state=None, *, write_mask, reset_mask) -> (y, state)`: `Memory`, `CMS`, compositions, blocks.
        layer_idx: the layer's number in the model, from 0.
        returns: "attention" for (y, None), as attention of transformers; "fla" for (y, None, cache); "output" for y.
    """

    def __init__(self, layer: nn.Module, layer_idx: int = 0, returns: Returns = "attention") -> None:
        super().__init__()
        expect_choice(returns, "returns", get_args(Returns))
        expect_count(layer_idx, "layer_idx", 0)
        self.layer, self.layer_idx, self.returns = layer, layer_idx, returns

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Output for hidden_states `[B, T, d_model]`. attention_mask is `[B, T]`, or of all tokens so far, 0 at
        padding; documents in a row are given by `cu_seqlens`, `cu_seq_lens_q` or `seq_idx`; other keywords are ignored.

        Raises:
            ShapeError: a mask over keys, which does not show the padding.
            ConfigError: attention weights are asked for; documents in a cached row; a cache layer with other content.
        """
        if kwargs.get("output_attentions"):
            raise ConfigError("output_attentions: a memory has no attention weights; leave it out")
        if attention_mask is not None and (
            attention_mask.dim() != 2 or attention_mask.shape[1] < hidden_states.shape[1]
        ):
            shape = f"[B, {hidden_states.shape[1]} or more]"
            raise ShapeError(f"attention_mask must be {shape}, 0 at padding, got {described(attention_mask)}")
        if kwargs.get("cu_seq_lens_q") is None:
            kwargs["cu_seq_lens_q"] = kwargs.get("cu_seqlens")
        past = cache_params if past_key_values is None else past_key_values
        masks = masks_of(hidden_states, attention_mask, kwargs, past)
        if past is None:
            y, _ = self.layer(hidden_states, None, **masks)
        else:
            y = self._state_layer(past).advance(self.layer, hidden_states, **masks, counts=True)
        return {"attention": (y, None), "fla": (y, None, past), "output": y}[self.returns]

    def _state_layer(self, cache: Any) -> StateLayer:
        """The layer of a cache that holds the state."""
        if not isinstance(cache, Cache) or cache.offloading:
            raise ConfigError(f"past_key_values must be a DynamicCache of transformers, got a {type(cache).__name__}")
        while len(cache.layers) <= self.layer_idx:
            cache.layers.append(DynamicLayer())
        slot = cache.layers[self.layer_idx]
        if type(slot) is DynamicLayer and not slot.is_initialized:
            slot = cache.layers[self.layer_idx] = StateLayer()
        if not isinstance(slot, StateLayer):
            raise ConfigError(f"layer {self.layer_idx} of past_key_values is a {type(slot).__name__} in use by another")
        return slot


@dataclass(frozen=True)
class Read:
    """State of an `AsModel`: the cache of transformers, None after a row of several documents, which cannot be
    continued; the number of tokens read; and which of them `[B, T]` are not padding, None if all. Not a pytree: the
    cache is treated as a whole."""

    cache: Any
    count: int
    written: Tensor | None


class AsModel(nn.Module):
    """A causal model of transformers with the interface of a `LanguageModel`: `(tokens, state) -> (logits, state)`.
    [HF-RUN-D1]

        model = AutoModelForCausalLM.from_pretrained(folder)
        hecate.hf.adopt(model)
        run_experiment(config, "runs/tuned", model=AsModel(model))  # resume=True goes on after a stop
        hecate.hf.save(model, "tuned")

    The model is trained in place; it may be adopted, upgraded, grafted, have LoRA adapters of peft, or be unchanged.
    Frozen parameters stay frozen. Documents in a row are passed to it as positions that start again. Whether the model
    keeps documents apart, and handles padding, is tested on a few tokens when it is first needed.

    Args:
        model: a model of `AutoModelForCausalLM`, with its weights.

    Raises:
        TypeError: anything else.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        causal = isinstance(base, PreTrainedModel) and base.can_generate()
        if not causal or getattr(base.config, "is_encoder_decoder", False):
            raise TypeError(f"AsModel takes a causal model of transformers, got a {type(base).__name__}")
        self.model = model
        self.past = "cache_params" if "cache_params" in signature(type(base).forward).parameters else "past_key_values"
        self._found: dict[str, bool] = {}

    @property
    def config(self) -> Any:
        """The config of the model."""
        return self.model.config

    def forward(
        self, tokens: Tensor, state: Read | None = None, *, write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
    ) -> tuple[Tensor, Read | None]:  # fmt: skip
        """Logits `[B, T, vocab]`, and the state after the last token: a new cache for every call, or None while
        gradients are recorded. Masks are bool `[B, T]`: `write_mask` is False at padding, which must be in front;
        `reset_mask` is True where a document begins.

        Raises:
            ConfigError: documents in a row of a model that would mix them, or after a state; padding with a model whose
                results would depend on it; a model without a cache.
            ShapeError: padding between tokens, or tokens outside the vocabulary.
        """
        arguments: dict[str, Any] = {}
        count, past_count = tokens.shape[1], 0 if state is None else state.count
        apart = reset_mask is not None and bool(reset_mask[:, 1:].any())
        written = None if state is None else state.written
        if state is not None and (state.cache is None or (reset_mask is not None and bool(reset_mask.any()))):
            raise ConfigError(CACHED)
        if write_mask is not None or written is not None:
            now = tokens.new_ones(tokens.shape, dtype=torch.bool) if write_mask is None else write_mask
            before = now.new_ones(len(now), past_count) if written is None else written
            written = torch.cat([before, now], 1)
            if bool((written[:, :-1] & ~written[:, 1:]).any()):
                raise ShapeError(f"write_mask must be False in front alone, got {described(write_mask)}")
            if not written.all():
                self._expect("write_mask")
            places = written.long().cumsum(1).sub(1).clamp(min=0)
            arguments = {"attention_mask": written.long(), "position_ids": places[:, -count:]}
        if apart and reset_mask is not None:
            if arguments:
                raise ConfigError("reset_mask and write_mask: a row of several documents has no padding; leave one out")
            self._expect("reset_mask")
            arguments = {"position_ids": places_of(reset_mask)}
        keeps = not (apart or torch.is_grad_enabled())
        if state is not None:
            arguments[self.past] = copy.deepcopy(state.cache)  # the call changes its cache
        try:
            output = self.model(input_ids=tokens, use_cache=keeps, **arguments)
        except IndexError as error:  # on the CPU, as in `LanguageModel.embedded`
            raise outside_vocabulary(tokens, self.model.get_input_embeddings().num_embeddings) or error from None
        if torch.is_grad_enabled():
            return output.logits, None
        cache = output.get(self.past) if keeps else None
        if keeps and cache is None:
            raise ConfigError(f"{self._name} returns no cache, and without one nothing can be read in pieces")
        return output.logits, Read(cache, past_count + count, written)

    @property
    def _name(self) -> str:
        return type(self.config).__name__.removesuffix("Config")

    def _expect(self, mask: str) -> None:
        """Refuses a mask that the model does not respect, as tested once on a few tokens."""
        if mask not in self._found:
            try:
                with self._evaluation():
                    self._found[mask] = self._keeps_apart() if mask == "reset_mask" else self._goes_on()
            except (RuntimeError, ValueError, AttributeError, LookupError, TypeError):  # transformers refuses it
                self._found[mask] = False
        if not self._found[mask]:
            raise ConfigError(
                f"{mask}: the {self._name} model {FAULTS[mask]}; give each a row of its own, or `hecate.hf.adopt` the "
                "model before AsModel takes it, if its layers can be adopted"
            )

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """`evaluating`, in the model's own dtype and without warnings, as the result says enough."""
        device = self.model.get_input_embeddings().weight.device
        with evaluating(self.model), without_autocast(device.type), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    def _few(self, *rows: list[int]) -> Tensor:
        embedding = self.model.get_input_embeddings()
        return torch.tensor(rows, device=embedding.weight.device) % embedding.num_embeddings

    def _keeps_apart(self) -> bool:
        """True if the logits of the second document in a row do not depend on the first."""
        rows = self._few([1, 2, 3, 4, 5, 6, 1, 3, 5, 2], [6, 5, 4, 1, 2, 2, 1, 3, 5, 2])
        starts = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device)
        starts[:, [0, 6]] = True
        one, two = self.model(input_ids=rows, position_ids=places_of(starts), use_cache=False).logits[:, 6:]
        return bool((one - two).abs().max() <= CLOSE * torch.finfo(one.dtype).eps * one.abs().max())

    def _goes_on(self) -> bool:
        """True if a padded row, and a token after it, have the same logits as without padding."""
        self._found["write_mask"] = True  # during the test, which calls forward
        row, more = self._few([1, 2, 3, 4, 5]), self._few([6])
        there = torch.arange(8, device=row.device)[None] >= 3
        padded, state = self.forward(torch.cat([row[:, :3], row], 1), write_mask=there)
        alone, other = self.forward(row)
        pairs = (padded[:, 3:], alone), (self.forward(more, state)[0], self.forward(more, other)[0])
        # Sums are in another order, and rounding errors grow with every layer, so only half of the digits must agree.
        return all(bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * b.abs().max()) for a, b in pairs)
