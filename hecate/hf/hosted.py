"""A memory in the place of a layer of transformers: its masks, documents and caches."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hecate.errors import ConfigError
from hecate.hf.adopted import CACHED, PACKING, STARTS, document_starts
from hecate.hf.grafted import Masks, remembering
from hecate.nn import LayerState, Memory

HELD = "layer"
"""The place of a layer's own state in its layer of a cache."""


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
