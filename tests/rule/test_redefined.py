"""A user's subclass that redefines one formula of a shipped variant: nothing that followed from the old one is left."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, algorithm, bias, memory_scan, phi, retention, structure
from hecate.activation import Activation
from hecate.engine import Plan, exact_engines, explain
from hecate.formula import formula_of, map_nodes
from tests.engine.test_properties import whole
from tests.memories import case_of, config_of


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


class Softer(bias.Yaad):
    kind: Literal["test_softer"] = "test_softer"

    def psi(self, error: Tensor) -> Tensor:
        return 0.5 * super().psi(error)


class Cubed(bias.Dot):
    kind: Literal["test_cubed"] = "test_cubed"

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return -(target**3)

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(g), -3 * target**2 * g


class Tripled(bias.L2):
    kind: Literal["test_tripled"] = "test_tripled"

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return 3 * super().grad(pred, target)

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return super().grad_vjp(pred, target, 3 * g)


class Harder(retention.ElasticNet):
    kind: Literal["test_harder"] = "test_harder"

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return super().step(memory, 2 * direction, retain)


class Turned(retention.Sphere):
    kind: Literal["test_turned"] = "test_turned"

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return super().step(memory, 2 * direction, retain)


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
    "step": {"retention": Squashed()}, "step of a threshold": {"retention": Harder(threshold=0.05)},
    "step of slots": {"retention": Turned()}, "grad": {"bias": Graded()}, "grad by hand": {"bias": Tripled()},
    "grad of values": {"bias": Cubed()}, "psi": {"bias": Sloped()}, "psi of a row": {"bias": Softer(delta=0.7)},
    "rho": {"bias": Cosh()}, "loss": {"bias": Lossy()}, "direction": {"algorithm": Clipped()},
    "predict": {"structure": Bent()}, "forward": {"feature_map": Shrunk()},
}  # fmt: skip


@pytest.mark.spec("VAR-FOLLOWS-I1", "ENG-NUM-D2", "ENG-NUM-D6", "ENG-NUM-D8", "ENG-FORMULA-D1")
@pytest.mark.parametrize("name", ALL)
def test_what_followed_from_the_old_formula_is_gone(name):
    """On every engine that takes the rule; a kernel is printed from the new formula."""
    config = config_of(**{"bias": "l2", "key_norm": "l2", **ALL[name]})
    case = case_of(config, length=70, batch=1, d=4, width=4, masks=True)
    expected = whole(case, engine="sequential", autodiff="torch")
    whole(case, engine="sequential", autodiff="tape").equals(expected)
    for engine in exact_engines(config, length=70, masked=True):
        whole(case, engine=engine).equals(expected)
    assert name == "predict" or explain(Plan.sketch(config, length=70))[0] == "compiled"


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
