"""Adding memories to existing models of transformers, beside the attention or in its place: `graft`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from types import MethodType
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hecate.checks import Depth, Size, Taps, described, expect_choice
from hecate.errors import ConfigError, ShapeError
from hecate.hf.adopt import FLOATS, called_with, starts_of_documents
from hecate.hf.cache import no_continuous_batching, record_drafts, remembering
from hecate.nn import FeatureMemoryConfig, LayerState, Memory
from hecate.nn.conv import QKNorm
from hecate.nn.gates import Firing
from hecate.nn.rule import Projection
from hecate.rule import MemoryConfig
from hecate.variant import Config

Mode = Literal["add", "replace"]
Train = Literal["memory", "all"]
GRAFT = "hecate_graft"
"""Key of an attention graft in a model's config."""
MASKS = "hecate_masks"
"""Keyword that passes masks through a model's layers: `write_mask` and `reset_mask`, bool `[B, T]` or None."""
BRANCH = "hecate"
"""Name of the submodule with the memory, in an attention or MLP."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class GraftConfig(Config):
    """Config of a graft: everything needed to load its weights again.

    Fields:
        layers: numbers of the layers with a memory.
        memory: the memory's rule.
        mode: "add" beside the attention, "replace" in its place.
        heads, d_key, d_value: sizes of the memory; None takes those of the attention's queries, or if heads are given,
            the defaults of `hecate.nn.Memory`.
        conv_kernel, qk_norm, output_gate, learned_initial, feature_memory, firing, query_projection: as in
            `hecate.nn.Memory`.
        dtype: dtype of its weights; None takes the model's, but at least float32.
    """

    layers: tuple[Annotated[Depth, Field(ge=0)], ...] = Field(min_length=1)
    memory: MemoryConfig = MemoryConfig()
    mode: Mode = "add"
    heads: Size | None = Field(None, ge=1)
    d_key: Size | None = Field(None, ge=1)
    d_value: Size | None = Field(None, ge=1)
    conv_kernel: Taps | None = None
    qk_norm: QKNorm | None = None
    output_gate: bool = True
    learned_initial: bool = True
    feature_memory: FeatureMemoryConfig | None = None
    firing: Firing = "always"
    query_projection: Projection = "none"
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None


def graft(
    model: Any,
    layers: Sequence[int] | None = None,
    memory: MemoryConfig | str | Mapping[str, Any] = "delta",
    *,
    mode: Mode = "add",
    train: Train = "memory",
    reuse: bool = True,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    **sizes: Any,
) -> Any:
    """Adds a memory beside the attention of some layers of a model, or replaces the attention; returns the same model.

        model = AutoModelForCausalLM.from_pretrained(folder)
        graft(model, layers=[4, 8], memory="titans")

    It takes any model of transformers whose decoder has `layers`, each with a `self_attn` with q_proj, k_proj, v_proj
    and o_proj, as in Llama, Mistral, Qwen and Gemma. With "add" the memory gets the attention's input, and its output,
    times a gate per channel that is zero at first, is added to the attention's: until the gate is trained, the model
    computes the same function. [HF-GRAFT-I1] With "replace" the memory's output replaces the attention's: the model
    computes another function, and has to be trained. [HF-GRAFT-D2]

    Names of existing weights stay; new ones contain `.self_attn.hecate.`. `save_pretrained` writes all weights and puts
    the graft into the model's config, for `load_graft`; `save_graft` writes only the new ones. [HF-GRAFT-D4]

    Args:
        model: on its device, with its weights; not dispatched over devices by accelerate, and not a `PeftModel`, which
            has to be made after the graft.
        layers: indices from 0; None for all.
        memory: a rule, in any form that `hecate.nn.Memory` takes.
        mode: "add" or "replace".
        train: "memory" freezes all weights except the new ones; "all" freezes none, except those of a replaced
            attention, which are not used.
        reuse: start from the weights of q, k, v and o where their shapes are the memory's, with keys and values of
            grouped queries repeated, without their biases. The model's `repr` shows which were reused.
        dtype: dtype of the new weights; None takes the model's, but at least float32.
        generator: source of all draws; None uses torch's default generator.
        sizes: the other fields of `GraftConfig`.

    Raises:
        ConfigError: an impossible graft; the model is then unchanged.
    """
    decoder = decoder_of(model, Grafted)
    asked = fields_of(decoder, layers, dtype, train)
    config = GraftConfig.model_validate({**asked, "memory": memory, "mode": mode, **sizes})
    expect_choice(reuse, "reuse", (True, False))
    return install(model, decoder, config, build(decoder, config, reuse, generator), train)


def fields_of(decoder: Any, layers: Any, dtype: torch.dtype | None, train: str) -> dict[str, Any]:
    """Layers and dtype in the form of the configs of grafts; refuses an unknown `train`."""
    expect_choice(train, "train", ("memory", "all"))
    layers = range(len(decoder.layers)) if layers is None else layers
    layers = tuple(layers) if isinstance(layers, range) else layers
    return {"layers": layers, "dtype": None if dtype is None else str(dtype).removeprefix("torch.")}


def build(
    decoder: Any, config: GraftConfig, reuse: bool, generator: torch.Generator | None
) -> dict[int, tuple[Any, Branch]]:
    """The attention of each layer and the memory to add to it; the model is not changed."""
    expect_layers(decoder, config.layers)
    attentions = {index: _attention(decoder, index, reuse) for index in config.layers}
    return {index: (at, _branch(index, at, config, reuse, generator)) for index, at in attentions.items()}


def expect_layers(decoder: Any, layers: Sequence[int]) -> None:
    """Refuses layers that do not exist, or are named twice."""
    for index in layers:
        if index >= len(decoder.layers):
            raise ConfigError(
                f"has layer {index}, but the model has layers 0 to {len(decoder.layers) - 1}", ("layers",)
            )
    if len(set(layers)) < len(layers):
        raise ConfigError(f"names a layer twice: {list(layers)}", ("layers",))


def freeze(model: Any) -> None:
    """Freezes all weights except those of grafts."""
    for name, parameter in model.named_parameters():
        if f".{BRANCH}." not in name:
            parameter.requires_grad_(False)


def install(model: Any, decoder: Any, config: GraftConfig, branches: dict[int, tuple[Any, Branch]], train: str) -> Any:
    """Adds the branches that `build` made to the model; returns the model."""
    for attention, branch in branches.values():
        if config.mode == "replace":
            attention.requires_grad_(False)
        setattr(attention, BRANCH, branch.train(attention.training))
        attention.__class__ = with_base(attention.__class__, Beside if config.mode == "add" else InPlace)
    return announce(model, decoder, GRAFT, config, train)


def announce(model: Any, decoder: Any, key: str, config: Config, train: str) -> Any:
    """Prepares a model to pass masks to its memories and to generate with their states; puts the graft's config into
    the model's under `key`; freezes all other weights if only the "memory" is trained; returns the model."""
    if train == "memory":
        freeze(model)
    if hand_masks not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(hand_masks, with_kwargs=True)
    setattr(model.config, key, config.model_dump(mode="json"))
    model.init_continuous_batching = no_continuous_batching
    model._prepare_cache_for_generation = MethodType(prepare_cache, model)  # a method: a copy of the model has its own
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.disable_compile = True  # states are replaced; static graphs need fixed addresses
    # Memories need a mask [B, T]: the masks over keys that are made for static caches do not show the padding.
    model.create_masks_for_generate = _unchanged_mask
    return model


