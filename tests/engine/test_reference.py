"""`memory_scan` against the numpy token loop, field by field and in random combinations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from hecate import MemoryConfig
from tests.memories import BIASES, DEEP, case_of, close, config_of, flat_state, reference_scan

FIELDS = [
    {},
    {"chunk": 3},
    {"chunk": 3, "commit": "chunk"},
    {"chunk": 1, "commit": "chunk"},
    {"read": "before"},
    {"read": "before", "chunk": 2, "commit": "chunk"},
    {"decay_order": "before_gradient"},
    {"decay_order": "before_gradient", "commit": "chunk"},
    {"decay_order": "before_gradient", "chunk": 3},
    {"decay_order": "before_gradient", "chunk": 3, "commit": "chunk", "read": "before"},
    {"key_norm": "l2"},
    {"key_norm": "sum", "feature_map": "relu"},
    {"query_scale": "key_dim"},
    {"step": "key_normalized", "key_norm": "l2"},
    {"step": "implicit"},
    {"key_norm": "l2", "feature_map": "elu"},
    {"normalizer": "sum", "feature_map": "elu"},
    {"normalizer": "sum", "feature_map": "elu", "key_norm": "sum", "read": "before"},
    {"normalizer": "sum", "feature_map": "relu", "chunk": 3, "commit": "chunk"},
]
KNOBS = [(r, a) for r in ("none", "decay") for a in ("gd", "momentum")]


def against_numpy(config: MemoryConfig, engine: str = "sequential", **options) -> None:
    case = case_of(config, **options)
    y, state = case.scan(engine=engine)
    expected, final = reference_scan(case)
    assert np.linalg.norm(expected) > 1e-2
    close(y, expected, 1e-10, "y")
    ours = flat_state(state)
    for name, value in final.items():
        if name in ours:
            close(ours[name], value, 1e-10, name)


def id_of(value) -> str:
    items = value.items() if isinstance(value, dict) else [("", value)]
    return "-".join(f"{k}{v}" for k, v in items if k != "kind") or "plain"


def masked(at: int) -> bool:
    """By turns, so that masks meet every bias, retention and algorithm, and no masks do."""
    return bool((at + at // 2 + at // 4) % 2)


def usable(fields: dict, retention: str, structure: str | dict) -> bool:
    if fields.get("decay_order") and retention == "none":
        return False
    return structure == "matrix" or "normalizer" not in fields


@pytest.mark.spec("RULE-WRITE-D1", "ALG-MOM-D1", "RULE-CHUNK-D1", "RULE-COMMIT-D1", "RULE-READ-D1")
@pytest.mark.spec("RULE-ORDER-D1", "RULE-NORM-D1", "RULE-KEY-D1", "RULE-STEP-D1", "RULE-QSCALE-D1")
@pytest.mark.parametrize("fields", FIELDS, ids=id_of)
@pytest.mark.parametrize("structure", ["matrix", DEEP], ids=["matrix", "mlp"])
def test_every_field_with_every_knob(fields, structure):
    for seed, (bias, (retention, algorithm)) in enumerate(product(BIASES, KNOBS)):
        if usable(fields, retention, structure):
            config = config_of(structure=structure, bias=bias, retention=retention, algorithm=algorithm, **fields)
            against_numpy(config, seed=seed, masks=masked(seed), batch=1, ends=0.2, length=8)


# Over eleven tokens a cubic loss leaves the numbers in the token loop, too.
TAME = [bias for bias in BIASES if bias != {"kind": "lp", "p": 3.0}]


@pytest.mark.spec("ENG-PAR-D1", "ENG-PAR-R1")
@pytest.mark.parametrize("fields", [f for f in FIELDS if "chunk" not in f and "commit" not in f], ids=id_of)
def test_parallel_engine_with_every_field(fields):
    for seed, (bias, (retention, algorithm)) in enumerate(product(TAME, KNOBS)):
        if usable(fields, retention, "matrix"):
            config = config_of(bias=bias, retention=retention, algorithm=algorithm, **fields)
            against_numpy(config, "parallel", seed=seed, masks=masked(seed), ends=0.2, length=11)


@pytest.mark.spec("RET-DECAY-D1", "ENG-CHAN-D1")
@pytest.mark.parametrize("fields", FIELDS, ids=id_of)
def test_decay_per_phi_channel(fields):
    for seed, (bias, algorithm) in enumerate(product(("dot", "l2"), ("gd", "momentum"))):
        config = config_of(bias=bias, retention="decay", algorithm=algorithm, **fields)
        against_numpy(config, seed=seed, channels=True, masks=bool(seed % 2), ends=0.2)


@pytest.mark.spec("STR-MLP-D1")
@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "relu"])
@pytest.mark.parametrize("layers", [2, 3, 4])
@pytest.mark.parametrize("residual", [False, True])
def test_deep_memories(activation, layers, residual):
    structure = {"kind": "mlp", "layers": layers, "expansion": 2, "activation": activation}
    config = config_of(structure={**structure, "residual": residual}, retention="decay", algorithm="momentum")
    against_numpy(config, d=3, width=3, batch=1, heads=1)


@pytest.mark.spec("STR-MLP-D1", "STR-GATED-D1")
@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "mlp", "layers": 1},
        {"kind": "mlp", "layers": 1, "residual": True, "norm": "layer", "bias": True},
        {"kind": "mlp", "layers": 3, "norm": "layer", "activation": "tanh"},
        {"kind": "mlp", "layers": 2, "residual": True, "norm": "layer", "bias": True},
        {"kind": "gated_mlp", "activation": "silu"},
        {"kind": "gated_mlp", "activation": "gelu"},
    ],
    ids=lambda fields: "-".join(str(value) for value in fields.values()),
)
def test_norms_biases_and_gates_inside_a_memory(fields):
    structure = {"expansion": 2, **fields}
    config = config_of(structure=structure, retention="decay", algorithm="momentum")
    against_numpy(config, d=3, width=3, batch=1, heads=1)


@pytest.mark.spec("RULE-WRITE-V1")
@pytest.mark.parametrize(
    ("structure", "fields"),
    [(s, f) for f in FIELDS for s in ("matrix", DEEP) if usable(f, "decay", s)],
    ids=lambda value: "mlp" if value is DEEP else id_of(value),
)
def test_gradients_against_differences_of_the_numpy_loop(fields, structure):
    """No derivative of hecate or torch enters the expected value."""
    config = config_of(structure=structure, bias=BIASES[2], retention="decay", algorithm="momentum", **fields)
    case = case_of(config, batch=1, heads=1, length=6, seed=3).fresh()
    y, _ = case.scan()
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(y, case.leaves, g)
    generator, step = torch.Generator().manual_seed(2), 1e-6
    for leaf, grad in enumerate(grads):
        way = torch.randn(grad.shape, generator=generator)
        ends = []
        for sign in (1, -1):
            moved = [item.detach().clone() for item in case.leaves]
            moved[leaf] = moved[leaf] + sign * step * way
            ends.append(float((torch.as_tensor(reference_scan(case.with_leaves(moved))[0]) * g).sum()))
        slope, exact = (ends[0] - ends[1]) / (2 * step), float((grad * way).sum())
        # Truncation is of order step^2, round-off of order 1e-16 / step.
        assert abs(slope - exact) <= 1e-6 * max(float(grad.norm() * way.norm()), 1e-3), leaf
