"""A file of a user's own, outside the package: a variant of every family, listed, configured, checked and used."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

import hecate
from hecate import MemoryConfig, memory_scan
from hecate.activation import Activation
from hecate.algorithm import Algorithm, Momentum
from hecate.bias import Bias
from hecate.engine import Plan, explain
from hecate.phi import FeatureMap
from hecate.retention import Link, Retention
from hecate.rule import Gates
from hecate.structure import Structure
from hecate.testing import check_feature_map, check_knobs, check_rule
from hecate.train.catalogue import catalogue
from hecate.variant import import_variants

FAMILIES = {"phi": FeatureMap, "bias": Bias, "retention": Retention, "algorithm": Algorithm, "structure": Structure}

SCRATCH = '''
from typing import ClassVar, Literal
import torch
from hecate import activation, algorithm, bias, phi, retention, structure
from hecate.tape.ops import over


class Arsinh(phi.FeatureMap):
    kind: Literal["arsinh"] = "arsinh"
    promises = phi.Traits(parity="odd", componentwise=True, rising="everywhere", bounded_slope=True)

    def features(self, x, params):
        return x.asinh()


class LogCosh(bias.Bias):
    kind: Literal["log_cosh"] = "log_cosh"
    curvature: ClassVar[float] = 1.0

    def loss(self, pred, target):
        return (torch.logaddexp(pred - target, target - pred)).sum(-1)


class Halving(retention.Retention):
    kind: Literal["halving"] = "halving"

    def step(self, memory, direction, retain):
        return memory / 2 + direction


class Unit(retention.Link):
    kind: Literal["unit"] = "unit"
    floor: float = 0.1

    def memory(self, dual):
        return dual / (self.floor + dual.square().mean(-1, keepdim=True)).sqrt()


class Softsign(activation.Activation):
    kind: Literal["softsign"] = "softsign"

    def value(self, x):
        return x / (1 + x.abs())


class Carried(algorithm.Algorithm):
    """Momentum once more."""

    kind: Literal["carried"] = "carried"
    momentum: float = 0.9
    slots: ClassVar = ("sum",)
    uses_momentum: ClassVar = True
    linear: ClassVar = True
    kernel: ClassVar = algorithm.AlgorithmForm(momentum=True)

    def direction(self, grad, lr, momentum, *slots):
        carried = over(momentum, grad) * slots[0] - over(lr, grad) * grad
        return carried, carried


class Offset(structure.Structure):
    kind: Literal["offset"] = "offset"

    def shapes(self, d_phi, d_v):
        return {"matrix": (d_v, d_phi), "offset": (d_v,)}

    def predict(self, memory, p):
        return (memory[0] @ p.unsqueeze(-1)).squeeze(-1) + memory[1]
'''
CONFIG = """
structure: offset
bias: log_cosh
retention: halving
algorithm: {kind: carried, lr: 0.5, momentum: 0.8}
feature_map: arsinh
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for family in (*FAMILIES.values(), Link, Activation):
        monkeypatch.setattr(family, "_registry", dict(family._registry))
    path = tmp_path / "scratch.py"
    path.write_text(SCRATCH)
    spec = importlib.util.spec_from_file_location("scratch", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "scratch", module)
    spec.loader.exec_module(module)
    return module


