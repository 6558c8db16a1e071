"""Linear attention as a layer, and with random features of the softmax kernel, redrawn as training goes on."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from hecate.checks import expect_choice, expect_count, named
from hecate.engine import EngineName, document_starts
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.nn.arguments import Mask, check_sequence, check_sizes
from hecate.nn.parameters import FeatureParameters, TensorDict, blank, redraw, source_of
from hecate.nn.positions import Position
from hecate.nn.rule import ScanArguments
from hecate.nn.sums import MEMORIES, Normalizer, Weights, check_options, linear_attention, turned_width
from hecate.phi import Favor, FeatureMap, FeatureMapKind, PerformerReLU
from hecate.phi.random import Norms
from hecate.rule import Gates, MemoryState
from hecate.states import State
from hecate.tape import Autodiff

Kernel = Literal["positive", "hyperbolic", "trigonometric", "relu"]


@named()
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
        feature_map: phi, with its parameters per key head: learned ones are trained, draws of a random one are buffers.
        causal: whether a token sees those up to itself or its whole document.
        normalizer: "sum", or "none" to leave the sum of values; see `linear_attention`.
        kv_heads: heads of keys and values, each shared by heads // kv_heads; None means `heads`.
            There is one state per key head.
        d_key, d_value: per head; default d_model // heads.
        d_context: width of `context`; None for self-attention.
        positions: what the distance of two tokens does; see `hecate.nn.positions`.
        dropout: share of the heads' answers set to 0 before W_out while training. Weights are
            never formed, so none can be dropped. Like `nn.Dropout` it draws from torch's own generator.
        eps: added to the sum of weights.
        bias: whether the projections have biases, 0 at the start.
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
        positions: Position | str = "none",
        dropout: float = 0.0,
        eps: float = 0.0,
        bias: bool = False,
        engine: EngineName = "auto",
        autodiff: Autodiff = "auto",
        name: str = "attention",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_key, self.d_value = check_sizes(d_model, heads, d_key, d_value, 0)
        self.feature_map = FeatureMap.model_validate(feature_map)
        self.positions = Position.model_validate(positions)
        self.d_model, self.heads, self.d_context = d_model, heads, d_context
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.causal, self.normalizer, self.eps = causal, normalizer, eps
        self.dropout, self.name = dropout, name
        self.engine, self.autodiff = engine, autodiff
        self._check_options()
        place: dict[str, Any] = {"device": device, "dtype": dtype, "bias": bias}
        self.query = blank(nn.Linear, d_model, heads * self.d_key, **place)
        # Keys and values are one product: in cross-attention they have another source than queries.
        self.splits = [self.kv_heads * self.d_key, self.kv_heads * self.d_value]
        source = d_model if d_context is None else d_context
        self.key_value = blank(nn.Linear, source, sum(self.splits), **place)
        self.out = blank(nn.Linear, heads * self.d_value, d_model, **place)
        self.hold_features(self.feature_map, self.kv_heads, self.d_key, device=device, dtype=dtype)
        # Shapes alone: the values come in `reset_parameters`, on a device that has numbers.
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
        redraw(source, self.query, self.key_value, self.out)
        self.draw_features(source, self.out.weight)
        like = self.out.weight
        self.position_params.copy_(self._start_of_positions(device=like.device, dtype=like.dtype))

    def forward(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        context: Tensor | None = None,
        write_mask: Mask = None,
        reset_mask: Mask = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, MemoryState]:
        """One pass over x `[B, T, d_model]`, and the sums to go on from.

        `write_mask` is bool `[B, T]`, with a context `[B, S]`: at False a token is padding, which no other token sees.
        `reset_mask` `[B, T]` or `cu_seqlens` mark where documents start.
        """
        masks = {"write_mask": write_mask, "reset_mask": reset_mask, "cu_seqlens": cu_seqlens}
        self._check_inputs(x, state, context, masks)
        q, k, v = self.projected(x, context, write_mask)
        # y [B, T, heads, V], concatenated over heads for W_out.
        y, after = self.attend(q, k, v, state, **masks)
        return self.out(F.dropout(y.flatten(-2), self.dropout, self.training)), after

    def projected(
        self, x: Tensor, context: Tensor | None = None, write_mask: Mask = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, T, H, D]` of x, and k `[B, S, G, D]` and v `[B, S, G, V]` of the context, or of x without one."""
        source = context if self.d_context is not None else x
        if source is None:  # nothing new to see
            source = x.new_zeros(x.shape[0], 0, self.key_value.in_features)
        if write_mask is not None:  # a masked token may hold garbage
            source = torch.where(write_mask.unsqueeze(-1), source, 0.0)
        k, v = self.key_value(source).split(self.splits, -1)
        # [B, S, G V] to [B, S, G, V].
        k, v = (item.unflatten(-1, (self.kv_heads, -1)) for item in (k, v))
        return self.query(x).unflatten(-1, (self.heads, -1)), k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: MemoryState | None = None, **masks: Tensor | None
    ) -> tuple[Tensor, MemoryState]:
        """`linear_attention` with the options of this layer."""
        options: dict[str, Any] = {"positions": self.positions, "position_params": self.position_params.tensors}
        options |= {"state": state, "name": self.name, **masks, **self._options()}
        return linear_attention(q, k, v, self.feature_map, self.phi_params, **options)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("causal", "normalizer", "eps", "engine", "autodiff")}

    @property
    def is_memory(self) -> bool:
        """True if answers come from a memory: not from sums over what comes later, nor from features that positions
        have turned or a table weighs. [SCOPE-LIN-D1]"""
        return self.causal and self.positions.sums_past and not self.positions.turns_features

    def asked(
        self, x: Tensor, state: MemoryState | None = None, *, context: Tensor | None = None, **masks: Tensor | None
    ) -> ScanArguments:
        """The same as a scan of a memory per query head with bias dot and lr 1, where the layer `is_memory`.

        The scan knows no `eps`; without a normaliser its decaying memory has decayed once more to a masked token."""
        group, write_mask = self.heads // self.kv_heads, masks.get("write_mask")
        q, k, v = self.projected(x, context, write_mask)
        going_on = state is not None
        reset_mask = document_starts(masks.get("reset_mask"), masks.get("cu_seqlens"), k, going_on=going_on)
        # A memory per query head: the scan knows no shared heads.
        k, v = (item.repeat_interleave(group, 2) for item in (k, v))
        phi, turns = _repeat_heads((self.phi_params, self.position_params.tensors), group, 0)
        weights = Weights(self.feature_map, phi, self.positions, turns)
        place, _ = weights.places(state, write_mask, reset_mask, k)
        # Rotated before phi, as in `linear_attention`; with rotated features the layer is not a memory.
        q, k = weights.turned(q, place), weights.turned(k, place)
        fields = {"feature_map": self.feature_map, "normalizer": self.normalizer}
        config = MEMORIES["after", self.positions.weighs_distance].model_copy(update=fields)
        gates = Gates(retain=self.positions.retain(k, turns))
        before = None if state is None else self.per_query_head(state)
        return ScanArguments(config, q, k, v, gates, phi, None, before, write_mask, reset_mask)

    def per_query_head(self, state: MemoryState) -> MemoryState:
        """A state as that of the scan which `asked` describes."""
        # `seen` has a row per sequence, and no heads.
        memory: MemoryState = _repeat_heads(state._replace(seen=None), self.heads // self.kv_heads, 1)
        return memory._replace(seen=state.seen if self.feature_map.needs_position else None)

    def _check_options(self) -> None:
        expect_count(self.kv_heads, "kv_heads")
        if self.d_context is not None:
            expect_count(self.d_context, "d_context")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}", ("kv_heads",))
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be a number in [0, 1), got {shorten(self.dropout)}")
        check_options(self.feature_map, **self._options())
        order = "the tokens of x and of context have no common order; set causal=False"
        apart = "x and context count their tokens apart, so no distance lies between them; choose one without positions"
        for option, orders, reason in (
            ("causal=True", self.causal, order),
            (f"positions {self.positions.kind!r}", self.positions.needs_order, apart),
            (f"feature_map {self.feature_map.kind!r}", self.feature_map.needs_position, apart),
        ):
            if orders and self.d_context is not None:
                raise ConfigError(f"{option} with d_context={self.d_context}: {reason}")

    def _check_inputs(
        self, x: Tensor, state: MemoryState | None, context: Tensor | None, masks: dict[str, Mask]
    ) -> None:
        write_mask, reset_mask, cu_seqlens = masks.values()
        if self.d_context is None:
            if context is not None:
                built = "the layer was built for self-attention; build it with d_context=..."
                raise ConfigError(f"{self.name}: a context is given, but {built}")
            check_sequence(self.query.weight, x, write_mask=write_mask, reset_mask=reset_mask)
            return
        if reset_mask is not None or cu_seqlens is not None:
            cure = "give every document a row of its own, with write_mask over context"
            raise ConfigError(
                f"{self.name}: documents packed into one row cannot be told apart in cross-attention; {cure}"
            )
        check_sequence(self.query.weight, x)
        if context is not None:
            check_sequence(self.key_value.weight, context, "context", write_mask=write_mask)
        elif state is None or write_mask is not None:
            masked = "" if write_mask is None else "; write_mask is over context, and there is none"
            raise ConfigError(
                f"{self.name}: cross-attention needs a context, or the state of one to read again{masked}"
            )

    def extra_repr(self) -> str:
        """The options."""
        return (
            f"{self.d_model}, heads={self.heads}, kv_heads={self.kv_heads}, d_key={self.d_key}, "
            f"d_value={self.d_value}, feature_map={self.feature_map.kind!r}, causal={self.causal}, "
            f"normalizer={self.normalizer!r}, positions={self.positions.kind!r}"
        )