def _unchanged_mask(*, attention_mask: Tensor | None, **_: Any) -> Tensor | None:
    return attention_mask


def decoder_of(model: Any, kind: type[nn.Module]) -> Any:
    """The decoder of a model, which has the layers; refuses a model that cannot be grafted, or has a graft of this
    kind already."""
    if not isinstance(model, PreTrainedModel):
        after = "; graft the model first and wrap it then" if hasattr(model, "get_base_model") else ""
        raise ConfigError(f"a graft needs a PreTrainedModel of transformers, got a {type(model).__name__}{after}")
    name = type(model).__name__
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        raise ConfigError(f"a graft needs a decoder with a list of layers, and the {name} has no .layers")
    if any(isinstance(module, kind) for module in model.modules()):
        raise ConfigError(f"the {name} has a graft already; begin with the model as it was and name all layers at once")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(f"the {name} is on the meta device; load its weights before the graft")
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise ConfigError(f"the {name} is sharded over devices; graft it before it is sharded")
    for part in (decoder, layers[0]):
        expect_keywords(part, **{"**": "does not hand keywords on, by which its memories get masks"})
    return decoder


def expect_keywords(module: nn.Module, **needed: str) -> None:
    """Refuses a module whose forward lacks an argument; `**` stands for arbitrary keywords."""
    known = inspect.signature(type(module).forward).parameters.values()
    names = {"**" if p.kind is p.VAR_KEYWORD else p.name for p in known}
    for name, why in needed.items():
        if name not in names:
            raise ConfigError(f"{type(module).__name__} {why}")


