"""What the levels of a trained model do, layer by layer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hecate.cms import CMS, LevelHealth
from hecate.data import Source
from hecate.errors import HealthWarning

HEADER = (
    "level", "period", "commits", "fired", "memory norm", "output rms", "half-life", "cotangent",
    "dead",
)  # fmt: skip


def model_health(model: nn.Module, source: Source, seq_len: int, device: torch.device) -> dict[str, list[LevelHealth]]:
    """`CMS.health` of every layer of levels, on what it is given on one validation sequence."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, CMS)}
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = inputs[0].detach()

        return hook

    if not layers:
        return {}
    handles = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            batch = next(iter(source.validation_batches(1, seq_len, 1)))
            model(batch.tokens[:1].to(device))
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HealthWarning)  # the table has a column for it
        return {name: layers[name].health(x) for name, x in seen.items()}


def health_rows(health: dict[str, list[LevelHealth]]) -> list[Sequence[Any]]:
    """A row per level, under `HEADER`."""
    return [
        (
            f"`{layer}` {level.name}",
            level.period,
            f"{level.commits:g}",
            "all" if level.fired is None else f"{level.fired:.1%}",
            f"{level.norm_start:.3g} -> {level.norm_end:.3g}",
            f"{level.output_rms:.3g}",
            f"{level.half_life:.3g}",
            f"{level.cotangent:.3g}",
            level.dead or "no",
        )
        for layer, levels in health.items()
        for level in levels
    ]
