"""Parts of one's own that lack a method, or return what they should not, are named."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from hecate import MemoryConfig, memory_scan, phi, stepper
from hecate.bias import Bias
from hecate.errors import ConfigError, ShapeError
from hecate.optim import MatrixOptimizer, OptimizerKind
from hecate.testing import check_feature_map
from tests.registries import restore_registries


@pytest.fixture(autouse=True)
def own(monkeypatch):
    restore_registries(monkeypatch)


def test_a_map_with_a_forward_and_no_vjp_is_told_what_it_lacks():
    class Half(phi.FeatureMap):
        """half: phi(x) = sin(x)."""

        kind: Literal["half"] = "half"

        def forward(self, x: Tensor, params: phi.Params) -> tuple[Tensor, Tensor]:
            return torch.sin(x), x

    with pytest.raises(ConfigError, match="Half defines forward without vjp; define vjp too, or features alone"):
        check_feature_map(Half())


def test_a_loss_over_a_whole_batch_is_refused_in_a_scan():
    class Mean(Bias):
        """mean: ell = mean of e^2 over everything."""

        kind: Literal["whole_mean"] = "whole_mean"

        def loss(self, pred: Tensor, target: Tensor) -> Tensor:
            return (pred - target).square().mean()

    with pytest.raises(ShapeError, match=r"'whole_mean': loss must take the last axis alone away, .* got \[\]"):
        memory_scan(MemoryConfig(bias=Mean()), *torch.randn(3, 2, 4, 2, 3))


def test_an_optimiser_without_an_update_takes_no_silent_step():
    class Still(MatrixOptimizer):
        """still: nothing."""

        class Options(OptimizerKind):
            kind: Literal["still"] = "still"

    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(NotImplementedError, match="Still defines no update"):
        Still([p]).step()


def test_another_batch_than_that_of_a_state_is_not_taken_for_turned_axes():
    step, token = stepper(MemoryConfig()), torch.randn(1, 2, 3)
    step(token, token, token)
    more = token.expand(2, -1, -1)
    with pytest.raises(ShapeError, match=r"must be \[2, 2, 3, 3\], got \[1, 2, 3, 3\]$"):
        step(more, more, more)