def _attention(decoder: Any, index: int, reuse: bool) -> Any:
    """The attention of a layer; refuses one that a memory cannot be added to."""
    layer = decoder.layers[index]
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        raise ConfigError(f"layer {index}, a {type(layer).__name__}, has no self_attn to put a memory beside")
    kind = type(attention).__name__
    for name in (*_PROJECTIONS, "head_dim", "layer_idx"):
        if not hasattr(attention, name):
            raise ConfigError(f"layer {index}: a graft needs self_attn.{name}, which {kind} does not have")
    expect_keywords(attention, past_key_values="takes no past_key_values, where memories keep their states")
    if "forward" in vars(attention):
        raise ConfigError(
            f"layer {index}: the forward of its {kind} is not that of its class, as where accelerate dispatches a "
            "model over devices; graft the model on one device, and dispatch it then"
        )
    for name in _PROJECTIONS if reuse else ():
        linear = getattr(attention, name)
        plain = isinstance(linear, nn.Linear) and linear.weight.dtype in FLOATS
        if not plain:
            dtype = linear.weight.dtype if isinstance(getattr(linear, "weight", None), Tensor) else "no tensor"
            raise ConfigError(
                f"reuse=True copies the weights of {name}, but that of layer {index} is a {type(linear).__name__} of "
                f"{dtype}, quantised or adapted; set reuse=False"
            )
    return attention


def _branch(index: int, attention: Any, config: GraftConfig, reuse: bool, generator: torch.Generator | None) -> Branch:
    """A memory for an attention, with `reuse` starting from those of its weights that fit."""
    width, linear = attention.head_dim, attention.q_proj
    model_dtype = linear.weight.dtype if linear.weight.dtype in FLOATS else torch.float32
    dtype = torch.promote_types(model_dtype, torch.float32) if config.dtype is None else getattr(torch, config.dtype)
    given = config.model_dump(exclude={"layers", "memory", "mode", "feature_memory", "dtype"}, exclude_none=True)
    like = {"heads": linear.out_features // width, "d_key": width, "d_value": width} if config.heads is None else {}
    memory = Memory(
        linear.in_features,
        config=config.memory,
        feature_memory=config.feature_memory,
        name=f"layer {index}",
        generator=generator,
        device=linear.weight.device,
        dtype=dtype,
        **like | given,
    )
    reused = _reuse(memory, attention) if reuse else ()
    return Branch(memory, gated=config.mode == "add", reused=reused)


@torch.no_grad()
def _reuse(memory: Memory, attention: Any) -> tuple[str, ...]:
    """Copies those weights of an attention whose shapes fit; returns their names."""
    places = dict(zip("qkv", memory.qkv.weight.split(memory.splits), strict=True)) | {"o": memory.out.weight}
    width, taken = attention.head_dim, []
    for name, place in places.items():
        weight = getattr(attention, f"{name}_proj").weight
        head = memory.d_key if name in "qk" else memory.d_value
        if name in "kv" and head == width and memory.pairs == 1 and weight.shape[0] % width == 0:
            groups = weight.unflatten(0, (-1, width))
            if memory.heads % len(groups) == 0:
                weight = groups.repeat_interleave(memory.heads // len(groups), 0).flatten(0, 1)
        if head == width and weight.shape == place.shape:
            place.copy_(weight)
            taken.append(name)
    return tuple(taken)


# A graft changes a running model in three places: the class of an attention, the class of its cache layer, and a hook.


class Branch(nn.Module):
    """A memory and, if it is beside attention, a gate on its output: a factor per channel, zero at first.

    It computes in the dtype of its own weights, whatever the model's.
    """

    def __init__(self, memory: Memory, *, gated: bool, reused: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.memory, self.reused = memory, reused
        self.gate = nn.Parameter(memory.out.weight.new_zeros(memory.d_model)) if gated else None

    def forward(
        self, x: Tensor, state: LayerState | None, *, write_mask: Tensor | None, reset_mask: Tensor | None
    ) -> tuple[Tensor, LayerState]:
        """Output for x `[B, T, d_model]` of any dtype, in the memory's dtype; and the memory's state."""
        wide = x.to(self.memory.norm.dtype)
        if write_mask is not None:  # attention may output NaN at padding, where it may have no key
            wide = wide.masked_fill(~write_mask.unsqueeze(-1), 0)
        y, state = self.memory(wide, state, write_mask=write_mask, reset_mask=reset_mask)
        return (y if self.gate is None else self.gate * y), state

    def extra_repr(self) -> str:
        """Names of the attention's weights that it started from."""
        return f"from {', '.join(self.reused)}" if self.reused else ""


def prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """`_prepare_cache_for_generation` of a grafted model: makes the cache layers hold states from the start, so that
    they can be told to record."""
    type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)
    past: Any = model_kwargs.get("past_key_values")
    if type(past) is not DynamicCache or past.offloading:
        return
    for index in [module.layer_idx for module in self.modules() if isinstance(module, Holder)]:
        while len(past.layers) <= index:  # a DynamicCache() made without a config has no layers
            past.layers.append(past.layer_class_to_replicate())
        record_drafts(generation_config, remembering(past.layers[index]))


class Holder(nn.Module):
    """Mixin for a part of a layer with memories; their states are in layer `layer_idx` of a cache."""

    layer_idx: int


class Grafted(Holder):
    """Mixin for an attention with a memory, which reads the same hidden states, without positions."""

    def _answers(self, x: Tensor, past: Any, masks: dict[str, Tensor | None]) -> Tensor:
        """The memory's output, gated if there is a gate; its state is stored in the cache."""
        branch = getattr(self, BRANCH)
        if past is None:
            return branch(x, None, **masks)[0]
        layer = remembering(past.layers[self.layer_idx])
        if BRANCH not in layer.memories and (count := int(layer.get_seq_length()) - x.shape[1]) > 0:
            raise ShapeError(
                f"past_key_values holds {count} tokens that the memory of layer {self.layer_idx} has not read; fill it "
                "with the grafted model, and leave prefix tuning out"
            )
        return layer.answers(BRANCH, branch, x, **masks)

    def _pop_masks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Tensor | None]]:
        """The cache and the masks among the arguments of a call; removes the masks from the keywords."""
        masks = kwargs.pop(MASKS, None)
        past = next((value for value in args if isinstance(value, Cache)), kwargs.get("past_key_values"))
        if masks is None:
            raise ConfigError(
                f"no masks reached the memory of layer {self.layer_idx}: its layer was called on its own, or does not "
                "hand its keywords on to its attention"
            )
        if past is not None and not isinstance(past, Cache):
            raise ShapeError(f"past_key_values must be a Cache of transformers, got a {type(past).__name__}")
        return past, masks


