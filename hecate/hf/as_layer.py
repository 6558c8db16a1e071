"""Layers of hecate called as those of transformers and flash-linear-attention are."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from hecate.checks import described, expect_choice, expect_count
from hecate.errors import ConfigError, ShapeError
from hecate.hf.adopted import CACHED, PACKING, document_starts
from hecate.hf.cache import StateLayer

Returns = Literal["attention", "fla", "output"]


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
        given = {name: kwargs.get(name) for name in PACKING}
        if given["cu_seq_lens_q"] is None:
            given["cu_seq_lens_q"] = kwargs.get("cu_seqlens")
        past = cache_params if past_key_values is None else past_key_values
        starts = document_starts(given, hidden_states)
        if starts is not None and past is not None:
            raise ConfigError(CACHED)
        written = None if attention_mask is None else attention_mask[:, -hidden_states.shape[1] :].bool()
        if past is None:
            y, _ = self.layer(hidden_states, None, write_mask=written, reset_mask=starts)
        else:
            y = self._held(past).advance(self.layer, hidden_states, written, starts, counts=True)
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
