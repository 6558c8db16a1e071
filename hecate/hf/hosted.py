"""A memory in the place of a layer of transformers: its masks, documents and caches."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate.errors import ConfigError
from hecate.hf.adopted import CACHED, PACKING, STARTS, document_starts
from hecate.nn import LayerState, Memory

TREE = "hecate_tree"
"""The attribute of a cache's layer that has the form of the state whose tensors it holds."""


class Hosted(nn.Module):
    """A `hecate.nn.Memory` called as transformers calls its linear layers.

    Its state lies in the cache's layer for linear attention as so many recurrent states, tensors with a row for each
    sequence, to which the cache does whatever it does to its own.
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
        held = None if cache_params is None else cache_params.layers[self.layer_idx]
        wide = hidden_states.to(self.memory.out.weight.dtype)
        y, state = self.memory(wide, self._state(held), write_mask=written, reset_mask=starts)
        if held is not None:
            _hold(held, state)
        return y.to(hidden_states.dtype)

    def _state(self, held: Any) -> LayerState | None:
        if held is None or not any(held.has_previous_state.values()):
            return None
        if TREE not in vars(held):
            raise ConfigError(
                f"layer {self.layer_idx} of the cache was filled by the model before its upgrade; fill it anew"
            )
        return pytree.tree_unflatten([*held.recurrent_states.values()], getattr(held, TREE))


def _hold(held: Any, state: LayerState) -> None:
    """Puts a state into a cache's layer: tensors as its recurrent states, None among them for what there is not."""
    leaves, tree = pytree.tree_flatten(state)
    count = range(len(leaves))
    there = {at: leaf is not None for at, leaf in enumerate(leaves)}
    held.number_of_states, held.recurrent_states = len(leaves), dict(enumerate(leaves))
    held.is_recurrent_states_initialized, held.has_previous_state = there, dict.fromkeys(count, True)
    held.conv_states, held.is_conv_states_initialized = dict.fromkeys(count), dict.fromkeys(count, False)
    held.device, held.dtype = leaves[0].device, leaves[0].dtype
    setattr(held, TREE, tree)
