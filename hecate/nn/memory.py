"""A memory as a layer."""

from __future__ import annotations

import math
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._C._nn import silu
from torch.nn.functional import linear
from torch.utils import _pytree as pytree

from hecate.checks import expect_choice, named
from hecate.distributed.context import Context, Shares, context_scan
from hecate.engine import EngineName, memory_scan, short_way
from hecate.errors import ConfigError
from hecate.gating import Masks, Sizes, Written
from hecate.nn.arguments import check_engine, check_options, check_sequence, check_sizes, check_state, check_type
from hecate.nn.blocks import EPS, EXACT, form_of, layer_token, readout, token_kernels, units
from hecate.nn.conv import QK_NORMS, QKNorm, ShortConv, convolved, normalise_qk, of_rule, token_unit
from hecate.nn.gates import Firing, GateHeads, check_firing
from hecate.nn.parameters import blank, redraw, source_of, unheard
from hecate.nn.rule import (
    FeatureMemory,
    FeatureMemoryConfig,
    GatingParameters,
    Projection,
    RuleParameters,
    ScanArguments,
    between,
    by_token,
    check_projection,
    project_queries,
)
from hecate.rule import LAYER, Gates, LayerOptions, MemoryConfig, MemoryState, Named
from hecate.states import State
from hecate.tape import Autodiff, is_traced, steady
from hecate.tape.bridge import below_autograd
from hecate.tape.ops import number

Tree = TypeVar("Tree")
_WEIGHTS = itemgetter("weight", "bias")
FEW = 6  # the most tokens to go one by one: as a sequence, 3 to 6 tokens take the time of 3.6 to 4.6 (measured)
_PARTS = "qkv", "gates", "out", "conv", "output_gate", "gate_down"


class _LayerFields(NamedTuple):
    memory: MemoryState
    conv: Tensor | None
    conv_segment: Tensor | None
    features: MemoryState | None = None
    projection: MemoryState | None = None
    gating: dict[str, Tensor] | None = None


class LayerState(State, _LayerFields):
    """The state of a `Memory` layer: a pytree of tensors. [NN-MEM-I6]

    Fields:
        memory: the memory of every sequence and head, in float32 or better.
        conv: the last inputs of the short convolution, `[B, kernel-1, C]`; None without one.
        conv_segment: the document of each of those, `[B, kernel-1]` int64, 0 for the present one;
            None until a `reset_mask` was given.
        features: the state of the feature memory; None without one.
        projection: what queries are projected onto; None without `query_projection`.
        gating: what the config's gating carries on, by name; None where it carries nothing.
    """

    __slots__ = ()
    whole = (("conv_segment", torch.int64),)
    wide = ("gating",)


