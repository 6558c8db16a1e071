"""What a user defines outside the package: a monotone feature map, and an optimiser in one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from hecate import phi
from hecate.cli import main
from hecate.errors import ConfigError
from hecate.optim import PhiMomentum
from hecate.phi import FeatureMap
from hecate.train import OptimConfig, OptimizerKind, Trainer, dump_experiment
from tests.train.common import tiny


@pytest.fixture(autouse=True)
def _forget_the_kinds(monkeypatch):
    for family in (FeatureMap, OptimizerKind):
        monkeypatch.setattr(family, "_registry", dict(family._registry))


def a_map(named: str, **declared) -> FeatureMap:
    class Cubic(FeatureMap):
        kind: Literal[named] = named

        def traits(self) -> phi.Traits:
            return phi.Traits(**declared)

        def features(self, x: Tensor, params: phi.Params) -> Tensor:
            return x + x**3 / 3

    return Cubic()


@pytest.mark.spec("OPT-LIFT-D5")
def test_lifts_of_a_users_maps_follow_their_traits():
    def chosen(**declared):
        named = f"own_{len(FeatureMap._registry)}"
        p = torch.nn.Parameter(torch.zeros(3, 4))
        group = PhiMomentum([p], feature_map=a_map(named, **declared)).param_groups[0]
        return group["lift"], group["odd"], group["input_scale"]

    alone = {"componentwise": True, "parity": "odd"}
    assert chosen(**alone, rising="everywhere") == ("identity", False, "restored")
    assert chosen(**alone, rising="everywhere", bounded_slope=True) == ("identity", False, "none")
    assert chosen(**alone, rising="odd_part") == ("identity", True, "restored")
    assert chosen(parity="odd") == ("vjp", False, "restored")
    assert chosen(decodes=True)[0] == chosen(forgets_length=True)[0] == "pinv"
    p = torch.nn.Parameter(torch.ones(1, 2))
    optimizer = PhiMomentum([p], 0.1, 0.0, a_map("own_rising", **alone, rising="everywhere"), input_scale="none")
    p.grad = torch.tensor([[3.0, 0.0]])
    optimizer.step()
    torch.testing.assert_close(p.data, torch.tensor([[1 - 0.1 * 12, 1.0]]))
    PhiMomentum([p], feature_map=a_map("own_linear", linear_at=0), lift="prefix")  # x + x^3 / 3 is not, but it says so


def the_example() -> str:
    """What CONTRIBUTING.md says an optimiser is, to the letter."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.split("## Adding an optimiser")[1].split("```python\n")[1].split("```")[0]


@pytest.mark.spec("OPT-BASE-D6")
def test_an_optimiser_of_one_file_is_listed_configured_and_trains(tmp_path, monkeypatch, capsys):
    def hecate(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["--import", "own_signs", *arguments])
        assert not caught.value.code
        return capsys.readouterr().out

    (tmp_path / "own_signs.py").write_text(the_example(), encoding="utf-8")
    optim = {"optimizer": {"kind": "signs", "momentum": 0.5}, "lr": 0.01, "warmup": 0, "weight_decay": 0.0}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    listed = hecate("list", "optimizer")
    assert "signs" in listed and "w <- w - lr sign(m)" in listed
    config = tiny(optim=optim)
    (tmp_path / "own.yaml").write_text(dump_experiment(config), encoding="utf-8")
    assert "finished at step" in hecate("train", "own.yaml", "--set", "budget.steps=1", "--out", "run", "--quiet")
    trainer = Trainer(config)
    weight = trainer.model.get_parameter("blocks.0.memory.qkv.weight")
    before = weight.detach().clone()
    trainer.train_step()
    torch.testing.assert_close((weight - before).abs(), torch.full_like(before, 0.01))
    with pytest.raises(ConfigError, match=r"momentum: must be < 1.0, got 1.5"):
        OptimConfig(optimizer={"kind": "signs", "momentum": 1.5})
    signs = sys.modules["own_signs"].Signs
    assert signs([before.requires_grad_()], 0.1, momentum=1.0).param_groups[0]["momentum"] == 1.0
    with pytest.raises(ConfigError, match=r"momentum must be a finite number .* at most 1, got 1.5"):
        signs([before], 0.1, momentum=1.5)
