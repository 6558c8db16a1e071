"""A memory as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hecate.engine import EngineName
from hecate.nn.arguments import Firing, check_engine, check_firing, check_inputs, check_sizes
from hecate.nn.asked import Asked
from hecate.nn.conv import ShortConv, mix
from hecate.nn.feature_memory import FeatureMemory, FeatureMemoryConfig
from hecate.nn.norm import QKNorm, check_norm, normalise_qk
from hecate.nn.parameters import blank, draw_normal, source_of
from hecate.nn.projection import Projection, check_projection, project_queries, projected_config
from hecate.nn.rule import RuleParameters
from hecate.nn.state import LayerState
from hecate.rule import MemoryConfig, MemoryState
from hecate.tape import Autodiff


class Memory(RuleParameters):
    """A memory layer: `(x [B, T, d_model], state=None) -> (y [B, T, d_model], state)`. [NN-MEM-D1]

        layer = Memory(256, heads=4, config=MemoryConfig(retention="decay"))
        y, state = layer(x)             # a whole sequence
        y, state = layer(more, state)   # and on from there; any split gives the same result

    x goes through projections to q, k, v, a short causal convolution with SiLU, `qk_norm`, phi (inside the scan), the
    memory, an RMS norm per head, an output gate silu(W x) and the output projection. Gates come from x. Parameters live
    here; the memory's state is explicit, per sequence, never a buffer.

    Args:
        d_model: width of x and y.
        heads: number of memories; each has key width `d_key` and value width `d_value`.
        config: the memory's rule and conventions; `algorithm.lr` is the ceiling of the lr gate.
        d_key, d_value: per head; default d_model // heads.
        conv_kernel: taps of the short convolution, 0 for none.
        qk_norm: normalisation of q and k before phi (`config.key_norm` acts after it).
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

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: MemoryConfig | None = None,
        *,
        d_key: int | None = None,
        d_value: int | None = None,
        conv_kernel: int = 4,
        qk_norm: QKNorm = "l2",
        output_gate: bool = True,
        learned_initial: bool = True,
        feature_memory: MemoryConfig | None = None,
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
        check_sizes(d_model, heads, d_key, d_value, conv_kernel)
        check_norm(qk_norm)
        check_engine(config, engine, autodiff)
        check_firing(config, firing)
        check_projection(config, query_projection)
        d_key = d_model // heads if d_key is None else d_key
        d_value = d_model // heads if d_value is None else d_value
        start: dict[str, Any] = {"learned_initial": learned_initial}
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        inner, seen = None, d_key
        if feature_memory is not None:
            inner = FeatureMemoryConfig.model_validate(feature_memory)
            check_engine(inner, engine, autodiff)
            seen = inner.width(d_key)
        own: dict[str, Any] = {"d_key": seen, "d_value": d_value, "firing": firing == "learned"}
        super().__init__(d_model, heads, config, **own, **start, **place)
        self.d_model, self.d_key, self.qk_norm = d_model, d_key, qk_norm
        self.query_projection, self.name = query_projection, name
        self.engine, self.autodiff = engine, autodiff
        self.projected = config if query_projection == "none" else projected_config(config)
        self.feature_memory = None
        if inner is not None:
            self.feature_memory = FeatureMemory(d_model, heads, inner, d_key=d_key, **start, **place)
        keys, values = heads * d_key, heads * d_value
        self.splits = [keys, keys, values]
        self.qkv = blank(nn.Linear, d_model, sum(self.splits), bias=False, **place)
        self.conv = ShortConv(sum(self.splits), conv_kernel, **place) if conv_kernel else None
        self.output_gate = None
        if output_gate:
            self.output_gate = blank(nn.Linear, d_model, values, bias=False, **place)
        self.norm = nn.Parameter(torch.empty(heads, self.d_value, **place))
        self.out = blank(nn.Linear, values, d_model, bias=False, **place)
        if self.qkv.weight.device.type != "meta":
            self._draw(generator)
            self._warn()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        self._draw(generator)
        self._warn()

    def _draw(self, generator: torch.Generator | None) -> None:
        source = source_of(generator)
        for linear in (self.qkv, self.output_gate, self.out):
            if linear is not None:
                draw_normal(linear.weight, linear.in_features**-0.5, source)
        if self.conv is not None:
            self.conv.reset_parameters(source)
        nn.init.ones_(self.norm)
        self.draw_rule(source, self.qkv.weight)
        if self.feature_memory is not None:
            self.feature_memory.draw_rule(source, self.qkv.weight)

    def _warn(self) -> None:
        self.warn_if_unstable(self.name, self.qk_norm)
        if self.feature_memory is not None:
            self.feature_memory.warn_if_unstable(f"{self.name} (features)", self.qk_norm)

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

        To the convolution a masked token is zero for the tokens after it, while it reads with its own input; a reset
        hides earlier documents from it. `restart_mask` resets the memory alone."""
        masks = {"write_mask": write_mask, "reset_mask": reset_mask}
        if not torch.compiler.is_compiling():
            check_inputs(self, x, state, **masks, restart_mask=restart_mask)
        asked, carried = self.asked(x, state, **masks, restart_mask=restart_mask)
        y, memory = asked.scan(engine=self.engine, autodiff=self.autodiff, name=self.name)
        y = nn.functional.rms_norm(y, (self.d_value,), eps=1e-6) * self.norm
        y = y.flatten(-2)
        if self.output_gate is not None:
            y = y * nn.functional.silu(self.output_gate(x))
        return self.out(y), LayerState(memory, *carried)

    def asked(
        self,
        x: Tensor,
        state: LayerState | None = None,
        *,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        restart_mask: Tensor | None = None,
    ) -> tuple[Asked, tuple[Any, ...]]:
        """What `forward` asks of the memory, unchecked, and what else the layer carries on."""
        how: dict[str, Any] = {"write_mask": write_mask, "reset_mask": reset_mask}
        mixed, conv, segment = mix(
            self.conv,
            self.qkv(x),
            None if state is None else state.conv,
            None if state is None else state.conv_segment,
            **how,
        )
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in mixed.split(self.splits, dim=-1))
        q, k = (normalise_qk(part, self.qk_norm) for part in (q, k))
        features = None
        if self.feature_memory is not None:
            features = None if state is None else state.features
            own = {"engine": self.engine, "autodiff": self.autodiff}
            q, k, features = self.feature_memory(x, q, k, features, **how, **own, name=f"{self.name} (features)")
            q, k = (normalise_qk(part, self.qk_norm) for part in (q, k))
        if restart_mask is not None:
            how["reset_mask"] = restart_mask if reset_mask is None else restart_mask | reset_mask
        memory = None if state is None else state.memory
        held, asked = None, Asked(self.config, q, k, v, self.gates(x), self.phi_params)
        if self.query_projection != "none":
            held = None if state is None else state.projection
            asked, held = self._projected(asked, memory, held, how)
        asked = asked._replace(initial=self.initial.tensors, state=memory, **how)
        return asked, (conv, segment, features, held)

    def _projected(
        self, asked: Asked, memory: MemoryState | None, held: MemoryState | None, masks: dict[str, Tensor | None]
    ) -> tuple[Asked, MemoryState]:
        """The same asked with projected queries, features in place of q and k, and what the projection holds on to."""
        position = torch.zeros(len(asked.q), dtype=torch.int64, device=asked.q.device)
        if memory is not None:
            position = memory.position[:, 0]
        given = (self.config, asked.q, asked.k, self.phi_params, held, position)
        both = (masks["write_mask"], masks["reset_mask"])
        q, k, held = project_queries(self.query_projection, *given, *both)
        return asked._replace(config=self.projected, q=q, k=k, phi_params=None), held

    def extra_repr(self) -> str:
        """The rule and sizes."""
        c = self.config
        return (
            f"{self.d_model}, heads={self.heads}, d_key={self.d_key}, d_value={self.d_value}, "
            f"structure={c.structure.kind}, bias={c.bias.kind}, retention={c.retention.kind}, "
            f"algorithm={c.algorithm.kind}, feature_map={c.feature_map.kind}"
        )
