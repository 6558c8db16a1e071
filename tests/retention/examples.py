"""Retentions beside their numpy forms, and random steps for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hecate import retention
from tests.reference import knobs as reference

# Each retention beside the numpy class that carries its own state.
PAIRS: list[tuple[Any, Any]] = [
    (retention.L2(towards="zero"), reference.Coupled()),
    (retention.L2(decoupled=True, towards="zero"), reference.Decayed()),
    (retention.ElasticNet(threshold=0.003), reference.ElasticNet(0.003)),
    (retention.KL(), reference.Softmax()),
    (retention.KL(scale=3.0), reference.Softmax(3.0)),
    (retention.KL(signed=True), reference.Banks()),
    (retention.KL(signed=True, scale=3.0), reference.Banks(3.0)),
    (retention.Bounded(), reference.Sigmoid()),
    (retention.Bounded(low=-1.0, high=2.0), reference.Sigmoid(-1.0, 2.0)),
    # The numpy form has no chord near 0, where initial weights of the deep memory fall.
    (retention.Lq(eps=1e-12), reference.Lq()),
    (retention.Lq(q=1.5), reference.Lq(1.5)),
    (retention.Lq(form="paper"), reference.Lq(4.0, "paper")),
    (retention.Lq(q=2.5, form="paper"), reference.Lq(2.5, "paper")),
    (retention.Sphere(), reference.Sphere()),
    (retention.Sphere(slot="row"), reference.Sphere("row")),
    (retention.Sphere(form="divide"), reference.Sphere("column", "divide")),
    (retention.Sphere(slot="row", form="divide"), reference.Sphere("row", "divide")),
    (retention.Bregman(), reference.Decayed()),
    (retention.Bregman(link="softmax"), reference.Softmax()),
    (retention.Bregman(link="signed_softmax"), reference.Banks()),
    (retention.Bregman(link="sigmoid"), reference.Sigmoid()),
    (retention.Bregman(link=retention.LqLink(q=3.0)), reference.Lq(3.0)),
    (retention.NormCap(norm=0.8), reference.Capped(0.8, reference.Decayed())),
    (
        retention.NormCap(norm=0.8, retention=retention.ElasticNet(threshold=0.003)),
        reference.Capped(0.8, reference.ElasticNet(0.003)),
    ),
    (retention.NormCap(norm=1.5, retention="sphere"), reference.Capped(1.5, reference.Sphere())),
]
KNOBS = [knob for knob, _ in PAIRS]
every_knob = pytest.mark.parametrize("knob", KNOBS, ids=repr)


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def stepped(knob: Any, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    memory = knob.start(draw(generator, 8, 4, 5))
    direction, retain = draw(generator, 8, 4, 5), torch.rand(8, generator=generator)
    return memory, direction, retain, knob.step(memory, direction, retain)
