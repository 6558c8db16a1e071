"""One token by the short way: the bits, the errors and the states of the whole way."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import hecate
from hecate import Gates, MemoryConfig, MemoryState, memory_scan, memory_step, named_rule, phi
from hecate.engine import Stepper
from hecate.engine.one_token import MOST, OneToken
from hecate.errors import ConfigError, HecateError, NonFiniteError, ShapeError
from hecate.rule import RULES

FLOAT: Any = {"dtype": torch.float32}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "read before": {"read": "before"},
    "key_norm": {"key_norm": "l2"},
    "key_norm sum": {"key_norm": "sum", "feature_map": "elu"},
    "normalized": {"step": "normalized"},
    "implicit": {"step": "implicit"},
    "query_scale": {"query_scale": "key_dim"},
    "chunk": {"chunk": 3},
    "commit": {"chunk": 2, "commit": "chunk"},
    "early": {"decay_order": "before_gradient"},
    "early chunk": {"decay_order": "before_gradient", "chunk": 3},
    "drawn map": {"feature_map": phi.RandomFourier(d_phi=6)},
    "learned map": {"feature_map": phi.Linear(d_phi=5)},
    "propagate": {"on_nonfinite": "propagate"},
    "float64": {"state_dtype": "float64"},
    "momentum": {"algorithm": "momentum"},
    "decay": {"retention": "decay"},
    "normalizer": {"normalizer": "sum", "feature_map": "elu", "bias": "dot"},
}
GATES = ("none", "numbers", "tensors", "channels")


@pytest.fixture(autouse=True)
def without_grad() -> Any:
    with torch.no_grad():
        yield


def varied(config: MemoryConfig, fields: dict[str, Any]) -> MemoryConfig | None:
    try:
        return config.model_copy(update=fields)
    except ConfigError:
        return None


def gates_of(kind: str, config: MemoryConfig, lead: tuple[int, ...], d: int, g: torch.Generator) -> Gates:
    decays, moves = config.retention.uses_retain, config.algorithm.uses_momentum
    if kind == "none":
        return Gates(0.05)
    if kind == "numbers":
        return Gates(0.1, 0.9 if decays else None, 0.5 if moves else None)
    wide = (*lead, config.feature_map.output_dim(d)) if kind == "channels" and config.structure.linear else lead

    def draw(shape: tuple[int, ...], top: float) -> Tensor:
        return top * torch.rand(shape, generator=g, **FLOAT)

    return Gates(draw(lead, 0.1), draw(wide, 1.0) if decays else None, draw(lead, 0.9) if moves else None)


def token(config: MemoryConfig, kind: str, g: torch.Generator, lead: tuple[int, ...], d: int = 8, values: int = 8) -> Any:
    q, k, v = (torch.randn(*lead, width, generator=g, **FLOAT) for width in (d, d, values))
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, gates_of(kind, config, lead, d, g)


def params_of(config: MemoryConfig, d: int = 8, heads: int = 2) -> Any:
    return config.feature_map.init(d, heads=heads, generator=torch.Generator().manual_seed(1), **FLOAT)


def whole(config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates, **given: Any) -> tuple[Tensor, MemoryState]:
    """The token loop, which has no short way."""
    timed = Gates(*(g.unsqueeze(1) if isinstance(g, Tensor) else g for g in gates))
    y, state = memory_scan(config, *(x.unsqueeze(1) for x in (q, k, v)), timed, engine="sequential", **given)
    return y.squeeze(1), state


def same(a: Any, b: Any) -> bool:
    mine, others = (pytree.tree_flatten_with_path(tree)[0] for tree in (a, b))
    pairs = [(x, y) for (at, x), (where, y) in zip(mine, others, strict=True) if at == where]
    equal = (x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
    return len(pairs) == len(mine) and all(equal)


def programs(config: MemoryConfig) -> list[OneToken]:
    return list(config.programs.values())


def walk(config: MemoryConfig, kind: str = "tensors", dtype: torch.dtype = torch.float32, tokens: int = 5) -> None:
    """Steps beside the whole way: the same bits at every token, of outputs and of all that is carried."""
    g = torch.Generator().manual_seed(0)
    given, state = {"phi_params": params_of(config)}, None
    for _ in range(tokens):
        q, k, v, gates = token(config, kind, g, (3, 2))
        q, k, v = (x.to(dtype) for x in (q, k, v))
        expected = whole(config, q, k, v, gates, state=state, **given)
        y, state = memory_step(config, q, k, v, gates, state=state, **given)
        assert same((y, state), expected)
        assert state.memory.keys() == expected[1].memory.keys()


@pytest.mark.spec("ENG-STEP-I2")
@pytest.mark.parametrize("name", RULES)
def test_steps_have_the_bits_of_the_whole_way(name: str):
    for title, fields in VARIANTS.items():
        config = varied(named_rule(name), fields)
        if config is not None:
            walk(config, "tensors", torch.bfloat16 if title == "as it is" else torch.float32)
            assert len(programs(config)) == (config.on_nonfinite != "skip"), title


@pytest.mark.spec("ENG-STEP-I2")
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_gates_of_every_kind(kind: str, fields: dict[str, Any]):
    for base in (MemoryConfig(retention="decay"), MemoryConfig(retention="decay", algorithm="momentum")):
        config = varied(base, fields)
        if config is not None:
            walk(config, kind)
            assert programs(config)
