"""Fifty tokens through a knob, against the numpy reference that carries its own state."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hecate import Gates, MemoryConfig, memory_scan, memory_weights
from tests.reference import knobs as reference

STRUCTURES: dict[str, Any] = {
    "matrix": "matrix",
    "mlp": {"kind": "mlp", "layers": 2, "expansion": 2, "activation": "silu"},
}
TOKENS, WIDTH = 50, 4


def worst_error(structure: str, bias: Any, retention: Any, loss: Any, kept: Any, *, lr: float = 0.3) -> float:
    """Largest relative error of outputs and of final memories, float64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(TOKENS, WIDTH)) / s for s in (1.0, 2.0, 1.0))
    rates = lr * rng.uniform(0.2, 1.0, TOKENS)
    retain, momentum = rng.uniform(0.96, 1.0, TOKENS), rng.uniform(0.0, 0.6, TOKENS)
    config = MemoryConfig(
        structure=STRUCTURES[structure], bias=bias, retention=retention, algorithm="momentum", state_dtype="float64"
    )
    shapes = config.structure.shapes(WIDTH, WIDTH)
    weights = {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}
    uses = config.retention.uses_retain
    y, state = memory_scan(
        config,
        *(torch.tensor(item)[None, :, None] for item in (q, k, v)),
        Gates(*(torch.tensor(g)[None, :, None] if g is not None else None for g in (
            rates, retain if uses else None, momentum
        ))),
        initial={name: torch.tensor(w)[None] for name, w in weights.items()},
        engine="sequential",  # as all others are held against it
    )  # fmt: skip
    gates = (rates, retain if uses else np.ones(TOKENS), momentum)
    expected, final = reference.scan(loss, kept, q, k, v, *gates, list(weights.values()))
    pairs = [(y[0, :, 0].numpy(), expected)]
    pairs += [
        (mine[0, 0].numpy(), true) for mine, true in zip(memory_weights(config, state).values(), final, strict=True)
    ]
    assert all(np.isfinite(true).all() and np.linalg.norm(true) > 1e-2 for _, true in pairs)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
