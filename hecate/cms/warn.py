"""Faults that a layer shows before it is run: windows that diverge, levels that pass nothing."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from hecate.cms.config import CMSConfig, LevelConfig
from hecate.engine import Sequence, to_tokens
from hecate.errors import HealthWarning, StabilityWarning
from hecate.nn import Memory, normalise_qk
from hecate.phi import Params
from hecate.tape import execute

KEYS = 512  # of a window that are drawn; a longer one is extrapolated


def warn_if_windows_diverge(level: LevelConfig, memory: Memory) -> None:
    """Measures the largest eigenvalue of the sum of lr phi(k) phi(k)^T over a window of random keys, at the ceiling of
    the lr gate. [CMS-LAYER-I4]"""
    config = memory.config
    algorithm = config.algorithm
    if level.period == 1 or not algorithm.linear or config.diverging(math.inf) is None:
        return
    count = min(level.period, KEYS)
    with torch.no_grad():
        lengths = _step_lengths(memory, count)
    largest = config.diverging(float(lengths.max()) * level.period / count, lr=1.0)
    if largest is not None:
        fitting = algorithm.lr * algorithm.stable_step / largest
        warnings.warn(
            f"level {memory.name!r}: the {level.period} steps that its period sums up come to "
            f"{largest:.3g} along one direction of phi, measured on random keys at the ceiling "
            f"lr={algorithm.lr:g} of its gate, and bias {config.bias.kind!r} may diverge beyond "
            f"{algorithm.stable_step:g}; set algorithm.lr below {fitting:.2g}, or shorten the "
            "period",
            StabilityWarning,
            stacklevel=4,
        )


def warn_if_nothing_passes(config: CMSConfig, memories: tuple[Memory, ...]) -> None:
    """Names the levels of a chain whose output is zero until their first commit."""
    for level, memory in zip(config.levels[:-1], memories[:-1], strict=True):
        weights = memory.initial.tensors.values()
        empty = memory.config.structure.linear and not any(w.count_nonzero() for w in weights)
        if level.period > 1 and empty:
            warnings.warn(
                f"level {memory.name!r} starts empty and commits every {level.period} tokens: "
                f"until its first commit it passes zero to the levels behind it, so sequences "
                f"shorter than {level.period} train nothing; use composition 'sequential', or a "
                "structure that starts with weights, such as 'mlp'",
                HealthWarning,
                stacklevel=4,
            )


def _step_lengths(memory: Memory, count: int) -> Tensor:
    """The largest eigenvalue per head, for a window of `count` random keys."""
    heads, generator = memory.heads, torch.Generator().manual_seed(0)
    shape = (1, count, heads, memory.phi_width)
    double: Any = {"dtype": torch.float64, "device": "cpu"}
    keys = normalise_qk(torch.randn(shape, generator=generator, **double), memory.qk_norm)
    ones = torch.ones(shape[:3], **double)
    position = torch.arange(count, device="cpu").unsqueeze(0)
    params: Params = {
        "learned": {n: t.detach().to(**double) for n, t in memory.phi_learned.tensors.items()},
        "frozen": {n: t.detach().to(**double) for n, t in memory.phi_frozen.tensors.items()},
    }
    needed = position if memory.config.feature_map.needs_position else None
    lr = ones * memory.config.algorithm.lr
    sequence = Sequence(keys, keys, keys, lr, ones, ones, position=needed)
    tokens = to_tokens(memory.config, sequence, params, torch.float64, execute)
    rows = (tokens.phi_k * tokens.lr.sqrt().unsqueeze(-1))[0].transpose(0, 1)
    tall = rows.shape[1] > rows.shape[2]
    return torch.linalg.eigvalsh(rows.mT @ rows if tall else rows @ rows.mT)[:, -1]
