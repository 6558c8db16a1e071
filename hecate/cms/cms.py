"""A continuum of memories: levels that commit at different rates, combined into one layer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from hecate.checks import check_shapes, expect, expect_choice, named
from hecate.cms.config import CMSConfig, LevelConfig
from hecate.cms.health import LevelHealth, level_health, record_calls, warn_of_levels
from hecate.distributed.context import Context, Shares
from hecate.engine import EngineName, as_plain, log_linear_scan, written_before
from hecate.errors import ConfigError, HealthWarning, ShapeError, faults_under
from hecate.nn import LayerState, Memory
from hecate.nn.arguments import Mask, check_sequence, check_state, check_type
from hecate.nn.blocks import RMSNorm
from hecate.nn.memory import where_rows
from hecate.nn.parameters import draw_normal, redraw, source_of, sources_for
from hecate.nn.rule import ScanArguments, between
from hecate.rule import MemoryState
from hecate.states import State
from hecate.tape import Autodiff
from hecate.tape.bridge import can_inspect, without_autocast

Levels = tuple[LayerState | None, ...]
Masks = dict[str, Mask]
OF_LEVEL = {"name", "period", "memory", "heads", "restart"}  # the other fields are arguments of its `Memory`


class CarryMemory(Memory):
    """Log-linear attention: a `Memory` that reads content of different ages with different weights. [CMS-CARRY-D1]

    L levels of periods 1, 2, 4, ... share projections and gates. A token is written to level 0, and its content is
    always in exactly one level: a level that is due moves its content up into the next and restarts at 0, and the last
    keeps all that it receives. Decay and erasure act on all levels alike. The read is sum_l lambda_l(t) M^(l) q_t with
    a learned lambda_l(t) = softplus(level_l (W x_t)_l) per token, head and level, level starting at 1. With lambda = 1
    that is the plain rule.

    A state holds L times the plain rule's weights, `[B, H, L, V, P]`, whatever the length: L = ceil(log2 T) + 1 levels
    are enough for T tokens; in a longer stream the oldest content stays in the last level and is read with one weight,
    as the plain rule reads it. Learned starting weights start in the last level. `engine` is "auto", "sequential" or
    "parallel".

    References: Log-Linear Attention (Guo et al., 2025, arXiv 2506.04761).
    """

    shares: ClassVar[Shares] = "turns"  # levels are passed on from rank to rank

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: Any = None,
        *,
        levels: int,
        engine: str = "auto",
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        expect_choice(engine, "engine of composition 'carry'", ("auto", "sequential", "parallel"))
        super().__init__(d_model, heads, config, engine=engine, generator=generator, **options)
        self.bare = False  # a single token is run as a sequence
        rows, place = heads * levels, {"device": options.get("device"), "dtype": options.get("dtype")}
        check_shapes({"mixture": (rows, d_model)}, "lower carry_levels, heads or d_model")
        self.mixture = nn.Parameter(torch.empty(rows, d_model, **place))
        self.level = nn.Parameter(torch.empty(heads, levels, **place))
        if not self.mixture.is_meta:
            self._draw_levels(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        super().reset_parameters(generator)
        self._draw_levels(generator)

    def _draw_levels(self, generator: torch.Generator | None) -> None:
        draw_normal(self.mixture, self.d_model**-0.5, source_of(generator))
        nn.init.ones_(self.level)

    def scale(self, x: Tensor) -> Tensor:
        """lambda `[B, T, H, L]` of x `[B, T, d_model]`, in float32 or better."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device.type):
            logits = linear(x.to(wide), self.mixture.to(wide)).unflatten(-1, self.level.shape)
            return softplus(self.level.to(wide) * logits)

    def scan(self, asked: ScanArguments, x: Tensor) -> tuple[Tensor, MemoryState]:
        """The weighted read of all levels, and their states."""
        how: dict[str, Any] = {"engine": self.engine, "autodiff": self.autodiff, "name": self.name}
        return log_linear_scan(**asked._asdict(), scale=self.scale(x), **how)

    def seen(self, **arguments: Any) -> tuple[ScanArguments, str | None]:
        """The arguments of the plain rule's scan, on the sum of all levels, and the reason why its answers differ."""
        asked, _ = super().seen(**arguments)
        state = None if asked.state is None else as_plain(asked.state, self.level.shape[1])
        return asked._replace(state=state), "a level of each age is read with a weight of its own"

    def extra_repr(self) -> str:
        """The rule, sizes and levels."""
        return f"{super().extra_repr()}, carry_levels={self.level.shape[1]}"


