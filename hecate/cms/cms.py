"""A continuum of memories: levels that commit at different rates, joined into one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hecate.cms.arguments import check_state
from hecate.cms.config import CMSConfig, LevelConfig
from hecate.cms.nested import check_shapes, in_windows, restarted
from hecate.cms.state import CMSState
from hecate.engine import Engine
from hecate.engine.positions import written_before
from hecate.errors import ConfigError, Problem
from hecate.nn import LayerState, Memory
from hecate.nn.arguments import check_inputs
from hecate.tape import Autodiff

Levels = tuple[LayerState, ...]


class CMS(nn.Module):
    """A layer of levels: `(x [B, T, d_model], state=None) -> (y [B, T, d_model], state)`.
    [CMS-LAYER-D1]

        config = CMSConfig(levels=[{"name": "fast"}, {"name": "slow", "period": 64}])
        layer = CMS(256, heads=4, config=config)
        y, state = layer(x)
        y, state = layer(more, state)   # any split gives the same result

    Every level is an `nn.Memory`, is read at every token and commits every `period` tokens; tokens
    are counted, not calls. With L_l the levels, x_0 = x and n_l RMS norms with weights:

        sequential   x_(l+1) = x_l + L_l(n_l(x_l)),  y = x_K - x_0 = the sum of all outputs
        nested       the same, and after a commit of level l + 1 level l restarts from its memory
        chained      x_(l+1) = L_l(x_l),  y = x_K
        independent  y = sum of w_l L_l(x)

    The block around the layer adds x, as it does for any other layer. Starting weights are learned.

    Args:
        d_model: width of x and y.
        heads: memories of every level whose config names no number.
        config: levels, composition, aggregation.
        engine, autodiff: passed to `memory_scan`; they change speed and memory only.
        name: what errors call the layer; a level is `name/level`.
        generator: source of all draws; None uses torch's default generator.

    Raises:
        ConfigError: sizes that do not fit, with the path of the level.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq 70 to 74.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: CMSConfig,
        *,
        engine: Engine = "auto",
        autodiff: Autodiff = "auto",
        name: str = "cms",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = CMSConfig.model_validate(config)
        self.d_model, self.heads, self.config, self.name = d_model, heads, config, name
        self.engine, self.autodiff = engine, autodiff
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        how: dict[str, Any] = {"engine": engine, "autodiff": autodiff, "generator": generator}
        self.levels = nn.ModuleList()
        for index, level in enumerate(config.levels):
            try:
                self.levels.append(
                    _memory(d_model, heads, level, f"{name}/{level.name}", how, place)
                )
            except ConfigError as error:
                path = ("levels", index)
                problems = (Problem(path + item.path, item.message) for item in error.problems)
                raise ConfigError(problems) from None
        residual = config.composition in ("sequential", "nested")
        self.norms = nn.ModuleList(
            nn.RMSNorm(d_model, eps=1e-6, **place) for _ in config.levels if residual
        )
        if config.composition == "nested":
            check_shapes(config, self.memories)
        self.weight = self.bias = None
        if config.aggregation == "learned":
            self.weight = nn.Parameter(torch.empty(len(config.levels), d_model, **place))
        elif config.aggregation == "gated":
            self.weight = nn.Parameter(torch.empty(len(config.levels), d_model, **place))
            self.bias = nn.Parameter(torch.empty(len(config.levels), **place))
        if self.memories[0].qkv.weight.device.type != "meta":
            self._start()

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The levels, from fast to slow."""
        return tuple(self.levels)  # type: ignore[arg-type]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        for memory in self.memories:
            memory.reset_parameters(generator)
        self._start()

    def _start(self) -> None:
        """Norms at 1, learned weights at 1/sqrt(levels), gates at 1/2; draws nothing."""
        for norm in self.norms:
            nn.init.ones_(norm.weight)  # type: ignore[arg-type]
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.weight is not None:
            start = len(self.levels) ** -0.5 if self.bias is None else 0.0
            nn.init.constant_(self.weight, start)

    def forward(
        self,
        x: Tensor,
        state: CMSState | None = None,
        *,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
    ) -> tuple[Tensor, CMSState]:
        """One pass over x `[B, T, d_model]` from a state; masks are bool `[B, T]`, as in `Memory`.

        A masked token counts for no level; a reset restarts all of them, counts included.
        """
        if not torch.compiler.is_compiling():
            check_inputs(self.memories[0], x, None, write_mask, reset_mask)
            check_state(len(self.levels), x, state)
        written = x.new_zeros(x.shape[0], dtype=torch.int64) if state is None else state.written
        levels = None if state is None else state.levels
        before = written_before(written, write_mask, reset_mask, x.shape[1])
        after = before + (1 if write_mask is None else write_mask)
        masks = {"write_mask": write_mask, "reset_mask": reset_mask}
        if self.config.composition == "nested":
            y, levels = self._nested(x, levels, before != after, after, masks)
        else:
            y, levels = self._flow(x, levels, masks)
        return y, CMSState(levels, after[:, -1] if x.shape[1] else written)

    def _nested(
        self,
        x: Tensor,
        levels: Levels | None,
        write: Tensor,
        count: Tensor,
        masks: dict[str, Tensor | None],
    ) -> tuple[Tensor, Levels]:
        """The flow in windows that end where a level commits that another restarts from."""
        outputs: list[Tensor] = []
        periods = [level.period for level in self.config.levels]
        for window, written, counted in in_windows(write, count, periods[1:]):
            own = {name: mask if mask is None else mask[:, window] for name, mask in masks.items()}
            y, levels = self._flow(x[:, window], levels, own)
            levels = restarted(periods, levels, written, counted)
            outputs.append(y)
        return torch.cat(outputs, 1), levels  # type: ignore[return-value]

    def _flow(
        self, x: Tensor, levels: Levels | None, masks: dict[str, Tensor | None]
    ) -> tuple[Tensor, Levels]:
        """Every level once over x: the layer's output and the levels' states."""
        residual = len(self.norms) > 0
        states: list[LayerState] = []
        outputs: list[Tensor] = []
        seen = x
        for index, memory in enumerate(self.memories):
            given = self.norms[index](seen) if residual else seen
            out, after = memory(given, None if levels is None else levels[index], **masks)
            if residual:
                seen = seen + out
            elif self.config.composition == "chained":
                seen = out
            states.append(after)
            outputs.append(out)
        if self.config.composition == "chained":
            return seen, tuple(states)
        return self._joined(x, outputs), tuple(states)

    def _joined(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        """The weighted sum of the levels' outputs."""
        weights: Any = [None] * len(outputs)
        if self.weight is not None and self.bias is not None:
            weights = torch.sigmoid(nn.functional.linear(x, self.weight, self.bias)).split(1, -1)
        elif self.weight is not None:
            weights = self.weight
        elif self.config.aggregation == "rsqrt":
            weights = [len(outputs) ** -0.5] * len(outputs)
        total: Tensor | None = None
        for out, weight in zip(outputs, weights, strict=True):
            part = out if weight is None else out * weight
            total = part if total is None else total + part
        return total  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """How the levels are joined, and their periods."""
        periods = ", ".join(f"{level.name}={level.period}" for level in self.config.levels)
        return f"{self.d_model}, composition={self.config.composition}, periods: {periods}"


def _memory(
    d_model: int,
    heads: int,
    level: LevelConfig,
    name: str,
    how: dict[str, Any],
    place: dict[str, Any],
) -> Memory:
    return Memory(
        d_model,
        heads if level.heads is None else level.heads,
        level.rule,
        d_key=level.d_key,
        d_value=level.d_value,
        conv_kernel=level.conv_kernel,
        qk_norm=level.qk_norm,
        output_gate=level.output_gate,
        learned_initial=level.learned_initial,
        feature_memory=level.feature_memory,
        firing=level.firing,
        name=name,
        **how,
        **place,
    )
