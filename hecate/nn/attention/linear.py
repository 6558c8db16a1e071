"""Linear attention as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hecate.engine import EngineName
from hecate.nn.arguments import check_sizes
from hecate.nn.attention.arguments import check_forward, check_layer, width_of
from hecate.nn.attention.functional import Normalizer, linear_attention
from hecate.nn.attention.state import LinearAttentionState
from hecate.nn.parameters import FeatureParameters, TensorDict, blank, draw_normal, source_of
from hecate.nn.positions import Position, PositionKind
from hecate.phi import FeatureMap, FeatureMapKind
from hecate.tape import Autodiff


class LinearAttention(FeatureParameters):
    """Linear attention: `(x [B, T, d_model], state=None) -> (y [B, T, d_model], state)`.

        layer = LinearAttention(256, heads=4, feature_map="elu")
        y, state = layer(x)             # a whole sequence
        y, state = layer(more, state)   # and on from there; any split gives the same result

    y_t = W_out sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s), s over the written tokens of t's document,
    causal: up to t. [LIN-ATT-D1]

    In cross-attention (`d_context` given) s goes over all tokens of `context`, which may come in pieces: the state is
    the sums over what has come, and without a context it is only read.

    Args:
        d_model, heads: width of x and y, number of query heads.
        feature_map: phi, with its parameters per key head: learned ones are trained, draws of a
            random one are buffers.
        causal: whether a token sees those up to itself or its whole document.
        normalizer: "sum", or "none" to leave the sum of values; see `linear_attention`.
        kv_heads: heads of keys and values, each shared by heads // kv_heads; None means `heads`.
            There is one state per key head.
        d_key, d_value: per head; default d_model // heads.
        d_context: width of `context`; None for self-attention.
        positions: what the distance of two tokens does; see `hecate.nn.positions`.
        dropout: share of the heads' answers set to 0 ahead of W_out while training. Weights are
            never formed, so none can be dropped. Like `nn.Dropout` it draws from torch's own generator.
        eps: added to the sum of weights.
        engine, autodiff: passed to `memory_scan`; they change speed and memory only.
        name: what errors call this layer.
        generator: source of all draws; None uses torch's default generator.

    Cost: per token and head O(d_phi d_value), causal and not; the state has that size. A causal backward pass keeps
    states of a few tokens, not of each.

    References: Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236); shared heads: GQA (Ainslie et al.,
    2023, arXiv 2305.13245).
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        feature_map: FeatureMapKind | str = "elu",
        causal: bool = True,
        normalizer: Normalizer = "sum",
        kv_heads: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        d_context: int | None = None,
        positions: PositionKind | str = "none",
        dropout: float = 0.0,
        eps: float = 0.0,
        engine: EngineName = "auto",
        autodiff: Autodiff = "auto",
        name: str = "attention",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(d_model, heads, d_key, d_value, 0)
        self.feature_map = FeatureMap.model_validate(feature_map)
        self.positions = Position.model_validate(positions)
        self.d_model, self.heads, self.d_context = d_model, heads, d_context
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.d_key = d_model // heads if d_key is None else d_key
        self.d_value = d_model // heads if d_value is None else d_value
        self.causal, self.normalizer, self.eps = causal, normalizer, eps
        self.dropout, self.name = dropout, name
        self.engine, self.autodiff = engine, autodiff
        check_layer(self)
        place: dict[str, Any] = {"device": device, "dtype": dtype, "bias": False}
        self.query = blank(nn.Linear, d_model, heads * self.d_key, **place)
        self.splits = [self.kv_heads * self.d_key, self.kv_heads * self.d_value]
        source = d_model if d_context is None else d_context
        self.key_value = blank(nn.Linear, source, sum(self.splits), **place)
        self.out = blank(nn.Linear, heads * self.d_value, d_model, **place)
        self.hold_features(self.feature_map, self.kv_heads, self.d_key, device=device, dtype=dtype)
        start = self._start_of_positions(device="meta", dtype=self.out.weight.dtype)
        self.position_params = TensorDict(start, learned=True, device=device, dtype=dtype)
        if self.out.weight.device.type != "meta":
            self.reset_parameters(generator)

    def _start_of_positions(self, **place: Any) -> dict[str, Tensor]:
        width = width_of(self.positions, self.feature_map, self.d_key)
        return self.positions.init(width, heads=self.kv_heads, causal=self.causal, **place)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        source = source_of(generator)
        for linear in (self.query, self.key_value, self.out):
            draw_normal(linear.weight, linear.in_features**-0.5, source)
        self.draw_features(source, self.out.weight)
        like = self.out.weight
        self.position_params.copy_(self._start_of_positions(device=like.device, dtype=like.dtype))

    def forward(
        self,
        x: Tensor,
        state: LinearAttentionState | None = None,
        *,
        context: Tensor | None = None,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, LinearAttentionState]:
        """One pass over x `[B, T, d_model]`, and the sums to go on from.

        `write_mask` is bool `[B, T]`, with a context `[B, S]`: at False a token is padding, which no other token sees.
        `reset_mask` `[B, T]` or `cu_seqlens` mark where documents start.
        """
        if not torch.compiler.is_compiling():
            check_forward(self, x, state, context, write_mask, reset_mask, cu_seqlens)
        source = context if self.d_context is not None else x
        if source is None:  # nothing new to see
            source = x.new_zeros(x.shape[0], 0, self.key_value.in_features)
        if write_mask is not None:
            source = torch.where(write_mask.unsqueeze(-1), source, 0.0)
        q = self.query(x).unflatten(-1, (self.heads, -1))
        k, v = (part.unflatten(-1, (self.kv_heads, -1)) for part in self.key_value(source).split(self.splits, -1))
        y, after = linear_attention(
            q,
            k,
            v,
            self.feature_map,
            self.phi_params,
            causal=self.causal,
            normalizer=self.normalizer,
            eps=self.eps,
            positions=self.positions,
            position_params=self.position_params.tensors,
            state=state,
            write_mask=write_mask,
            reset_mask=reset_mask,
            cu_seqlens=cu_seqlens,
            engine=self.engine,
            autodiff=self.autodiff,
            name=self.name,
        )
        return self.out(F.dropout(y.flatten(-2), self.dropout, self.training)), after

    def extra_repr(self) -> str:
        """The options."""
        return (
            f"{self.d_model}, heads={self.heads}, kv_heads={self.kv_heads}, d_key={self.d_key}, "
            f"d_value={self.d_value}, feature_map={self.feature_map.kind!r}, "
            f"causal={self.causal}, normalizer={self.normalizer!r}, "
            f"positions={self.positions.kind!r}"
        )