class _CMSFields(NamedTuple):
    levels: tuple[LayerState, ...]
    written: Tensor


class CMSState(State, _CMSFields):
    """The state of a `CMS`: a pytree of tensors. [CMS-LAYER-I1]

    Fields:
        levels: the state of every level, from fast to slow.
        written: tokens written since the start or the last reset, `[B]` int64.
    """

    __slots__ = ()
    whole = (("written", torch.int64),)


@named(*CMSConfig.model_fields)
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
        carry        y = L(x), L a `CarryMemory`: levels that carry their content up, read with learned weights

    The block around the layer adds x, as it does for any other layer. Starting weights are learned.

    Args:
        d_model: width of x and y.
        heads: number of memories in each level whose config gives none.
        config: levels, composition, aggregation.
        engine, autodiff: passed to `memory_scan`; they change speed and memory only.
        name: what errors call the layer; a level is `name/level`.
        generator: source of all draws: it gives one number, and every level draws from a generator seeded with that and
            the level's name, so that other levels do not change its start; None uses torch's default generator.

    Raises:
        ConfigError: sizes that do not fit, with the path of the level.
    Warns:
        StabilityWarning: if the steps of a window, measured on random keys, allow divergence.
        HealthWarning: if a chained level outputs zero until its first commit.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq 70 to 74.
    """

    context: Context | None = None  # the ranks that hold the other pieces of its sequences

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: CMSConfig | Mapping[str, Any],
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
        how: dict[str, Any] = {"engine": engine, "autodiff": autodiff, **place}
        drawn = torch.empty(0, **place).device.type != "meta"
        sources = self._sources(generator) if drawn else [None] * len(config.levels)
        kind = partial(CarryMemory, levels=config.carry_levels) if config.composition == "carry" else Memory
        self.levels = nn.ModuleList()
        for index, (level, source) in enumerate(zip(config.levels, sources, strict=True)):
            options = {field: getattr(level, field) for field in LevelConfig.model_fields if field not in OF_LEVEL}
            options |= {"name": f"{name}/{level.name}", "generator": source, **how}
            with faults_under("levels", index):
                self.levels.append(kind(d_model, level.heads or heads, level.rule, **options))
        residual = config.composition in ("sequential", "nested")
        self.norms = nn.ModuleList(RMSNorm(d_model, **place) for _ in config.levels if residual)
        shapes = [{name: tuple(w.shape) for name, w in each.initial.tensors.items()} for each in self.memories]
        for index, (fast, slow) in enumerate(pairwise(shapes), 1):
            if config.composition == "nested" and fast != slow:
                both = f"{config.levels[index - 1].name!r} and {config.levels[index].name!r}"
                raise ConfigError(
                    f"nested levels {both}: memories are {fast} and {slow} per level, but a restart copies one into "
                    "the other; give both the same structure, heads, d_key, d_value and width of phi",
                    path=("levels", index, "memory"),
                )
        weighted, gated = config.aggregation in ("learned", "gated"), config.aggregation == "gated"
        self.weight = nn.Parameter(torch.empty(len(config.levels), d_model, **place)) if weighted else None
        self.bias = nn.Parameter(torch.empty(len(config.levels), **place)) if gated else None
        if drawn:
            self._start()
            warn_of_levels(config, self.memories)

    def _sources(self, generator: torch.Generator | None) -> list[Any]:
        return sources_for([level.name for level in self.config.levels], generator)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The levels, from fast to slow."""
        return tuple(self.levels)  # type: ignore[arg-type]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        for memory, source in zip(self.memories, self._sources(generator), strict=True):
            memory.reset_parameters(source)
        self._start()
        warn_of_levels(self.config, self.memories)

    def _start(self) -> None:
        """Norms at 1, learned weights at 1/sqrt(levels), gates at 1/2; draws nothing."""
        redraw(None, *self.norms)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.weight is not None:
            nn.init.constant_(self.weight, len(self.levels) ** -0.5 if self.bias is None else 0.0)

    def forward(
        self, x: Tensor, state: CMSState | None = None, *, write_mask: Mask = None, reset_mask: Mask = None
    ) -> tuple[Tensor, CMSState]:
        """One pass over x `[B, T, d_model]` from a state; masks are bool `[B, T]`, as in `Memory`.

        A masked token is not counted by any level; a reset restarts all levels and their counts.
        """
        masks = {"write_mask": write_mask, "reset_mask": reset_mask}
        check_sequence(self.memories[0].qkv.weight, x, **masks)
        self._check_state(state, x)
        written = x.new_zeros(x.shape[0], dtype=torch.int64) if state is None else state.written
        levels: Levels = (None,) * len(self.levels) if state is None else state.levels
        last = None
        if self.context is not None:
            written, last = self.context.counted(written, write_mask, reset_mask, x.shape[1])
        before = written_before(written, write_mask, reset_mask, x.shape[1])
        count = before + (1 if write_mask is None else write_mask)
        level_masks = [masks] * len(self.levels)
        for index, level in enumerate(self.config.levels):
            if level.restart is not None:
                level_masks[index] = {**masks, "restart_mask": (before % level.restart == 0) & (before != count)}
        if self.config.composition == "nested" and x.shape[1]:
            y, after = self._in_windows(x, levels, level_masks, before != count, count)
        else:
            y, after = self._through_levels(x, levels, level_masks)
        if last is None:
            last = count[:, -1] if x.shape[1] else written.clone()
        return y, CMSState(tuple(after), last)

    @property
    def shares(self) -> Shares:
        """Mode of context parallelism: nested levels take turns, as they are cut where they commit."""
        return "turns" if self.config.composition == "nested" else "layers"

    def _check_state(self, state: CMSState | None, x: Tensor) -> None:
        if not check_type(state, CMSState):
            return
        if len(state.levels) != len(self.levels):
            wanted = f"one state for each of {len(self.levels)} levels"
            raise ShapeError(f"state.levels must hold {wanted}, got {len(state.levels)}; was it made by another layer?")
        check_state(state, x, {"written": (state.written, x.shape[:1])})
        expect(state.written, "B", name="state.written", dtype=torch.int64, like=x, other="x")

    def _through_levels(self, x: Tensor, levels: Levels, masks: list[Masks]) -> tuple[Tensor, list[LayerState]]:
        """The layer's output and the states of its levels, from one call of every level."""
        chained = self.config.composition == "chained"
        states, outputs, inputs, norms = [], [], x, [*self.norms] or [None] * len(levels)
        for memory, norm, before, level_masks in zip(self.memories, norms, levels, masks, strict=True):
            out, after = memory(inputs if norm is None else norm(inputs), before, **level_masks)
            if norm is not None:
                inputs = inputs + out
            elif chained:
                inputs = out
            states.append(after)
            outputs.append(out)
        return inputs if chained else self._join(x, *outputs), states

    def _in_windows(
        self, x: Tensor, levels: Levels, masks: list[Masks], write: Tensor, count: Tensor
    ) -> tuple[Tensor, list[LayerState]]:
        """The same in windows, each up to a token at which a level commits and the next faster one restarts from it.

        If several levels commit, the slowest goes first, so that its memory is copied down through all of them. The
        short convolution, the feature memory and the token counts go on, since they belong to the sequence. `write` is
        True for written tokens, and `count` is the number of tokens written so far, both `[B, T]`. [CMS-NEST-D1]
        """
        periods = [level.period for level in self.config.levels]
        ends: list[int] = []
        if len(periods) > 1 and not count.is_meta:
            if not can_inspect(write, count):
                raise ConfigError(
                    "composition 'nested' cuts a sequence where levels commit, which counts and masks tell; it has to "
                    "look at them, and neither torch.compile nor torch.func lets it; use another composition there"
                )
            # Later periods are multiples of this one.
            ends = (write & (count % periods[1] == 0)).any(0).nonzero().flatten().tolist()
        outputs: list[Tensor] = []
        for at, end in pairwise(sorted({0, *(end + 1 for end in ends), count.shape[1]})):
            y, after = self._through_levels(x[:, at:end], levels, between(masks, at, end))
            for index in reversed(range(1, len(after))):
                committed = write[:, end - 1] & (count[:, end - 1] % periods[index] == 0)
                slow, fast = after[index].memory, after[index - 1].memory
                restarted = where_rows(committed, _fresh(slow, fast), fast)
                after[index - 1] = after[index - 1]._replace(memory=restarted)
            levels = tuple(after)
            outputs.append(y)
        return torch.cat(outputs, 1), after

    def _join(self, x: Tensor, *outputs: Tensor) -> Tensor:
        weights: Any = None
        if self.weight is not None and self.bias is not None:
            weights = torch.sigmoid(linear(x, self.weight, self.bias)).split(1, -1)
        elif self.weight is not None:
            weights = self.weight.to(outputs[0].dtype)
        elif self.config.aggregation == "rsqrt":
            weights = [len(outputs) ** -0.5] * len(outputs)
        if weights is not None:
            outputs = tuple(out * weight for out, weight in zip(outputs, weights, strict=True))
        return sum(outputs[1:], outputs[0])

    def push_up(
        self, level: LevelConfig, state: CMSState | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[CMS, CMSState | None]:
        """A new layer with a faster level in front; the present ones move to slower slots.

        It computes the same function until it is trained, because the new level's output projection is zero; that
        projection gets a gradient at once, the other parameters of the level after one step. `state` is extended by an
        empty memory for the new level, at its place in the schedule. [CMS-GROW-I1]
        """
        return self._grow(level, 0, state, generator)

    def stack_up(
        self, level: LevelConfig, state: CMSState | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[CMS, CMSState | None]:
        """A new layer with a slower level behind the present ones; otherwise as `push_up`."""
        return self._grow(level, len(self.levels), state, generator)

    def _grow(
        self, level: LevelConfig, at: int, state: CMSState | None, generator: torch.Generator | None
    ) -> tuple[CMS, CMSState | None]:
        """The layer and its state with a new level at index `at`, whose output is zero."""
        config = self.config
        refusals = {
            "chained": "a chained layer cannot grow without changing its function: levels pass on their outputs alone, "
            "and a new level's output is zero; use composition 'sequential'",
            "carry": "a tree has no place for another level: its levels share one level's projections and carry their "
            "content up; start it with the carry_levels that the longest sequence needs",
        }
        if at:
            refusals["nested"] = (
                f"a nested layer cannot take a slower level without changing its function: level "
                f"{config.levels[-1].name!r} would restart from it at its first commit; use push_up, or composition "
                "'sequential'"
            )
        if config.composition in refusals:
            raise ConfigError(refusals[config.composition])
        levels = (*config.levels[:at], level, *config.levels[at:])
        weight = self.memories[0].qkv.weight
        how: dict[str, Any] = {"engine": self.engine, "autodiff": self.autodiff, "name": self.name}
        how |= {"generator": generator, "device": weight.device, "dtype": weight.dtype}
        new = type(self)(self.d_model, self.heads, config.model_copy(update={"levels": levels}), **how)
        new._take_over(self, at)
        new.train(self.training)
        if state is None:
            return new, None
        # An empty memory at its place in the schedule of the tokens written so far.
        memory = new.memories[at]
        _, silent = memory(weight.new_zeros(len(state.written), 0, self.d_model))
        position = (state.written % memory.config.chunk).unsqueeze(1).expand_as(silent.memory.position).clone()
        silent = silent._replace(memory=silent.memory._replace(position=position))
        return new, state._replace(levels=(*state.levels[:at], silent, *state.levels[at:]))

    @torch.no_grad()
    def _take_over(self, old: CMS, at: int) -> None:
        """Copies the parameters of `old`, which lacks the level at `at`, and sets that level's output to zero."""
        count = len(old.levels)
        places = [index for index in range(count + 1) if index != at]
        for index, place in enumerate(places):
            _copy(old.levels[index], self.levels[place])
            if len(old.norms):
                _copy(old.norms[index], self.norms[place])
            if old.config.aggregation == "rsqrt":
                # The outputs are now divided by sqrt(count + 1).
                self.memories[place].out.weight.mul_(((count + 1) / count) ** 0.5)
        for theirs, mine in ((old.weight, self.weight), (old.bias, self.bias)):
            if theirs is not None and mine is not None:
                mine[places] = theirs
                mine.requires_grad_(theirs.requires_grad)
        nn.init.zeros_(self.memories[at].out.weight)

    def health(self, x: Tensor, state: CMSState | None = None) -> list[LevelHealth]:
        """Statistics of every level on x `[B, T, d_model]`; a `HealthWarning` for each dead one."""
        if x.dim() != 3 or x.numel() == 0:
            raise ShapeError(
                f"health needs tokens: x must be [B, T, {self.d_model}] with B and T at least 1, got {list(x.shape)}"
            )
        with torch.no_grad():
            _, before = self(x[:, :0], state)  # checks the state, or makes one
        calls, handles = zip(*map(record_calls, self.memories), strict=True)
        try:
            with torch.enable_grad():
                y, after = self(x.detach().requires_grad_(), before)
        finally:
            for handle in handles:
                handle.remove()
        written = written_before(before.written, None, None, x.shape[1]) + 1
        each = zip(self.config.levels, self.memories, calls, before.levels, after.levels, strict=True)
        reports = [level_health(*level, written, y) for level in each]
        for level in reports:
            if level.dead is not None:
                message = f"level {level.name!r} of {self.name!r} is dead: {level.dead}"
                warnings.warn(message, HealthWarning, stacklevel=2)
        return reports

    def extra_repr(self) -> str:
        """The width, the composition of the levels, and their periods."""
        periods = ", ".join(f"{level.name}={level.period}" for level in self.config.levels)
        return f"{self.d_model}, composition={self.config.composition}, periods: {periods}"


def _copy(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict(source.state_dict())
    for mine, theirs in zip(source.parameters(), target.parameters(), strict=True):
        theirs.requires_grad_(mine.requires_grad)


def _fresh(source: MemoryState, like: MemoryState) -> MemoryState:
    """The state of a level that restarts from the memory of `source`, with slots at zero: the level has just closed a
    window of its own, so no gradients are pending and its next token takes a new anchor."""
    normalizer = like.normalizer
    if normalizer is not None and source.normalizer is not None:
        normalizer = _fresh(source.normalizer, normalizer)
    return like._replace(
        memory={name: source.memory[name].to(weight.dtype) for name, weight in like.memory.items()},
        slots={name: torch.zeros_like(slot) for name, slot in like.slots.items()},
        normalizer=normalizer,
        readout=None if source.readout is None else dict(source.readout),
    )
