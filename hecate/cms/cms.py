"""A continuum of memories: levels that commit at different rates, joined into one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hecate.cms.arguments import check_state
from hecate.cms.config import CMSConfig, LevelConfig
from hecate.cms.flow import Levels, Masks, flow, nested_flow
from hecate.cms.growth import grown
from hecate.cms.health import LevelHealth, levels_health
from hecate.cms.nested import check_shapes
from hecate.cms.state import CMSState
from hecate.cms.warn import warn_if_nothing_passes, warn_if_windows_diverge
from hecate.engine import EngineName, written_before
from hecate.errors import ConfigError
from hecate.nn import Memory
from hecate.nn.arguments import check_inputs
from hecate.nn.parameters import draw_base, source_for
from hecate.tape import Autodiff, Run, execute


class CMS(nn.Module):
    """A layer of levels: `(x [B, T, d_model], state=None) -> (y [B, T, d_model], state)`. [CMS-LAYER-D1]

        gentle = {"retention": "decay", "algorithm": {"kind": "gd", "lr": 0.1}}
        slow = {"name": "slow", "period": 64, "memory": gentle}
        layer = CMS(256, heads=4, config=CMSConfig(levels=[{"name": "fast"}, slow]))
        y, state = layer(x)
        y, state = layer(more, state)   # any split gives the same result

    Every level is an `nn.Memory`, is read at every token and commits every `period` tokens; tokens are counted, not
    calls. With L_l the levels, x_0 = x and n_l RMS norms with weights:

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
        generator: source of all draws, of which it gives one: every level draws from a generator
            made of that and the level's name, so other levels do not change its start; None uses torch's default
            generator.

    Raises:
        ConfigError: sizes that do not fit, with the path of the level.
    Warns:
        StabilityWarning: if the steps of a window, measured on random keys, allow divergence.
        HealthWarning: if a chained level passes nothing until its first commit.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq 70 to 74.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: CMSConfig,
        *,
        engine: EngineName = "auto",
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
        how: dict[str, Any] = {"engine": engine, "autodiff": autodiff}
        drawn = torch.empty(0, **place).device.type != "meta"
        base = draw_base(generator) if drawn else 0
        self.levels = nn.ModuleList()
        for index, level in enumerate(config.levels):
            try:
                how["generator"] = source_for(level.name, base)
                self.levels.append(_memory(d_model, heads, level, f"{name}/{level.name}", how, place))
            except ConfigError as error:
                raise error.under("levels", index) from None
        residual = config.composition in ("sequential", "nested")
        self.norms = nn.ModuleList(nn.RMSNorm(d_model, eps=1e-6, **place) for _ in config.levels if residual)
        if config.composition == "nested":
            check_shapes(config, self.memories)
        self.weight = self.bias = None
        if config.aggregation == "learned":
            self.weight = nn.Parameter(torch.empty(len(config.levels), d_model, **place))
        elif config.aggregation == "gated":
            self.weight = nn.Parameter(torch.empty(len(config.levels), d_model, **place))
            self.bias = nn.Parameter(torch.empty(len(config.levels), **place))
        if drawn:
            self._start()
            self._warn()

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The levels, from fast to slow."""
        return tuple(self.levels)  # type: ignore[arg-type]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        base = draw_base(generator)
        for level, memory in zip(self.config.levels, self.memories, strict=True):
            memory.reset_parameters(source_for(level.name, base))
        self._start()
        self._warn()

    def _warn(self) -> None:
        for level, memory in zip(self.config.levels, self.memories, strict=True):
            warn_if_windows_diverge(level, memory)
        if self.config.composition == "chained":
            warn_if_nothing_passes(self.config, self.memories)

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
        masks = {"write_mask": write_mask, "reset_mask": reset_mask}
        if not torch.compiler.is_compiling():
            check_inputs(self.memories[0], x, None, **masks)
            check_state(len(self.levels), x, state)
        return self.passed(x, state, masks)

    def passed(self, x: Tensor, state: CMSState | None, masks: Masks, *, run: Run = execute) -> tuple[Tensor, CMSState]:
        """`forward`, unchecked, by calls of `run`."""
        written = x.new_zeros(x.shape[0], dtype=torch.int64) if state is None else state.written
        levels: Levels = (None,) * len(self.levels) if state is None else state.levels
        write = masks["write_mask"]
        before = written_before(written, write, masks["reset_mask"], x.shape[1])
        count = before + (1 if write is None else write)
        own = [masks] * len(self.levels)
        for index, level in enumerate(self.config.levels):
            if level.restart is not None:
                again = (before % level.restart == 0) & (before != count)
                own[index] = {**masks, "restart_mask": again}
        if self.config.composition == "nested":
            y, levels = nested_flow(self, x, levels, own, (before != count, count), run=run)
        else:
            y, levels = flow(self, x, levels, own, run=run)
        written = count[:, -1] if x.shape[1] else written.clone()
        return y, CMSState(levels, written)  # type: ignore[arg-type]

    def joined(self, x: Tensor, *outputs: Tensor) -> Tensor:
        """The weighted sum of the levels' outputs."""
        weights: Any = [None] * len(outputs)
        if self.weight is not None and self.bias is not None:
            weights = torch.sigmoid(nn.functional.linear(x, self.weight, self.bias)).split(1, -1)
        elif self.weight is not None:
            weights = self.weight.to(outputs[0].dtype)
        elif self.config.aggregation == "rsqrt":
            weights = [len(outputs) ** -0.5] * len(outputs)
        total: Tensor | None = None
        for out, weight in zip(outputs, weights, strict=True):
            part = out if weight is None else out * weight
            total = part if total is None else total + part
        return total  # type: ignore[return-value]

    def push_up(
        self, level: LevelConfig, state: CMSState | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[CMS, CMSState | None]:
        """A new layer with a faster level in front; the present ones move to slower slots.

        It computes the same function until it is trained, because the new level's output projection is zero; that
        projection gets a gradient at once, the rest of the level after one step. `state` is taken over, the new level
        starting empty at its place in the schedule. [CMS-GROW-I1]
        """
        return grown(self, level, 0, state, generator)

    def stack_up(
        self, level: LevelConfig, state: CMSState | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[CMS, CMSState | None]:
        """As `push_up`, with a slower level behind the present ones."""
        return grown(self, level, len(self.levels), state, generator)

    def health(self, x: Tensor, state: CMSState | None = None) -> list[LevelHealth]:
        """What every level does on x `[B, T, d_model]`; a `HealthWarning` for each dead one."""
        return levels_health(self, x, state)

    def extra_repr(self) -> str:
        """How the levels are joined, and their periods."""
        periods = ", ".join(f"{level.name}={level.period}" for level in self.config.levels)
        return f"{self.d_model}, composition={self.config.composition}, periods: {periods}"


def _memory(
    d_model: int, heads: int, level: LevelConfig, name: str, how: dict[str, Any], place: dict[str, Any]
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
        query_projection=level.query_projection,
        name=name,
        **how,
        **place,
    )
