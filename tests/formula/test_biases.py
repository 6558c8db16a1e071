"""The printed text of every bias against its own methods: no kernel may differ from what torch computes."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from hecate import MemoryConfig
from hecate.bias import L2, Bias, Dot
from hecate.errors import ConfigError
from hecate.formula import Unprintable, bias_formula
from hecate.testing.rule import in_torch
from tests.engine.own_biases import LossAlone, Sorted
from tests.formula.draws import drawn
from tests.registries import shipped_kinds

SPECIAL = [0.0, -0.0, 0.3, -0.3, 1.0, -1.0, 1.0001, 7.0, 1e-8, 1e30, -1e30, 1e300, math.inf, -math.inf, math.nan]
IEEE = set("add sub mul div neg abs sqrt where lt le gt ge eq ne and or top".split())
SHIPPED = shipped_kinds(Bias)
WORDS = {"target": ["softmax", "distribution"]}


def close(found: Any, expected: Tensor, operations: frozenset[str], size: Tensor) -> None:
    """Equal to the bit where operations are IEEE's alone, in the same order; else within rounding of the largest number
    of a row, of the result or of what cancels in it, which has that `size`."""
    found = found if isinstance(found, Tensor) else torch.full_like(expected, found)
    found = found.expand_as(expected)
    assert torch.equal(found.isnan(), expected.isnan())
    size = size.nan_to_num(0.0, 0.0, 0.0)
    if {item for item in operations if not item.startswith("in ")} <= IEEE:
        assert torch.equal(found.nan_to_num(5.0), expected.nan_to_num(5.0))
    else:
        scale = torch.maximum(expected.nan_to_num(0.0, 0.0, 0.0).abs(), size).amax(-1, keepdim=True).clamp(min=1e-300)
        bound = 64 * torch.finfo(expected.dtype).eps * scale
        same = (found == expected) | expected.isnan()
        assert bool((same | ((found - expected).abs() <= bound)).all())


def check(bias: Bias, dtype: torch.dtype) -> None:
    formula = bias_formula(bias)
    source = torch.Generator().manual_seed(0)
    p, v, g = (2 * torch.randn(30, 7, generator=source, dtype=dtype) for _ in range(3))
    p[:4] = v[:4]  # errors of 0
    cases = [(p, v, g)]
    if formula.coordinatewise:
        special = torch.tensor(SPECIAL, dtype=dtype)
        x, y = (item.flatten().repeat(32)[None] for item in torch.meshgrid(special, special, indexing="ij"))
        cases.append((x, y, y.roll(3)))
    for p, v, g in cases:
        u = bias.grad(p, v)
        psi, pull = (in_torch(text, dtype, p.shape[-1]) for text in (formula.psi, formula.pull))
        # g - <s, g> cancels under a softmax s near one-hot
        size = 0 * p if formula.coordinatewise else g.abs() / min(1.0, getattr(bias, "temperature", 1.0))
        close(psi(p, v, formula.psi.numbers), u, formula.psi.operations, 0 * p)
        pulled = pull(p, v, u, g, formula.pull.numbers)
        for found, expected in zip(pulled, bias.grad_vjp(p, v, g), strict=True):
            close(found, expected, formula.pull.operations | formula.psi.operations, size)


@pytest.mark.spec("ENG-FORMULA-D2")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", SHIPPED)
def test_a_shipped_bias(kind, dtype):
    check(SHIPPED[kind](), dtype)


def test_drawn_biases():
    for bias in drawn(SHIPPED, 200, WORDS):
        check(bias, torch.float64)


class Choice(Bias):
    """choice: u = a above v and a - 1 at and below it."""

    kind: Literal["choice"] = "choice"

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.where(pred > target, 0.3, -0.7).to(pred.dtype)


class Steered(Bias):
    """steered: of fewer numbers where p is a little less than 2."""

    kind: Literal["steered"] = "steered"
    p: float = 2.0

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        square = (pred - target).square()
        return (0.3 * square + 0.7 * (self.p + square).log() if self.p >= 2 else square).sum(-1)


# They are passed as values: tests of all known kinds need not know them.
for own in ("choice", "steered"):
    del Bias._registry[own]


def test_a_loss_and_nothing_else_has_a_text():
    formula = bias_formula(LossAlone())
    assert formula.coordinatewise
    check(LossAlone(scale=0.7), torch.float64)
    # tanh(e / scale), by another path than the one that is printed
    e = torch.linspace(-3, 3, 32, dtype=torch.float64)[None]
    found = in_torch(formula.psi, e.dtype, 32)(e, 0 * e, formula.psi.numbers)
    torch.testing.assert_close(found, torch.tanh(e / 1.5), rtol=1e-14, atol=1e-14)


@pytest.mark.spec("ENG-FORMULA-D2")
def test_numbers_of_a_config_are_arguments():
    one, other = bias_formula(LossAlone(scale=0.7)), bias_formula(LossAlone(scale=2.5))
    assert one.digest == other.digest
    assert one.psi.numbers != other.psi.numbers
    # a number that steers which way is taken has a text each
    assert bias_formula(SHIPPED["lp"](p=1.5)).digest != bias_formula(SHIPPED["lp"](p=3.0)).digest
    assert bias_formula(SHIPPED["lp"](p=2.5)).digest == bias_formula(SHIPPED["lp"](p=3.5)).digest


def test_a_number_that_steers_has_its_own_text():
    pred, target = torch.linspace(-2, 2, 28, dtype=torch.float64).view(4, 7).chunk(2)
    for bias in (Steered(p=2.0), Steered(p=1.99), Steered(p=2.5)):
        psi = bias_formula(bias).psi
        found = in_torch(psi, torch.float64, 7)(pred, target, psi.numbers)
        torch.testing.assert_close(found, bias.grad(pred, target), rtol=1e-14, atol=1e-14)
    assert bias_formula(Steered(p=2.2)).digest == bias_formula(Steered(p=2.5)).digest != bias_formula(Steered()).digest


def test_traits_are_those_that_are_declared():
    found = {kind: bias_formula(cls()) for kind, cls in SHIPPED.items()}
    assert {kind for kind, item in found.items() if item.target} == {"dot"}
    assert {kind for kind, item in found.items() if item.error} == {"l2"}
    assert {kind for kind, item in found.items() if item.linear} == {kind for kind, c in SHIPPED.items() if c().linear}
    assert {kind for kind, item in found.items() if not item.coordinatewise} == {"kl", "robust", "yaad"}
    assert not bias_formula(SHIPPED["huber"](norm=True)).coordinatewise


def test_a_choice_between_two_numbers_is_of_another_dtype():
    """torch has it in its default dtype, which rounds .3."""
    with pytest.raises(Unprintable, match=r"computes in torch\.float(32|64), in aten\.where"):
        bias_formula(Choice())


def test_a_class_that_is_defined_anew_has_its_own_text():
    def of(factor: float) -> type[Bias]:
        class Own(Bias):
            kind: Literal["own_again"] = "own_again"

            def loss(self, pred: Tensor, target: Tensor) -> Tensor:
                return factor * (pred - target).square().sum(-1)

        return Own

    first = of(1.0)
    before = bias_formula(first())
    del Bias._registry["own_again"]
    assert bias_formula(of(2.0)()).digest != before.digest
    assert bias_formula(first()).digest == before.digest
    del Bias._registry["own_again"]


def test_tracing_leaves_torch_as_it_was():
    """No hidden random numbers, and inside of whatever traces already."""
    state = torch.get_rng_state()
    seen = []
    torch.func.vmap(lambda x: seen.append(bias_formula(LossAlone(scale=3.25))) or x)(torch.ones(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert seen[0].digest == bias_formula(LossAlone(scale=0.7)).digest
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert bias_formula(LossAlone(scale=4.25)).digest == seen[0].digest


@pytest.mark.spec("ENG-FORMULA-D3")
def test_the_command_line_prints_texts_and_says_who_has_one(monkeypatch):
    from hecate.train.catalogue import catalogue, formula_text

    assert "where" in formula_text("huber") and "# c = (-1.0, 1.0)" in formula_text("huber")
    assert "c = (1e-12, 1e-06, 0.5)" in formula_text("{kind: lp, p: 1.5}")
    with pytest.raises(ConfigError, match="Did you mean 'huber'"):
        formula_text("hubr")
    assert "def act(x, c)" in formula_text("gelu", "activation") and "def link_back" in formula_text("lq", "link")
    with pytest.raises(Unprintable, match="'identity' changes nothing"):
        formula_text("identity", "link")
    others = {"relu": "an activation: give --family activation or phi", "ftrl": "an algorithm: give --family algorithm"}
    for kind, other in others.items():
        with pytest.raises(ConfigError, match=f"'{kind}' is not a bias but {other}"):
            formula_text(kind)
    for given in ("[1]", "{kind: [1]}"):
        with pytest.raises(ConfigError, match=r"bias kind.* \[1\]"):
            formula_text(given)
    monkeypatch.setitem(Bias._registry, "printed_sorted", Sorted)
    header, table = catalogue("bias")
    found = {row[0]: row[header.index("kernel")] for row in table}
    assert found["huber"] == "printed" and found["kl"] == "printed, for whole rows"
    assert found["printed_sorted"] == "token loop: aten.sort has no kernel form"
    with pytest.raises(Unprintable, match="aten.sort"):
        formula_text("printed_sorted")


class Stopped(Bias):
    """formula_test_stopped: l2 whose derivative hands nothing to values."""

    kind: Literal["formula_test_stopped"] = "formula_test_stopped"

    def loss(self, pred, target):
        return 0.5 * (pred - target).square().sum(-1)

    def grad(self, pred, target):
        return pred - target

    def grad_vjp(self, pred, target, g):
        return g, torch.zeros_like(g)


class Silent(Stopped):
    """formula_test_silent: dot whose derivative hands nothing to values."""

    kind: Literal["formula_test_silent"] = "formula_test_silent"

    def grad(self, pred, target):
        return -target

    def grad_vjp(self, pred, target, g):
        return torch.zeros_like(g), torch.zeros_like(g)


for own in (Stopped, Silent):
    del Bias._registry[own.model_fields["kind"].default]


@pytest.mark.spec("ENG-FORMULA-D1")
def test_a_bias_is_l2_or_dot_with_their_derivatives_alone():
    """Engines that know l2 and dot by algebra would hand on the gradient of these."""
    assert not bias_formula(Stopped()).error and not bias_formula(Silent()).target
    assert bias_formula(L2()).error and bias_formula(Dot()).target
    assert MemoryConfig(bias=Stopped()).forms.apart
