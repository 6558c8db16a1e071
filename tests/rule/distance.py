"""Trials of the named rules, run by the rules themselves: how far they are from the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hecate import Gates, MemoryState, memory_scan, memory_weights, named_rule
from tests.rule.trials import TRIALS, Array, Trial


def run(name: str, trial: Trial, **options: Any) -> tuple[Array, MemoryState]:
    """The rule's own scan of a trial."""
    x, writes = trial.inputs, named_rule(name).writes

    def gate_of(gate: str, value: Array) -> Tensor:
        own = torch.as_tensor(value)[None]
        return own.unsqueeze(3 if writes > 1 and gate in ("lr", "erase", "write") else 2)

    learned = {n: torch.as_tensor(w)[None] for n, w in (trial.learned or {}).items()}
    initial = trial.initial and {n: torch.as_tensor(w)[None] for n, w in trial.initial.items()}
    y, state = memory_scan(
        named_rule(name),
        *(torch.as_tensor(item)[None].unsqueeze(item.ndim if item.ndim == 3 else 2) for item in (x.q, x.k, x.v)),
        Gates(
            **{gate: gate_of(gate, value) if isinstance(value, Array) else value for gate, value in trial.gates.items()}
        ),  # type: ignore[arg-type]
        phi_params={"learned": learned, "frozen": {}},
        initial=initial,
        **options,
    )
    return y[0, :, 0].numpy(), state


def errors(name: str, length: int = 70, **options: Any) -> dict[str, float]:
    """Relative errors in norm of the outputs and of every tensor of the final state."""
    trial = TRIALS[name](named_rule(name), length)
    y, state = run(name, trial, **options)
    found = {"y": _error(y, trial.y)}
    for path, expected in trial.state.items():
        *part, key = path.split(".", 1) if path.split(".")[0] in _PARTS else ("memory", path)
        tensors: Any = state.normalizer.memory if part == ["normalizer"] else getattr(state, part[0])  # type: ignore[union-attr]
        if part == ["memory"]:
            tensors = memory_weights(named_rule(name), state)
        found[path] = _error(tensors[key][0, 0].numpy(), expected)
    return found


_PARTS = ("slots", "pending", "normalizer", "readout")


def _error(got: Array, expected: Array) -> float:
    if got.shape != expected.shape:
        raise AssertionError(f"shape {got.shape} against {expected.shape}")
    return float(np.linalg.norm(got - expected) / max(float(np.linalg.norm(expected)), 1e-3))
