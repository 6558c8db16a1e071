"""Trials of the named rules, run by the rules themselves: how far they are from the truth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, MemoryState, memory_scan, memory_weights, named_rule
from hecate.engine import Engine, exact_engines
from tests.rule.trials import TRIALS, Array, Draws, Trial

LENGTH = 70  # four chunks of 16 and two of 32, both with a rest
STEPS = [1e-3 / 5**i for i in range(7)]  # the last 6e-8, for rules whose links have slopes of hundreds
STENCIL = ((-2, 1 / 12), (-1, -2 / 3), (1, 2 / 3), (2, -1 / 12))  # of a derivative, to the order STEP^4


def errors(name: str, length: int = LENGTH, **options: Any) -> dict[str, float]:
    """Relative errors in norm of the outputs and of every tensor of the final state."""
    config = named_rule(name)
    trial = TRIALS[name](config, length)
    found = run(config, tensors(trial), **options)
    return {part: _error(found[part].numpy(), expected) for part, expected in truth(trial).items()}


def gradient_errors(
    name: str, length: int = LENGTH, *, directions: int = 2, chunk: int | None = None, **options: Any
) -> dict[int, float]:
    """Relative errors of the derivatives of outputs and final state, weighed at random, by each of the numbers drawn.

    The truth are differences of the transcription of fourth order, along random directions of one draw at a time; ours
    are the gradients by what the scan is given, times what the draw does to that."""
    config = named_rule(name)
    if chunk is not None:
        config = config.model_copy(update={"chunk": min(config.chunk, chunk)})
    rng, drawn = np.random.default_rng(1), []
    with moved(lambda number, x: drawn.append(x) or x):
        trial = TRIALS[name](config, length)
    weights = {part: rng.normal(size=item.shape) for part, item in truth(trial).items()}
    inputs = {path: item.requires_grad_() for path, item in tensors(trial).items()}
    ours = run(config, inputs, **options)
    loss = torch.stack([(ours[part] * torch.as_tensor(w)).sum() for part, w in weights.items()]).sum()
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    grads = {path: grad.numpy() for path, grad in zip(inputs, found, strict=True) if grad is not None}

    def at(draw: int, shift: Array) -> Array:
        """What our gradients make of the inputs there, and the loss of the truth."""
        with moved(lambda number, x: x + shift if number == draw else x):
            there = TRIALS[name](config, length)
        given, true = tensors(there), truth(there)
        mine = sum(float((grad * given[path].numpy()).sum()) for path, grad in grads.items())
        return np.array([mine, sum(float((w * true[part]).sum()) for part, w in weights.items())])

    rounding = np.finfo(float).eps * sum(float(np.abs(w * truth(trial)[part]).sum()) for part, w in weights.items())

    def along(draw: int) -> Array:
        """Our derivative and the truth, at the step where the truth has settled best, rounding counted."""
        direction, found, doubts = rng.normal(size=drawn[draw].shape), [], []
        for h in STEPS:
            found.append(sum(share / h * at(draw, n * h * direction) for n, share in STENCIL))
            doubts += [abs(wide[1] - close[1]) + rounding / h for wide, close in pairwise(found[-2:])]
            if doubts and doubts[-1] <= 1e-9 * abs(found[-1][1]):
                break
        return found[1 + int(np.argmin(doubts))]

    pairs = np.array([[along(draw) for _ in range(directions)] for draw in range(len(drawn))])
    floor = 1e-3 * max(np.linalg.norm(pairs[..., 1], axis=1))
    return {draw: _error(got, true, floor) for draw, (got, true) in enumerate(pairs.swapaxes(1, 2))}


def engines_of(name: str, length: int = LENGTH) -> list[str]:
    """The token loop, and every engine that is exact for the rule and takes the gates of its trial."""
    config = named_rule(name).model_copy(update={"state_dtype": "float64"})
    few = {"erase", "write", "retain_value", "floor"} & TRIALS[name](config, 2).gates.keys()
    others = exact_engines(config, length=length)
    return ["sequential", *(engine for engine in others if few <= set(Engine.registry[engine].takes))]


def reference(name: str) -> str:
    """The function of `tests.reference` whose outputs a rule is held against, as `file.function`."""
    returned: list[tuple[str, Any]] = []

    def watch(frame: FrameType, event: str, value: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "return" and module.startswith("tests.reference."):
            first = value[0] if isinstance(value, tuple) and value else value
            returned.append((f"{module.rpartition('.')[2]}.{frame.f_code.co_name}", first))

    sys.setprofile(watch)
    try:
        trial = TRIALS[name](named_rule(name), 3)
    finally:
        sys.setprofile(None)
    own = [called for called, first in returned if first is trial.y]
    if not own:
        raise AssertionError(f"the trial of {name!r} returns no outputs of a function of tests.reference")
    return own[-1]


@contextmanager
def moved(move: Callable[[int, Array], Array]) -> Iterator[None]:
    """Trials whose draws are changed so."""
    before = Draws.move
    Draws.move = staticmethod(move)
    try:
        yield
    finally:
        Draws.move = staticmethod(before)


def tensors(trial: Trial) -> dict[str, Tensor]:
    """What the scan of a trial is given, by name: q, k, v, `gates.NAME`, `initial.NAME`, `learned.NAME`; float64."""
    x, several = trial.inputs, trial.inputs.k.ndim == 3
    found = {name: getattr(x, name) for name in ("q", "k", "v")}
    for part in ("gates", "initial", "learned"):
        found |= {f"{part}.{name}": item for name, item in (getattr(trial, part) or {}).items()}

    def shaped(path: str, item: Array | float) -> Tensor:
        own = torch.tensor(item, dtype=torch.float64)[None]
        if path.startswith(("initial", "learned")) or not isinstance(item, np.ndarray):
            return own
        per_write = several and path in ("k", "v", "gates.lr", "gates.erase", "gates.write")
        return own.unsqueeze(3 if per_write else 2)

    return {path: shaped(path, item) for path, item in found.items()}


def run(config: MemoryConfig, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The rule's own scan: outputs y and the final state, by the names of `truth`."""

    def part(name: str) -> dict[str, Tensor]:
        prefix = f"{name}."
        return {path.removeprefix(prefix): item for path, item in inputs.items() if path.startswith(prefix)}

    q, k, v = (inputs[name] for name in "qkv")
    gates = {name: item if item.ndim > 1 else item.expand(q.shape[:3]) for name, item in part("gates").items()}
    params = {"learned": part("learned"), "frozen": {}}
    y, state = memory_scan(
        config, q, k, v, Gates(**gates), phi_params=params, initial=part("initial") or None, **options
    )
    return {"y": y[0, :, 0], **states(config, state)}


def states(config: MemoryConfig, state: MemoryState) -> dict[str, Tensor]:
    """Every tensor of a state of one head, by `part.name`, of the memory without."""
    found = dict(memory_weights(config, state))
    parts = {"slots": state.slots, "pending": state.pending, "readout": state.readout or {}}
    parts["normalizer"] = {} if state.normalizer is None else state.normalizer.memory
    for part, items in parts.items():
        found |= {f"{part}.{name}": item for name, item in items.items()}
    return {path: item[0, 0] for path, item in found.items()}


def truth(trial: Trial) -> dict[str, Array]:
    """Outputs y and final states of the transcription."""
    return {"y": trial.y, **trial.state}


def _error(got: Array, expected: Array, floor: float = 1e-3) -> float:
    if got.shape != expected.shape:
        raise AssertionError(f"shape {got.shape} against {expected.shape}")
    return float(np.linalg.norm(got - expected) / max(float(np.linalg.norm(expected)), floor))