def where_rows(rows: Tensor, yes: Tree, no: Tree) -> Tree:
    """A pytree with the tensors of `yes` in some sequences, `rows` `[B]`, of `no` in the others."""

    def chosen(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None or b is None:
            return b
        return torch.where(rows.reshape(-1, *[1] * (b.dim() - 1)), a, b)

    return pytree.tree_map(chosen, yes, no)


def rule_repr(config: MemoryConfig) -> str:
    """The knobs of a rule as a layer prints them."""
    knobs = ("structure", "bias", "retention", "algorithm", "feature_map")
    return ", ".join(f"{knob}={getattr(config, knob).kind}" for knob in knobs)


class MemoryLayer(nn.Module):
    """Base class of layers around memories: an input projection, a short convolution and a feature memory in front of
    the memory; behind it an RMS norm per head, an output gate silu(W x) and an output projection."""

    conv: ShortConv | None
    feature_memory: FeatureMemory | None
    output_gate: nn.Linear | None
    gate_down: nn.Linear | None
    norm: nn.Parameter
    out: nn.Linear
    name: str
    engine: EngineName
    qk_norm: QKNorm
    qk_eps: float = EPS  # beside the length
    output_options = LAYER.output

    def _first_and_rule(self) -> tuple[nn.Linear, Any]:
        """The input projection, and the module with the memory's own parameters: a `RuleParameters` or its like."""
        raise NotImplementedError

    def hold_output(self, d_model: int, heads: int, width: int, output_gate: bool, **place: Any) -> None:
        """Creates the output gate, norm and projection, without values yet, as `output_options` says."""
        options, self.output_gate, self.gate_down = self.output_options, None, None
        if output_gate and options.gate != "none":
            if options.rank is not None:
                self.gate_down = blank(nn.Linear, d_model, options.rank, bias=False, **place)
            d_gate = d_model if options.rank is None else options.rank
            self.output_gate = blank(nn.Linear, d_gate, heads * width, bias=options.bias, **place)
        self.norm = nn.Parameter(torch.empty(*([] if options.norm.weight == "shared" else [heads]), width, **place))
        self.out = blank(nn.Linear, heads * width, d_model, bias=False, **place)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator), and warns of steps that may
        diverge."""
        source, (first, rule) = source_of(generator), self._first_and_rule()
        redraw(source, first, self.gate_down, self.output_gate, self.out, self.conv)
        nn.init.ones_(self.norm)
        rule.draw_rule(source, first.weight)
        if self.feature_memory is not None:
            self.feature_memory.draw_rule(source, first.weight)
        rule.warn_if_unstable(self.name, self.qk_norm)
        if self.feature_memory is not None:
            self.feature_memory.warn_if_unstable(f"{self.name} (features)", self.qk_norm)

    def with_features(
        self, x: Tensor, q: Tensor, k: Tensor, state: MemoryState | None, **how: Any
    ) -> tuple[Tensor, Tensor, MemoryState | None]:
        """q and k with the feature memory applied and normalised again, and its new state; unchanged without one."""
        if self.feature_memory is None:
            return q, k, None
        q, k, state = self.feature_memory(x, q, k, state, engine=self.engine, name=f"{self.name} (features)", **how)
        return normalise_qk(q, self.qk_norm, self.qk_eps), normalise_qk(k, self.qk_norm, self.qk_eps), state

    def read_out(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's output from the answers y `[B, T, H, V]` of its memory."""
        gate, inputs = self.output_gate, x if self.gate_down is None else self.gate_down(x)
        return self.out(self.gated(y, None if gate is None else gate(inputs)))

    def gated(self, y: Tensor, gate: Tensor | None, *, plain: bool = False) -> Tensor:
        """The answers, normalised and gated; `plain`, for a single token, writes out torch's RMS norm on a CPU."""
        options, outer = self.output_options, None
        weight: Tensor = self.norm
        if options is not LAYER.output:
            if options.norm.weight == "shared":
                weight = weight.expand(y.shape[-2:])
            if gate is not None and options.norm.place == "after_gate":
                factor = torch.sigmoid(gate) if options.gate == "sigmoid" else silu(gate)
                y, gate = y * factor.view(y.shape), None
            elif options.gate == "sigmoid":
                gate, outer = None, gate
            if options.norm.over == "all":  # [B, T, H, V] as one row of H V
                y, weight = y.flatten(-2).unsqueeze(-2), weight.reshape(1, -1)
        if not plain:
            y = readout(y, weight, gate, eps=options.norm.eps)
        else:
            # By operations that this token has just used: to fetch other code into the cache costs more than the calls.
            size = (y * y).sum(-1, keepdim=True).div_(number(y.shape[-1], y.dtype))
            y = (y * size.add_(number(options.norm.eps, y.dtype)).rsqrt_() * weight).flatten(-2)
            y = y if gate is None else y * silu(gate)
        return y if outer is None else y * torch.sigmoid(outer)


