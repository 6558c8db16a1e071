"""Every engine that runs a rule exactly gives what the token loop gives: whole and in pieces, by tape and by autograd,
masked or not, with gates at 0 and 1."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from hecate.engine import exact_engines
from tests.engine.test_properties import in_pieces, whole
from tests.memories import case_of, config_of

DECAY: dict[str, Any] = {"retention": "decay"}
FIRST = {**DECAY, "decay_order": "before_gradient"}
BOTH = ("erase", "write")
KEY = {**DECAY, "structure": {"kind": "matrix", "learns": "key"}}
NORMALISED = {**DECAY, "structure": {"kind": "mlp", "activation": "tanh", "last": 0.1}, "step": "normalized"}
NORMED = {"kind": "mlp", "bias": True, "norm": "layer", "residual": True}
DAMPENED = {"kind": "momentum", "dampening": True}

# Of a name the fields of a rule, and what `case_of` is told.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # keys that erase and keys that write, decay of value channels, several writes a token
    "two writes": ({**FIRST, "writes": 2}, {"more": BOTH, "channels": True}),
    "erased before the decay": ({"retention": "decay"}, {"more": BOTH, "channels": True}),
    "values decay": (FIRST, {"more": (*BOTH, "retain_value"), "channels": True, "ends": 0.0}),
    "sums decay": ({"bias": "dot", **DECAY, "read": "before"}, {"more": ("write", "retain_value"), "ends": 0.0}),
    "huber": ({"bias": "huber", "algorithm": "momentum", **DECAY}, {"more": BOTH}),
    "vector": ({"structure": "vector", "algorithm": "momentum", **DECAY}, {"more": BOTH}),
    "the larger of two": ({"normalizer": "max", **DECAY}, {"more": ("write",)}),
    # a matrix that learns keys
    "learns keys": ({**KEY, "decay_order": "before_gradient"}, {"more": ("retain_value",)}),
    "learns keys, read before": ({**KEY, **FIRST, "read": "before"}, {"more": ("retain_value",)}),
    "learns keys by momentum": ({**KEY, "algorithm": "momentum"}, {"more": ("retain_value",)}),
    "learns keys, huber": ({**KEY, "bias": "huber"}, {}),
    "learns sums of keys": ({**KEY, "bias": "dot"}, {}),
    # steps normalised by what writes do to one another, and memories that forget towards their start
    "gd": (NORMALISED, {}),
    "momentum": ({**NORMALISED, "algorithm": DAMPENED}, {}),
    "before the gradient": ({**NORMALISED, "decay_order": "before_gradient"}, {}),
    "towards zero": ({**NORMALISED, "retention": {"kind": "decay", "towards": "zero"}}, {}),
    "norm and bias": ({**NORMALISED, "structure": NORMED}, {}),
    "gated": ({**NORMALISED, "structure": "gated_mlp", "read": "before"}, {}),
    "raw": ({**NORMALISED, "step": "raw"}, {}),
    "chunk": ({**NORMALISED, "chunk": 8, "algorithm": DAMPENED}, {}),
    "chunk, norm": ({**NORMALISED, "chunk": 8, "structure": NORMED, "read": "before"}, {}),
    "longer than a block": ({**NORMALISED, "chunk": 100}, {}),
    "one step a chunk": ({**NORMALISED, "chunk": 6, "commit": "chunk", "algorithm": DAMPENED}, {}),
    "one step a long chunk": ({**NORMALISED, "chunk": 100, "commit": "chunk"}, {}),
    "built": ({**NORMALISED, "chunk": 5, "retention": "l2", "bias": "huber"}, {}),
    "mirror": ({**NORMALISED, "chunk": 5, "retention": "lq"}, {}),
    "linear": ({"step": "normalized", "chunk": 8, **DECAY}, {}),
    "linear towards the start": ({"retention": {"kind": "decay", "towards": "start"}}, {}),
}


@pytest.mark.spec("RULE-GATES-D1", "ENG-WRITES-D1", "ENG-PAR-D5", "STR-MATRIX-D2", "RULE-STEP-D3", "RET-START-D2")
@pytest.mark.spec("ALG-MOM-D2")
@pytest.mark.parametrize("masks", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", CASES)
def test_engines_and_pieces_agree_with_the_token_loop(name: str, masks: bool) -> None:
    fields, told = CASES[name]
    config = config_of(**fields)
    case = case_of(config, masks=masks, **{"length": 40, "d": 3, "width": 3, "ends": 0.1, **told})
    expected = whole(case, engine="sequential", autodiff="torch")
    engines = exact_engines(config, length=40, masked=masks)
    if "more" in told:  # gates that layers' kernels do not know
        engines = [engine for engine in engines if engine != "compiled_layers"]
    assert engines
    for engine in engines:
        whole(case, engine=engine).equals(expected)
    if masks:  # where more can go wrong, in every way
        whole(case, engine="sequential", autodiff="tape").equals(expected)
        for engine in ("sequential", *engines):
            in_pieces(case, [3, 4, 20], engine=engine).equals(expected)
        for engine, autodiff in product(engines, ("torch", "tape")):
            whole(case, engine=engine, autodiff=autodiff).equals(expected)
