"""Algorithms that step every number of a weight by its own gradient, as text and in kernels, against their methods."""

from __future__ import annotations

from itertools import product
from typing import ClassVar, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor

from hecate import MemoryConfig
from hecate.algorithm import FTRL, Adaptive, Algorithm, Momentum
from hecate.engine import Plan, choose
from hecate.errors import ConfigError
from hecate.formula import AlgorithmFormula, Unprintable, algorithm_formula, algorithm_texts
from hecate.tape.ops import over
from hecate.testing import check_rule
from hecate.testing.rule import in_torch
from hecate.train.catalogue import catalogue, formula_text
from tests.engine.test_properties import in_pieces, whole
from tests.formula.draws import drawn
from tests.memories import case_of, config_of

SHIPPED = {"adaptive": Adaptive, "ftrl": FTRL}


class Smooth(Algorithm):
    """smooth: D = -lr G / sqrt(1 + G^2), without anything carried."""

    kind: Literal["algorithm_test_smooth"] = "algorithm_test_smooth"

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        return (-over(lr, grad) * grad / (1 + grad.square()).sqrt(),)


class Lion(Algorithm):
    """lion: D = -lr tanh((m S + (1 - m) G) / width), S' = keep S + (1 - keep) G, and two slots that damp each other."""

    kind: Literal["algorithm_test_lion"] = "algorithm_test_lion"
    keep: float = Field(0.9, ge=0, le=1)
    width: float = Field(0.3, gt=0)
    slots: ClassVar[tuple[str, ...]] = ("mean", "size", "last")
    uses_momentum: ClassVar[bool] = True

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        mean, size, last = slots
        keep = over(momentum, grad)
        step = torch.tanh((keep * mean + (1 - keep) * grad) / self.width)
        return (
            -over(lr, grad) * step + 0.01 * last,
            self.keep * mean + (1 - self.keep) * grad,
            size / 2 + 1,
            (grad + last) / (1 + size.square()),
        )


class Whole(Algorithm):
    """whole: a step as long as lr, which no number knows alone."""

    kind: Literal["algorithm_test_whole"] = "algorithm_test_whole"

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        return (-over(lr, grad) * grad / grad.square().sum((-2, -1), keepdim=True).add(1e-6).sqrt(),)


class Gated(Smooth):
    """gated: the step of smooth, times the momentum gate."""

    kind: Literal["algorithm_test_gated"] = "algorithm_test_gated"  # type: ignore[assignment]
    uses_momentum: ClassVar[bool] = True

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        return (over(momentum, grad) * super().direction(grad, lr, momentum)[0],)


for each in [kind for kind in Algorithm._registry if kind.startswith("algorithm_test_")]:
    del Algorithm._registry[each]  # passed as values: tests of all known kinds need not know them

NESTEROV = Momentum(nesterov=True)
EVERY = [
    Adaptive(), Adaptive(decay=0.5, eps=0.1), FTRL(l1=0.1), FTRL(l1=0.0, l2=0.5), NESTEROV, Smooth(), Gated(), Lion(),
]  # fmt: skip
BESIDE: list[dict[str, object]] = [
    {}, {"retention": "decay", "read": "before"}, {"retention": "decay", "decay_order": "before_gradient"},
    {"retention": "kl", "bias": "huber"}, {"retention": {"kind": "elastic_net", "threshold": 0.01}, "bias": "kl"},
    {"structure": "vector"},
]  # fmt: skip
# Each with a third of what may be beside it, and the one with the most slots with all.
PAIRS = [
    (algorithm, beside)
    for (at, algorithm), (place, beside) in product(enumerate(EVERY), enumerate(BESIDE))
    if at % 3 == place % 3 or isinstance(algorithm, Lion)
]


@pytest.mark.spec("ENG-FORMULA-D5")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_text_equals_methods(dtype: torch.dtype) -> None:
    """Of ftrl, which is IEEE's operations one by one, to the bit, but for sums; of others, whose torch has roots, tanh
    or products and sums at once, within rounding."""
    source = torch.Generator().manual_seed(0)
    for algorithm in [*EVERY, *drawn(SHIPPED, 40, {})]:
        formula = algorithm_formula(algorithm)
        assert isinstance(formula, AlgorithmFormula) and formula.slots == len(algorithm.slots)
        count = 2 + 2 * formula.slots
        grad, g, *more = (torch.randn(2, 3, 7, generator=source, dtype=dtype) for _ in range(count))
        grad[0, 0, :3], slots, cotangents = 0, more[: formula.slots], [g, *more[formula.slots :]]
        slots = [item.abs() if name == "square" else item for name, item in zip(algorithm.slots, slots, strict=True)]
        lr, momentum = (torch.rand(2, generator=source, dtype=dtype) for _ in range(2))
        given = (grad, lr, momentum, *slots)
        wide = [item.view(-1, 1, 1) if item.dim() == 1 else item for item in given]
        text, back = algorithm_texts(algorithm)
        found = in_torch(text, dtype, 7, 3)(*wide, text.numbers)
        found = found if isinstance(found, tuple) else (found,)
        pulled = in_torch(back, dtype, 7, 3)(*wide, *cotangents, back.numbers)
        rightly = algorithm.direction_vjp(given, *cotangents)
        for own, expected in zip((*found, *pulled), (*algorithm.direction(*given), *rightly), strict=True):
            if expected is not None:
                own = torch.as_tensor(own, dtype=dtype)
                own = own.flatten() if expected.dim() == 1 and own.dim() else own
                exact = isinstance(algorithm, FTRL) and expected.dim() > 1
                slack = 0.0 if exact else 256 * torch.finfo(dtype).eps * float(expected.abs().max())
                assert float((own - expected).abs().max()) <= slack, algorithm