def test_a_users_variants_take_part_in_everything(scratch):
    config = MemoryConfig.model_validate(yaml.safe_load(CONFIG))
    for name, family in FAMILIES.items():
        knob = config.feature_map if name == "phi" else getattr(config, name)
        assert type(knob).__module__ == "scratch" and family.variants()[knob.kind] is type(knob)
    check_feature_map(scratch.Arsinh(), d=2, heads=1, smooth=False)
    check_rule(config, d=2, width=2, heads=1, length=3, smooth=False)
    q, k, v = torch.randn(3, 1, 5, 2, 4, generator=torch.Generator().manual_seed(0))
    y, state = memory_scan(config, q, k, v)
    assert y.shape == v.shape and bool(y.isfinite().all()) and set(state.memory) == {"matrix", "offset"}


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("{bias: log_cosh, retention: halving, feature_map: arsinh}", "compiled"),
        (
            "{bias: log_cosh, retention: {kind: bregman, link: {kind: unit, floor: 0.3}}, algorithm: carried}",
            "compiled",
        ),
        ("{structure: {kind: mlp, activation: softsign}, bias: log_cosh, key_norm: l2}", "compiled_layers"),
        ("{structure: mlp, retention: {kind: bregman, link: unit}, key_norm: l2}", "compiled_layers"),
    ],
)
def test_a_users_parts_have_kernels(scratch, text, engine):
    """Each of one class, with a loss, a step, a memory, features or a value alone: kernels, gradients, conformance."""
    pytest.importorskip("numba")
    config = MemoryConfig.model_validate(yaml.safe_load(text))
    check_rule(config, d=2, width=2, heads=1, length=3, smooth=False)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 40, 2, 4, generator=generator, dtype=torch.float64).mul(0.5).requires_grad_()
    explained = explain(Plan.sketch(config, length=40))[0]
    assert explained == engine
    found = [memory_scan(config, q, k, v, Gates(lr=0.2), engine=name)[0] for name in (engine, "sequential")]
    grads = [torch.autograd.grad(y.sin().sum(), (q, k, v), retain_graph=True) for y in found]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    for own, expected in zip(*grads, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-8, atol=1e-9)


def test_a_users_parts_are_listed_with_their_kernels(scratch):
    for family, kind in (("bias", "log_cosh"), ("retention", "halving"), ("activation", "softsign")):
        header, rows = catalogue(family)
        assert {row[0]: row[header.index("kernel")] for row in rows}[kind] == "printed"
    header, rows = catalogue("phi")  # asinh is no function of a kernel
    assert {row[0]: row[header.index("kernel")] for row in rows}["arsinh"] == "torch: aten.asinh has no kernel form"
    for family, kind, engines in (
        ("algorithm", "carried", "parallel, compiled, compiled_layers"),
        ("structure", "offset", "token loop: structure 'offset' has no kernel"),
        ("structure", "two_pass", "cascade"),
        ("algorithm", "newton_schulz", "window"),
    ):
        header, rows = catalogue(family)
        assert {row[0]: row[header.index("exact engines")] for row in rows}[kind] == engines


def test_a_users_linear_algorithm_is_as_good_as_momentum(scratch):
    own, known = (MemoryConfig(algorithm=item, retention="decay") for item in (scratch.Carried(), Momentum()))
    check_rule(own, d=2, width=2, heads=1, length=3, smooth=False)
    assert own.rule.write_block() is not None
    q, k, v = torch.randn(3, 1, 9, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gates = Gates(lr=0.1, momentum=0.7)
    torch.testing.assert_close(memory_scan(own, q, k, v, gates)[0], memory_scan(known, q, k, v, gates)[0])


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        ("AlgorithmForm()", "one slot and a momentum gate"),
        ("AlgorithmForm(momentum=True, nesterov=True)", "declared Algo"),
    ],
)
def test_a_form_that_is_not_its_own_is_found(scratch, monkeypatch, kernel, complaint):
    monkeypatch.setattr(scratch.Carried, "kernel", eval(f"hecate.algorithm.{kernel}"))
    with pytest.raises(AssertionError, match=complaint):
        check_knobs(MemoryConfig(algorithm="carried"), d=2, width=2, smooth=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_new_file_is_enough(name, tmp_path, monkeypatch):
    """A file dropped into a family's folder is imported, registered and exported with no other edit."""
    package, family = importlib.import_module(f"hecate.{name}"), FAMILIES[name]
    monkeypatch.setattr(family, "_registry", dict(family._registry))
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    source = "from typing import Literal\nfrom {0} import {1}\n\n\nclass Dropped({1}):\n    kind: {2}\n"
    kind = 'Literal["dropped"] = "dropped"'
    (tmp_path / "dropped.py").write_text(source.format(family.__module__, family.__name__, kind))
    try:
        listed = import_variants(package.__name__, family)
        assert "Dropped" in listed and package.Dropped is family.variants()["dropped"]
        files = {item.name for item in pkgutil.iter_modules([str(Path(hecate.__file__).parent / name)])}
        ours = {cls.__module__ for cls in family.variants().values() if cls.__module__.startswith(package.__name__)}
        assert ours <= {f"{package.__name__}.{file}" for file in files | {"dropped"}}
    finally:
        vars(package).pop("Dropped", None), vars(package).pop("dropped", None)
        __import__("sys").modules.pop(f"hecate.{name}.dropped", None)
