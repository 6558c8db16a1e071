"""Componentwise maps as text: the numbers of their methods, centred and pulled back too, in torch."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor

from hecate.errors import ConfigError
from hecate.formula import Text, Unprintable, map_formula
from hecate.optim.lift import RowMap
from hecate.phi import DPFP, ELU, Exp, FeatureMap, OddLift, Tanh
from hecate.phi.elementwise import Elementwise
from hecate.testing.rule import in_torch
from hecate.train.catalogue import catalogue, formula_text
from tests.formula.draws import drawn
from tests.formula.test_biases import SPECIAL, close
from tests.registries import shipped_kinds

NOTHING: Any = {"learned": {}, "frozen": {}}
SHIPPED = {
    kind: cls
    for kind, cls in shipped_kinds(FeatureMap).items()
    if cls.__module__ == "hecate.phi.elementwise" and cls().traits().componentwise and kind != "identity"
}
WAYS = [(False, False), (True, False), (False, True), (True, True)]


def text_of(feature_map: FeatureMap, **how: bool) -> Text:
    found = map_formula(feature_map, **how)
    assert isinstance(found, Text), found
    return found


def check(feature_map: FeatureMap, dtype: torch.dtype) -> None:
    """Against the rows' map of optimisers, which subtracts phi(0) and pulls back by itself."""
    draws = 2 * torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=dtype)
    special = torch.tensor(SPECIAL, dtype=dtype)
    if feature_map.kind == "gelu_shifted":  # of infinity torch's gelu makes NaN in float32
        special = special[~special.isinf()]
    x = torch.cat([special, draws])
    for centred, pulled in WAYS:
        text = text_of(feature_map, centred=centred and feature_map.parity != "odd", pulled=pulled)
        lift = "vjp" if pulled else "identity"
        rows = RowMap(feature_map, NOTHING, lift, centre=centred, by_number=True).with_params(NOTHING, x[:, None])
        expected = rows(x)
        if centred and not pulled:
            assert not in_torch(text, dtype, 1)(torch.zeros(2, dtype=dtype), text.numbers).any()
        # Products with an infinite factor, and what cancels against phi(0), are as large as their terms.
        size = feature_map(x, NOTHING).abs() + x.abs() * (feature_map.kind == "gelu_shifted")
        operations = text.operations | {"phi(0)"} if centred else text.operations  # which rounds once more in float32
        close(in_torch(text, dtype, 1)(x, text.numbers)[:, None], expected[:, None], operations, size[:, None])


@pytest.mark.spec("OPT-FUSED-D1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", SHIPPED)
def test_a_shipped_map(kind: str, dtype: torch.dtype) -> None:
    check(SHIPPED[kind](), dtype)


def test_drawn_maps_and_maps_of_maps() -> None:
    for feature_map in (*drawn(SHIPPED, 60, {}), OddLift(inner=ELU()), OddLift(inner=Exp(shift=0.5))):
        check(feature_map, torch.float64)


class Softsign(FeatureMap):
    """map_test_softsign: x / (scale + |x|), of which torch makes the derivative."""

    kind: Literal["map_test_softsign"] = "map_test_softsign"
    scale: float = Field(default=1.0, gt=0)
    promises = Tanh.promises

    def features(self, x: Tensor, params: Any) -> Tensor:
        return x / (self.scale + x.abs())


def test_a_map_of_ones_own() -> None:
    check(Softsign(scale=0.3), torch.float64)


def test_numbers_of_a_config_are_arguments() -> None:
    one, two = (text_of(Exp(shift=shift), centred=True) for shift in (0.3, -0.7))
    assert one.source == two.source and one.numbers == pytest.approx((0.3, math.exp(-0.3)))
    assert two.numbers == pytest.approx((-0.7, math.exp(0.7)))


def test_a_class_that_is_defined_anew_has_its_own_text() -> None:
    def made(factor: float) -> Text:
        class Line(Elementwise):
            """map_test_line: factor x."""

            kind: Literal["map_test_line"] = "map_test_line"
            promises = Tanh.promises

            def value(self, x: Tensor) -> Tensor:
                return factor * x

            def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
                return factor * g

        return text_of(Line())

    assert made(2.0).source != made(3.0).source


class Sum(FeatureMap):
    """map_test_sum: says that it goes number by number, and adds up the row."""

    kind: Literal["map_test_sum"] = "map_test_sum"
    promises = Tanh.promises

    def features(self, x: Tensor, params: Any) -> Tensor:
        return x + x.sum(-1, keepdim=True)


def test_what_has_no_text_says_why() -> None:
    assert "needs the whole row" in str(map_formula(Sum()))
    assert map_formula(DPFP()) == "it makes features of rows, not of single numbers"
    with pytest.raises(Unprintable, match="of rows"):
        formula_text("dpfp", "phi")
    assert "tanh(x)" in formula_text("tanh", "phi")
    header, rows = catalogue("phi")
    kernels = {row[0]: row[header.index("kernel")] for row in rows}
    assert kernels["tanh"] == "printed, in optimisers" and kernels["elu"] == "printed, in optimisers and on a GPU"
    assert kernels["compose"] == "depends on its settings"
    assert kernels["dpfp"] == "torch: it makes features of rows, not of single numbers"
    with pytest.raises(ConfigError, match="no formulas of family 'gating'. Known: bias, retention"):
        formula_text("none", "gating")
