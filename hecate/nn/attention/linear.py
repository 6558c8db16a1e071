"""Linear attention as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from hecate.checks import expect_count
from hecate.engine import EngineName, document_starts
from hecate.errors import ConfigError, shorten
from hecate.nn.arguments import check_sequence, check_sizes
from hecate.nn.attention.functional import Normalizer, Weights, check_options, linear_attention, turned_width
from hecate.nn.attention.sums import memory_of_sums
from hecate.nn.parameters import FeatureParameters, TensorDict, blank, draw_normal, source_of
from hecate.nn.positions import Position, PositionKind
from hecate.nn.rule import Asked
from hecate.phi import FeatureMap, FeatureMapKind
from hecate.rule import Gates, MemoryState
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
        self._check_options()
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
        width = turned_width(self.positions, self.feature_map, self.d_key)
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
        state: MemoryState | None = None,
        *,
        context: Tensor | None = None,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, MemoryState]:
        """One pass over x `[B, T, d_model]`, and the sums to go on from.

        `write_mask` is bool `[B, T]`, with a context `[B, S]`: at False a token is padding, which no other token sees.
        `reset_mask` `[B, T]` or `cu_seqlens` mark where documents start.
        """
        masks = {"write_mask": write_mask, "reset_mask": reset_mask, "cu_seqlens": cu_seqlens}
        if not torch.compiler.is_compiling():
            self._check_inputs(x, state, context, masks)
        q, k, v = self.projected(x, context, write_mask)
        y, after = self.attend(q, k, v, state, **masks)
        return self.out(F.dropout(y.flatten(-2), self.dropout, self.training)), after

    def projected(
        self, x: Tensor, context: Tensor | None = None, write_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, T, H, D]` of x, and k `[B, S, G, D]` and v `[B, S, G, V]` of the tokens that are seen."""
        source = context if self.d_context is not None else x
        if source is None:  # nothing new to see
            source = x.new_zeros(x.shape[0], 0, self.key_value.in_features)
        if write_mask is not None:  # a masked token may hold garbage
            source = torch.where(write_mask.unsqueeze(-1), source, 0.0)
        k, v = self.key_value(source).split(self.splits, -1)
        k, v = (item.unflatten(-1, (self.kv_heads, -1)) for item in (k, v))
        return self.query(x).unflatten(-1, (self.heads, -1)), k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: MemoryState | None = None, **masks: Tensor | None
    ) -> tuple[Tensor, MemoryState]:
        """`linear_attention` with the options of this layer."""
        return linear_attention(
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
            engine=self.engine,
            autodiff=self.autodiff,
            name=self.name,
            **masks,
        )

    @property
    def is_memory(self) -> bool:
        """Whether answers come from a memory: not from sums over what comes later, nor from features that positions
        have turned or a table weighs. [SCOPE-LIN-D1]"""
        return self.causal and self.positions.sums_past and not self.positions.turns_features

    def asked(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        context: Tensor | None = None,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Asked:
        """The same as a scan of a memory per query head with bias dot and lr 1, where the layer `is_memory`.

        The scan knows no `eps`; without a normaliser its decaying memory has decayed once more to a masked token."""
        group = self.heads // self.kv_heads
        q, k, v = self.projected(x, context, write_mask)
        reset_mask = document_starts(reset_mask, cu_seqlens, k, going_on=state is not None)
        k, v = (item.repeat_interleave(group, 2) for item in (k, v))
        phi, turns = _repeated((self.phi_params, self.position_params.tensors), group, 0)
        weights = Weights(self.feature_map, phi, self.positions, turns)
        place, _ = weights.places(state, write_mask, reset_mask, k)
        q, k = weights.turned(q, place), weights.turned(k, place)
        retain = self.positions.retain(k, turns)
        decays = self.positions.weighs_distance
        config = memory_of_sums(decays=decays, feature_map=self.feature_map, normalizer=self.normalizer)
        before = None if state is None else self.per_query_head(state)
        return Asked(config, q, k, v, Gates(retain=retain), phi, None, before, write_mask, reset_mask)

    def per_query_head(self, state: MemoryState) -> MemoryState:
        """A state as that of the scan which `asked` describes."""
        held: MemoryState = _repeated(state._replace(seen=None), self.heads // self.kv_heads, 1)
        return held._replace(seen=state.seen if self.feature_map.needs_position else None)

    def _check_options(self) -> None:
        expect_count(self.kv_heads, "kv_heads")
        if self.d_context is not None:
            expect_count(self.d_context, "d_context")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}", ("kv_heads",))
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be a number in [0, 1), got {shorten(self.dropout)}")
        check_options(
            self.feature_map,
            causal=self.causal,
            normalizer=self.normalizer,
            eps=self.eps,
            engine=self.engine,
            autodiff=self.autodiff,
        )
        turned_width(self.positions, self.feature_map, self.d_key)
        if self.d_context is None:
            return
        if self.causal:
            raise ConfigError(
                f"causal=True with d_context={self.d_context}: the tokens of x and of context have no "
                "common order; set causal=False"
            )
        for what, kind, needs in (
            ("positions", self.positions.kind, self.positions.needs_order),
            ("feature_map", self.feature_map.kind, self.feature_map.needs_position),
        ):
            if needs:
                raise ConfigError(
                    f"{what} {kind!r} with d_context={self.d_context}: x and context count their "
                    "tokens apart, so no distance lies between them; choose one without positions"
                )

    def _check_inputs(
        self, x: Tensor, state: MemoryState | None, context: Tensor | None, masks: dict[str, Tensor | None]
    ) -> None:
        """Refuses tensors that do not fit the layer or each other."""
        write_mask, reset_mask, cu_seqlens = masks.values()
        if self.d_context is None:
            if context is not None:
                raise ConfigError(
                    f"{self.name}: a context is given, but the layer was built for self-attention; "
                    "build it with d_context=..."
                )
            check_sequence(self.query.weight, x, write_mask=write_mask, reset_mask=reset_mask)
            return
        if reset_mask is not None or cu_seqlens is not None:
            raise ConfigError(
                f"{self.name}: documents packed into one row cannot be told apart in "
                "cross-attention; give every document a row of its own, with write_mask over context"
            )
        check_sequence(self.query.weight, x)
        if context is not None:
            check_sequence(self.key_value.weight, context, "context", write_mask=write_mask)
        elif state is None or write_mask is not None:
            raise ConfigError(
                f"{self.name}: cross-attention needs a context, or the state of one to read again"
                + ("" if write_mask is None else "; write_mask is over context, and there is none")
            )

    def extra_repr(self) -> str:
        """The options."""
        return (
            f"{self.d_model}, heads={self.heads}, kv_heads={self.kv_heads}, d_key={self.d_key}, "
            f"d_value={self.d_value}, feature_map={self.feature_map.kind!r}, "
            f"causal={self.causal}, normalizer={self.normalizer!r}, "
            f"positions={self.positions.kind!r}"
        )


def _repeated(tree: Any, group: int, axis: int) -> Any:
    """Every key head of a pytree as often as it has query heads."""
    return pytree.tree_map_only(Tensor, lambda x: x.repeat_interleave(group, axis), tree)
