"""The diagonal memory: its transcription, its engines, and what cannot be asked of it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from hecate import MemoryConfig, memory_scan, structure
from hecate.engine import Engine, Plan, choose, exact_engines, explain
from hecate.engine.parallel import coordinate_refusal
from hecate.errors import ConfigError
from hecate.testing import check_rule
from hecate.testing.rule import check_diagonal
from tests.engine.test_properties import whole
from tests.memories import BIASES, case_of, close, config_of, reference_of
from tests.reference import vector as reference

FORMS = BIASES[:5]  # all but the norm of huber, which couples coordinates
ORDERS = ["with_step", "before_gradient"]
WAYS = [
    {"retention": retention, "algorithm": algorithm, "decay_order": order, "read": read}
    for retention, algorithm, order, read in product(("none", "decay"), ("gd", "momentum"), ORDERS, ("after", "before"))
    if retention == "decay" or order == "with_step"
]
ENGINES = ["sequential", *exact_engines(MemoryConfig(structure="vector"))]


def vector(**fields) -> MemoryConfig:
    return config_of(structure="vector", **fields)


def name_of(value) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.mark.spec("STR-VECTOR-D1", "STR-VECTOR-R1")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fields", WAYS, ids=name_of)
def test_against_numpy(fields, engine):
    """Outputs and states; in turn with masks and resets, gates at 0 and 1, retain per channel."""
    for seed, bias in enumerate(FORMS):
        channels = fields["retention"] == "decay" and seed % 2 == 0
        case = case_of(
            vector(bias=bias, **fields),
            length=19, d=3, width=3, seed=seed, masks=bool(seed % 2), ends=0.2, channels=channels,
        )  # fmt: skip
        y, state = case.scan(engine=engine)
        rule = reference_of(case.config)
        for b, h in product(range(2), range(2)):
            gates = [np.ones(19) if g is None else g[b, :, h].numpy() for g in case.gates[:3]]
            expected, w, s = reference.scan(
                rule,
                *(item[b, :, h].numpy() for item in (case.q, case.k, case.v)),
                *gates,
                case.initial["weight"][h].numpy(),
                *(None if mask is None else mask[b].numpy() for mask in (case.write, case.reset)),
            )
            close(y[b, :, h], expected, 1e-12, f"{bias} y")
            close(state.memory["weight"][b, h], w, 1e-12, f"{bias} memory")
            if state.slots:
                close(state.slots["momentum.weight"][b, h], s, 1e-12, f"{bias} slot")


@pytest.mark.spec("STR-VECTOR-V1", "STR-VECTOR-R1")
@pytest.mark.parametrize(("at", "bias"), list(enumerate(FORMS)), ids=name_of)
def test_conformance(at, bias):
    for algorithm, order in zip(("gd", "momentum"), ORDERS if at % 2 else ORDERS[::-1], strict=True):
        config = vector(bias=bias, retention="decay", algorithm=algorithm, decay_order=order)
        check_rule(config)
        assert set(exact_engines(config)) >= {"parallel"}


@pytest.mark.spec("STR-VECTOR-R1")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fields", [{}, {"key_norm": "l2"}, {"step": "implicit"}], ids=name_of)
def test_gradients_of_every_engine(fields, engine):
    """Several blocks, masks, resets, retain per channel; with the final state's gradient."""
    config = vector(bias="huber", retention="decay", algorithm="momentum", **fields)
    for channels in (False, True):
        case = case_of(config, length=29, d=3, width=3, masks=True, ends=0.1, channels=channels, seed=4)
        whole(case, engine=engine).equals(whole(case, engine="sequential", autodiff="torch"))


@pytest.mark.spec("STR-VECTOR-R2")
def test_a_diagonal_matrix_holds_the_same():
    """On keys of one coordinate a matrix memory stays diagonal: the vector is its diagonal."""
    config = vector(retention="decay")
    case = case_of(config, batch=1, heads=1, length=12, d=4, width=4)
    spot = torch.nn.functional.one_hot(torch.arange(12) % 4, 4)[None, :, None].double()
    q, k, v = case.q, spot * case.k, spot * case.v
    y, state = memory_scan(config, q, k, v, case.gates)
    wide, full = memory_scan(config_of(retention="decay"), q, k, v, case.gates)
    close(y, wide, 1e-12)
    close(torch.diag_embed(state.memory["weight"]), full.memory["weight"], 1e-12)


@pytest.mark.spec("STR-VECTOR-R1")
def test_biases_that_couple_coordinates_run_token_by_token():
    config = vector(bias={"kind": "huber", "norm": True})
    for refusal in (Engine.registry["parallel"].refuses(config), coordinate_refusal(config)):
        assert "bias 'huber'" in refusal and "coordinates apart" in refusal
    assert coordinate_refusal(config_of(bias=config.bias)) is None
    assert explain(Plan.sketch(config, length=100))[0] == "sequential"
    with pytest.raises(ConfigError, match="coordinates apart"):
        choose(Plan.sketch(config), "parallel")
    check_rule(config)


@pytest.mark.spec("STR-VECTOR-I1")
def test_what_is_refused():
    x, wide = torch.ones(1, 2, 1, 3), torch.ones(1, 2, 1, 4)
    with pytest.raises(ConfigError, match="width 3 and values width 4"):
        memory_scan(MemoryConfig(structure="vector"), x, x, wide)
    with pytest.raises(ConfigError, match="cancels in the quotient"):
        MemoryConfig(structure="vector", feature_map="elu", normalizer="sum")
    with pytest.raises(ConfigError, match="diverges"):
        MemoryConfig(structure="vector", key_norm="l2", algorithm={"kind": "gd", "lr": 3.0})


@pytest.mark.spec("STR-ANY-V1")
def test_coordinates_that_mix_are_found(monkeypatch):
    memory, p = (torch.ones(2, 3),), torch.ones(2, 3)
    check_diagonal("structure.vector", structure.Vector(), memory, p)
    monkeypatch.setattr(structure.Vector, "predict", lambda self, memory, p: (memory[0] * p).cumsum(-1))
    with pytest.raises(AssertionError, match="coordinates of the prediction mix"):
        check_diagonal("structure.vector", structure.Vector(), memory, p)
