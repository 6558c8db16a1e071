"""Layers of hecate called as those of transformers and flash-linear-attention are, in their place: masks, documents and
caches."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from hecate.checks import Depth, Size, described, expect_choice, expect_count
from hecate.errors import ConfigError, ShapeError
from hecate.hf.adopted import CACHED, PACKING, STARTS, document_starts
from hecate.hf.cache import StateLayer, remembering
from hecate.nn import Memory
from hecate.nn.arguments import Firing
from hecate.rule import MemoryConfig
from hecate.variant import Config

Returns = Literal["attention", "fla", "output"]
HELD = "layer"
"""The place of a layer's own state in its layer of a cache."""


LAYERS = "hecate_layers"
"""The key of a model's upgraded layers in its config: a `HostedConfig` by the name of each."""


class HostedConfig(Config):
    """Config of a memory in a layer's place: all that is needed to load its weights again."""

    version: Literal[1] = 1
    memory: MemoryConfig
    layer_idx: Depth = Field(ge=0)
    d_model: Size = Field(ge=1)
    heads: Size = Field(ge=1)
    d_key: Size = Field(ge=1)
    d_value: Size = Field(ge=1)
    conv_kernel: Depth = Field(ge=0)
    learned_initial: bool = False
    firing: Firing = "always"

    def build(self) -> Memory:
        """The memory, without numbers."""
        how = self.model_dump(include=set(OF_MEMORY))
        return Memory(self.d_model, self.heads, self.memory, name=f"layer {self.layer_idx}", device="meta", **how)


OF_MEMORY = ("d_key", "d_value", "conv_kernel", "learned_initial", "firing")
"""Arguments of `hecate.nn.Memory` in which memories of `from_layer` and `upgrade` differ."""


def arguments_of(memory: Memory) -> dict[str, Any]:
    """The `OF_MEMORY` of a memory."""
    learned = next(memory.initial.parameters(), None) is not None
    firing = "learned" if "firing" in memory.gates.starts else "always"
    kernel = 0 if memory.conv is None else memory.conv.kernel
    return dict(zip(OF_MEMORY, (memory.d_key, memory.d_value, kernel, learned, firing), strict=True))


def describe_hosted(model: nn.Module) -> None:
    """Says in the config of a model of transformers which of its layers are memories."""
    for root in [part for part in model.modules() if isinstance(part, PreTrainedModel)][:1]:
        found = {}
        for name, part in root.named_modules():
            if isinstance(part, Hosted):
                own = {"d_model": part.memory.d_model, "heads": part.memory.heads, **arguments_of(part.memory)}
                config = HostedConfig(memory=part.memory.config, layer_idx=part.layer_idx, **own)
                found[name] = config.model_dump(mode="json")
        if found:
            setattr(root.config, LAYERS, found)
        elif hasattr(root.config, LAYERS):  # a config that was another model's
            delattr(root.config, LAYERS)


def _masks(x: Tensor, attention_mask: Tensor | None, given: dict[str, Any], past: Any) -> dict[str, Tensor | None]:
    """Masks of x `[B, T, d_model]` by what transformers tells a layer; refuses documents in a cached row."""
    starts = given.get(STARTS)
    if starts is None:
        starts = document_starts({name: given.get(name) for name in PACKING}, x)
    if starts is not None and past is not None:
        raise ConfigError(CACHED)
    written = None if attention_mask is None else attention_mask[:, -x.shape[1] :].bool()
    return {"write_mask": written, "reset_mask": starts}


class Hosted(nn.Module):
    """A `hecate.nn.Memory` called as transformers calls its linear layers.

    Its state lies in the cache's layer for linear attention, which does to it whatever happens to the cache, and takes
    back what has been recorded.
    """

    def __init__(self, memory: Memory, layer_idx: int) -> None:
        super().__init__()
        self.memory, self.layer_idx = memory, layer_idx

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """hidden_states `[B, T, d_model]`; the memory's answers, and its state in the cache."""
        masks = _masks(hidden_states, attention_mask, kwargs, cache_params)
        wide = hidden_states.to(self.memory.out.weight.dtype)
        if cache_params is None:
            y, _ = self.memory(wide, None, **masks)
        else:
            y = self._held(cache_params).answers(HELD, self.memory, wide, **masks)
        return y.to(hidden_states.dtype)

    def _held(self, cache: Any) -> Any:
        """The layer of a cache that holds the state."""
        held = remembering(cache.layers[self.layer_idx])
        if HELD not in held.memories and any(held.has_previous_state.values()):
            raise ConfigError(
                f"layer {self.layer_idx} of the cache was filled by the model before its upgrade; fill it anew"
            )
        held.has_previous_state = dict.fromkeys(held.has_previous_state, True)
        return held


class AsLayer(nn.Module):
    """A layer of hecate in the place of an attention or a linear layer of transformers or fla. [HF-CALL-D1]

        block.self_attn = AsLayer(Memory(256, heads=4, config="titans"), layer_idx=3)
        y, _ = block.self_attn(hidden_states=x, attention_mask=padding, past_key_values=cache)

    Positions are not looked at. The state lies in layer `layer_idx` of the cache, a `StateLayer`, which it makes of one
    that is empty.

    Args:
        layer: `(x, state=None, *, write_mask, reset_mask) -> (y, state)`: `Memory`, `CMS`, compositions, blocks.
        layer_idx: its number in the model, from 0.
        returns: "attention" (y, None), as attention of transformers; "fla" (y, None, cache); "output" y.
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
        """hidden_states `[B, T, d_model]`, attention_mask `[B, T]` or of all tokens so far, 0 where there is padding;
        documents of a row by `cu_seqlens`, `cu_seq_lens_q` or `seq_idx`; other keywords say nothing to a memory.

        Raises:
            ShapeError: a mask over keys, which does not say what is padding.
            ConfigError: attention weights are asked for; documents in a cached row; a layer of the cache that holds
                something else.
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
        masks = _masks(hidden_states, attention_mask, kwargs, past)
        if past is None:
            y, _ = self.layer(hidden_states, None, **masks)
        else:
            y = self._held(past).advance(self.layer, hidden_states, **masks, counts=True)
        return {"attention": (y, None), "fla": (y, None, past), "output": y}[self.returns]

    def _held(self, cache: Any) -> StateLayer:
        """The layer of a cache that holds the state."""
        if not isinstance(cache, Cache) or cache.offloading:
            raise ConfigError(f"past_key_values must be a DynamicCache of transformers, got a {type(cache).__name__}")
        while len(cache.layers) <= self.layer_idx:
            cache.layers.append(DynamicLayer())
        held = cache.layers[self.layer_idx]
        if type(held) is DynamicLayer and not held.is_initialized:
            held = cache.layers[self.layer_idx] = StateLayer()
        if not isinstance(held, StateLayer):
            raise ConfigError(f"layer {self.layer_idx} of past_key_values is a {type(held).__name__} in use by another")
        return held