@pytest.mark.spec("ENG-FORMULA-D5", "ENG-NUM-D8")
@pytest.mark.parametrize(("algorithm", "fields"), PAIRS, ids=str)
def test_kernels_are_the_token_loop(algorithm: Algorithm, fields: dict[str, object]) -> None:
    pytest.importorskip("numba")
    config = config_of(algorithm=algorithm, key_norm="l2", **fields)
    assert choose(Plan.sketch(config, length=64)).name == "compiled"
    width = 5 if config.structure.diagonal else 3
    case = case_of(config, d=5, width=width, length=37, masks=True, ends=0.1)
    expected = whole(case, engine="sequential")
    whole(case, engine="compiled").equals(expected, 1e-9)
    in_pieces(case, (1, 20), engine="compiled").equals(expected, 1e-9)


@pytest.mark.spec("ENG-FORMULA-D5")
@pytest.mark.parametrize("algorithm", [Smooth(), Lion()], ids=["smooth", "lion"])
def test_an_algorithm_of_ones_own_conforms(algorithm: Algorithm) -> None:
    pytest.importorskip("numba")
    check_rule(MemoryConfig(algorithm=algorithm, retention="decay", key_norm="l2"), d=3, width=2, heads=1, length=5)


@pytest.mark.spec("ENG-FORMULA-D5", "ENG-FORMULA-D2")
def test_numbers_share_a_kernel_and_another_formula_has_its_own() -> None:
    pytest.importorskip("numba")
    from hecate.engine.cpu.family import parts_of

    def part(algorithm: Algorithm) -> str:
        return parts_of(MemoryConfig(algorithm=algorithm), channels=False, values=False).descend.name

    assert part(Adaptive(decay=0.5)) == part(Adaptive(decay=0.7)) != part(FTRL())
    first = part(Smooth())
    before, Smooth.direction = Smooth.direction, lambda self, g, lr, m: (-over(lr, g) * g,)  # type: ignore[method-assign]
    try:
        assert part(Smooth()) != first
    finally:
        Smooth.direction = before  # type: ignore[method-assign]


@pytest.mark.spec("ENG-FORMULA-D5", "ENG-NUM-D3")
@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (Whole(), "a number of its step needs others of the weight"),
        ("newton_schulz", "aten.transpose has no kernel form"),
        ("deep_momentum", "its slots are no weights"),
        ("implicit", "it descends a gradient of its own"),
    ],
    ids=str,
)
def test_what_has_no_kernel_is_refused_in_a_sentence(algorithm: object, reason: str) -> None:
    for engine in ("compiled", "triton"):
        with pytest.raises(ConfigError, match=f"as configured has no kernel: {reason}"):
            choose(Plan.sketch(config_of(algorithm=algorithm)), engine)


@pytest.mark.spec("ENG-TRITON-D5")
@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ("adaptive", "'adaptive' has several slots, and kernels hold one beside the memory"),
        (Gated(), "'algorithm_test_gated' has a momentum without a slot, which has no kernel"),
    ],
    ids=str,
)
def test_a_loop_on_a_card_holds_one_slot(algorithm: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose(Plan.sketch(config_of(algorithm=algorithm)), "triton")


@pytest.mark.spec("ENG-NUM-D8")
def test_slots_turn_gradients_of_any_rank_and_only_known_steps_follow() -> None:
    with pytest.raises(ConfigError, match="'adaptive' has a kernel for gradients of rank one, and those of structure"):
        choose(Plan.sketch(config_of(structure="slots", algorithm="adaptive")), "compiled")


@pytest.mark.spec("ENG-FORMULA-D3")
def test_texts_are_printed_and_engines_listed() -> None:
    text = formula_text("adaptive", "algorithm")
    assert (
        "def direction(G, lr, m, s0, s1, c):" in text and "def direction_back(G, lr, m, s0, s1, g, h0, h1, c):" in text
    )
    with pytest.raises(Unprintable, match="aten.transpose"):
        formula_text("newton_schulz", "algorithm")
    header, rows = catalogue("algorithm")
    assert {row[0]: row[header.index("exact engines")] for row in rows}["adaptive"] == "compiled"
