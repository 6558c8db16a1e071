"""A memory in the place of a layer of transformers: its masks, documents and caches."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from hecate.checks import Depth, Size
from hecate.errors import ConfigError
from hecate.hf.adopted import CACHED, PACKING, STARTS, document_starts
from hecate.hf.grafted import Masks, remembering
from hecate.nn import LayerState, Memory
from hecate.nn.arguments import Firing
from hecate.rule import MemoryConfig
from hecate.variant import Config

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
        starts = kwargs.get(STARTS)
        if starts is None:
            starts = document_starts({name: kwargs.get(name) for name in PACKING}, hidden_states)
        if starts is not None and cache_params is not None:
            raise ConfigError(CACHED)
        written = None if attention_mask is None else attention_mask[:, -hidden_states.shape[1] :].bool()
        masks = Masks(written, starts)
        wide = hidden_states.to(self.memory.out.weight.dtype)
        if cache_params is None:
            y, _ = self.masked(wide, None, write_mask=masks.write, reset_mask=masks.reset)
        else:
            y = self._held(cache_params).answers(HELD, self, wide, masks)
        return y.to(hidden_states.dtype)

    def masked(self, x: Tensor, state: LayerState | None, **masks: Tensor | None) -> tuple[Tensor, LayerState]:
        """The memory's answers to x `[B, T, d_model]`, and its state."""
        return self.memory(x, state, **masks)

    def _held(self, cache: Any) -> Any:
        """The layer of a cache that holds the state."""
        held = remembering(cache.layers[self.layer_idx])
        if HELD not in held.memories and any(held.has_previous_state.values()):
            raise ConfigError(
                f"layer {self.layer_idx} of the cache was filled by the model before its upgrade; fill it anew"
            )
        held.has_previous_state = dict.fromkeys(held.has_previous_state, True)
        return held
