"""Small continuum memories for tests, and how the reference sees them."""

import warnings
from typing import Any

import torch
from torch import Tensor

from hecate.cms import CMS, CMSConfig
from hecate.errors import HealthWarning
from tests.nn.layers import seeded, shaken
from tests.reference import cms as reference
from tests.reference.memory import Rule

D_MODEL, HEADS = 8, 2
DELTA: dict[str, Any] = {"key_norm": "l2", "retention": "decay", "algorithm": {"kind": "gd", "lr": 0.4}}
MOMENTUM: dict[str, Any] = {"key_norm": "l2", "retention": "decay", "algorithm": {"kind": "momentum", "lr": 0.1}}
LEVELS: list[dict[str, Any]] = [
    {"name": "fast", "memory": {**DELTA, "feature_map": "elu"}},
    {"name": "middle", "period": 2, "memory": {**MOMENTUM, "feature_map": "elu"}},
    {"name": "slow", "period": 4, "memory": {**DELTA, "read": "before"}, "conv_kernel": 0},
]
GATED: list[dict[str, Any]] = [
    {"name": "now", "memory": {"kind": "gated_delta", "chunk": 2}},
    {"name": "often", "period": 2, "memory": "gated_delta"},
    {"name": "seldom", "period": 4, "memory": {"kind": "gated_delta", "algorithm": "momentum"}},
]
# A sum of weights, an unfinished chunk with an anchor, momentum, positions: all that is carried.
CARRYING: list[dict[str, Any]] = [
    {"name": "a", "memory": {"feature_map": "elu", "normalizer": "sum", "step": "normalized"}},
    {
        "name": "b",
        "period": 3,
        "memory": {
            "feature_map": "elu",
            "normalizer": "sum",
            "key_norm": "l2",
            "algorithm": {"kind": "momentum", "lr": 0.1},
        },
        "firing": "learned",
    },
]
FROZEN: list[dict[str, Any]] = [{"name": "x", "memory": {**LEVELS[0]["memory"], "chunk": 2}}, *LEVELS[2:]]
JOINS = [
    ("sequential", "sum"),
    ("nested", "sum"),
    ("chained", "sum"),
    ("independent", "sum"),
    ("independent", "rsqrt"),
    ("independent", "learned"),
    ("independent", "gated"),
]


def cms_of(
    composition: str = "sequential",
    aggregation: str = "sum",
    *,
    levels: list[dict[str, Any]] | None = None,
    shake: float = 0.3,
    seed: int = 0,
    **options: Any,
) -> CMS:
    """A layer whose parameters are off their starting values."""
    config = CMSConfig(levels=LEVELS if levels is None else levels, composition=composition, aggregation=aggregation)
    with warnings.catch_warnings():
        if composition == "chained":  # which its own test expects
            warnings.simplefilter("ignore", HealthWarning)
        layer = CMS(D_MODEL, HEADS, config, generator=seeded(seed), **options)
    return shaken(layer, seed + 1, shake)


def inputs(batch: int = 2, length: int = 11, *, seed: int = 2) -> Tensor:
    return torch.randn(batch, length, D_MODEL, generator=seeded(seed))


def masks(batch: int = 2, length: int = 11, *, seed: int = 3) -> dict[str, Tensor]:
    generator = seeded(seed)
    draws = (torch.rand(batch, length, generator=generator) for _ in range(2))
    return {"write_mask": next(draws) > 0.2, "reset_mask": next(draws) > 0.85}


def expected(layer: CMS, x: Tensor, **given: Tensor) -> tuple[Tensor, list[Any]]:
    """What the reference computes: outputs `[B, T, d]`, and the weights at each row's end."""
    params = {name: item.detach().numpy() for name, item in layer.state_dict().items()}
    levels = [told(level, layer) for level in layer.config.levels]
    found = [
        reference.cms(
            levels,
            params,
            row.detach().numpy(),
            layer.config.composition,
            layer.config.aggregation,
            *(given[name][b].numpy() if name in given else None for name in NAMES),
        )
        for b, row in enumerate(x)
    ]
    return torch.stack([torch.tensor(y) for y, _ in found]), [ends for _, ends in found]


NAMES = ("write_mask", "reset_mask")


def told(level: Any, layer: CMS) -> reference.Level:
    """A level's config in the words of the reference."""
    memory, heads = level.rule, level.heads or HEADS
    rule = Rule(
        bias=memory.bias.kind,
        decay=memory.retention.kind == "decay",
        towards="start" if memory.retention.anchored else "zero",
        momentum=memory.algorithm.kind == "momentum",
        residual=getattr(memory.structure, "residual", False),
        chunk=level.period if level.period > 1 else level.memory.chunk,
        commit="chunk" if level.period > 1 else level.memory.commit,
        read=memory.read,
        decay_order=memory.decay_order,
        key_norm=memory.key_norm,
        step=memory.step,
        phi=PHI[memory.feature_map.kind],
    )
    return reference.Level(
        rule,
        period=level.period,
        heads=heads,
        d_key=level.d_key or D_MODEL // heads,
        d_value=level.d_value or D_MODEL // heads,
        kernel=level.conv_kernel,
        lr_max=memory.algorithm.lr,
        output_gate=level.output_gate,
        firing=level.firing == "learned",
        restart=getattr(level, "restart", None),
        projection=getattr(level, "query_projection", "none"),
    )


PHI = {"identity": lambda x: x, "elu": reference.reference.elu}
