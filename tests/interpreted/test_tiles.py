"""Printed biases in Triton's interpreter: the names of their texts against torch, and biases of one's own against the
token loop."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from hecate import MemoryConfig, memory_scan
from hecate.algorithm import FTRL, Algorithm
from hecate.bias import Bias, Dot, Huber
from hecate.engine.triton import kernel, tiles
from hecate.engine.triton.loops import formulas
from hecate.errors import ConfigError
from hecate.formula import Unprintable
from hecate.retention import ElasticNet, Retention
from tests.engine.own_biases import Least, LossAlone, Mean, Pinball, Sorted, Together
from tests.interpreted.test_block import trial
from tests.interpreted.test_loop import trial as by_loop

EPS = torch.finfo(torch.float32).eps
SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1e-8,
    -1e-30,
    1e-3,
    19.0,
    -21.0,
    88.0,
    -104.0,
    math.inf,
    -math.inf,
    math.nan,
)


class LogCosh(Bias):
    """tiles_log_cosh: ell = sum log cosh e, u = tanh e, its slope by hand."""

    kind: Literal["tiles_log_cosh"] = "tiles_log_cosh"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target).cosh().log().sum(-1)

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.tanh(pred - target)

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        pulled = (1 - torch.tanh(pred - target).square()) * g
        return pulled, -pulled


class Bare(Bias):
    """tiles_bare: ell = |e|, whose derivative is no number at e = 0, where nothing is written as well."""

    kind: Literal["tiles_bare"] = "tiles_bare"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target).square().sum(-1).sqrt()

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target) / (pred - target).square().sum(-1, keepdim=True).sqrt()


class Blind(Bias):
    """tiles_blind: u = -v in other words than those of dot."""

    kind: Literal["tiles_blind"] = "tiles_blind"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred * target).sum(-1) * -1.0


for own in (LogCosh, Bare, Blind):  # they are passed as values: tests of all known kinds need not know them
    del Bias._registry[own.model_fields["kind"].default]


@triton.jit
def applied(x, y, to, N: tl.constexpr, OF: tl.constexpr):
    at = tl.arange(0, N)[None, :]
    tl.store(to + at, OF(tl.load(x + at), tl.load(y + at)))


@triton.jit
def over(x, to, N: tl.constexpr, W: tl.constexpr, OF: tl.constexpr):
    at = tl.arange(0, N)[:, None] * W + tl.arange(0, W)[None, :]
    inside = (tl.arange(0, W) < W - 3)[None, :]
    tl.store(to + at, OF(1, inside, tl.load(x + at)) + tl.zeros([N, W], tl.float32))


def of_names(text: str) -> Any:
    """A function of x and y by a text, as biases are printed."""
    psi, _ = tiles._compiled(f"def psi(x, y):\n    return {text}\n\ndef pull(x, y):\n    return x\n", ("psi", "pull"))
    return psi


@pytest.mark.spec("ENG-TRITON-D9")
@pytest.mark.parametrize(
    ("text", "ulps"),
    [("expm1(x)", 4), ("tanh(x)", 6), ("log1p(x)", 4), ("tl.erf(x)", 4), ("tl.floor(x)", 1), ("tl.log(x)", 4),
     ("power(x, 3.0)", 0), ("power(x, -2.5)", 0), ("power(x, y)", 0), ("power(x, 0.0)", 1), ("power(2.0, x)", 0)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN and infinities
def test_every_name_has_torchs_numbers(text: str, ulps: int) -> None:
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.cat([torch.tensor(SPECIAL), drawn * torch.logspace(-9, 1.2, 1000, dtype=torch.float64)]).float()
    x = torch.cat([x, x.new_zeros(1024 - len(x))])
    y = x.roll(7)
    y = torch.where(y.abs() > 1, y.round(), y)
    found = torch.empty_like(x)
    applied[(1,)](x, y, found, N=1024, OF=of_names(text))
    space = {
        **vars(torch.special),
        "tl": torch,
        "tanh": torch.tanh,
        "power": torch.pow,
        "x": x.double(),
        "y": y.double(),
    }
    right = eval(text, space).float()
    assert torch.equal(found.isnan(), right.isnan())
    fine = right.abs() > 1e-37  # what is smaller may be flushed to 0
    ulps = ulps or 4 + 2 * right.abs().log2().abs().nan_to_num(0, 0, 0)  # a power rounds its exponent
    near = (found - right).abs() <= ulps * EPS * right.abs()
    assert bool((near | (found == right) | right.isnan() | ~fine).all())


@pytest.mark.spec("ENG-TRITON-D9")
@pytest.mark.filterwarnings("error")
def test_sums_and_maxima_are_of_the_width_and_keep_what_is_no_number() -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x[:, -3:], x[1, 4], x[2, 5], x[3] = 1e9, math.nan, -math.inf, math.nan
    for own, right in ((tiles.total, x[:, :-3].sum(1)), (tiles.top, x[:, :-3].amax(1))):
        found = torch.empty_like(x)
        over[(1,)](x, found, N=16, W=32, OF=own)
        torch.testing.assert_close(found, right[:, None].expand_as(x), rtol=1e-5, atol=1e-6, equal_nan=True)


OWN = [LogCosh(), LossAlone(), LossAlone(scale=0.2), Pinball(), Together(), Mean(), Least(), Blind(), Bare()]
WITHIN = (1, 4, 7, 8)


@pytest.mark.spec("ENG-TRITON-D9")
@pytest.mark.parametrize(
    "bias",
    [each if at in WITHIN else pytest.param(each, marks=pytest.mark.slow) for at, each in enumerate(OWN)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bias_of_ones_own_has_the_token_loops_numbers(bias: Bias) -> None:
    trial({"bias": bias, "retention": "decay", "algorithm": "momentum"}, masked=True)
    by_loop({"bias": bias, "retention": {"kind": "elastic_net", "threshold": 0.01}}, length=7, extra="masks")


@pytest.mark.spec("ENG-TRITON-D9")
def test_another_number_is_the_same_kernel() -> None:
    one, other = tiles.tiles_of(LossAlone(scale=0.2)), tiles.tiles_of(LossAlone(scale=3.0))
    assert (one.psi, one.pull) == (other.psi, other.pull) and one.cu != other.cu
    assert tiles.tiles_of(Huber(delta=0.3)).psi is tiles.tiles_of(Huber()).psi is not one.psi
    told = [tiles.tiles_of(bias) for bias in (Dot(), Blind(), Together(), Huber(norm=True))]
    assert [(own.moves, own.apart) for own in told] == [(False, True), (False, True), (True, False), (True, False)]
    assert not formulas(MemoryConfig(bias=Together(), retention="elastic_net"), single=True).apart


@pytest.mark.spec("ENG-TRITON-I3")
def test_a_verdict_is_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernel, "judged", lambda facts, judge, own: asked.append((facts, own)))
    for bias in (Huber(delta=0.3), Huber(), Huber(norm=True), LogCosh()):
        kernel.verdict(MemoryConfig(bias=bias), (), torch.float32, "cpu", (4, 4))
    (one, own), (same, other), *rest = asked
    assert one == same and own != other and all(one != facts for facts, _ in rest)
    assert 0.3 in own["rule"]["numbers"] and "0.3" not in str(one)


@pytest.mark.spec("ENG-TRITON-I3")
def test_a_class_redefined_under_its_name_has_a_verdict_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(Algorithm._registry, "ftrl")
    monkeypatch.delitem(Retention._registry, "elastic_net")

    class Halved(FTRL):
        def direction(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            direction, *slots = super().direction(*given)
            return direction / 2, *slots

    class Kept(ElasticNet):
        def step(self, memory: torch.Tensor, direction: torch.Tensor, retain: torch.Tensor) -> torch.Tensor:
            return super().step(memory, direction / 2, retain)

    asked: list[Any] = []
    monkeypatch.setattr(kernel, "judged", lambda facts, judge, own: asked.append(facts))
    for field, knobs in {"algorithm": (FTRL(), Halved()), "retention": (ElasticNet(), Kept())}.items():
        for knob in knobs:
            kernel.verdict(MemoryConfig(**{field: knob}), (), torch.float32, "cpu", (4, 4))
    assert asked[0] != asked[1] and asked[2] != asked[3]


@pytest.mark.spec("ENG-TRITON-D9")
def test_what_cannot_be_printed_is_refused_in_a_sentence() -> None:
    q = torch.ones(1, 2, 1, 4, dtype=torch.float32)
    with pytest.raises(
        ConfigError, match=r"'printed_sorted' as configured has no kernel: aten\.sort has no kernel form"
    ):
        memory_scan(MemoryConfig(bias=Sorted()), q, q, q, engine="triton")
    with pytest.raises(Unprintable, match=r"aten\.sort"):
        tiles.tiles_of(Sorted())
