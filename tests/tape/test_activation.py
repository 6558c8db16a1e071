"""Derivatives of activations at arguments of every size, against functions in float64, one's own among them."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from hecate import MemoryConfig
from hecate.activation import Activation, Tanh
from hecate.errors import ConfigError
from hecate.structure import MLP
from tests.registries import shipped_kinds


class Arctan(Activation):
    """test_arctan: act(x) = arctan x, and nothing else."""

    kind: Literal["test_arctan"] = "test_arctan"
    odd = True

    def value(self, x: Tensor) -> Tensor:
        return torch.atan(x)


del Activation._registry["test_arctan"]


@pytest.mark.parametrize("act", [*(own() for own in shipped_kinds(Activation).values()), Arctan()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_of_large_and_small_arguments(act, dtype):
    sizes = torch.tensor([0.0, 1e-30, 1e-3, 1.0, 5.0, 20.0, 300.0, 1e5, 1e9, 1e18, 1e30])
    x = torch.cat([-sizes, sizes]).to(dtype).double().requires_grad_()
    (slope,) = torch.autograd.grad(act.value(x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, materialize_grads=True)
    at = x.detach().to(dtype)
    y = act.value(at)
    ours = act.slope(at, y)
    for got, true in ((ours, slope.detach()), (act.bend(at, y, ours), bend)):
        # Rounded differences of numbers up to the largest |x| at which a derivative still bends.
        error = 40 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), true, rtol=error, atol=error, equal_nan=True)


def test_one_is_named_by_its_kind_and_written_so():
    config = MemoryConfig.model_validate({"structure": {"kind": "mlp", "activation": "silu"}})
    assert config.structure == MLP(activation={"kind": "silu"})
    assert config.model_dump(mode="json")["structure"]["activation"] == "silu"
    assert MemoryConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ConfigError, match=r"activation.*Did you mean 'gelu'"):
        MemoryConfig.model_validate({"structure": {"kind": "mlp", "activation": "gelo"}})


class Raised(Tanh):
    """test_raised: tanh x + 1/2, which is not odd."""

    kind: Literal["test_raised"] = "test_raised"

    def value(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + 0.5


del Activation._registry["test_raised"]


def test_another_value_has_lost_traits_and_derivatives():
    raised, x = Raised(), torch.linspace(-2, 2, 5)
    assert Tanh().odd and not raised.odd
    torch.testing.assert_close(raised.slope(x, raised.value(x)), 1 - torch.tanh(x).square())
