"""Layers of every named rule and preset on inputs that hurt: one token, rows of zeros, masks, pieces, two dtypes."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hecate.cms.config import LevelConfig
from hecate.errors import HecateError
from hecate.nn import Memory
from hecate.rule.config import RULES, MemoryConfig
from tests.nn.test_write_strength import presets

CASES, SEED = 1000, 20261126  # of cases SEED, SEED + 1, ...
WIDTH, HEADS, LENGTHS = 16, 2, (1, 2, 3, 7, 17, 33)


def memories() -> dict[str, Any]:
    """Named rules, and the memories of presets with their periods, those beyond 64 shortened to it."""
    found: dict[str, Any] = dict(zip(RULES, RULES, strict=True))
    for name, (memory, period) in presets().items():
        config = LevelConfig.model_validate({"name": "level", "memory": memory, "period": min(period, 64)}).rule
        found[f"preset {name}"] = config.model_copy(update={"chunk": min(config.chunk, 64)})
    return found


class Case:
    """One draw: a layer's memory, a length, and what is done to its input."""

    def __init__(self, number: int, names: list[str]) -> None:
        drawn = random.Random(SEED + number)
        self.number, self.name, self.length = number, drawn.choice(names), drawn.choice(LENGTHS)
        self.batch, self.dtype = drawn.choice((1, 2)), drawn.choice((torch.float32, torch.float32, torch.bfloat16))
        self.zeros = drawn.choice(("none", "none", "start", "middle", "all"))
        self.write = drawn.choice(("none", "none", "some", "all masked"))
        self.reset, self.cuts = drawn.random() < 0.3, sorted({drawn.randrange(self.length) for _ in range(2)} - {0})
        self.size = drawn.choice((1.0, 1.0, 30.0, 1e-3))

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())

    def input(self) -> tuple[Tensor, dict[str, Tensor]]:
        source = torch.Generator().manual_seed(self.number)
        x = self.size * torch.randn(self.batch, self.length, WIDTH, generator=source)
        half = max(1, self.length // 2)
        if self.zeros != "none":
            at = {"start": slice(0, half), "middle": slice(half // 2, half), "all": slice(None)}[self.zeros]
            x[:, at] = 0
        masks = {}
        if self.write != "none":
            share = 0.6 if self.write == "some" else 0.0
            masks["write_mask"] = torch.rand(self.batch, self.length, generator=source) < share
        if self.reset:
            masks["reset_mask"] = torch.rand(self.batch, self.length, generator=source) < 0.2
        return x.to(self.dtype).requires_grad_(), masks


def fault(case: Case, config: MemoryConfig | str) -> str | None:
    """What is wrong with a layer's outputs and gradients, whole or in pieces; None if nothing."""
    layer = Memory(WIDTH, HEADS, config, generator=torch.Generator().manual_seed(0), dtype=case.dtype)
    (x, masks), outputs = case.input(), []
    for cuts in ([], case.cuts):
        state, made = None, []
        for at, end in pairwise([0, *cuts, case.length]):
            y, state = layer(x[:, at:end], state, **{name: mask[:, at:end] for name, mask in masks.items()})
            made.append(y)
        outputs.append(torch.cat(made, 1))
    whole, pieces = outputs
    (whole.float().square().mean() + pieces.float().mean()).backward()
    if not whole.isfinite().all():
        return "outputs are not finite"
    none = [name for name, p in layer.named_parameters() if p.requires_grad and p.grad is None]
    if none:
        return f"no gradient of {none}"
    grads = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters() if p.grad is not None}}
    odd = [name for name, g in grads.items() if g is None or not g.isfinite().all()]
    if odd:
        return f"gradients of {odd} are not finite"
    if case.dtype == torch.float32 and case.size == 1.0:
        apart = (whole - pieces).detach().norm() / whole.detach().norm().clamp(min=1e-3)
        if apart > 1e-2:
            return f"pieces are {apart:.1e} from the whole"
    return None


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")
def test_no_layer_fails(float32):
    known = memories()
    wrong = []
    for number in range(CASES):
        case = Case(number, sorted(known))
        try:
            found = fault(case, known[case.name])
        except HecateError as error:
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            wrong.append(f"{case}: {found}")
    assert not wrong, "\n".join([f"{len(wrong)} of {CASES}", *wrong[:20]])