def _repeat_heads(tree: Any, group: int, axis: int) -> Any:
    """A pytree with every key head repeated for each of its query heads."""
    return pytree.tree_map_only(Tensor, lambda x: x.repeat_interleave(group, axis), tree)


class _PerformerFields(NamedTuple):
    sums: MemoryState
    redraws: Tensor


class PerformerState(State, _PerformerFields):
    """State of a `PerformerAttention` between calls: a pytree of tensors.

    Fields:
        sums: of the attention.
        redraws: number of the draws whose features were summed, `[]` int64.
    """

    __slots__ = ()
    whole = (("redraws", torch.int64),)


@named(to=LinearAttention)
class PerformerAttention(nn.Module):
    """Linear attention with random features: `(x [B, T, d_model], state=None) -> (y, state)`.

        layer = PerformerAttention(256, heads=4, redraw_every=1000)
        optimizer.register_step_post_hook(lambda *_: layer.advance())

    y_t = W_out sum_s w_ts v_s with w_ts = phi(q_t).phi(k_s) / sum_s phi(q_t).phi(k_s), where phi is `phi.Favor`, an
    estimate of softmax attention, or `phi.PerformerReLU`. [TRF-PERF-D1]

    Draws number n are a function of `seed` and n alone, which are in the state dict: equal on all processes that start
    from one state dict (DDP's default), and the same after a resume. They change in `advance` and `redraw`, never in a
    call, so that what runs a call twice, such as a checkpoint, sees one phi. A state made with other draws is refused.
    [TRF-PERF-I1]

    Args:
        d_model, heads: width of x and y, number of query heads.
        kernel: "positive", "hyperbolic" or "trigonometric" features of exp(q.k / sqrt(D)), or
            "relu". Trigonometric ones can be negative, and so can sums of them: that kernel needs normalizer="none".
        num_features: d_phi; None for max(D, int(D log D)) of key heads of width D, even for pairs.
        orthogonal: blocks of orthogonal projections; False for independent ones.
        norms: lengths of the projections, "chi" or "sqrt"; None for the map's own.
        kernel_epsilon: of "relu" alone; None for 1e-3.
        redraw_every: training steps between draws; None for one draw kept.
        generator: source of all draws, the seed among them; None uses torch's default generator.
        **options: every other option of `LinearAttention`.

    Cost: that of `LinearAttention`, and O(D d_phi) per token and head for phi. A call with a state reads one number
    back from the device.

    References: Rethinking Attention with Performers (Choromanski et al., 2021, arXiv 2009.14794)."""

    seed: Tensor
    redraws: Tensor
    steps: Tensor

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kernel: Kernel = "positive",
        num_features: int | None = None,
        orthogonal: bool = True,
        norms: Norms | None = None,
        kernel_epsilon: float | None = None,
        redraw_every: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if redraw_every is not None and (type(redraw_every) is not int or redraw_every < 1):
            raise ConfigError(f"redraw_every must be an integer >= 1 or None, got {shorten(redraw_every)}")
        if kernel == "trigonometric" and options.get("normalizer", "sum") != "none":
            raise ConfigError(
                "kernel='trigonometric' has negative weights, whose sum can vanish or change sign; "
                "use kernel 'positive' or 'hyperbolic', or normalizer='none'",
                path=("normalizer",),
            )
        self.kernel, self.redraw_every = kernel, redraw_every
        if "feature_map" in options:
            cure = "leave it out, or use LinearAttention with a feature_map of your own"
            raise ConfigError(f"feature_map is made of kernel, num_features, orthogonal and norms here; {cure}")
        expect_choice(kernel, "kernel", get_args(Kernel))
        if kernel != "relu" and kernel_epsilon is not None:
            reason = f"kernel_epsilon={kernel_epsilon} is added to ReLU features, but kernel is {kernel!r}"
            raise ConfigError(f"{reason}; leave it out or use kernel='relu'")
        fields: dict[str, Any] = {"num_features": num_features, "norms": norms, "kernel_epsilon": kernel_epsilon}
        fields = {name: value for name, value in fields.items() if value is not None} | {"orthogonal": orthogonal}
        phi = PerformerReLU(**fields) if kernel == "relu" else Favor(variant=kernel, **fields)
        options |= {"feature_map": phi, "generator": generator, "device": device, "dtype": dtype}
        self.attention = LinearAttention(d_model, heads, **options)
        for name in ("seed", "redraws", "steps"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))
        if self.seed.device.type != "meta":
            self._start(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter and the seed anew from `generator` (None: torch's default)."""
        self.attention.reset_parameters(generator)
        self._start(generator)

    def _start(self, generator: torch.Generator | None) -> None:
        source = source_of(generator)
        self.seed.copy_(torch.randint(2**63 - 1, (), generator=source, dtype=torch.int64, device="cpu"))
        self.redraws.zero_()
        self.steps.zero_()
        self._draw()

    def advance(self) -> None:
        """Counts a training step; every `redraw_every`-th one redraws."""
        self._check_training("advance")
        self.steps += 1
        if self.redraw_every is not None and int(self.steps) % self.redraw_every == 0:
            self.redraw()

    def redraw(self) -> None:
        """The next draws of the seed; states made with the present ones are refused from now on."""
        self._check_training("redraw")
        self.redraws += 1
        self._draw()

    def _draw(self) -> None:
        mixed = np.random.SeedSequence([int(self.seed), int(self.redraws)]).generate_state(1)
        source = torch.Generator().manual_seed(int(mixed[0]))
        fresh = self.attention.feature_map.redraw(self.attention.phi_params, source)
        frozen = self.attention.phi_frozen
        for name, value in fresh["frozen"].items():
            # Not in place: a graph that still waits for its backward pass keeps the old draws.
            setattr(frozen, frozen.names[name], value)

    def _check_training(self, what: str) -> None:
        if not self.training:
            raise ConfigError(
                f"{self.attention.name}: {what}() would change the draws of a layer that is "
                "evaluated; call train() first, or leave the draws as they are"
            )

    def forward(
        self, x: Tensor, state: PerformerState | None = None, *, return_attention: bool = False, **inputs: Tensor | None
    ) -> tuple[Tensor, PerformerState] | tuple[Tensor, PerformerState, Tensor]:
        """(y, state), and with `return_attention` the weights w `[B, H, T, S]` as a third.

        The weights are those that y used: w @ v are the heads' answers ahead of dropout and W_out. They take O(T S
        d_phi) time and O(T S) memory per head, and a call without a state. Other arguments (`context`, `write_mask`,
        `reset_mask`, `cu_seqlens`) are those of `LinearAttention`.
        """
        if state is not None:
            self._check_state(state, return_attention)
        y, sums = self.attention(x, None if state is None else state.sums, **inputs)
        after = PerformerState(sums, self.redraws.clone())
        return (y, after, self._weights(x, **inputs)) if return_attention else (y, after)

    def _check_state(self, state: PerformerState, return_attention: bool) -> None:
        name = self.attention.name
        whole = isinstance(state, PerformerState) and isinstance(state.sums, MemoryState)
        if not whole or not isinstance(state.redraws, Tensor):
            raise ShapeError(
                f"{name}: state must be the PerformerState that this layer returned, got {type(state).__name__}"
            )
        if return_attention:
            sums = "a state holds sums over earlier ones; pass the whole sequence without a state"
            raise ConfigError(f"{name}: return_attention needs all tokens in one call, but {sums}")
        if not torch.compiler.is_compiling() and int(state.redraws) != int(self.redraws):
            raise ShapeError(
                f"{name}: the state was summed with draws number {int(state.redraws)}, the layer is at "
                f"{int(self.redraws)}, whose features do not fit the sums; start from state=None after a redraw"
            )

    def _weights(self, x: Tensor, *, context: Tensor | None = None, **masks: Tensor | None) -> Tensor:
        """The answers to values that are each token's own unit vector: its weights."""
        q, k, _ = self.attention.projected(x, context, masks.get("write_mask"))
        identity = torch.eye(k.shape[1], dtype=k.dtype, device=k.device).unsqueeze(1)
        weights, _ = self.attention.attend(q, k, identity.expand(*k.shape[:3], -1), None, **masks)
        return weights.transpose(1, 2)

    def extra_repr(self) -> str:
        """The schedule."""
        return f"kernel={self.kernel!r}, redraw_every={self.redraw_every}"
