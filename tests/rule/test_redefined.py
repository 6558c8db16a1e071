"""A user's subclass that redefines one formula of a shipped variant: nothing that followed from the old one is left."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, algorithm, bias, memory_scan, phi, retention, structure
from hecate.activation import Activation
from hecate.formula import formula_of, map_nodes


class Squashed(retention.Decay):
    kind: Literal["test_squashed"] = "test_squashed"

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return torch.tanh(super().step(memory, direction, retain))


class Graded(bias.L2):
    kind: Literal["test_graded"] = "test_graded"

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.tanh(pred - target)


class Sloped(bias.L2):
    kind: Literal["test_sloped"] = "test_sloped"

    def psi(self, error: Tensor) -> Tensor:
        return torch.tanh(error)


class Cosh(bias.Huber):
    kind: Literal["test_smoothed"] = "test_smoothed"

    def rho(self, error: Tensor) -> Tensor:
        return error.cosh().log().sum(-1)


class Lossy(bias.Huber):
    kind: Literal["test_lossy"] = "test_lossy"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target).cosh().log().sum(-1)


class Clipped(algorithm.Momentum):
    kind: Literal["test_clipped"] = "test_clipped"

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        step, *kept = super().direction(grad, lr, momentum, *slots)
        return torch.tanh(step), *kept


class Bent(structure.Matrix):
    kind: Literal["test_bent"] = "test_bent"

    def predict(self, memory: tuple[Tensor, ...], p: Tensor) -> Tensor:
        return torch.tanh(super().predict(memory, p))


class Shrunk(phi.ELU):
    kind: Literal["test_shrunk"] = "test_shrunk"

    def forward(self, x: Tensor, params: Any) -> tuple[Tensor, Any]:
        features, residuals = super().forward(x, params)
        return features.tanh(), residuals


class Lifted(phi.ReLU):
    kind: Literal["test_lifted"] = "test_lifted"

    def value(self, x: Tensor) -> Tensor:
        return super().value(x) + 1.0


ALL = {
    "step": {"retention": Squashed()}, "grad": {"bias": Graded()}, "psi": {"bias": Sloped()},
    "rho": {"bias": Cosh()}, "loss": {"bias": Lossy()}, "direction": {"algorithm": Clipped()},
    "predict": {"structure": Bent()}, "forward": {"feature_map": Shrunk()},
}  # fmt: skip


def scanned(fields: dict[str, Any], how: dict[str, Any]) -> tuple[Tensor, ...]:
    """The reads and the gradients of q, k and v."""
    config = MemoryConfig.model_validate({"bias": "l2", "state_dtype": "float64", **fields})
    source = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 12, 2, 4, dtype=torch.float64, generator=source) for _ in range(3)]
    q, k, v = (x.requires_grad_() for x in drawn)
    y, _ = memory_scan(config, q, k, v, Gates(lr=0.1), **how)
    return y.detach(), *torch.autograd.grad(
        (y * torch.linspace(0, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), (q, k, v)
    )


@pytest.mark.spec("VAR-FOLLOWS-I1")
@pytest.mark.parametrize("name", ALL)
def test_what_followed_from_the_old_formula_is_gone(name):
    expected = scanned(ALL[name], {"engine": "sequential", "autodiff": "torch"})
    for how in ({"engine": "sequential", "autodiff": "tape"}, {}):
        for found, wanted in zip(scanned(ALL[name], how), expected, strict=True):
            # 12 steps of sums over 4 numbers of unit size, in float64
            assert (found - wanted).abs().max() <= 1e-13 * max(1.0, float(wanted.abs().max()))


def test_a_gradient_is_that_of_the_new_loss():
    pred, target = torch.linspace(-2, 2, 6, dtype=torch.float64).view(2, 3)
    for knob in (Cosh(), Lossy()):
        assert torch.allclose(knob.grad(pred, target), torch.tanh(pred - target), rtol=1e-14, atol=1e-14)
        assert not knob.hand_written()
    assert bias.Huber.hand_written() and structure.Matrix.hand_written()
    assert not (Graded().linear or Bent().linear or Clipped().linear or Squashed().linear or Graded().curvature)
    assert map_nodes(Shrunk()) != map_nodes(phi.ELU()) and map_nodes(Lifted()) != map_nodes(phi.ReLU())


SIZE = 1.0


def size(error: Tensor) -> Tensor:
    return SIZE * error.square()


class Reading(bias.Bias):
    kind: Literal["test_reading"] = "test_reading"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return size(pred - target).sum(-1)


class Bump(Activation):
    kind: Literal["test_bump"] = "test_bump"

    def value(self, x: Tensor) -> Tensor:
        return torch.tanh(size(x))


@pytest.mark.spec("ENG-FORMULA-D1")
@pytest.mark.parametrize("knob", ["bias", "activation"])
@pytest.mark.parametrize("change", [{"SIZE": 2.0}, {"size": lambda error: error.cosh()}], ids=["number", "function"])
def test_kernels_are_made_anew_where_what_a_formula_reads_is(
    change: dict[str, Any], knob: str, monkeypatch: pytest.MonkeyPatch
):
    """As a cell of a notebook leaves it that is run again, ahead of the class."""
    source = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 40, 1, 4, generator=source).unbind()
    initial = structure.MLP().init(4, 4, generator=source)

    def outputs(engine: Any) -> Tensor:
        knobs = {"bias": Reading()} if knob == "bias" else {"structure": structure.MLP(activation=Bump())}
        start = None if knob == "bias" else initial
        config = MemoryConfig(**knobs, key_norm="l2")
        return memory_scan(config, q, k, v, Gates(lr=0.1), initial=start, engine=engine)[0]

    before = outputs("auto")
    for name, value in change.items():
        monkeypatch.setitem(globals(), name, value)
    after = outputs("auto")
    assert not torch.allclose(before, after) and torch.allclose(after, outputs("sequential"))


def test_a_formula_may_read_what_is_not_there_yet():
    class Early(bias.Bias):
        kind: Literal["test_early"] = "test_early"

        def loss(self, pred: Tensor, target: Tensor) -> Tensor:
            return late(pred - target).sum(-1)

    assert "NameError" in str(formula_of(Early()))

    def late(error: Tensor) -> Tensor:
        return error.square()

    assert not isinstance(formula_of(Early()), str)