class Beside(Grafted):
    """Attention plus a memory."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The results of the attention for hidden_states `[B, T, d_model]`, with the memory's output added."""
        past, masks = self._pop_masks(args, kwargs)
        y, *rest = super().forward(hidden_states, *args, **kwargs)
        return (y + self._answers(hidden_states, past, masks).to(y.dtype), *rest)


class InPlace(Grafted):
    """A memory in place of an attention, which keeps its own weights, frozen and unused."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The memory's output for hidden_states `[B, T, d_model]`, and None for attention weights."""
        past, masks = self._pop_masks(args, kwargs)
        if past is not None:  # zero keys and values, one number per token, as a cache counts tokens by them
            layer = past.layers[self.layer_idx] if self.layer_idx < len(past.layers) else None
            keys = getattr(layer, "keys", None)  # in a static cache keys are allocated already, and fix the shape
            heads, width = (1, 1) if keys is None or keys.dim() < 4 else (keys.shape[1], keys.shape[3])
            stub = hidden_states.new_zeros(len(hidden_states), heads, hidden_states.shape[1], width)
            past.update(stub, stub, self.layer_idx)
        return self._answers(hidden_states, past, masks).to(hidden_states.dtype), None


@cache
def with_base(kind: Any, base: Any) -> Any:
    """A subclass of a class of transformers, with a mixin as its first base."""
    return type(f"{base.__name__}{kind.__name__}", (base, kind), {})


def hand_masks(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Pre-forward hook of a decoder: adds `MASKS` to the keywords, which are passed on to its layers."""
    arguments, tokens = called_with(model, args, kwargs)
    return args, {**kwargs, MASKS: _masks(arguments, tokens)}


def _masks(arguments: dict[str, Any], tokens: Tensor) -> dict[str, Tensor | None]:
    """Masks of the tokens of a call for memories, each None if it has no effect: `write_mask` is False at padding,
    which memories neither write nor count; `reset_mask` is True where another document begins."""
    padding, count = arguments.get("attention_mask"), tokens.shape[1]
    if padding is not None:
        if not isinstance(padding, Tensor) or padding.dim() != 2 or padding.shape[1] < count:
            raise ShapeError(
                f"attention_mask must be [B, {count} or more], which tells memories what is padding, got "
                f"{described(padding)}"
            )
        start, past = padding.shape[1] - count, arguments.get("past_key_values")
        if start and past is not None:  # a mask for a static cache may extend beyond these tokens
            start = min(start, int(past.get_seq_length()))
        write = padding[:, start : start + count].to(tokens.device).bool()
        # This check waits for the device, but a scan without a mask is much faster.
        whole = not torch.compiler.is_compiling() and bool(write.all())
        return {"write_mask": None if whole else write, "reset_mask": None}
    return {"write_mask": None, "reset_mask": starts_of_documents(arguments, tokens)}
