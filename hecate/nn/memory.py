"""A memory as a layer."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from hecate.engine import Engine, memory_scan
from hecate.errors import StabilityWarning
from hecate.nn.arguments import check_engine, check_inputs, check_sizes
from hecate.nn.conv import ShortConv
from hecate.nn.gates import GateHeads
from hecate.nn.norm import QKNorm, check_norm, normalise_qk
from hecate.nn.parameters import TensorDict, blank, draw_normal, source_of
from hecate.nn.state import LayerState
from hecate.phi import Params
from hecate.rule import MemoryConfig
from hecate.tape import Autodiff


class Memory(nn.Module):
    """A memory layer: `(x [B, T, d_model], state=None) -> (y [B, T, d_model], state)`. [NN-MEM-D1]

        layer = Memory(256, heads=4, config=MemoryConfig(retention="decay"))
        y, state = layer(x)             # a whole sequence
        y, state = layer(more, state)   # and on from there; any split gives the same result

    x goes through projections to q, k, v, a short causal convolution with SiLU, `qk_norm`, phi
    (inside the scan), the memory, an RMS norm per head, an output gate silu(W x) and the output
    projection. Gates come from x. Parameters live here; the memory's state is explicit, per
    sequence, never a buffer.

    Args:
        d_model: width of x and y.
        heads: number of memories; each has key width `d_key` and value width `d_value`.
        config: the memory's rule and conventions; `algorithm.lr` is the ceiling of the lr gate.
        d_key, d_value: per head; default d_model // heads.
        conv_kernel: taps of the short convolution, 0 for none.
        qk_norm: normalisation of q and k before phi (`config.key_norm` acts after it).
        output_gate: whether the output is multiplied by silu(W x).
        learned_initial: whether the memory's starting weights are trained; else they stay as drawn.
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
        engine: Engine = "auto",
        autodiff: Autodiff = "auto",
        name: str = "memory",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = MemoryConfig.model_validate(MemoryConfig() if config is None else config)
        check_sizes(d_model, heads, d_key, d_value, conv_kernel)
        check_norm(qk_norm)
        check_engine(self.config, engine, autodiff)
        self.d_model, self.heads = d_model, heads
        self.d_key = d_model // heads if d_key is None else d_key
        self.d_value = d_model // heads if d_value is None else d_value
        self.qk_norm: QKNorm = qk_norm
        self.engine, self.autodiff, self.name = engine, autodiff, name
        d_phi = self.config.feature_map.output_dim(self.d_key)
        place: dict[str, Any] = {"device": device, "dtype": dtype}

        keys, values = heads * self.d_key, heads * self.d_value
        self.splits = [keys, keys, values]
        self.qkv = blank(nn.Linear, d_model, sum(self.splits), bias=False, **place)
        self.conv = ShortConv(sum(self.splits), conv_kernel, **place) if conv_kernel else None
        self.gates = GateHeads(d_model, heads, self.config, **place)
        self.output_gate = None
        if output_gate:
            self.output_gate = blank(nn.Linear, d_model, values, bias=False, **place)
        self.norm = nn.Parameter(torch.empty(heads, self.d_value, **place))
        self.out = blank(nn.Linear, values, d_model, bias=False, **place)

        # Shapes first, on no device; the draws follow in reset_parameters.
        shapes: dict[str, Any] = {"dtype": dtype or torch.get_default_dtype(), "device": "meta"}
        params = self.config.feature_map.init(self.d_key, heads=heads, **shapes)
        start = self.config.structure.init(d_phi, self.d_value, heads=heads, **shapes)
        self.phi_learned = TensorDict(params["learned"], learned=True, **place)
        self.phi_frozen = TensorDict(params["frozen"], learned=False, **place)
        self.initial = TensorDict(start, learned=learned_initial, **place)
        if self.qkv.weight.device.type != "meta":
            self._draw(generator)
            self._warn_if_unstable()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        self._draw(generator)
        self._warn_if_unstable()

    def _draw(self, generator: torch.Generator | None) -> None:
        source = source_of(generator)
        like = self.qkv.weight
        place = {"dtype": like.dtype, "device": like.device, "generator": source}
        for linear in (self.qkv, self.output_gate, self.out):
            if linear is not None:
                draw_normal(linear.weight, linear.in_features**-0.5, source)
        if self.conv is not None:
            self.conv.reset_parameters(source)
        self.gates.reset_parameters(source)
        nn.init.ones_(self.norm)
        params = self.config.feature_map.init(self.d_key, heads=self.heads, **place)
        self.phi_learned.copy_(params["learned"])
        self.phi_frozen.copy_(params["frozen"])
        d_phi = self.config.feature_map.output_dim(self.d_key)
        self.initial.copy_(
            self.config.structure.init(d_phi, self.d_value, heads=self.heads, **place)
        )

    @property
    def phi_params(self) -> Params:
        """Parameters of the feature map, as `memory_scan` takes them."""
        return {"learned": self.phi_learned.tensors, "frozen": self.phi_frozen.tensors}

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        *,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """One pass over x `[B, T, d_model]` from a state; masks are bool `[B, T]` as in
        `memory_scan`.

        A masked token's input is zero to the convolution; a reset hides earlier documents from it.
        """
        if not torch.compiler.is_compiling():
            check_inputs(self, x, state, write_mask, reset_mask)
        mixed, conv, segment = self._mix(self.qkv(x), state, write_mask, reset_mask)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)) for part in mixed.split(self.splits, dim=-1)
        )
        y, memory = memory_scan(
            self.config,
            normalise_qk(q, self.qk_norm),
            normalise_qk(k, self.qk_norm),
            v,
            self.gates(x),
            phi_params=self.phi_params,
            state=None if state is None else state.memory,
            initial=self.initial.tensors,
            write_mask=write_mask,
            reset_mask=reset_mask,
            engine=self.engine,
            autodiff=self.autodiff,
            name=self.name,
        )
        y = nn.functional.rms_norm(y, (self.d_value,), eps=1e-6) * self.norm
        y = y.flatten(-2)
        if self.output_gate is not None:
            y = y * nn.functional.silu(self.output_gate(x))
        return self.out(y), LayerState(memory, conv, segment)

    def _mix(
        self,
        x: Tensor,
        state: LayerState | None,
        write_mask: Tensor | None,
        reset_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The short convolution over q, k and v, its new state and the documents of that state."""
        if self.conv is None:
            return x, None, None
        if write_mask is not None:
            x = torch.where(write_mask.unsqueeze(-1), x, 0.0)
        batch, length, _ = x.shape
        reach = self.conv.kernel - 1
        past = None if state is None else state.conv_segment
        if past is None and reset_mask is None:
            return *self.conv(x, None if state is None else state.conv), None
        if past is None:
            past = torch.zeros(batch, reach, dtype=torch.int64, device=x.device)
        if reset_mask is None:
            reset_mask = torch.zeros(batch, length, dtype=torch.bool, device=x.device)
        # Documents are numbered from the last one seen, which is 0 again in the next call's state.
        segment = torch.cat([past, reset_mask.cumsum(1)], 1)
        mixed, conv = self.conv(x, None if state is None else state.conv, segment)
        kept = segment[:, length:]
        return mixed, conv, kept - kept[:, -1:]

    def _warn_if_unstable(self) -> None:
        """Measures lr |phi(k)|^2 on random keys at the lr gate's ceiling."""
        config, curvature = self.config, self.config.bias.curvature
        linear = config.structure.linear and config.retention.linear
        if config.step != "raw" or not linear or curvature == 0:
            return
        if config.key_norm != "none":
            return
        generator = torch.Generator().manual_seed(0)
        # 256 keys, fewer where phi is wide.
        width = config.feature_map.output_dim(self.d_key)
        count = max(8, min(256, 2**22 // (self.heads * width)))
        keys = torch.randn(count, self.heads, self.d_key, generator=generator, device="cpu")
        params: Params = {
            "learned": {n: t.detach().cpu().float() for n, t in self.phi_learned.tensors.items()},
            "frozen": {n: t.detach().cpu().float() for n, t in self.phi_frozen.tensors.items()},
        }
        with torch.no_grad():
            phi = config.feature_map(normalise_qk(keys, self.qk_norm), params)
        largest = float(phi.square().sum(-1).max()) * config.algorithm.lr * (curvature or 1.0)
        if largest >= config.algorithm.stable_step:
            warnings.warn(
                f"memory {self.name!r}: lr * |phi(k)|^2 reaches {largest:.3g} at the ceiling "
                f"lr={config.algorithm.lr:g} of its gate (feature_map {config.feature_map.kind!r}, "
                f"qk_norm {self.qk_norm!r}, key_norm 'none'), and bias {config.bias.kind!r} may "
                f"diverge from {config.algorithm.stable_step:g} on; set key_norm='l2', "
                "step='normalized' or a lower algorithm.lr",
                StabilityWarning,
                stacklevel=3,
            )

    def extra_repr(self) -> str:
        """The rule and sizes."""
        c = self.config
        return (
            f"{self.d_model}, heads={self.heads}, d_key={self.d_key}, d_value={self.d_value}, "
            f"structure={c.structure.kind}, bias={c.bias.kind}, retention={c.retention.kind}, "
            f"algorithm={c.algorithm.kind}, feature_map={c.feature_map.kind}"
        )
