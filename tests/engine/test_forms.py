"""Knobs of one's own that name their form get the fast engines, and give what the token loop gives."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest
import torch

from hecate.algorithm import Algorithm, AlgorithmForm
from hecate.bias import Bias, ErrorBias
from hecate.engine import Plan, choose, exact_engines
from hecate.errors import ConfigError
from hecate.retention import Retention
from hecate.tape.ops import over
from tests.engine.test_properties import whole
from tests.memories import DEEP, case_of, config_of


class Surprise(Algorithm):
    """forms_test_surprise: S' = momentum S - lr G, D = S', or with `ahead` D = momentum S' - lr G."""

    kind: Literal["forms_test_surprise"] = "forms_test_surprise"
    ahead: bool = False
    slots: ClassVar[tuple[str, ...]] = ("surprise",)
    uses_momentum: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    @property
    def kernel(self):
        return AlgorithmForm(momentum=True, nesterov=self.ahead)

    def direction(self, grad, lr, momentum, *slots):
        step, keep = over(lr, grad) * grad, over(momentum, grad)
        carried = keep * slots[0] - step
        return (keep * carried - step if self.ahead else carried), carried


class Plain(Algorithm):
    """forms_test_plain: D = -lr G."""

    kind: Literal["forms_test_plain"] = "forms_test_plain"
    linear: ClassVar[bool] = True

    @property
    def kernel(self):
        return AlgorithmForm()

    def direction(self, grad, lr, momentum, *slots):
        return (-over(lr, grad) * grad,)


class Nameless(Surprise):
    """forms_test_nameless: another direction below a class that names its form."""

    kind: Literal["forms_test_nameless"] = "forms_test_nameless"

    def direction(self, grad, lr, momentum, *slots):
        direction, carried = super().direction(grad, lr, momentum, *slots)
        return direction + 0.1 * carried.square(), carried


class Difference(ErrorBias):
    """forms_test_difference: l2 by someone else."""

    kind: Literal["forms_test_difference"] = "forms_test_difference"

    def rho(self, error):
        return 0.5 * error.square().sum(-1)

    def psi(self, error):
        return error

    def psi_jvp(self, error, tangent):
        return tangent


class Aligned(Bias):
    """forms_test_aligned: dot by someone else."""

    kind: Literal["forms_test_aligned"] = "forms_test_aligned"

    def loss(self, pred, target):
        return -(pred * target).sum(-1)

    def grad(self, pred, target):
        return -target.expand_as(pred)

    def grad_vjp(self, pred, target, g):
        return torch.zeros_like(g), -g


class Fading(Retention):
    """forms_test_fading: retain M + D."""

    kind: Literal["forms_test_fading"] = "forms_test_fading"
    uses_retain: ClassVar[bool] = True
    linear: ClassVar[bool] = True  # type: ignore[assignment]

    def step(self, memory, direction, retain):
        return over(retain, memory) * memory + direction


# They are passed as values: tests of all known kinds need not know them.
for family in (Algorithm, Bias, Retention):
    for kind in [kind for kind in family._registry if kind.startswith("forms_test_")]:
        del family._registry[kind]

KNOBS = [
    {"algorithm": Surprise(), "retention": "decay"},
    {"algorithm": Surprise(ahead=True), "retention": "decay", "decay_order": "before_gradient"},
    {"algorithm": Plain(), "bias": "huber"},
    {"algorithm": Surprise(), "bias": Difference(), "retention": Fading(), "read": "before"},
    {"algorithm": Plain(), "bias": Aligned(), "retention": Fading()},
    {"algorithm": Surprise(), "structure": DEEP, "retention": "decay", "chunk": 4},
    {"algorithm": Surprise(), "structure": "vector", "retention": "decay"},
]
KNOBS += [{**fields, "chunk": 4} for fields in KNOBS[:5]]


@pytest.mark.spec("ENG-FORM-D1")
@pytest.mark.parametrize(
    "fields", KNOBS, ids=lambda fields: "-".join(str(getattr(v, "kind", v)) for v in fields.values())
)
def test_knobs_of_ones_own_on_every_engine(fields):
    config = config_of(**fields)
    engines = set(exact_engines(config, length=70)) - {"fla"}
    ahead = getattr(config.algorithm, "ahead", False)
    walked = {"compiled"} | ({"compiled_layers"} if not config.structure.diagonal else set())
    assert engines == ({"chunk"} if config.chunk > 1 else {"parallel", "compiled"} if ahead else {"parallel"} | walked)
    case = case_of(config, d=3, width=3, length=19, batch=1, masks=True, ends=0.2)
    expected = whole(case, engine="sequential")
    for engine in engines:
        whole(case, engine=engine).equals(expected)
        whole(case, engine=engine, autodiff="tape").equals(expected)


@pytest.mark.spec("ENG-FORM-D1")
def test_the_form_is_that_of_the_formulas_that_name_it():
    assert Surprise().kernel_form() == AlgorithmForm(momentum=True) and Nameless().kernel_form() is None
    config = config_of(algorithm=Nameless())
    with pytest.raises(ConfigError, match="engine='parallel'.*'forms_test_nameless'"):
        choose(Plan.sketch(config), "parallel")
    assert choose(Plan.sketch(config, length=70)).name == "compiled"  # by its direction, number by number