@named(*MemoryConfig.model_fields)
class Memory(RuleParameters, MemoryLayer):
    """A memory layer: `(x [B, T, d_model], state=None) -> (y [B, T, d_model], state)`. [NN-MEM-D1]

        layer = Memory(256, heads=4, config=MemoryConfig(retention="decay"))
        y, state = layer(x)             # a whole sequence
        y, state = layer(more, state)   # and on from there; any split gives the same result

    x goes through projections to q, k, v, a short causal convolution with SiLU (`config.layer_activation`), `qk_norm`,
    phi (inside the scan), the memory, an RMS norm per head, an output gate silu(W x) and the output projection. Gates
    come from x. Parameters live here; the memory's state is explicit, per sequence, never a buffer. Other norms, gates
    and convolutions, and keys that heads share, are `config.layer_options`.

    Args:
        d_model: width of x and y.
        heads: number of memories; each has key width `d_key` and value width `d_value`.
        config: the memory's rule and conventions, a mapping of them or a rule's name; `algorithm.lr` is the ceiling
            of the lr gate.
        d_key, d_value: per head; default d_model // heads.
        conv_kernel: taps of the short convolution, 0 for none; None takes `config.layer_conv_kernel`, which a named
            rule may set, else 4. [NN-MEM-D3]
        qk_norm: normalisation of q and k before phi (`config.key_norm` acts after it); None takes
            `config.layer_qk_norm`, which a named rule may set, else "l2".
        output_gate: whether the output is multiplied by silu(W x).
        learned_initial: whether the memory's starting weights are trained; else they stay as drawn.
        feature_memory: a second memory, whose answers are added to q and k before phi, or take
            their place (and are normalised again); None for none. See `FeatureMemory`.
        firing: "learned" lets a gate decide which tokens are written. See `GateHeads`.
        query_projection: what phi(q) is projected onto before it is read with: "none", or by "sum"
            or "orthogonal" the keys of the present chunk. See `project_queries`.
        engine, autodiff: passed to `memory_scan`; they change speed and memory only.
        name: what errors call this memory.
        generator: source of all draws; None uses torch's default generator, as torch modules do.

    Raises:
        ConfigError: sizes that do not fit, or an inner step that provably diverges.
    Warns:
        StabilityWarning: if lr times |phi(k)|^2, measured on random keys, allows divergence.
    """

    context: Context | None = None  # the ranks that hold the other pieces of its sequences

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: MemoryConfig | Named | None = None,
        *,
        d_key: int | None = None,
        d_value: int | None = None,
        conv_kernel: int | None = None,
        qk_norm: QKNorm | None = None,
        output_gate: bool = True,
        learned_initial: bool = True,
        feature_memory: MemoryConfig | Named | None = None,
        firing: Firing = "always",
        query_projection: Projection = "none",
        engine: EngineName = "auto",
        autodiff: Autodiff = "auto",
        name: str = "memory",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = MemoryConfig.model_validate(MemoryConfig() if config is None else config)
        conv_kernel = of_rule(config, "conv_kernel") if conv_kernel is None else conv_kernel
        qk_norm = of_rule(config, "qk_norm") if qk_norm is None else qk_norm
        d_key, d_value = check_sizes(d_model, heads, d_key, d_value, conv_kernel)
        expect_choice(qk_norm, "qk_norm", QK_NORMS)
        check_engine(config, engine, autodiff)
        check_firing(config, firing)
        check_projection(config, query_projection)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        how: dict[str, Any] = {"learned_initial": learned_initial, **place}
        inner, width = None, d_key
        if feature_memory is not None:
            inner = FeatureMemoryConfig.model_validate(feature_memory)
            check_engine(inner, engine, autodiff)
            width = inner.width(d_key)
        super().__init__(Sizes(d_model, heads, width, d_value), config, firing=firing == "learned", **how)
        self.d_model, self.d_key, self.qk_norm = d_model, d_key, qk_norm
        self.query_projection, self.name = query_projection, name
        options = check_options(config, heads, conv_kernel, qk_norm, output_gate)
        self.engine, self.autodiff = engine, autodiff
        ready = {"feature_map": "identity", "key_norm": "none", "query_scale": "none"}
        self.projected = config if query_projection == "none" else config.model_copy(update=ready)
        self.feature_memory = None if inner is None else FeatureMemory(d_model, heads, inner, d_key=d_key, **how)
        self.held = {"features": inner is not None, "projection": query_projection != "none"}
        self.pairs = config.gating.pairs(config.writes)
        if config.writes > 1 and any(self.held.values()):
            both = "feature_memory" if inner is not None else f"query_projection={query_projection!r}"
            raise ConfigError(f"{both} looks at one key per token, and writes={config.writes} makes several")
        self.bare = not any(self.held.values()) and config.writes == 1 and config.gating.plain
        self._hold_front(options, conv_kernel, **place)
        self.hold_output(d_model, heads, d_value, output_gate, **place)
        if self.qkv.weight.device.type != "meta":
            MemoryLayer.reset_parameters(self, generator)  # not a subclass's, which has parameters of its own to come

    def _hold_front(self, options: LayerOptions, conv_kernel: int, **place: Any) -> None:
        """Creates the projection and convolution ahead of the memory, and stores the options of what is behind it."""
        self.key_heads, self.output_options = options.key_heads or self.heads, options.output
        self.conv_on_qk = options.conv.on == "qk"  # values skip the convolution
        if options.qk_eps is not None:
            self.qk_eps = math.sqrt(options.qk_eps)
        keys, values = self.key_heads * self.d_key, self.heads * self.d_value
        self.splits = [keys, self.pairs * keys, self.pairs * values]
        self.qkv = blank(nn.Linear, self.d_model, sum(self.splits), bias=False, **place)
        active = self.config.layer_activation or ("silu" if conv_kernel else "none")
        self.activation = not conv_kernel and active == "silu"  # of the projections themselves
        conv: dict[str, Any] = {"activation": active == "silu", "bias": options.conv.bias, **place}
        mixed = sum(self.splits[:2] if self.conv_on_qk else self.splits)
        self.conv = ShortConv(mixed, conv_kernel, **conv) if conv_kernel else None

    def _first_and_rule(self) -> tuple[nn.Linear, Any]:
        return self.qkv, self

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        *,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        restart_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """One pass over x `[B, T, d_model]` from a state; masks are bool `[B, T]` as in `memory_scan`.

        In the convolution a masked token counts as zero for the tokens after it, but sees its own input; after a reset
        no token sees earlier documents. `restart_mask` resets the memory and leaves the convolution alone."""
        plain = self.bare and self.context is None
        if state is not None and write_mask is reset_mask is restart_mask is None and plain:
            if (output := self._one_token(x, state) or self._few_tokens(x, state)) is not None:
                return output
        masks = {"write_mask": write_mask, "reset_mask": reset_mask, "restart_mask": restart_mask}
        check_sequence(self.qkv.weight, x, **masks)
        if not self.bare and x.shape[1] > 1 and steady():
            return by_token(self, x, state, masks)
        if state is not None and check_type(state, LayerState):
            shapes = {} if self.gating is None else self.gating.gating.state_shapes(self.gating.sizes)
            wanted = {name: (len(x), *shape) for name, shape in shapes.items()}
            before = state.gating if isinstance(state.gating, dict) else {}
            tensors = {f"gating[{n!r}]": (before.get(n), wanted.get(n)) for n in {**wanted, **before}}
            check_state(state, x, tensors, self.conv, **self.held)
        asked, (conv, segment, after), others, skip = self.asked(x, state, **masks)
        y, memory = self.scan(asked, x)
        y = y if skip is None else y + skip
        if self.context is not None:
            conv, segment, after = self.context.final((conv, segment, after))
        return self.read_out(x, y), LayerState(memory, conv, segment, *others, after)

    @property
    def shares(self) -> Shares:
        """Mode of context parallelism: the ranks take turns where queries are projected, which goes token by token."""
        return "itself" if self.query_projection == "none" else "turns"

    def scan(self, asked: ScanArguments, x: Tensor) -> tuple[Tensor, MemoryState]:
        """The answers of the memory and its state after the last token."""
        return asked.scan(self.context, engine=self.engine, autodiff=self.autodiff, name=self.name)

    def seen(self, **arguments: Any) -> tuple[ScanArguments, str | None]:
        """The arguments of the memory's scan in a call of `forward`, for inspection; and the reason why the layer does
        not use its answers as they are, None if it does."""
        return self.asked(**arguments)[0], None

    def asked(
        self, x: Tensor, state: LayerState | None = None, *, restart_mask: Tensor | None = None, **masks: Tensor | None
    ) -> tuple[ScanArguments, tuple[Any, Any, Any], tuple[Any, Any], Tensor | None]:
        """The arguments of the memory's scan, not yet checked; of the layer's new state the fields of the convolution
        and of the gating, and those of the feature memory and the projection; and the term that is to be added to the
        memory's answers, None if there is none."""
        write_mask, reset_mask = masks.get("write_mask"), masks.get("reset_mask")
        # [B, T, d_model] to queries, keys and values of all heads side by side.
        mixed, parts = self.qkv(x), self.splits
        values: list[Tensor] = []  # where they skip the convolution
        if self.conv_on_qk:
            parts = self.splits[:2]
            mixed, *values = mixed.split([sum(parts), self.splits[2]], -1)
        mixed, conv, segment = convolved(self.conv, mixed, state, write_mask, reset_mask, self.context)
        mixed = silu(mixed) if self.activation else mixed
        q, k, v = list(mixed.split(parts, dim=-1)) + values
        # [B, T, n H D] to [B, T, n, H, D] where a token writes n pairs.
        per_head = (self.pairs, self.heads, -1) if self.pairs > 1 else (self.heads, -1)
        q, k = q.unflatten(-1, (self.key_heads, -1)), k.unflatten(-1, (*per_head[:-2], self.key_heads, -1))
        if self.qk_norm != "none":
            q, k = units(q, k, norm=self.qk_norm, eps=self.qk_eps)
        if (shared := self.heads // self.key_heads) > 1:  # heads that share a query and a key
            q, k = q.repeat_interleave(shared, -2), k.repeat_interleave(shared, -2)
        memory, _, _, features, projection, before = (None,) * 6 if state is None else state
        if self.feature_memory is not None:
            across: Any = {} if self.context is None else {"scan": partial(context_scan, context=self.context)}
            q, k, features = self.with_features(x, q, k, features, autodiff=self.autodiff, **masks, **across)
        v, gates, skip, after = v.unflatten(-1, per_head), self.gates(x), None, None
        if (norm := self.config.layer_v_norm) != "none":
            v = normalise_qk(v, norm)
        # Only now, as a restart of the memory leaves the convolution alone.
        if restart_mask is not None:
            reset_mask = restart_mask if reset_mask is None else restart_mask | reset_mask
        if self.gating is not None:
            written, after = self._apply_gating(self.gating, (x, q, k, v, gates), before, Masks(write_mask, reset_mask))
            (q, k, v, _, skip), gates = written, Gates(**written.gates)
        arguments: Any = (self.phi_params, self.initial.tensors, memory, write_mask, reset_mask)
        asked = ScanArguments(self.config, q, k, v, gates, *arguments)
        if self.query_projection != "none":
            q, k, projection = project_queries(self.query_projection, asked, projection)
            asked = asked._replace(config=self.projected, q=q, k=k, phi_params=None)
        return asked, (conv, segment, after or None), (features, projection), skip

    def _apply_gating(
        self, gating: GatingParameters, inputs: tuple[Any, ...], before: dict[str, Tensor] | None, masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        """The gating applied to x, q, k, v and gates: the memory's inputs, and the gating's new state."""
        if self.context is None or not gating.gating.state_shapes(gating.sizes):
            return gating(*inputs, before, masks)
        few: Any = between((inputs, masks.write, masks.reset), 0, 0)
        written, after, anchor = self.context.relay(
            lambda state: gating(*inputs, state, masks), before, lambda: gating(*few[0], None, Masks(*few[1:]))[1]
        )
        return written._replace(v=written.v + anchor), after

    def _one_token(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState] | None:
        """`forward` for x `[B, 1, d_model]` in fewer calls, equal to it to the bit where no kernel runs. None where
        `forward` has to take the token itself, or to raise the error. [NN-MEM-I13]"""
        if torch.is_grad_enabled() or is_traced() or type(x) is not Tensor or type(state) is not LayerState:
            return None
        parts: Any = self._modules  # torch looks attributes up there, by a call each
        qkv, gates, out, conv, gate, down = map(parts.get, _PARTS)
        maps = (qkv, nn.Linear), (out, nn.Linear), (gate, nn.Linear), (down, nn.Linear)
        if self.engine != "auto" or not unheard(*maps, (gates, GateHeads), (conv, ShortConv)):
            return None
        tensors, past, shape, device, heads = qkv._parameters, state.conv, x.shape, x.device, self.key_heads
        batch, (rows, columns) = shape[:1], (weight := tensors["weight"]).shape
        fits = shape[1:] == (1, columns) and x.dtype == weight.dtype and device == weight.device
        fits = fits and shape[0] > 0 and state.memory is not None
        width, apart = self.splits[0] + self.splits[1], self.conv_on_qk
        expected = None if conv is None else (*batch, conv.kernel - 1, width if apart else rows)
        fits = fits and state.conv_segment is None is state.features is state.projection
        fits = fits and state.gating is None and (past is None or past.device == device)
        if not fits or (None if past is None else past.shape) != expected:
            return None
        # Shapes, dtypes and devices are those that the layer was made with: no checks are needed from here on.
        near, casts = device.type == "cpu", torch.is_autocast_enabled(device.type)
        with below_autograd():
            mixed = linear(x, weight, tensors["bias"])
            inputs = x if down is None else linear(x, *_WEIGHTS(down._parameters))
            opened = None if gate is None else linear(inputs, *_WEIGHTS(gate._parameters))
        form, widths = form_of(self, conv), (self.d_key, self.d_value, columns)
        if form and past is not None and (kernels := token_kernels(mixed, *widths)) is not None:
            done = layer_token(kernels, self, form, gates, conv, x, mixed, opened, past, state.memory)
            if done is not None:
                return linear(done[0], *_WEIGHTS(out._parameters)), LayerState(done[1], done[2], None)
        with below_autograd():
            if conv is not None and not apart:
                mixed, past = conv.token(mixed, past, torch.unsafe_split_with_sizes)
            elif self.activation:
                mixed = silu(mixed)
            qk, v = torch.unsafe_split_with_sizes(mixed, (width, rows - width), -1)
            if apart:
                qk, past = conv.token(qk, past, torch.unsafe_split_with_sizes)
            qk, v = (
                qk.view(*batch, 1, 2, heads, -1),
                normalise_qk(v.view(*batch, 1, self.heads, -1), self.config.layer_v_norm),
            )
            qk = qk if self.qk_norm == "none" else token_unit(qk, self.qk_norm, self.qk_eps)
            q, k = (qk if heads == self.heads else qk.repeat_interleave(self.heads // heads, 3)).unbind(2)
        values = gates.forward(x)
        params = self.phi_params if self.has_params else None
        start = self.initial.tensors if self.config.retention.anchored else None
        outputs = short_way(self.config, q, k, v, values, state.memory, params, start, self.name, squashed=True)
        if outputs is None:
            how: Any = {"phi_params": params, "state": state.memory, "initial": start, "name": self.name}
            outputs = memory_scan(self.config, q, k, v, values, **how)
        with below_autograd():
            y = self.gated(outputs[0], opened, plain=near and mixed.dtype in EXACT and not casts)
            y = linear(y, *_WEIGHTS(out._parameters))
        return y, LayerState(outputs[1], past, None)

    def _few_tokens(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState] | None:
        """`forward` for x `[B, T, d_model]` of a few tokens, one at a time, if a kernel can run them; else None."""
        if torch.is_grad_enabled() or is_traced() or form_of(self, self.conv) is None:
            return None  # first: a traced length is no number to be compared
        if x.dim() != 3 or not 1 < x.shape[1] <= FEW:
            return None
        if token_kernels(x, self.d_key, self.d_value, x.shape[-1]) is None:
            return None
        # Each token goes on from the state that the one before it has left, as within a sequence.
        outputs = []
        for token in x.split(1, 1):
            if (step := self._one_token(token, state)) is None:
                return None
            y, state = step
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def extra_repr(self) -> str:
        """The rule and sizes."""
        sizes = f"{self.d_model}, heads={self.heads}, d_key={self.d_key}, d_value={self.d_value}"
        return f"{sizes}, {rule_repr(self.config)}"
