"""Laws of compiled kernels, whether they take a matrix, any rule of rows or layers; and the rules that `auto` gives
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hecate import MemoryConfig, NonFiniteError, named_rule
from hecate.engine import Call, Plan, explain
from tests.engine.test_compiled_layers import RULES
from tests.engine.test_properties import whole
from tests.memories import case_of, config_of

pytest.importorskip("numba")

TITANS = {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}
CAPPED = {"structure": "slots", "retention": {"kind": "norm_cap", "norm": 0.8, "retention": "sphere"}}


@pytest.mark.spec("ENG-NUM-I3", "ENG-LAYERS-I2")
@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ("compiled", {**TITANS, "algorithm": "gd"}),
        ("compiled", TITANS),
        ("compiled", {**CAPPED, "algorithm": "momentum", "key_norm": "l2"}),
        ("compiled_layers", RULES["yaad"]),
    ],
)
def test_threads_change_no_bit(engine: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hecate.engine.cpu.arrays.SHARE", 1)
    case = case_of(config_of(**fields), batch=3, d=3, width=3, length=37, masks=True)
    results = []
    for threads in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(whole(case, engine=engine))
    for other in results[1:]:
        for mine, first in zip([other.y, *other.grads], [results[0].y, *results[0].grads], strict=True):
            assert torch.equal(mine, first)


@pytest.mark.spec("ENG-NUM-I4", "ENG-LAYERS-I3")
@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ("compiled", {"retention": "decay"}),
        ("compiled", {"retention": "decay", "algorithm": "delta_momentum", "key_norm": "l2"}),
        *(("compiled_layers", RULES[name]) for name in ("titans", "memora", "moneta")),
    ],
)
def test_what_is_not_finite_stays_in_its_memory_and_is_placed(engine: str, fields: dict[str, Any], junk: float) -> None:
    clean = case_of(config_of(**fields, on_nonfinite="propagate"), batch=3, d=3, width=3, length=40)
    expected, _ = clean.scan(engine=engine)
    v = clean.v.clone()
    v[1, 20, 0, 0] = junk
    bad = clean._replace(v=v).fresh()
    y, state = bad.scan(engine=engine)
    broken = torch.zeros(3, 40, 2, dtype=torch.bool)
    broken[1, 20:, 0] = True
    assert torch.equal(y[~broken], expected[~broken]) and not y[broken].isfinite().all(-1).any()
    assert not next(iter(state.memory.values()))[1, 0].isfinite().all()
    (gk,) = torch.autograd.grad(y.sum(), bad.k)
    assert gk[[0, 2]].isfinite().all() and not gk[1].isfinite().all()
    with pytest.raises(NonFiniteError, match="batch row 1, head 0, token 20"):
        bad._replace(config=config_of(**fields)).scan(engine=engine)


HUBER, NET = MemoryConfig(bias="huber"), MemoryConfig(retention="elastic_net")


@pytest.mark.spec("ENG-NUM-D4", "ENG-NUM-D8", "ENG-LAYERS-D4")
@pytest.mark.parametrize(
    ("config", "call", "engine"),
    [
        (MemoryConfig(), {"length": 2048, "shape": (64, 64)}, "compiled"),
        (MemoryConfig(), {"length": 2048, "shape": (256, 256)}, "parallel"),
        *((config, {"length": 2048, "shape": (256, 256)}, "compiled") for config in (HUBER, NET)),
        (MemoryConfig(bias="dot"), {"length": 2048, "shape": (256, 256)}, "compiled"),
        (MemoryConfig(), {"length": 15}, "parallel"),
        (MemoryConfig(), {"length": 1}, "sequential"),
        *((named_rule(name), {"length": 512}, "compiled") for name in ("delta_momentum", "lattice", "mesa")),
        *(
            (named_rule(name).model_copy(update={"chunk": chunk}), call, engine)
            for name in ("titans", "yaad", "moneta", "memora")
            for chunk, call, engine in (
                (1, {"length": 16}, "compiled_layers"),
                (1, {"length": 15}, "sequential"),
                (8, {"length": 64, "steps": 8}, "chunk"),
            )
        ),
    ],
    ids=str,
)
def test_auto_gives_them_what_they_are_fast_at(config: MemoryConfig, call: dict[str, Any], engine: str) -> None:
    assert explain(Plan.sketch(config, **call))[0] == engine


@pytest.mark.spec("ENG-NUM-D8")
def test_auto_knows_a_call_with_keys_that_erase() -> None:
    case = case_of(config_of(bias="huber", retention="decay", key_norm="l2"), length=32, more=("erase", "write"))
    assert explain(Call.of(case.config, case.q, case.k, case.v, case.gates, initial=case.initial))[0] == "compiled"
