"""Steps of retention and links as text, and in kernels, against their own methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from hecate import MemoryConfig
from hecate.engine import Plan, choose
from hecate.errors import ConfigError
from hecate.formula import Weights, retention_formula
from hecate.formula.printer import printed
from hecate.retention import Bregman, ElasticNet, Link, NormCap, Retention, SoftmaxLink
from hecate.tape.ops import over
from hecate.testing.rule import in_torch
from tests.engine.test_properties import whole
from tests.formula.draws import drawn
from tests.memories import case_of, config_of
from tests.registries import shipped_kinds

SHIPPED = shipped_kinds(Retention)
WORDS = {name: ["column", "row", "tangent", "divide", "exact", "paper"] for name in ("slot", "form")}
SHAPES = [(1, 1), (3, 7), (6, 2)]


class Centring(Retention):
    """centring: r M + D without the means of its columns, and as long as sqrt(the sum of their lengths)."""

    kind: Literal["retention_test_centring"] = "retention_test_centring"
    uses_retain: ClassVar[bool] = True

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        moved = over(retain, memory) * memory + direction
        moved = moved - moved.mean(-2, keepdim=True)
        lengths = moved.square().sum(-2, keepdim=True).add(1e-3).sqrt()
        return moved / (1 + lengths.sum(-1, keepdim=True)).sqrt()


class Even(Link):
    """even: A / (its row's mean size + that of all), the row's largest number taken out."""

    kind: Literal["retention_test_even"] = "retention_test_even"
    share: float = 0.5

    def memory(self, dual: Tensor) -> Tensor:
        near = dual - self.share * dual.amax(-1, keepdim=True)
        size = near.square().mean(-1, keepdim=True) + near.square().mean((-2, -1), keepdim=True)
        return near.tanh() / (size + 0.1).sqrt()


class Gated(Link):
    """gated: tanh(A) where it is above .1, over a sum of such: an answer that two loops over a row ask for."""

    kind: Literal["retention_test_gated"] = "retention_test_gated"

    def memory(self, dual: Tensor) -> Tensor:
        on = dual.tanh() > 0.1
        whole = torch.where(on, dual, 0.0).square().sum(-1, keepdim=True)
        return torch.where(on, dual.tanh(), 0.3 * dual) / (1 + whole)


class Sorted(Link):
    """sorted: what no kernel knows."""

    kind: Literal["retention_test_sorted"] = "retention_test_sorted"

    def memory(self, dual: Tensor) -> Tensor:
        return dual.sort(-1).values


class Mixing(Retention):
    """mixing: memories that look at each other."""

    kind: Literal["retention_test_mixing"] = "retention_test_mixing"

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return memory + direction - memory.mean(0)


class One(Retention):
    """one: a step for one retain alone."""

    kind: Literal["retention_test_one"] = "retention_test_one"
    uses_retain: ClassVar[bool] = True

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return memory * retain.view(-1, 1, 1) ** 2 + direction


# They are passed as values: tests of all known kinds need not know them.
for family in (Retention, Link):
    for kind in [kind for kind in family._registry if kind.startswith("retention_test_")]:
        del family._registry[kind]

OWN = [Centring(), Bregman(link=Even()), Bregman(link=Gated()), NormCap(retention=Centring(), norm=0.5)]


def near(found: Any, expected: Tensor, *inputs: Tensor, slack: float = 64) -> None:
    """Within rounding of the largest number of a weight."""
    found = torch.as_tensor(found, dtype=expected.dtype)
    if expected.dim() < 3:
        found = found.flatten() if found.dim() else found.expand_as(expected)
    scale = max(float(item.abs().max()) for item in (expected, *inputs)) + 1e-300
    assert float((found - expected).abs().max()) <= slack * torch.finfo(expected.dtype).eps * scale


def check(formula: Weights, method: Callable[..., Tensor], vjp: Callable[..., Any], *inputs: Tensor) -> None:
    """The texts of a function and its pullback; r is broadcast as kernels have it."""
    names, height, width = ("XDr" if len(inputs) == 3 else "A"), *inputs[0].shape[1:]
    g = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=inputs[0].dtype)
    text = printed("f", names, [formula.out])
    back = printed("back", f"{names}g", formula.pulled)
    wide = [item.view(-1, 1, 1) if item.dim() == 1 else item for item in inputs]
    numbers = inputs[0].dtype, width, height
    near(in_torch(text, *numbers)(*wide, text.numbers), method(*inputs), *inputs)
    found = in_torch(back, *numbers)(*wide, g, back.numbers)
    found = found if isinstance(found, tuple) else (found,)
    for own, expected in zip(found, vjp(*inputs, g), strict=True):
        if expected is not None:
            near(own, expected, *inputs, g, slack=4096)  # slopes of lengths and powers near their floors


@pytest.mark.spec("ENG-FORMULA-D4")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_text_equals_methods(dtype: torch.dtype) -> None:
    """Of every retention that ships, drawn ones, and own ones without a derivative by hand."""
    source = torch.Generator().manual_seed(0)
    for retention in [*(cls() for cls in SHIPPED.values()), *drawn(SHIPPED, 60, WORDS, without=("channels",)), *OWN]:
        formula = retention_formula(retention)
        assert not isinstance(formula, str), (retention, formula)
        for height, width in SHAPES:
            memory, direction = (torch.randn(2, height, width, generator=source, dtype=dtype) for _ in range(2))
            memory = retention.start(memory)
            for step, shape in ((formula.single, (2,)), (formula.cells, (2, height, width))):
                assert not isinstance(step, str)
                retain = 0.5 + 0.5 * torch.rand(shape, generator=source, dtype=dtype)
                check(step, retention.step, retention.step_vjp, memory, direction, retain)
            if formula.link is not None:
                weights_vjp = lambda carried, g, own=retention: (own.weights_vjp(carried, g),)  # noqa: E731
                check(formula.link, retention.weights, weights_vjp, memory)


# Steps by one retain and by one of each cell; links, which meet no retain, by either.
IN_KERNELS = [(0, False), (0, True), (1, False), (2, True), (3, False), (3, True)]


@pytest.mark.spec("ENG-FORMULA-D4", "ENG-NUM-D8")
@pytest.mark.parametrize(
    ("at", "channels"), IN_KERNELS, ids=[f"{OWN[at].kind}{'-channels' * wide}" for at, wide in IN_KERNELS]
)
def test_a_retention_of_ones_own_runs_in_kernels(at: int, channels: bool) -> None:
    """Outputs, states and all gradients, at widths around whole vectors and fours."""
    pytest.importorskip("numba")
    fields = ({"algorithm": "momentum", "bias": "huber"}, {"read": "before"})[(at + channels) % 2]
    config = config_of(retention=OWN[at], **fields)
    assert choose(Plan.sketch(config, length=64)).name == "compiled"
    for d, width, masks in ((1, 1, False), (5, 3, True), (16, 9, False), (19, 4, True)):
        more = ("retain_value",) if channels else ()
        ends = 0.2 if masks else 0.0
        case = case_of(config, d=d, width=width, length=21, channels=channels, masks=masks, ends=ends, more=more)
        whole(case, engine="compiled").equals(whole(case, engine="sequential"), 1e-9)


@pytest.mark.spec("ENG-FORMULA-D4")
@pytest.mark.parametrize(
    ("retention", "reason"),
    [(Bregman(link=Sorted()), "aten.sort has no kernel form"), (Mixing(), "more than a row")],
    ids=lambda given: given if isinstance(given, str) else given.kind,
)
def test_what_cannot_be_printed_is_refused_in_a_sentence(retention: Retention, reason: str) -> None:
    config = MemoryConfig(retention=retention)
    with pytest.raises(ConfigError, match=f"retention '{retention.kind}' as configured has no kernel: .*{reason}"):
        choose(Plan.sketch(config, length=64), "compiled")
    assert choose(Plan.sketch(config, length=64)).name in ("sequential", "parallel")


@pytest.mark.spec("ENG-FORMULA-D4")
def test_a_step_of_one_retain_has_kernels_for_that() -> None:
    pytest.importorskip("numba")
    config = config_of(retention=One())
    assert choose(Plan.sketch(config, length=64)).name == "compiled"
    case = case_of(config, length=21)
    whole(case, engine="compiled").equals(whole(case, engine="sequential"))
    with pytest.raises(ConfigError, match="'retention_test_one' with a retain for every channel has no kernel"):
        choose(Plan.sketch(config, length=64, channels=True), "compiled")


@pytest.mark.spec("ENG-FORMULA-D4")
def test_numbers_share_a_kernel_and_another_formula_has_its_own() -> None:
    pytest.importorskip("numba")
    from hecate.engine.cpu.family import parts_of

    def parts(retention: Retention) -> list[str]:
        found = parts_of(MemoryConfig(retention=retention), channels=False, values=False)
        return [found.step.name, found.link.name]

    class Softmax(SoftmaxLink):
        """softmax: that of 2 A."""

        kind: Literal["retention_test_softmax"] = "retention_test_softmax"

        def memory(self, dual: Tensor) -> Tensor:
            return self.scale * (2 * dual).softmax(-1)

    del Link._registry["retention_test_softmax"]
    assert parts(ElasticNet(threshold=0.1)) == parts(ElasticNet(threshold=0.2)) != parts(NormCap())
    assert parts(NormCap(norm=2.0)) == parts(NormCap(norm=3.0))
    assert parts(Bregman(link=SoftmaxLink(scale=2.0))) == parts(Bregman(link=SoftmaxLink(scale=3.0)))
    assert parts(Bregman(link=Softmax(scale=2.0))) != parts(Bregman(link=SoftmaxLink(scale=2.0)))
    first = parts(Bregman(link=Softmax()))
    Softmax.memory = lambda self, dual: self.scale * (3 * dual).softmax(-1)  # type: ignore[method-assign]
    assert parts(Bregman(link=Softmax())) != first


class Halved(Retention):
    """halved: M / 2 + D, which is no retain gate's doing."""

    kind: Literal["retention_test_halved"] = "retention_test_halved"
    linear: ClassVar[bool] = True  # type: ignore[assignment]

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return memory / 2 + direction


del Retention._registry["retention_test_halved"]


@pytest.mark.spec("ENG-FORMULA-D4")
def test_a_step_that_is_declared_linear_is_one() -> None:
    """Engines add directions to what is kept, the token loop too: another step would be passed over."""
    with pytest.raises(ConfigError, match="'retention_test_halved' is declared linear, and its `step` is not"):
        MemoryConfig(retention=Halved())
    for retention in (cls() for cls in SHIPPED.values()):
        formula = retention_formula(retention)
        assert not isinstance(formula, str) and formula.adds >= retention.additive


@pytest.mark.spec("ENG-FORMULA-D3")
def test_texts_are_printed_and_listed() -> None:
    from hecate.train.catalogue import catalogue, formula_text

    text = formula_text("{kind: kl, scale: 2.0}", "retention")
    assert "top(A)" in text and "# c = (2.0,)" in text and "def link_back(A, g, c):" in text
    header, rows = catalogue("retention")
    kernels = {row[0]: row[header.index("kernel")] for row in rows}
    assert kernels["decay"] == "printed" and kernels["sphere"] == "printed, for whole weights"
