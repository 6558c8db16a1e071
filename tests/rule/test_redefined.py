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


def redefined(base: Any, **formulas: Any) -> Any:
    """A user's subclass with these formulas, and a kind of its own."""
    kind = f"test_{base.__name__}_{'_'.join(formulas)}".lower()
    about = {"__module__": __name__, "__annotations__": {"kind": Literal[kind]}, "kind": kind}
    return type(f"Own{base.__name__}", (base,), {**about, **formulas})


Squashed = redefined(retention.Decay, step=lambda self, *x: torch.tanh(retention.Decay.step(self, *x)))
Graded = redefined(bias.L2, grad=lambda self, pred, target: torch.tanh(pred - target))
Sloped = redefined(bias.L2, psi=lambda self, error: torch.tanh(error))
Softer = redefined(bias.Yaad, psi=lambda self, error: 0.5 * bias.Yaad.psi(self, error))
Cubed = redefined(
    bias.Dot,
    grad=lambda self, pred, target: -(target**3),
    grad_vjp=lambda self, pred, target, g: (torch.zeros_like(g), -3 * target**2 * g),
)
Tripled = redefined(
    bias.L2,
    grad=lambda self, pred, target: 3 * bias.L2.grad(self, pred, target),
    grad_vjp=lambda self, pred, target, g: bias.L2.grad_vjp(self, pred, target, 3 * g),
)
Harder = redefined(
    retention.ElasticNet, step=lambda self, memory, d, retain: retention.ElasticNet.step(self, memory, 2 * d, retain)
)
Turned = redefined(
    retention.Sphere, step=lambda self, memory, d, retain: retention.Sphere.step(self, memory, 2 * d, retain)
)
Cosh = redefined(bias.Huber, rho=lambda self, error: error.cosh().log().sum(-1))
Lossy = redefined(bias.Huber, loss=lambda self, pred, target: (pred - target).cosh().log().sum(-1))
Bent = redefined(
    structure.Matrix, predict=lambda self, memory, p: torch.tanh(structure.Matrix.predict(self, memory, p))
)
Lifted = redefined(phi.ReLU, value=lambda self, x: phi.ReLU.value(self, x) + 1.0)


class Clipped(algorithm.Momentum):
    kind: Literal["test_clipped"] = "test_clipped"

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        step, *kept = super().direction(grad, lr, momentum, *slots)
        return torch.tanh(step), *kept


class Shrunk(phi.ELU):
    kind: Literal["test_shrunk"] = "test_shrunk"

    def forward(self, x: Tensor, params: Any) -> tuple[Tensor, Any]:
        features, residuals = super().forward(x, params)
        return features.tanh(), residuals


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
    case = case_of(config, length=24, batch=1, d=4, width=4, masks=True)
    expected = whole(case, engine="sequential", autodiff="torch")
    whole(case, engine="sequential", autodiff="tape").equals(expected)
    for engine in exact_engines(config, length=24, masked=True):
        whole(case, engine=engine).equals(expected)
    assert name == "predict" or explain(Plan.sketch(config, length=24))[0] == "compiled"


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
