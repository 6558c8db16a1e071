"""Growing a trained `CMS` by one level without changing what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hecate.cms.config import CMSConfig, LevelConfig
from hecate.cms.state import CMSState
from hecate.errors import ConfigError
from hecate.nn import LayerState, Memory

if TYPE_CHECKING:
    from hecate.cms.cms import CMS


def grown(
    layer: CMS, level: LevelConfig, at: int, state: CMSState | None, generator: torch.Generator | None
) -> tuple[CMS, CMSState | None]:
    """The layer and its state with a silent level at index `at`."""
    config = layer.config
    _check_possible(config, at)
    levels = [*config.levels[:at], level, *config.levels[at:]]
    weight = layer.memories[0].qkv.weight
    new = type(layer)(
        layer.d_model,
        layer.heads,
        config.model_copy(update={"levels": tuple(levels)}),
        engine=layer.engine,
        autodiff=layer.autodiff,
        name=layer.name,
        generator=generator,
        device=weight.device,
        dtype=weight.dtype,
    )
    _take_over(layer, new, at)
    new.train(layer.training)
    if state is None:
        return new, None
    silent = _start_of(new.memories[at], state)
    return new, state._replace(levels=(*state.levels[:at], silent, *state.levels[at:]))


def _check_possible(config: CMSConfig, at: int) -> None:
    if config.composition == "chained":
        raise ConfigError(
            "a chained layer cannot grow without changing its function: levels pass on their "
            "outputs alone, and a new level's output is zero; use composition 'sequential'"
        )
    if config.composition == "nested" and at:
        slowest = config.levels[-1].name
        raise ConfigError(
            f"a nested layer cannot take a slower level without changing its function: level "
            f"{slowest!r} would restart from it at its first commit; use push_up, or composition "
            "'sequential'"
        )


@torch.no_grad()
def _take_over(old: CMS, new: CMS, at: int) -> None:
    """Every trained tensor into its new place; the level at `at` is silenced."""
    count = len(old.levels)
    places = [index for index in range(count + 1) if index != at]
    for index, place in enumerate(places):
        _copy(old.levels[index], new.levels[place])
        if len(old.norms):
            _copy(old.norms[index], new.norms[place])
        if old.config.aggregation == "rsqrt":
            # The outputs are now divided by sqrt(count + 1).
            new.memories[place].out.weight.mul_(((count + 1) / count) ** 0.5)
    for mine, theirs in ((old.weight, new.weight), (old.bias, new.bias)):
        if mine is not None and theirs is not None:
            theirs[places] = mine
            theirs.requires_grad_(mine.requires_grad)
    nn.init.zeros_(new.memories[at].out.weight)


def _copy(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict(source.state_dict())
    for mine, theirs in zip(source.parameters(), target.parameters(), strict=True):
        theirs.requires_grad_(mine.requires_grad)


def _start_of(memory: Memory, state: CMSState) -> LayerState:
    """An empty memory at its place in the schedule of the tokens written so far."""
    empty = memory.qkv.weight.new_zeros(len(state.written), 0, memory.d_model)
    _, start = memory(empty)
    place = (state.written % memory.config.chunk).unsqueeze(1)
    position = place.expand_as(start.memory.position).clone()
    return start._replace(memory=start.memory._replace(position=position))
