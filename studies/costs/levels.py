"""Layers of levels and their like against a plain memory layer of the same sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hecate.cms import CMS, SelfReferential
from hecate.nn import Composed, Memory
from studies.costs.cases import BATCH, HEADS, WIDTH
from studies.costs.harness import Function, Row, Size, compare

RULE: dict[str, Any] = {"retention": "decay", "algorithm": {"kind": "gd", "lr": 0.01}, "key_norm": "l2"}


def levels(size: Size) -> Iterator[Row]:
    """Forward and backward of a layer over T = 1024 tokens, against `nn.Memory`."""
    length, d_model = size.short(1024), HEADS * WIDTH
    how: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float32}
    periods = (1, 8, 64, 512)
    each = {period: {"name": f"p{period}", "period": period, "memory": RULE} for period in periods}

    def cms(composition: str, *chosen: int) -> nn.Module:
        config = {"levels": [each[period] for period in chosen], "composition": composition}
        return CMS(d_model, HEADS, config, **how)  # type: ignore[arg-type]

    plain = Memory(d_model, HEADS, RULE, **how)  # type: ignore[arg-type]
    layers: dict[str, nn.Module] = {
        **{f"one level, period {period}": cms("independent", period) for period in periods},
        "levels 1, 8, 64, sequential": cms("sequential", 1, 8, 64),
        "levels 1, 8, 64, independent": cms("independent", 1, 8, 64),
        "levels 8, 64, nested": cms("nested", 8, 64),
        **{
            f"self-referential, chunk {chunk}": SelfReferential(d_model, HEADS, {"memory": RULE, "chunk": chunk}, **how)
            for chunk in (16, 64)
        },
        **{
            f"{kind} around it": Composed(
                d_model, HEADS, {"kind": kind, **({"segment": 64} if kind == "mac" else {"window": 64})}, plain, **how
            )
            for kind in ("mag", "mal", "mac")
        },
    }
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, length, d_model, generator=generator, dtype=torch.float32)
    for name, layer in layers.items():
        yield compare(
            "levels",
            f"{name}, T={length}",
            _output(layer),
            "nn.Memory",
            _output(plain),
            (x,),
            repeats=size.fewer(2),
            tolerance=None,
        )


def _output(layer: nn.Module) -> Function:
    def run(x: Tensor) -> Tensor:
        return layer(x)[0]

    return run
